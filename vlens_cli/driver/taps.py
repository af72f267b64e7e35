"""Reading and writing inside the forward: each request's rows of each asked point, at the moment they exist.

vLLM's fused kernels write in place, so a tensor kept by reference is later garbage: every value is copied (or
summed into a new tensor) in the hook, only the asked rows and columns, on the device. The host sees it once,
when the request is taken. A point is changed before it is read: what is captured is the value after its edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vlens_cli.driver import attention, internals, writes
from vlens_cli.driver.base import Edit, Want
from vlens_cli.driver.locate import Point
from vlens_cli.driver.outlet import Slot


@dataclass
class Record:
    """What one request asked for, what was kept of it so far, and how many forwards each edit was applied in.

    `wants` is what was asked, by point; `reads` has for each point that is read what to keep of it, and the names that
    `pieces` keep it under: the point's own, and one for each rebuilt point that is made of it. With a `slot`, what is
    asked for itself goes there at once.
    """

    key: str
    wants: dict[str, Want]
    reads: dict[str, list[tuple[str, Want]]]
    edits: dict[str, list[tuple[int, Edit]]]
    fired: list[int]
    slot: Slot | None = None
    pieces: dict[str, list[tuple[range | list[int], torch.Tensor]]] = field(default_factory=dict)
    chunks: int = 0
    fault: Exception | None = None

    @classmethod
    def of(cls, key: str, wants: dict[str, Want], reads: dict[str, list[tuple[str, Want]]], edits: Iterable[Edit]) -> Record:
        by_name: dict[str, list[tuple[int, Edit]]] = {}
        for n, edit in enumerate(edits):
            by_name.setdefault(edit.name, []).append((n, edit))
        return cls(key, wants, reads, by_name, [0] * sum(map(len, by_name.values())))

    @property
    def names(self) -> set[str]:
        return self.reads.keys() | self.edits.keys()

    def leaves(self, point: Point) -> bool:
        """Whether a point's rows go to the slot as they are read; logits and what is rebuilt are formed at the end."""
        return self.slot is not None and point.name in self.wants and not point.of and point.row.derive != "unembed"

    def keep(self, point: Point, tensors: list[torch.Tensor], segment: internals.Segment) -> None:
        """Copy the asked rows of one step."""
        for kept_as, want in self.reads[point.name]:
            if kept_as == point.name and self.leaves(point):
                continue
            positions = _asked(want, segment)
            if len(positions):
                value = _value(point, want, [_rows(t, positions, segment) for t in tensors])
                self.pieces.setdefault(kept_as, []).append((positions, value))

    def change(self, name: str, tensors: list[torch.Tensor], positions: Sequence[int], start: int = 0,
               counted: bool = True) -> None:
        """Apply the edits of one point, in order, to the rows of `positions`, which begin at row `start` of the
        tensors [rows, ...]. Logits that are formed once more, to be kept, do not count once more."""
        for n, edit in self.edits.get(name, ()):
            placed = _placed(edit, positions)
            if placed:
                rows = writes.places([start + row for _, row in placed])
                writes.write(edit, tensors, rows, writes.places([at for at, _ in placed]))
                self.fired[n] = self.fired[n] + 1 if counted else max(self.fired[n], 1)


def _placed(edit: Edit, positions: Sequence[int]) -> list[tuple[int, int]]:
    """(place among the edit's positions, place among `positions`) of every position in both."""
    if edit.positions is None:
        return [(p, row) for row, p in enumerate(positions)]
    rows = {p: row for row, p in enumerate(positions)}
    return [(at, rows[p]) for at, p in enumerate(edit.positions) if p in rows]


def _span(segment: internals.Segment) -> range:
    return range(segment.first, segment.first + segment.stop - segment.start)


def _asked(want: Want, segment: internals.Segment) -> range | list[int]:
    present = _span(segment)
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
    return _sum([_cut(point.shaped(t), want) for t in rows])


