"""The proof at load: one short forward, and every point checked against the ones around it.

Vendors change a module tree between versions, and a row that reads the wrong tensor gives plausible numbers. So
each layer's values must satisfy the identities that define them (DESIGN: hook points); a point that fails one is
refused by name. Every check is written as `got` against `want`, in fp32, over the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set as AbstractSet
from dataclasses import dataclass

import torch

from vlens_cli.driver import internals
from vlens_cli.driver.locate import Locator

PROOF_TOKENS = 12

# Relative error that rounding explains: a few units in the last place of sums of a few thousand terms.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Points that are set together in one forward of the proof of writes: of two neighbours in the forward, one only.
WRITTEN_TOGETHER = (
    ("hook_embed", "hook_pos_embed", "hook_q", "hook_k", "hook_z", "hook_resid_mid", "hook_pre", "hook_pre_linear",
     "hook_mlp_out"),
    ("hook_resid_pre", "hook_rot_q", "hook_rot_k", "hook_v", "hook_attn_out", "hook_post", "hook_router_logits"),
    ("hook_resid_post", "unembed.hook_out"),
    ("hook_normalized",),
)  # fmt: skip

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
}


@dataclass(frozen=True)
class Check:
    """One identity: the points that it proves, what was found and what the identity says."""

    points: tuple[str, ...]
    law: str
    got: torch.Tensor
    want: torch.Tensor

    def error(self) -> float:
        """Norm of the difference over the norm of what the law says; infinite for a shape or value that is off."""
        if self.got.shape != self.want.shape:
            return float("inf")
        got, want = self.got.double(), self.want.double()
        error = float((got - want).norm() / want.norm().clamp_min(1e-30))
        return error if error == error else float("inf")


class Proof:
    """Checks of one model, from the captured values of one forward of a few tokens.

    values  canonical name -> [pos, ...] for every located point;  logits  the engine's own, last position, if known
    """

    def __init__(self, locator: Locator, values: dict[str, torch.Tensor], logits: torch.Tensor | None = None) -> None:
        self._locator = locator
        self._values = values
        self._logits = logits
        self._spec = locator.catalog.spec
        self._layers = locator.catalog.n_layers

    def verdict(self) -> dict[str, str]:
        """Points that an identity contradicts, or that none speaks about -> the reason.

        Where an identity fails, the blame falls on those of its points that no other identity confirms; where all
        are confirmed elsewhere, on all of them.
        """
        found = [(check.points, _fault(check)) for check in self._checks()]
        confirmed = {point for points, fault in found if not fault for point in points}
        failed: dict[str, str] = {}
        for points, fault in found:
            if fault:
                blamed = [point for point in points if point not in confirmed] or points
                failed = {**dict.fromkeys(blamed, fault), **failed}
        silent = self._values.keys() - {point for points, _ in found for point in points}
        return {**dict.fromkeys(silent, "the proof at load says nothing about it"), **failed}

    def written(self, changed: AbstractSet[str]) -> set[str]:
        """Of the points that were changed in this forward, those whose change the points after them obey.

        An identity speaks about the changed ones among its points where the last of them, in the order of the forward,
        was left alone.
        """
        order = {name: n for n, name in enumerate(self._locator.catalog.names)}
        obeyed: dict[str, bool] = {}
        for check in self._checks():
            if max(check.points, key=order.__getitem__) not in changed:
                for point in changed & set(check.points):
                    obeyed[point] = obeyed.get(point, True) and not _fault(check)
        return {point for point, well in obeyed.items() if well}

    def _checks(self) -> Iterator[Check]:
        yield from self._ends()
        for i in range(self._layers):
            yield from self._stream(i)
            yield from self._norms(i)
            yield from self._attention(i)
            yield from self._mlp(i)

    def _at(self, *names: str) -> list[torch.Tensor] | None:
        """The values of several points; None where one was not located (it is refused already)."""
        return [self._values[n] for n in names] if all(n in self._values for n in names) else None

    def _check(self, law: str, got: str, want: Callable[..., torch.Tensor], *of: str) -> Iterator[Check]:
        """The identity got = want(of); nothing where one of them was not located: it is refused already."""
        found = self._at(got, *of)
        if found is not None:
            wanted = want(*found[1:])
            yield Check((got, *of), law, found[0].reshape(wanted.shape), wanted)

    def _ends(self) -> Iterator[Check]:
        first, last = "blocks.0.hook_resid_pre", f"blocks.{self._layers - 1}.hook_resid_post"
        yield from self._check("hook_embed = resid_pre[0]", "hook_embed", lambda x: x, first)
        yield from self._norm("ln_final", "ln_final", None, last)
        found = self._at("unembed.hook_out")
        if found is not None and self._logits is not None:
            law = "the unembedding of ln_final.hook_out = the engine's logits"
            yield Check(("unembed.hook_out", "ln_final.hook_out"), law, found[0][-1:], self._logits)

    def _stream(self, i: int) -> Iterator[Check]:
        pre, mid, post, attn, mlp = (
            f"blocks.{i}.hook_{p}" for p in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
        )
        yield from self._check("resid_pre + attn_out = resid_mid", mid, torch.add, pre, attn)
        yield from self._check("resid_mid + mlp_out = resid_post", post, torch.add, mid, mlp)
        if i + 1 < self._layers:
            after = f"blocks.{i + 1}.hook_resid_pre"
            yield from self._check("resid_post[i] = resid_pre[i+1]", post, lambda x: x, after)

    def _norms(self, i: int) -> Iterator[Check]:
        yield from self._norm(f"blocks.{i}.ln1", "ln1", i, f"blocks.{i}.hook_resid_pre")
        yield from self._norm(f"blocks.{i}.ln2", "ln2", i, f"blocks.{i}.hook_resid_mid")

    def _norm(self, name: str, role: str, layer: int | None, stream: str) -> Iterator[Check]:
        """normalized * scale is the stream, and the norm's own forward of the stream is its output."""
        scale, normalized, out = f"{name}.hook_scale", f"{name}.hook_normalized", f"{name}.hook_out"
        module = self._locator.module(role, layer)
        yield from self._check(f"{name}: normalized * scale = its input", normalized, torch.div, stream, scale)
        yield from self._check(f"{name}: out = the norm of its input", out, lambda x: module(x.clone()), stream)
        yield from self._check(f"{name}: out = normalized * weight", out,
                               lambda x: x * module.weight.to(x.dtype), normalized)

    def _attention(self, i: int) -> Iterator[Check]:
        b = f"blocks.{i}.attn"
        q, k, v = f"{b}.hook_q", f"{b}.hook_k", f"{b}.hook_v"
        rot_q, rot_k, z = f"{b}.hook_rot_q", f"{b}.hook_rot_k", f"{b}.hook_z"
        yield from self._projection("qkv", i, f"blocks.{i}.ln1.hook_out", (q, k, v))
        yield from self._head_norms(i)
        normed = (f"{b}.hook_q_normed", f"{b}.hook_k_normed")
        yield from self._rotation(i, normed if self._at(*normed) else (q, k), (rot_q, rot_k))
        attention = self._locator.module("attention", i)
        if internals.attention_plain(attention):
            scale, window = internals.attention_scale(attention), internals.attention_window(attention)
            yield from self._check("the pattern of rot_q and rot_k, times v = z", z,
                                   lambda *qkv: attend(*qkv, scale, window), rot_q, rot_k, v)
        yield from self._check("the output projection of z = attn_out", f"blocks.{i}.hook_attn_out",
                               lambda x: self._project("o", i, x.flatten(1)), z)

    def _rotation(self, i: int, before: tuple[str, str], after: tuple[str, str]) -> Iterator[Check]:
        found = self._at(*before, *after)
        if found is None:
            return
        q, k = (t.flatten(1).clone() for t in found[:2])
        positions = torch.arange(q.shape[0], device=q.device)
        rotated = self._locator.module("rotary", i)(positions, q, k)
        for source, name, got, want in zip(before, after, found[2:], rotated, strict=True):
            law = f"{name.rsplit('.', 1)[1]} = the rotation of {source.rsplit('.', 1)[1]}"
            yield Check((name, source), law, got, want.view_as(got))

    def _head_norms(self, i: int) -> Iterator[Check]:
        for role, part in (("q_norm", "q"), ("k_norm", "k")):
            if role in self._spec.modules:
                name = f"blocks.{i}.attn.hook_{part}"
                module = self._locator.module(role, i)
                yield from self._check(f"{part}_normed = the norm of {part}", f"{name}_normed",
                                       lambda x, m=module: m(x.clone()), name)

    def _mlp(self, i: int) -> Iterator[Check]:
        pre, linear, post, out = (
            f"blocks.{i}.{p}" for p in ("mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post", "hook_mlp_out")
        )
        act = ACTIVATIONS[self._spec.activation]
        yield from self._projection("gate_up", i, f"blocks.{i}.ln2.hook_out", (pre, linear))
        yield from self._check("act(pre) * pre_linear = post", post, lambda x, y: act(x) * y, pre, linear)
        yield from self._check("the down projection of post = mlp_out", out,
                               lambda x: self._project("down", i, x), post)

    def _projection(self, role: str, layer: int, source: str, parts: tuple[str, ...]) -> Iterator[Check]:
        """A fused projection's columns, part by part: a wrong part does not blame the others."""
        found = self._at(source, *parts)
        if found is None:
            return
        widths = [t[0].numel() for t in found[1:]]
        product = self._project(role, layer, found[0])
        if product.shape[1] != sum(widths):
            yield Check(parts, f"the widths of {role} = those of its parts", product, product[:, :0])
            return
        for name, got, want in zip(parts, found[1:], product.split(widths, dim=1), strict=True):
            yield Check((name, source), f"{name.rsplit('.', 1)[1]} = its part of the {role} projection", got.flatten(1), want)

    def _project(self, role: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        return internals.linear(self._locator.module(role, layer), x)


def _fault(check: Check) -> str:
    """Why a check fails, or nothing."""
    limit, error = TOLERANCE[check.got.dtype], check.error()
    if error <= limit:
        return ""
    return f"failed the proof at load: {check.law} is off by {error:.1e} (limit {limit:.0e})"


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """softmax(scale * q k^T + causal mask) v, in fp32; q [pos, head, d], k and v [pos, kv_head, d] -> [pos, head, d].

    Each kv head serves heads / kv_heads consecutive query heads (grouped-query attention).
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    scores = scale * torch.einsum("qhd,khd->hqk", q.float(), keys)
    distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    pattern = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", pattern, values).to(q.dtype)
