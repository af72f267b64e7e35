"""Direct logit attribution: what each part of the stream adds to a logit.

The last stream x is the sum of the embedding and of what every sublayer added, and the logit before its softcap is
linear in it once the final norm's divisor s is taken as it is in that row (nostalgebraist 2020; Elhage et al. 2021,
"logit contributions"; TransformerLens' `logit_attrs`):

    logit_t = scale (W_t . (w * centred(x) / s + b) + bias_t)

with the norm's weight w and bias b, and centred(x) = x for norms that do not subtract the mean. Centring is symmetric,
so it is done once, on W_t * w. Where a softcap follows, its input is explained, and the scale after it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlens_cli.driver.base import Edit, Result, Want
from vlens_cli.errors import QueryError, UsageError

if TYPE_CHECKING:
    import torch

    from vlens_cli.driver.session import Session
    from vlens_cli.driver.vllm_driver import VLLMDriver
    from vlens_cli.families import Catalog

FINAL, SCALE = "ln_final.hook_out", "ln_final.hook_scale"
# How far the parts may be from the logit, relative to the largest of them: sums of rounded numbers.
LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


# Rows whose heads are told apart at once: each is [head, d_model].
HEAD_ROWS = 64


@dataclass(frozen=True)
class Explained:
    """One logit, or a difference of logits, that is asked about: `signs` has +1 or -1 for each token id."""

    label: dict[str, Any]
    signs: dict[int, int]


def wants(catalog: Catalog, positions: tuple[int, ...]) -> dict[str, Want]:
    """What the forward must keep for it."""
    names = [FINAL, SCALE, *_sources(catalog), _last(catalog)]
    for i in range(catalog.n_layers):
        names += [*_sublayers(i), *(n for n in (_own_out(i), _heads(i)) if n in catalog.points)]
    return dict.fromkeys(names, Want(positions))


def check_edits(edits: Sequence[Edit]) -> None:
    """Raises UsageError for an edit behind the last stream: the logit is then no longer what the stream's parts give."""
    for edit in edits:
        if not edit.name.startswith(("hook_", "blocks.")):
            raise UsageError(f"--attribution takes the stream apart, and {edit.name} is changed behind it", code="edited_end")


def _last(catalog: Catalog) -> str:
    return f"blocks.{catalog.n_layers - 1}.hook_resid_post"


def _sources(catalog: Catalog) -> list[str]:
    """What the stream begins with: a norm's output where one follows the embedding."""
    if "embed_ln.hook_out" in catalog.points:
        return ["embed_ln.hook_out"]
    return [name for name in ("hook_embed", "hook_pos_embed") if name in catalog.points]


def _sublayers(layer: int) -> tuple[str, str]:
    return f"blocks.{layer}.hook_attn_out", f"blocks.{layer}.hook_mlp_out"


def _own_out(layer: int) -> str:
    """Where a norm or a factor stands between the output projection and the stream; elsewhere an alias of attn_out."""
    return f"blocks.{layer}.attn.hook_out"


