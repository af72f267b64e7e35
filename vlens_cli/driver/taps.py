"""Reading inside the forward: each request's rows of each asked point, copied at the moment they exist.

vLLM's fused kernels write in place, so a tensor kept by reference is later garbage: every value is copied (or
summed into a new tensor) in the hook, only the asked rows and columns, on the device. The host sees it once,
when the request is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from vlens_cli.driver import internals
from vlens_cli.driver.base import Want
from vlens_cli.driver.locate import Point


@dataclass
class Record:
    """What one request asked for, and what was kept of it so far."""

    key: str
    wants: dict[str, Want]
    pieces: dict[str, list[tuple[range | list[int], torch.Tensor]]] = field(default_factory=dict)
    chunks: int = 0
    fault: Exception | None = None

    def keep(self, point: Point, tensors: list[torch.Tensor], segment: internals.Segment) -> None:
        """Copy the asked rows of one step."""
        want = self.wants[point.name]
        positions = _asked(want, segment)
        if len(positions):
            rows = [_rows(t, positions, segment) for t in tensors]
            self.pieces.setdefault(point.name, []).append((positions, _value(point, want, rows)))


def _asked(want: Want, segment: internals.Segment) -> range | list[int]:
    present = range(segment.first, segment.first + segment.stop - segment.start)
    return present if want.positions is None else [p for p in want.positions if p in present]


def _rows(t: torch.Tensor, positions: range | list[int], segment: internals.Segment) -> torch.Tensor:
    if isinstance(positions, range):
        return t[segment.start : segment.stop]
    shift = segment.start - segment.first
    return t[torch.tensor([p + shift for p in positions], device=t.device)]


def _value(point: Point, want: Want, rows: list[torch.Tensor]) -> torch.Tensor:
    """A new tensor [rows, ...] with the point's value, cut to the asked heads and dims."""
    derive = point.row.derive
    if derive == "unembed":
        return _sum(rows)
    if derive:
        return _cut(DERIVE[derive](point, rows).view(-1, *point.shape), want)
    return _sum([_cut(t.unflatten(-1, point.shape), want) for t in rows])


def _cut(t: torch.Tensor, want: Want) -> torch.Tensor:
    t = t if want.heads is None else t[:, list(want.heads)]
    return t if want.dims is None else t[..., list(want.dims)]


def _sum(rows: list[torch.Tensor]) -> torch.Tensor:
    """Always a tensor of its own: the engine goes on writing into the ones that it was made from."""
    return rows[0].clone(memory_format=torch.contiguous_format) if len(rows) == 1 else rows[0] + rows[1]


def _fp32(rows: list[torch.Tensor]) -> torch.Tensor:
    """The stream as a fused norm sees it: summed in fp32, not rounded to the engine's dtype in between."""
    return rows[0].float() if len(rows) == 1 else rows[0].float() + rows[1].float()


def _rms(point: Point, x: torch.Tensor) -> torch.Tensor:
    """sqrt(mean(x^2) + eps), [rows, 1] (Zhang and Sennrich 2019, equation 4, with eps inside the root)."""
    return (x.square().mean(-1, keepdim=True) + internals.norm_eps(point.module)).sqrt()


def _scale(point: Point, rows: list[torch.Tensor]) -> torch.Tensor:
    return _rms(point, _fp32(rows)).to(rows[0].dtype)


def _normalized(point: Point, rows: list[torch.Tensor]) -> torch.Tensor:
    x = _fp32(rows)
    return (x / _rms(point, x)).to(rows[0].dtype)


DERIVE: dict[str, Callable[[Point, list[torch.Tensor]], torch.Tensor]] = {
    "scale": _scale,
    "normalized": _normalized,
}


class Taps:
    """The hooks of one worker: installed for the points that live requests ask, removed with the last of them."""

    def __init__(self, runner: Any, points: dict[str, Point]) -> None:
        self.points = points
        self._runner = runner
        self._records: dict[str, Record] = {}
        self._handles: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._segments: list[internals.Segment] | None = None

    def open(self, request: str, key: str, wants: dict[str, Want]) -> None:
        """A request has entered the batch."""
        self._records[request] = Record(key, wants)
        for name in wants:
            if name not in self._handles:
                self._handles[name] = self._install(self.points[name])

    def begin_step(self) -> None:
        self._segments = None

    def end_step(self, scheduled: dict[str, int]) -> None:
        """Count a forward for every request that had rows in it."""
        for request in scheduled:
            if request in self._records:
                self._records[request].chunks += 1

    def take(self, key: str) -> Record:
        """The record of one finished request, out of this worker; hooks that nobody else asks go with it."""
        request = next(r for r, record in self._records.items() if record.key == key)
        record = self._records.pop(request)
        asked = {name for other in self._records.values() for name in other.wants}
        for name in self._handles.keys() - asked:
            self._handles.pop(name).remove()
        return record

    def held(self) -> dict[str, int]:
        return {"requests": len(self._records), "hooks": len(self._handles)}

    def drop_all(self) -> None:
        """Forget every request: after a query that failed."""
        self._records.clear()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _install(self, point: Point) -> torch.utils.hooks.RemovableHandle:
        if point.on_input:
            return point.module.register_forward_pre_hook(
                lambda module, args, kwargs: self._read(point, args, kwargs, None), with_kwargs=True
            )
        return point.module.register_forward_hook(
            lambda module, args, kwargs, output: self._read(point, args, kwargs, output), with_kwargs=True
        )

    def _read(self, point: Point, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        asking = [(self._records[s.request], s) for s in self._step() if self._asks(s.request, point.name)]
        try:
            tensors = point.tensors(args, kwargs, output) if asking else []
            for record, segment in asking:
                record.keep(point, tensors, segment)
        except Exception as fault:
            # Raised here it would leave the engine in the middle of a step; kept here it fails these queries
            # when they are taken, and the engine lives.
            for record, _ in asking:
                record.fault = record.fault or fault

    def _asks(self, request: str, name: str) -> bool:
        record = self._records.get(request)
        return record is not None and name in record.wants

    def _step(self) -> list[internals.Segment]:
        if self._segments is None:
            self._segments = internals.step_segments(self._runner)
        return self._segments
