"""What vlens knows of an architecture, as data: one TOML file a family, and the catalog of one model.

A family file holds
    like        another family whose entries it starts from; its own entries replace or add
    classes     the classes whose live module tree has this shape (vLLM's; a checkpoint's `architectures` name them)
    norm, activation   names of formulas that the driver has
    foreign     config keys that the engine would obey and the architecture does not have
    [checkpoint]       tensor name -> when a whole checkpoint has it: always, never, a config key, or !key
    [dims]      which config key gives each width
    [modules]   role -> path in the live module tree; {i} is the layer
    [[row]]     one hook point each: hook, module (a role), `in` or `out` (what is read), axes, meaning;
                `split`/`part` choose columns of a fused output; `derive` names a formula over what is read;
                `before` places an added row in the order of the forward
    [aliases]   other name -> canonical name
    [refused]   name -> the reason it is not given

Light: no torch, so that the client can check names, layers and heads before any engine starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from vlens_cli.errors import BugError, StartError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")

# More is a broken config, and naming that many hook points takes for ever.
MOST_LAYERS = 10_000

# Points whose change reaches everything that follows: the engine forms them, or forms the next value from them alone.
EDITABLE = frozenset({
    "hook_embed", "hook_pos_embed", "unembed.hook_out", "ln_final.hook_normalized",
    *(f"blocks.{{i}}.{point}" for point in (
        "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out",
        "ln1.hook_normalized", "ln2.hook_normalized", "ln1_post.hook_normalized", "ln2_post.hook_normalized",
        "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_z",
        "mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post", "mlp.hook_router_logits",
    )),
})  # fmt: skip

_AXIS_DIMS = {"head": "n_heads", "kv_head": "n_kv_heads"}


@dataclass(frozen=True)
class Row:
    """One hook point of a family.

    hook     name with {i} for the layer       module   role in the family's module table
    inputs   arguments read, by name or place  outputs  outputs read, by place (one of the two is empty)
    axes     names of the axes, `pos` first    split    axes of the parts of a fused output; `part` which one
    derive   formula over what is read, or ""
    """

    hook: str
    module: str
    inputs: tuple[str | int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str, ...]
    meaning: str
    split: tuple[str, ...] = ()
    part: int = 0
    derive: str = ""

    @property
    def editable(self) -> bool:
        return self.hook in EDITABLE

    @property
    def derived(self) -> bool:
        """Whether vlens forms the value (a formula, or a stream summed from a pair) rather than the engine."""
        return bool(self.derive) or len(self.inputs) + len(self.outputs) > 1


@dataclass(frozen=True)
class Family:
    """One family file, with what it inherits."""

    name: str
    classes: tuple[str, ...]
    norm: str
    activation: str
    dims: dict[str, str]
    modules: dict[str, str]
    rows: tuple[Row, ...]
    aliases: dict[str, str]
    refused: dict[str, str]
    foreign: tuple[str, ...]
    checkpoint: dict[str, str]


@dataclass(frozen=True)
class Dims:
    """Widths of one model."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int


