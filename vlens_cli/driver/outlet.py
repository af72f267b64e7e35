"""The way of captures from the forward to a file: copied once, queued, written by a thread while the forward goes on.

Where every row lies in its file is known before the forward, so that rows can be written in any order. The queue is
bounded: a forward that is faster than the disk waits for it. Nothing is ever held whole.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vlens_cli.driver.base import Want
from vlens_cli.driver.blob import narrowed, too_narrow
from vlens_cli.errors import QueryError

if TYPE_CHECKING:
    from vlens_cli.driver.internals import Segment
    from vlens_cli.driver.locate import Point
    from vlens_cli.driver.taps import Record

# Bytes that may wait for the disk.
MOST_QUEUED = 96 * 2**20
# Buffers of one pwritev; Linux takes 1024.
MOST_BUFFERS = 512


class Place(NamedTuple):
    """Where one hook point of one request lies: `row_bytes` a row from byte `offset` of the open file `file`."""

    file: int
    offset: int
    row_bytes: int


@dataclass(eq=False)
class Slot:
    """Where one request's captures go: `places` by the names of `wants`. `done` counts the rows that have left."""

    outlet: Outlet
    wants: dict[str, Want]
    places: dict[str, Place]
    n_tokens: int
    done: dict[str, int] = field(default_factory=dict)
    folded: dict[str, torch.Tensor] = field(default_factory=dict)

    def asked(self, name: str) -> Sequence[int]:
        positions = self.wants[name].positions
        return range(self.n_tokens) if positions is None else positions

    def check(self) -> None:
        """Every row must have left: fewer are an error, never data. Raises QueryError."""
        for name in self.wants:
            asked, found = len(self.asked(name)), self.done.get(name, 0)
            if found != asked:
                raise QueryError(f"{name} gave {found} rows where {asked} were asked", code="rows_missing")


# Rows of one request in one step: its slot, the absolute positions, and the first and last row of the flat tensors.
class Part(NamedTuple):
    slot: Slot
    positions: Sequence[int]
    start: int
    stop: int


class Outlet:
    """Writes what taps keep into files, on a thread of its own. `dtypes`: what each hook point is written in."""

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        self._dtypes = dtypes
        self._jobs: deque[Callable[[], None]] = deque()
        self._queued = 0
        self._changed = threading.Condition()
        self._closing = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="outlet", daemon=True)
        self._thread.start()

    # What the forward calls

    def keep(self, point: Point, tensors: list[torch.Tensor], asking: Sequence[tuple[Record, Segment]],
             value: Callable[[Point, Want, list[torch.Tensor]], torch.Tensor]) -> None:
        """Send the asked rows of all requests of one step; `value` forms the point's value of flat rows."""
        parts = [part for record, segment in asking if (part := _part(record.slot, point.name, segment)) is not None]
        if parts:
            want = parts[0].slot.wants[point.name]
            self._send_rows(point.name, want, parts, value(point, want, [_rows(t, parts, want) for t in tensors]))

    def put(self, slot: Slot, name: str, positions: Sequence[int], value: torch.Tensor) -> None:
        """Send rows [rows, ...] of one request, which go on where the last ones ended, or begin again."""
        if len(positions):
            self._send_rows(name, slot.wants[name], [Part(slot, positions, 0, len(positions))], value)

    def put_whole(self, slot: Slot, name: str, positions: Sequence[int], value: torch.Tensor) -> None:
        """Send a hook point that is no row of rows, such as [head, query, key]."""
        place = slot.places[name]
        slot.done[name] = len(positions)
        self._send(name, value.unsqueeze(0), [(place.file, place.offset, 0, 1)])

    def _send_rows(self, name: str, want: Want, parts: Sequence[Part], value: torch.Tensor) -> None:
        if want.reduce is not None:
            self._fold(name, want.reduce, parts, value)
            return
        places, at = [], 0
        for slot, positions, *_ in parts:
            place, row = slot.places[name], _first_row(slot, name, positions)
            places.append((place.file, place.offset + row * place.row_bytes, at, at + len(positions)))
            slot.done[name] = row + len(positions)
            at += len(positions)
        self._send(name, value, places)

    def _fold(self, name: str, kind: str, parts: Sequence[Part], value: torch.Tensor) -> None:
        """One row of each request's rows; what a prompt of several steps has so far waits on the device."""
        lengths = torch.tensor([len(part.positions) for part in parts], device=value.device)
        rows = FOLDS[kind].fold(value, lengths)
        ended, places = [], []
        for n, (slot, positions, *_) in enumerate(parts):
            row = _first_row(slot, name, positions)
            folded = rows[n] if row == 0 else FOLDS[kind].join(slot.folded[name], rows[n])
            slot.done[name] = row + len(positions)
            if slot.done[name] < len(slot.asked(name)):
                slot.folded[name] = folded.clone()
                continue
            slot.folded.pop(name, None)
            ended.append(FOLDS[kind].end(folded, slot.done[name]))
            place = slot.places[name]
            places.append((place.file, place.offset, len(ended) - 1, len(ended)))
        if ended:
            self._send(name, torch.stack(ended), places)

    def _send(self, name: str, value: torch.Tensor, places: list[tuple[int, int, int, int]]) -> None:
        """Queue rows [start, stop) of `value` for byte `offset` of `file`, each; the tensor is not used again."""
        value, spilled = narrowed(value, self._dtypes[name])
        spill = None if spilled is None else to_host(spilled)[0]
        host, event = to_host(value.contiguous())
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None or not self._queued or
                                   self._queued + host.nbytes <= MOST_QUEUED)
            if self._fault is not None:
                # Nothing is written any more; the query is told between two steps.
                return
            self._queued += host.nbytes
            self._jobs.append(lambda: self._write(name, host, spill, event, places))
            self._changed.notify_all()

    # What the query calls

    def then(self, job: Callable[[], None]) -> None:
        """Do something on the writing thread, when everything that was sent before is written."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def raise_fault(self) -> None:
        """Raise QueryError where something could not be written: the rest of the query is in vain."""
        if isinstance(self._fault, OSError):
            raise QueryError(f"the file could not be written, {self._fault.strerror}", code="output_failed") from self._fault
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Wait until all is written. Raises as `raise_fault`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self.raise_fault()

    def drop(self) -> None:
        """End without what still waits: after a query that failed."""
        with self._changed:
            self._jobs.clear()
            self._queued = 0
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # The writing thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            if self._fault is None:
                try:
                    job()
                except BaseException as fault:  # it belongs to the query, which asks for it
                    self._fault = fault
            # What it holds must not live until the next one comes.
            del job
            with self._changed:
                self._changed.notify_all()

    def _write(self, name: str, host: torch.Tensor, spill: torch.Tensor | None, event: Any,
               places: list[tuple[int, int, int, int]]) -> None:
        try:
            if event is not None:
                event.synchronize()
            if spill is not None and spill:
                raise too_narrow(name, host.dtype)
            data = host.view(torch.uint8).numpy().reshape(-1).data if host.numel() else memoryview(b"")
            row_bytes = len(data) // max(1, len(host))
            for file, offset, buffers in _joined(places, data, row_bytes):
                _write_all(file, offset, buffers)
        finally:
            with self._changed:
                self._queued = max(0, self._queued - host.nbytes)


def _joined(places: list[tuple[int, int, int, int]], data: memoryview, row_bytes: int
            ) -> Iterator[tuple[int, int, list[memoryview]]]:
    """(file, offset, buffers) of neighbours as one write."""
    file, begin, end, buffers = -1, 0, 0, []
    for to, offset, start, stop in sorted(places):
        if to != file or offset != end or len(buffers) == MOST_BUFFERS:
            if buffers:
                yield file, begin, buffers
            file, begin, end, buffers = to, offset, offset, []
        buffers.append(data[start * row_bytes : stop * row_bytes])
        end += (stop - start) * row_bytes
    if buffers:
        yield file, begin, buffers


def _write_all(file: int, offset: int, buffers: list[memoryview]) -> None:
    while buffers:
        written = os.pwritev(file, buffers, offset)
        offset += written
        while buffers and written >= len(buffers[0]):
            written -= len(buffers.pop(0))
        if written:
            buffers[0] = buffers[0][written:]


def to_host(value: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The tensor on the host, and the event to wait for before it is read; copies end in the order they were begun in."""
    if value.device.type == "cpu":
        return value, None
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def _part(slot: Slot, name: str, segment: Segment) -> Part | None:
    asked = slot.wants[name].positions
    shift = segment.start - segment.first
    present = range(segment.first, segment.first + segment.stop - segment.start)
    positions = present if asked is None else [p for p in asked if p in present]
    return Part(slot, positions, positions[0] + shift, positions[-1] + 1 + shift) if positions else None