def _heads(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_z"


def attribute(session: Session, result: Result, positions: tuple[int, ...], asked: Sequence[Explained],
              edited: bool = False) -> list[dict[str, Any]]:
    """For each of `asked` and each position: the logit, what every part adds to it, and their sum. In a run that was
    `edited`, what its edits added to the stream itself is a part too.

    Raises QueryError where the sum is not the logit: then the parts are not all of this model's stream.
    """
    import torch

    rows = {name: c.at(positions).value.float() for name, c in result.captured.items()}
    ids = list(dict.fromkeys(i for one in asked for i in one.signs))
    signs = torch.tensor([[float(one.signs.get(i, 0)) for i in ids] for one in asked])
    driver = session.driver(lambda text: None)
    end = driver.directions(ids)
    factor = 1.0 if end["softcap"] else end["scale"]
    logits = factor * ((rows[FINAL] @ end["unembed"].T + end["bias"]) @ signs.T).T
    constant = factor * signs @ end["constant"]
    # [asked, pos, d_model]: what a part is multiplied with.
    against = factor * (signs @ end["weight"])[:, None, :] / rows[SCALE][None]
    parts = _parts(driver, rows, against)
    if edited:
        last = _products(rows[_last(session.catalog)], against)
        parts.append(("interventions", last - sum(values for _, values, _ in parts), None))
    sums = constant[:, None] + sum(values for _, values, _ in parts)
    _check(session, logits, sums, torch.stack([logits, *(values for _, values, _ in parts)]).abs().amax(0))
    return [
        {**one.label, "pos": pos, "of": "logit before the softcap" if end["softcap"] else "logit",
         "logit": float(logits[n, r]), "sum": float(sums[n, r]), "constant": float(constant[n]),
         "parts": [_part(name, values[n, r], heads, n, r) for name, values, heads in parts]}
        for n, one in enumerate(asked) for r, pos in enumerate(positions)
    ]


Heads = dict[str, "torch.Tensor"]


def _parts(driver: VLLMDriver, rows: dict[str, torch.Tensor], against: torch.Tensor
           ) -> list[tuple[str, torch.Tensor, Heads | None]]:
    """(hook, [asked, pos], heads) in the order of the forward; `heads` has [asked, pos, head] and the bias' [asked, pos]."""
    catalog = driver.catalog
    parts: list[tuple[str, torch.Tensor, Heads | None]] = []
    for name in _sources(catalog):
        parts.append((name, _products(rows[name], against), None))
    for i in range(catalog.n_layers):
        attn, mlp = _sublayers(i)
        parts.append((attn, _products(rows[attn], against), _by_head(driver, i, rows, against)))
        parts.append((mlp, _products(rows[mlp], against), None))
    return parts


def _products(part: torch.Tensor, against: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.einsum("rd,nrd->nr", part, against)


def _by_head(driver: VLLMDriver, layer: int, rows: dict[str, torch.Tensor], against: torch.Tensor) -> Heads | None:
    """What each head adds, through its columns of the output projection; None where a family has no such heads, or a
    centring norm behind them.

    What stands between the projection and the stream multiplies each entry (a norm's weight over its divisor, a
    factor), and is their quotient.
    """
    import torch

    z, own, attn = rows.get(_heads(layer)), rows.get(_own_out(layer)), rows[_sublayers(layer)[0]]
    if z is None or own is not None and driver.catalog.spec.norm == "layer":
        return None
    if own is not None:
        against = against * torch.where(own == 0, 0, attn / own)
    pieces = [driver.head_parts(layer, z[a : a + HEAD_ROWS], against[:, a : a + HEAD_ROWS])
              for a in range(0, len(z), HEAD_ROWS)]
    return {key: torch.cat([piece[key] for piece in pieces], dim=1) for key in pieces[0]}


def _part(name: str, value: torch.Tensor, heads: Heads | None, n: int, r: int) -> dict[str, Any]:
    part: dict[str, Any] = {"hook": name, "value": float(value)}
    if heads is not None:
        part |= {"heads": heads["heads"][n, r].tolist(), "bias": float(heads["bias"][n, r])}
    return part


def _check(session: Session, logits: torch.Tensor, sums: torch.Tensor, largest: torch.Tensor) -> None:
    limit = LIMITS[session.plan.dtype]
    off = ((sums - logits).abs() / largest.clamp_min(1e-30)).max()
    if not off.isfinite():
        raise QueryError("the parts of the stream are not all finite, and have no sum that says anything",
                         hint="without --attribution the values themselves can be seen", code="attribution_failed")
    if not off <= limit:
        raise QueryError(f"the parts of the stream do not add up to the logit: they are off by {float(off):.1e} of the largest",
                         hint="this model's stream has parts that are not its embedding, attention and MLP outputs",
                         code="attribution_failed")


# What a file holds of it


def tensors(found: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """`attribution` [asked, pos, part] and, where every layer has heads that can be told apart, `attribution/heads`
    [asked, pos, layer, head], of what `attribute` gave; float32."""
    import torch

    if not found:
        return {}
    n_asked = len(labels(found)["asked"])
    parts = torch.tensor([[part["value"] for part in one["parts"]] for one in found])
    kept = {"attribution": parts.unflatten(0, (n_asked, -1))}
    if "attribution/heads" in axes(found):
        heads = [[part["heads"] for part in one["parts"] if "heads" in part] for one in found]
        kept["attribution/heads"] = torch.tensor(heads).unflatten(0, (n_asked, -1))
    return kept


def axes(found: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The axes of `tensors`."""
    if not found:
        return {}
    attn = [part for part in found[0]["parts"] if part["hook"].endswith("hook_attn_out")]
    even = len({len(part.get("heads", ())) for part in attn}) == 1 and "heads" in attn[0]
    return {"attribution": ["asked", "pos", "part"]} | ({"attribution/heads": ["asked", "pos", "layer", "head"]} if even else {})


def labels(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the entries of the axes `asked` and `part` are; the parts and `constant` sum to the logit, `heads` are shares of
    their layer's attn_out."""
    asked = [one.get("target") or one["diff"] for one in found if one["pos"] == found[0]["pos"]]
    return {"asked": asked, "parts": [part["hook"] for part in found[0]["parts"]], "of": found[0]["of"],
            "constant": [one["constant"] for one in found if one["pos"] == found[0]["pos"]]}