class Catalog:
    """The hook points of one model: a family's rows at a model's widths.

    Names are concrete (`blocks.3.hook_resid_post`); `names` has the canonical ones in the order of the forward.
    """

    def __init__(self, family: Family, dims: Dims) -> None:
        self.spec = family
        self.dims = dims
        self.family = family.name
        self.n_layers = dims.n_layers

    @cached_property
    def points(self) -> dict[str, tuple[Row, int | None]]:
        """Canonical name -> its row and layer (None outside the blocks), in the order of the forward."""
        block = [row for row in self.spec.rows if "{i}" in row.hook]
        ahead = self.spec.rows[: self.spec.rows.index(block[0])]
        after = [row for row in self.spec.rows if row not in block and row not in ahead]
        found: dict[str, tuple[Row, int | None]] = {row.hook: (row, None) for row in ahead}
        for i in range(self.n_layers):
            found.update({row.hook.replace("{i}", str(i)): (row, i) for row in block})
        found.update({row.hook: (row, None) for row in after})
        return found

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.points)

    @cached_property
    def _aliases(self) -> dict[str, str]:
        last = str(self.n_layers - 1)
        return {alias: name.replace("{last}", last) for alias, name in self.spec.aliases.items()}

    @property
    def refused(self) -> dict[str, str]:
        """Names (with {i} for the layer) that are not given -> the reason."""
        return self.spec.refused

    def canonical(self, name: str) -> str | None:
        """The canonical name of a concrete name or alias of this model; None where it has none."""
        if name in self.points:
            return name
        folded, layer = _fold(name)
        target = self._aliases.get(folded)
        target = target and target.replace("{i}", layer)
        return target if target in self.points else None

    def refusal(self, name: str) -> str | None:
        """Why a concrete name of TransformerLens is not given here; None for any other."""
        return self.spec.refused.get(_fold(name)[0])

    def row(self, name: str) -> Row:
        return self.points[name][0]

    def layer(self, name: str) -> int | None:
        return self.points[name][1]

    def axes(self, name: str) -> tuple[str, ...]:
        return self.row(name).axes

    def size(self, axis: str) -> int:
        """Length of an axis other than `pos`."""
        return 1 if axis == "one" else getattr(self.dims, _AXIS_DIMS.get(axis, axis))

    def derived(self, name: str) -> bool:
        return self.row(name).derived

    def editable(self, name: str) -> bool:
        return self.row(name).editable

    def definition(self, name: str) -> str:
        return self.row(name).meaning

    def aliases(self, name: str) -> tuple[str, ...]:
        """Every other concrete name of a canonical name."""
        layer = self.layer(name)
        concrete = ((a, t) if layer is None else (a.replace("{i}", str(layer)), t.replace("{i}", str(layer)))
                    for a, t in self._aliases.items())
        return tuple(alias for alias, target in concrete if target == name)

    @cached_property
    def every_alias(self) -> tuple[str, ...]:
        """All concrete aliases, for near matches and completion."""
        return tuple(alias for name in self.names for alias in self.aliases(name))


def catalog_for(config: dict[str, Any]) -> Catalog:
    """The catalog of the model that a parsed config.json describes.

    Raises StartError where no family knows the architecture, or a width is missing or makes no sense.
    """
    named = config.get("architectures")
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise _bad_config("config.json names no architecture")
    family = family_of(named)
    foreign = [key for key in family.foreign if config.get(key)]
    if foreign:
        raise StartError(
            f"config.json sets what this architecture does not have, and the engine would obey: {', '.join(foreign)}",
            hint="take it out of config.json if the model was trained without it", code="foreign_config",
        )
    return Catalog(family, _dims(family, config))


def check_checkpoint(catalog: Catalog, config: dict[str, Any], found: Iterable[str]) -> None:
    """Whether a checkpoint's tensors are those that the engine reads, all and only. Raises StartError.

    Quantized checkpoints have tensors of their own scheme, and are not checked.
    """
    if config.get("quantization_config"):
        return
    wanted = {name for pattern, when in catalog.spec.checkpoint.items() if _holds(when, config)
              for name in _of_layers(pattern, catalog.n_layers)}
    optional = {"lm_head.weight"}
    there = {name for name in found if not name.endswith((".rotary_emb.inv_freq", ".masked_bias"))}
    for names, what in ((wanted - there, "lacks weights that the model has"),
                        (there - wanted - optional, "has weights that the engine does not read")):
        if names:
            first = sorted(names)[0]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise StartError(f"the checkpoint {what}: {first}{more}", code="bad_checkpoint",
                             hint="its values would not be the model's; compare its config.json and weights with the original")


def _holds(when: str, config: dict[str, Any]) -> bool:
    if when in ("always", "never"):
        return when == "always"
    return not config.get(when[1:]) if when.startswith("!") else bool(config.get(when))


def _of_layers(pattern: str, n_layers: int) -> list[str]:
    return [pattern.replace("{i}", str(i)) for i in range(n_layers)] if "{i}" in pattern else [pattern]


def family_of(architectures: list[str]) -> Family:
    """The family of the first architecture named that any family knows.

    Files that do not hold the name are not parsed: there are many, and each command looks for one.
    """
    for architecture in architectures:
        for name in FAMILIES:
            if f'"{architecture}"' in _text(name) and architecture in (family := load(name)).classes:
                return family
    known = ", ".join(c for name in FAMILIES for c in load(name).classes)
    raise StartError(
        f"no hook points are known for this architecture: {', '.join(architectures) or 'none named in config.json'}",
        hint=f"this version of vlens reads {known}",
        code="unknown_family",
    )


