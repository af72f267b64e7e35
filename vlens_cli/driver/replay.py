"""Many edited variants of one prompt, computing only what their edits can change.

Attention is causal, so what comes before the first edited position, and every layer before the first edited one, is the
same in all variants: it is computed once. A variant enters at its first edited layer with the rows from its first edited
position on, and its queries see the base's keys and values in front of its own. The live blocks run, one at a time, on
the rows of all variants together; only the attention kernel, which wants a scheduled batch, is stood in for by the
formula that the proof at load has checked it against.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlens_cli.driver import attention, internals
from vlens_cli.driver.base import Edit
from vlens_cli.driver.locate import Locator, Point
from vlens_cli.driver.taps import Taps
from vlens_cli.driver.unembed import Unembedding

BASE = "base"
# Numbers of one table of scores: 64 MB in fp32.
PIECE = 1 << 24


@dataclass(frozen=True)
class Variant:
    """One variant: its edits, and where they begin to matter."""

    edits: tuple[Edit, ...]
    layer: int
    start: int


def variant(edits: Sequence[Edit], layers: dict[str, int | None]) -> Variant:
    """`layers` gives the layer of each editable hook point. Raises LookupError for an edit outside the blocks."""
    found = [layers[edit.name] for edit in edits]
    if not found or None in found:
        raise LookupError("an edit outside the blocks")
    starts = [0 if edit.positions is None else min(edit.positions) for edit in edits]
    return Variant(tuple(edits), min(found), min(starts))


class Replay:
    """Runs variants on the live modules of one rank. Raises LookupError where this model's blocks are not of a form that
    can be run one by one."""

    def __init__(self, unembedding: Unembedding, locator: Locator, points: dict[str, Point], config: Any,
                 device: torch.device) -> None:
        self._unembedding, self._config, self._device = unembedding, config, device
        self._segments: list[internals.Segment] = []
        self._taps = Taps(lambda: self._segments, points, locator.module("logits"), device)
        self._blocks = [_Block(points, i) for i in range(locator.catalog.n_layers)]
        self._attention = [locator.module("attention", i) for i in range(locator.catalog.n_layers)]

    @torch.inference_mode()
    def run(self, stream: torch.Tensor, variants: Sequence[Variant]) -> torch.Tensor:
        """Logits at the last position, [1 + variants, d_vocab] in the engine's dtype, the first those of the base.

        stream   [pos, d_model], the residual stream before the first block
        """
        for n, one in enumerate(variants):
            self._taps.open(str(n), str(n), {}, one.edits)
        try:
            last = self._through(stream.to(self._device), variants)
            if missed := self._taps.unfired():
                raise LookupError(f"an edit of {missed[0]} was never applied")
            return self._unembedding.logits(self._unembedding.norm(last))
        finally:
            self._taps.drop_all()

    def _through(self, stream: torch.Tensor, variants: Sequence[Variant]) -> torch.Tensor:
        """The last row of each stream after the last block, [1 + variants, d_model]."""
        running = {BASE: stream.clone()}
        firsts = {BASE: 0} | {str(n): one.start for n, one in enumerate(variants)}
        for i, block in enumerate(self._blocks):
            running |= {str(n): running[BASE][one.start :] for n, one in enumerate(variants) if one.layer == i}
            self._segments = list(_segments(running, firsts))
            flat = torch.cat(list(running.values()))
            positions = _positions(self._segments).to(self._device)
            self._taps.begin_step()
            with internals.forward_context(self._config), self._standing_in(i):
                flat = block(flat, positions)
            self._taps.end_step({})
            self._taps.raise_fault()
            running = {s.request: flat[s.start : s.stop] for s in self._segments}
        order = [BASE, *map(str, range(len(variants)))]
        return torch.stack([running[name][-1] for name in order])

    @contextlib.contextmanager
    def _standing_in(self, layer: int) -> Iterator[None]:
        """Within, the attention layer computes z from its rows and the base's, without the engine's cache."""
        module = self._attention[layer]
        module.forward = lambda query, key, value, *args, **kwargs: self._attend(module, query, key, value)
        try:
            yield
        finally:
            del module.forward

    def _attend(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, width = internals.attention_heads(module)
        scoring = internals.attention_scoring(module)
        q = query.view(-1, heads, width)
        k, v = (t.view(len(q), kv_heads, -1) for t in (key, value))
        out = q.new_empty(len(q), heads, v.shape[-1])
        base = self._segments[0]
        n = base.stop - base.start
        for first, starts in _by_first(self._segments).items():
            per = max(1, PIECE // (heads * n * (n - first)))
            for at in range(0, len(starts), per):
                rows = torch.tensor(starts[at : at + per], device=q.device)[:, None] + torch.arange(n - first, device=q.device)
                front = base.start + torch.arange(first, device=q.device).expand(len(rows), -1)
                seen = torch.cat([front, rows], dim=1)
                out[rows] = attend(q[rows], k[seen], v[seen], scoring, first)
        return out.flatten(1) if query.ndim == 2 else out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: internals.Scoring, first: int) -> torch.Tensor:
    """z [batch, query, head, d_head] of queries at positions `first`, ... over keys at 0, 1, ... of each batch row."""
    kv_group = q.shape[2] // k.shape[2]
    if scoring.plain:
        distance = torch.arange(first, first + q.shape[1], device=q.device)[:, None] - torch.arange(k.shape[1], device=q.device)
        visible = (distance >= 0) if scoring.window is None else (distance >= 0) & (distance < scoring.window)
        k, v = (t.repeat_interleave(kv_group, dim=2).transpose(1, 2) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=visible, scale=scoring.scale).transpose(1, 2)
    heads = torch.arange(q.shape[2], device=q.device)
    at = torch.arange(first, first + q.shape[1], device=q.device)
    rows = (attention.attended(attention.pattern(attention.scores(
        one_q, one_k.repeat_interleave(kv_group, dim=1), heads, at, scoring), heads, scoring), one_v)
        for one_q, one_k, one_v in zip(q, k, v, strict=True))
    return torch.stack(list(rows)).to(q.dtype)


def _segments(running: dict[str, torch.Tensor], firsts: dict[str, int]) -> Iterator[internals.Segment]:
    start = 0
    for name, rows in running.items():
        yield internals.Segment(name, start, start + len(rows), firsts[name])
        start += len(rows)


def _positions(segments: Sequence[internals.Segment]) -> torch.Tensor:
    """The position of each row of all segments."""
    lengths = torch.tensor([s.stop - s.start for s in segments])
    shift = torch.tensor([s.start - s.first for s in segments])
    return torch.arange(segments[-1].stop) - shift.repeat_interleave(lengths)


def _by_first(segments: Sequence[internals.Segment]) -> dict[int, list[int]]:
    """First position -> where the rows of each such segment begin."""
    found: dict[int, list[int]] = {}
    for segment in segments:
        found.setdefault(segment.first, []).append(segment.start)
    return found


class _Block:
    """One live block, called on whole streams. Raises LookupError where it wants more than a stream and positions."""

    def __init__(self, points: dict[str, Point], layer: int) -> None:
        try:
            self._before, self._after = (points[f"blocks.{layer}.hook_{end}"] for end in ("resid_pre", "resid_post"))
        except KeyError as miss:
            raise LookupError(f"{miss.args[0]} is refused") from miss
        self._module = self._before.module
        if self._after.module is not self._module or not (self._before.on_input and not self._after.on_input):
            raise LookupError("the stream is not read on both sides of one module")
        if self._before.row.derive or self._after.row.derive or self._before.batch_axis:
            raise LookupError("the stream is not the block's own argument")
        self._names = self._arguments()

    def _arguments(self) -> dict[str, str]:
        """Parameter -> what it gets: the stream, nothing (the rest of a pair), or positions."""
        parameters = inspect.signature(self._module.forward).parameters
        order = list(parameters)
        stream = [order[key] if isinstance(key, int) else key for key in self._before.row.inputs]
        found = {stream[0]: "stream"} | dict.fromkeys(stream[1:], "nothing")
        for name, parameter in parameters.items():
            if name in ("positions", "position_ids"):
                found[name] = "positions"
            elif name not in found and parameter.default is parameter.empty and parameter.kind not in (
                    parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise LookupError(f"the block wants an argument that is not known here: {name}")
        return found

    def __call__(self, stream: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given = {"stream": stream, "nothing": None, "positions": positions}
        output = self._module(**{name: given[what] for name, what in self._names.items()})
        tensors = self._after.tensors((), {}, output)
        return tensors[0] if len(tensors) == 1 else tensors[0] + tensors[1]