def _rows(t: torch.Tensor, parts: Sequence[Part], want: Want) -> torch.Tensor:
    """The flat rows of all parts, in their order: a view where they follow each other."""
    first, n_rows = parts[0].start, sum(len(part.positions) for part in parts)
    ends = [first, *(part.stop for part in parts)]
    if all(part.start == end and part.stop - part.start == len(part.positions) for part, end in zip(parts, ends)):
        return t[first : first + n_rows]
    rows = [p - part.positions[0] + part.start for part in parts for p in part.positions]
    return t[torch.tensor(rows, device=t.device)]


def _first_row(slot: Slot, name: str, positions: Sequence[int]) -> int:
    """Which of a request's asked rows the first of `positions` is. Rows come in order; a preempted request is computed
    again from its start. Raises LookupError where some were left out."""
    asked = slot.asked(name)
    done = slot.done.get(name, 0)
    row = done if done < len(asked) and asked[done] == positions[0] else asked.index(positions[0])
    if row > done:
        raise LookupError(f"{name} gave no rows before position {positions[0]}")
    return row


@dataclass(frozen=True)
class Fold:
    """A reduction over rows: `fold` of [rows, ...] in runs of `lengths`, `join` of two folded rows, and the `end`, given how
    many rows there were."""

    fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    end: Callable[[torch.Tensor, int], torch.Tensor]


def _runs(value: torch.Tensor, lengths: torch.Tensor, how: str) -> torch.Tensor:
    return torch.segment_reduce(value, how, lengths=lengths, axis=0, unsafe=True)


# Sums are in float64: of rows with outliers the order would show.
FOLDS = {
    "mean": Fold(lambda v, n: _runs(v.double(), n, "sum"), torch.add, lambda folded, count: folded / count),
    "max": Fold(lambda v, n: _runs(v, n, "max"), torch.maximum, lambda folded, count: folded),
    "norm": Fold(lambda v, n: _runs(v.double().square(), n, "sum"), torch.add, lambda folded, count: folded.sqrt()),
}


def reduced(kind: str, rows: torch.Tensor) -> torch.Tensor:
    """[1, ...] of all rows [rows, ...], in their dtype."""
    fold = FOLDS[kind]
    folded = fold.fold(rows, torch.tensor([len(rows)], device=rows.device))
    return fold.end(folded, len(rows)).to(rows.dtype)