@cache
def _text(name: str) -> str:
    return (Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8")


@cache
def load(name: str) -> Family:
    """One family, with what it inherits; a file that contradicts itself is a BugError."""
    fields = _fields(name)
    rows = tuple(_row(name, entry, fields["modules"]) for entry in fields["row"])
    family = Family(
        name=name,
        classes=tuple(fields["classes"]),
        norm=fields["norm"],
        activation=fields["activation"],
        dims=fields["dims"],
        modules=fields["modules"],
        rows=rows,
        aliases=fields["aliases"],
        refused=fields["refused"],
        foreign=tuple(fields["foreign"]),
        checkpoint=fields["checkpoint"],
    )
    _check(family)
    return family


def _fields(name: str) -> dict[str, Any]:
    # Its import takes longer than what it reads here.
    import tomllib

    own = tomllib.loads(_text(name))
    if "like" not in own:
        return own
    base = _fields(own["like"])
    rows = list(base["row"])
    for entry in own.get("row", []):
        hooks = [row["hook"] for row in rows]
        at = hooks.index(entry["before"]) if "before" in entry else hooks.index(entry["hook"])
        rows[at : at + (entry["hook"] in hooks)] = [entry]
    given = {entry["hook"] for entry in rows} | own.get("aliases", {}).keys()
    refused = {**base["refused"], **own.get("refused", {})}
    return {
        **base,
        **own,
        "row": rows,
        "dims": {**base["dims"], **own.get("dims", {})},
        "modules": {**base["modules"], **own.get("modules", {})},
        "checkpoint": {**base["checkpoint"], **own.get("checkpoint", {})},
        "aliases": {**base["aliases"], **own.get("aliases", {})},
        "refused": {hook: reason for hook, reason in refused.items() if hook not in given},
    }


def _row(family: str, entry: dict[str, Any], modules: dict[str, str]) -> Row:
    if entry["module"] not in modules or ("in" in entry) == ("out" in entry):
        raise BugError(f"family {family}: the row of {entry['hook']} needs a known module, and `in` or `out`")
    return Row(
        hook=entry["hook"],
        module=entry["module"],
        inputs=tuple(entry.get("in", ())),
        outputs=tuple(entry.get("out", ())),
        axes=tuple(entry["axes"]),
        meaning=entry["meaning"],
        split=tuple(entry.get("split", ())),
        part=entry.get("part", 0),
        derive=entry.get("derive", ""),
    )


def _check(family: Family) -> None:
    hooks = [row.hook for row in family.rows]
    targets = {target.replace("{last}", "{i}") for target in family.aliases.values()}
    wrong = [f"{h} twice" for h in set(hooks) if hooks.count(h) > 1]
    wrong += [f"alias of unknown {t}" for t in targets - set(hooks)]
    wrong += [f"{h} both given and refused" for h in family.refused if h in hooks or h in family.aliases]
    if wrong:
        raise BugError(f"family {family.name}: {', '.join(wrong)}")


def _dims(family: Family, config: dict[str, Any]) -> Dims:
    values = {dim: config.get(key) for dim, key in family.dims.items()}
    values["n_kv_heads"] = values.get("n_kv_heads") or values["n_heads"]
    missing = [family.dims[d] for d, v in values.items() if d != "d_head" and not _is_width(v)]
    if not missing:
        values["d_head"] = values.get("d_head") or values["d_model"] // values["n_heads"]
        missing = [family.dims[d] for d, v in values.items() if not _is_width(v)]
    if missing:
        raise _bad_config(f"config.json has no usable value of: {', '.join(missing)}")
    if values["n_layers"] > MOST_LAYERS:
        raise _bad_config(f"config.json has {values['n_layers']} layers")
    return Dims(**values)


def _is_width(value: Any) -> bool:
    return type(value) is int and 1 <= value < 10_000_000


def _bad_config(message: str) -> StartError:
    return StartError(message, hint="the folder is not a whole model of a known architecture; compare its config.json with "
                      "the original", code="bad_config")


def _fold(name: str) -> tuple[str, str]:
    """(`blocks.{i}.x`, `3`) of `blocks.3.x`; (name, ``) outside the blocks."""
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return (f"blocks.{{i}}.{found[2]}", found[1]) if found else (name, "")