def _cut(t: torch.Tensor, want: Want) -> torch.Tensor:
    t = t if want.heads is None else t[:, list(want.heads)]
    return t if want.dims is None else t[..., list(want.dims)]


def _sum(rows: list[torch.Tensor]) -> torch.Tensor:
    """Always a tensor of its own: the engine goes on writing into the ones that it was made from."""
    return rows[0].clone(memory_format=torch.contiguous_format) if len(rows) == 1 else rows[0] + rows[1]


def _fp32(rows: list[torch.Tensor]) -> torch.Tensor:
    """The stream as a fused norm sees it: summed in fp32, not rounded to the engine's dtype in between."""
    return rows[0].float() if len(rows) == 1 else rows[0].float() + rows[1].float()


def _centred(point: Point, rows: list[torch.Tensor]) -> torch.Tensor:
    """What a norm divides: the stream, less its mean where the family's norms are layer norms."""
    x = _fp32(rows)
    weight = getattr(point.module, "weight", None)
    if weight is not None and weight.shape[-1] < x.shape[-1]:
        # A norm over each head's queries or keys: [rows, head, d_head].
        x = x.unflatten(-1, (-1, weight.shape[-1]))
    return x - x.mean(-1, keepdim=True) if point.norm == "layer" else x


def _divisor(point: Point, x: torch.Tensor) -> torch.Tensor:
    """sqrt(mean(x^2) + eps) of the centred x, [rows, 1]: RMSNorm (Zhang and Sennrich 2019, equation 4, with eps inside
    the root) and, over a centred x, LayerNorm (Ba, Kiros and Hinton 2016)."""
    return (x.square().mean(-1, keepdim=True) + internals.norm_eps(point.module)).sqrt()


def _scale(point: Point, rows: list[torch.Tensor]) -> torch.Tensor:
    return _divisor(point, _centred(point, rows)).to(rows[0].dtype)


def _normalized(point: Point, rows: list[torch.Tensor]) -> torch.Tensor:
    x = _centred(point, rows)
    return (x / _divisor(point, x)).to(rows[0].dtype)


def _times_factor(point: Point, rows: list[torch.Tensor]) -> torch.Tensor:
    return rows[0] * point.factor


def _expert_weights(point: Point, rows: list[torch.Tensor]) -> torch.Tensor:
    return internals.route(point.helper, rows[0])[0]


def _expert_indices(point: Point, rows: list[torch.Tensor]) -> torch.Tensor:
    return internals.route(point.helper, rows[0])[1]


DERIVE: dict[str, Callable[[Point, list[torch.Tensor]], torch.Tensor]] = {
    "scale": _scale,
    "normalized": _normalized,
    "times_factor": _times_factor,
    "expert_weights": _expert_weights,
    "expert_indices": _expert_indices,
}


class Taps:
    """The hooks of one worker: installed on the modules of the points that live requests ask, removed with the last.

    `segments` tells, inside a forward, which rows belong to which request; `logits` is the module whose output the
    engine samples from.
    """

    def __init__(self, segments: Callable[[], list[internals.Segment]], points: dict[str, Point], logits: torch.nn.Module | None, device: torch.device) -> None:
        self.points = points
        self._segments_now = segments
        self._logits = logits
        self._device = device
        self._records: dict[str, Record] = {}
        # The requests that ask each point, and the points of each module that are asked, in the order of the forward.
        self._asking: dict[str, dict[str, Record]] = {}
        self._on: dict[int, dict[str, Point]] = {}
        self._handles: dict[int, list[torch.utils.hooks.RemovableHandle]] = {}
        self._order = {name: n for n, name in enumerate(points)}
        self._renormed: dict[str, list[tuple[slice, torch.Tensor, torch.Tensor]]] = {}
        self._step: dict[str, internals.Segment] | None = None
        self._running = False
        # In the first forward ranks see that they are at the same point before one waits for what another holds.
        self.meeting = False

    def open(self, request: str, key: str, wants: dict[str, Want], edits: Iterable[Edit] = (), slot: Slot | None = None
             ) -> None:
        """A request has entered the batch. Points of other pipeline stages are theirs to see to."""
        wants = {name: want for name, want in wants.items() if name in self.points}
        record = Record.of(key, wants, self._reads(wants), [writes.on_device(edit, self._device) for edit in edits])
        record.edits = {name: edits for name, edits in record.edits.items() if name in self.points}
        record.slot = slot
        self._records[request] = record
        for name in record.names:
            self._asking.setdefault(name, {})[request] = record
            self._watch(self.points[name])

    def _reads(self, wants: dict[str, Want]) -> dict[str, list[tuple[str, Want]]]:
        """What to read for `wants`: the points themselves, and the sources of those that are rebuilt."""
        reads: dict[str, list[tuple[str, Want]]] = {}
        for name, want in wants.items():
            point = self.points[name]
            parts = zip(point.of, attention.reads(point, want), strict=True) if point.of else [(name, want)]
            for source, part in parts:
                reads.setdefault(source, []).append((point.source(source) if point.of else name, part))
        return reads

    def begin_step(self) -> None:
        self._step, self._running = None, True

    def end_step(self, scheduled: dict[str, int]) -> None:
        """Count a forward for every request that had rows in it."""
        self._running = False
        for request in scheduled:
            if request in self._records:
                self._records[request].chunks += 1

    def take(self, key: str) -> Record:
        """The record of one finished request, out of this worker; hooks that nobody else asks go with it."""
        request = next((r for r, record in self._records.items() if record.key == key), None)
        if request is None:
            raise LookupError("the engine has finished a request that no tap has seen")
        record = self._records.pop(request)
        for name in record.names:
            del self._asking[name][request]
            if not self._asking[name]:
                del self._asking[name]
                self._unwatch(self.points[name])
        return record

    def raise_fault(self) -> None:
        """Raise what the first hook body that failed has raised."""
        for record in self._records.values():
            if record.fault is not None:
                raise record.fault

    def unfired(self) -> list[str]:
        """The points of edits that no hook has applied."""
        return [name for record in self._records.values() for name, edits in record.edits.items()
                for n, _ in edits if not record.fired[n]]

    def held(self) -> dict[str, int]:
        return {"requests": len(self._records), "hooks": len(self._handles)}

    def drop_all(self) -> None:
        """Forget every request: after a query that failed."""
        self._running = False
        self._records.clear()
        self._asking.clear()
        self._renormed.clear()
        self._on.clear()
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def _modules(self, point: Point) -> list[torch.nn.Module]:
        """Where a point is read and written: its module, and for the logits also what the engine samples from."""
        return [point.module, self._logits] if point.row.derive == "unembed" else [point.module]

    def _watch(self, point: Point) -> None:
        for module in self._modules(point):
            if point.name in self._on.get(id(module), ()):
                continue
            asked = self._on.get(id(module), {}) | {point.name: point}
            self._on[id(module)] = {name: asked[name] for name in sorted(asked, key=self._order.__getitem__)}
            if id(module) not in self._handles:
                self._handles[id(module)] = [
                    module.register_forward_pre_hook(self._before, with_kwargs=True),
                    module.register_forward_hook(self._after, with_kwargs=True),
                ]

    def _unwatch(self, point: Point) -> None:
        for module in self._modules(point):
            del self._on[id(module)][point.name]
            if not self._on[id(module)]:
                del self._on[id(module)]
                for handle in self._handles.pop(id(module)):
                    handle.remove()

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for point in self._visited(module):
            if point.on_input:
                self._visit(self._read, point, args, kwargs, None)

    def _after(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for point in self._visited(module):
            if module is self._logits and module is not point.module:
                self._visit(self._sampled, point, args, kwargs, output)
            elif point.name in self._renormed:
                self._visit(self._renormalize, point, args, kwargs, output)
            elif not point.on_input:
                self._visit(self._read, point, args, kwargs, output)

    def _visited(self, module: torch.nn.Module) -> Iterable[Point]:
        """The asked points of a module; none outside a step, when vlens itself runs it."""
        return self._on.get(id(module), {}).values() if self._running else ()

    def _visit(self, body: Callable[..., None], point: Point, *call: Any) -> None:
        """Run one hook body for every request that asks the point and has rows in this step."""
        step = self._segments()
        asking = [(record, step[r]) for r, record in self._asking.get(point.name, {}).items() if r in step]
        try:
            if asking:
                body(point, asking, *call)
        except Exception as fault:
            # Raised here it would leave the engine in the middle of a step; kept here it fails these queries
            # when they are taken, and the engine lives.
            for record, _ in asking:
                record.fault = record.fault or fault

    def _read(self, point: Point, asking: Asking, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Change, then keep, the rows of each request."""
        if self.meeting and (point.spread or point.addend):
            point.ranks.meet(point.name)
        held = point.tensors(args, kwargs, output)
        tensors = point.whole(held)
        leaving: Asking = []
        for record, segment in asking:
            if point.name in record.edits and point.row.derive in ("normalized", "times_factor"):
                self._change_formed(point, record, tensors, segment)
                continue
            if point.name in record.edits and not point.row.derive:
                shaped = [point.shaped(t) for t in tensors]
                record.change(point.name, shaped, _span(segment), segment.start)
            if point.name in record.reads:
                record.keep(point, tensors, segment)
            if record.leaves(point):
                leaving.append((record, segment))
        if any(point.name in record.edits for record, _ in asking):
            point.give_back(held, tensors)
        if leaving:
            # Of all requests together: a copy for each of them would take longer than the forward of a small model.
            leaving[0][0].slot.outlet.keep(point, tensors, leaving, _value)

    def _change_formed(self, point: Point, record: Record, tensors: list[torch.Tensor],
                       segment: internals.Segment) -> None:
        """What the engine never forms: the stream before its norm's weight, a value that it multiplies later. The edited
        rows are formed here, kept, and taken to where the engine goes on: through the norm's weight into its output,
        when that is there, or back over the factor."""
        rows = slice(segment.start, segment.stop)
        before = DERIVE[point.row.derive](point, [t[rows] for t in tensors])
        after = before.clone()
        record.change(point.name, [after], _span(segment))
        if point.row.derive == "normalized":
            self._renormed.setdefault(point.name, []).append((rows, before, after))
        else:
            tensors[0][rows] = torch.where(after != before, after / point.factor, tensors[0][rows])
        if point.name in record.wants:
            want = record.wants[point.name]
            positions = _asked(want, segment)
            if len(positions):
                kept = after[[p - segment.first for p in positions]]
                if record.leaves(point):
                    record.slot.outlet.put(record.slot, point.name, positions, _cut(kept, want))
                    return
                record.pieces.setdefault(point.name, []).append((positions, _cut(kept, want)))

    def _renormalize(self, point: Point, asking: Asking, args: tuple[Any, ...], kwargs: dict[str, Any],
                     output: Any) -> None:
        """Only entries that an edit changed: the others keep the engine's bits."""
        target = output[0] if isinstance(output, tuple) else output
        target = target[0] if point.batch_axis else target
        for rows, before, after in self._renormed.pop(point.name):
            new = internals.norm_affine(point.module, after, point.norm)
            target[rows] = torch.where(after != before, new, target[rows])

    def _sampled(self, point: Point, asking: Asking, args: tuple[Any, ...], kwargs: dict[str, Any],
                 output: torch.Tensor) -> None:
        """Edits of the logits that the engine samples from: one row a request, that of its last position in the step."""
        order = list(self._segments())
        if len(output) != len(order):
            raise LookupError(f"the engine formed {len(output)} rows of logits for {len(order)} requests")
        for record, segment in asking:
            last = _span(segment)[-1:]
            record.change(point.name, [output[:, : point.shape[0]]], last, order.index(segment.request))

    def _segments(self) -> dict[str, internals.Segment]:
        if self._step is None:
            self._step = {segment.request: segment for segment in self._segments_now()}
        return self._step


Asking = list[tuple[Record, internals.Segment]]
