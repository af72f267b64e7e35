"""Reading and writing in compiled mode: what eager taps do inside a forward is planned before it and collected after it.

Before each step the tables say for every row of every asked point where it is copied to and which program changes it;
after the step the copied rows are taken out, still on the device. A step in which nothing but the positions has moved
on, as in decoding, leaves the tables as they are, and its rows with those of the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vlens_cli.driver import internals, writes
from vlens_cli.driver.base import LOGITS, Edit, Want
from vlens_cli.driver.graph import limits, op, programs
from vlens_cli.driver.graph.tables import Site, Tables
from vlens_cli.driver.locate import Point
from vlens_cli.driver.outlet import Slot
from vlens_cli.driver.taps import Record, Taps, _value


@dataclass
class GraphRecord(Record):
    """A request as the tables serve it.

    watched  site -> positions to copy, or None for all   block  its programs
    settled  from which position on every row is served alike: the last that anything names, and one
    taken    site -> (positions, rows) of each step, or of many that were alike
    """

    watched: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    block: programs.Block | None = None
    settled: int = 0
    taken: dict[int, list[tuple[Sequence[int], torch.Tensor]]] = field(default_factory=dict)

    def leaves(self, point: Point) -> bool:
        """Rows are collected when the request has ended, for its slot too."""
        return False


@dataclass
class Copied:
    """The rows of one site in one step: `parts` are (record, positions, first row) in the order of the rows."""

    site: int
    start: int
    count: int
    parts: list[tuple[GraphRecord, Sequence[int], int]]


@dataclass
class Steps:
    """Steps that the tables serve alike, one after the other, as in decoding: `layout`, `live` and `plan` are those of the
    first, `rows` what was copied in each. What they gave is handed out once, not once a step and request."""

    layout: internals.Layout
    live: list[tuple[GraphRecord, internals.Segment]]
    plan: list[Copied]
    rows: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # One row each, and nothing names a later one.
        self._alike = all(s.stop == s.start + 1 and s.first >= record.settled for record, s in self.live)

    def goes_on(self, layout: internals.Layout) -> bool:
        """Whether a step is the next of these: every request has one row, where it was, a position later."""
        n = len(self.rows)
        return (self._alike and layout.requests == self.layout.requests and layout.offsets == self.layout.offsets
                and layout.firsts == [first + n for first in self.layout.firsts])


class GraphTaps(Taps):
    """The taps of one worker whose points are in the graph. `located` are all points, `built` those in the graph."""

    def __init__(self, points: dict[str, Point], built: Sequence[str], logits: torch.nn.Module, device: torch.device,
                 n_tokens: int, n_bytes: int) -> None:
        self.located = points
        names = [name for name in points if name in built]
        self._numbers = {name: n for n, name in enumerate(names)}
        super().__init__(lambda: self._layout.segments(), self._served(points), logits, device)
        self.tables = Tables([_site(points[name]) for name in names], n_tokens, n_bytes, device)
        self.sampled: dict[str, list[torch.Tensor]] = {}
        self.sampling: tuple[Any, ...] = ()
        self._samples: torch.utils.hooks.RemovableHandle | None = None
        self._layout = internals.Layout([], [0], [])
        self._steps: Steps | None = None
        self._planned = False
        # The sites that the tables say something about.
        self._busy: set[int] = set()
        # What the op's own counts must be, and what is wrong with them, once looked at after the last step.
        self._expected = [[0, 0] for _ in names]
        self._counted: str | None = ""
        for name, site in self._numbers.items():
            _build_in(points[name], site)

    def _served(self, points: dict[str, Point]) -> dict[str, Point]:
        """Built points, those that are rebuilt from built ones, and logits where the final norm's output is built."""
        found = {name: points[name] for name in self._numbers}
        for name, point in points.items():
            if point.of and all(source in found for source in point.of):
                found[name] = point
            if name == LOGITS and limits.FINAL in found:
                found[name] = point
        return {name: found[name] for name in points if name in found}

    # Requests

    def open(self, request: str, key: str, wants: dict[str, Want], edits: Iterable[Edit] = (), slot: Slot | None = None
             ) -> None:
        # The logits are changed in a hook, beside the model; all else is written into the tables from the host.
        edits = [writes.on_device(edit, self._device) if edit.name == LOGITS else edit for edit in edits]
        base = Record.of(key, wants, self._reads(wants), edits)
        record = GraphRecord(base.key, base.wants, base.reads, base.edits, base.fired, slot)
        self._records[request] = record
        for name, asked in record.reads.items():
            site = self._site_of(name)
            positions = [want.positions for _, want in asked] + ([record.watched[site]] if site in record.watched else [])
            record.watched[site] = None if None in positions else tuple(sorted({p for of in positions for p in of}))
        named = [p for of in record.watched.values() if of for p in of] + [p for e in edits for p in e.positions or ()]
        record.settled = 1 + max(named, default=-1)
        try:
            self._write(record, [edit for edit in edits if edit.name != LOGITS])
        except Exception as fault:
            # As in a hook: the query fails when it is taken, and the engine lives.
            record.fault = fault
        if LOGITS in record.edits:
            self._asking.setdefault(LOGITS, {})[request] = record
            self._watch(self.points[LOGITS])

    def _site_of(self, name: str) -> int:
        return self._numbers[limits.FINAL if name == LOGITS else name]

    def _write(self, record: GraphRecord, edits: list[Edit]) -> None:
        """Put the programs of a request into the device's memory."""
        if not edits:
            return
        each = max((len(part) for e in edits if e.positions is None for part in (e.keep, e.value)
                    if isinstance(part, torch.Tensor) and part.ndim > len(self.points[e.name].shape)), default=0)
        record.settled = max(record.settled, each)
        shapes = {self._numbers[name]: self.points[name].shape for name in record.edits if name != LOGITS}
        record.block = self.tables.programs.take(programs.sites_of(edits, self._numbers), shapes)

    def take(self, key: str) -> Record:
        request = next((r for r, record in self._records.items() if record.key == key), None)
        if request is None:
            raise LookupError("the engine has finished a request that no tap has seen")
        self._hand_out()
        record = self._records.pop(request)
        self._release(record)
        if LOGITS in record.edits:
            del self._asking[LOGITS][request]
            if not self._asking[LOGITS]:
                del self._asking[LOGITS]
                self._unwatch(self.points[LOGITS])
        if record.fault is None:
            self._check_counts(record)
        for name, asked in record.reads.items():
            for kept_as, want in asked:
                pieces = self._pieces(record, self._site_of(name), self.points[name], want)
                record.pieces.setdefault(kept_as, []).extend(pieces)
        return record

    def _release(self, record: GraphRecord) -> None:
        if record.block is not None:
            self.tables.programs.give_back(record.block)

    def _check_counts(self, record: GraphRecord) -> None:
        """The op counts the rows that it served, in 32 bits: a graph that does not call it gives rows of nothing."""
        if self._counted is None:
            self._counted = self._miscounted()
        if self._counted:
            record.fault = LookupError(self._counted)

    def _miscounted(self) -> str:
        for site, (got, want) in enumerate(zip(self.tables.counts.tolist(), self._expected, strict=True)):
            if any((g - w) % 2**32 for g, w in zip(got, want, strict=True)):
                return (f"the graph served {got[0]} rows and {got[1]} edited rows of {self.tables.sites[site].name} where "
                        f"{want[0]} and {want[1]} were asked")
        return ""

    def _pieces(self, record: GraphRecord, site: int, point: Point, want: Want
                ) -> list[tuple[Sequence[int], torch.Tensor]]:
        """What was kept of a point, as eager taps keep it."""
        found = []
        for positions, rows in record.taken.get(site, ()):
            asked = [n for n, p in enumerate(positions) if want.positions is None or p in want.positions]
            if asked:
                some = rows if len(asked) == len(positions) else rows[asked]
                tensors = list(some.unbind(1)) if self.tables.sites[site].raw else [some]
                value = _value(point, want, tensors) if self.tables.sites[site].raw else _value_of(point, want, some)
                found.append(([positions[n] for n in asked], value))
        return found

    def drop_all(self) -> None:
        super().drop_all()
        self._steps, self._planned, self._counted = None, False, ""
        self._expected = [[0, 0] for _ in self._expected]
        self.tables.clear()
        self._busy = set()

    def held(self) -> dict[str, int]:
        return {"requests": len(self._records), "hooks": len(self._handles)}

    # The logits that the engine samples from, which are formed outside the graph

    def watch_samples(self, on: bool) -> None:
        """Keep, from now on, each request's rows of them: `sampled` has [d_vocab] of each step, by key; `sampling` is the
        last call of the module that forms them."""
        if self._samples is not None:
            self._samples.remove()
            self._samples = None
        self.sampled.clear()
        if on:
            self._samples = self._logits.register_forward_hook(self._sample, with_kwargs=True)

    def _sample(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        if not self._running:
            return
        self.sampling = module, args, kwargs
        width = self.located[LOGITS].shape[0]
        for n, request in enumerate(self._segments()):
            if (record := self._records.get(request)) is not None:
                self.sampled.setdefault(record.key, []).append(output[n, :width].clone())

    # Steps

    def begin_step(self) -> None:
        super().begin_step()
        self._planned, self.tables.busy = False, None

    def planned(self, layout: internals.Layout) -> None:
        """The engine has laid out the rows of a step that is about to run: fill the tables for it, unless it goes on from
        those before."""
        self._layout = layout
        if self._steps is None or not self._steps.goes_on(layout):
            self._hand_out()
            live = [(record, s) for s in layout.segments()
                    if (record := self._records.get(s.request)) is not None and record.fault is None]
            self._steps = Steps(layout, live, self._fill(live))
        self._planned, self.tables.busy = True, self._busy

    def _fill(self, live: list[tuple[GraphRecord, internals.Segment]]) -> list[Copied]:
        host, used, before, at, plan = self.tables.host, set(), self._busy, 0, []
        for site in before:
            host[site] = -1
        asked: dict[int, list[tuple[GraphRecord, internals.Segment]]] = {}
        for record, segment in live:
            used |= self._place_edits(record, segment)
            for site in record.watched:
                asked.setdefault(site, []).append((record, segment))
        changed = {site for site in used if (host[site, 1] >= 0).any()}
        for site, of in sorted(asked.items()):
            copied = self._place_copies(site, of, at)
            if copied.count:
                at += copied.count * self.tables.row_granules(site)
                plan.append(copied)
                changed.add(site)
        if touched := changed | before:
            self.tables.upload(range(min(touched), max(touched) + 1))
        self._busy = changed
        return plan

    def _place_edits(self, record: GraphRecord, segment: internals.Segment) -> set[int]:
        if record.block is None:
            return set()
        rows = range(segment.start, segment.stop)
        for site, of in record.block.programs.items():
            table = self.tables.host[site, 1]
            rest = of.get(None)
            if rest is not None:
                table[segment.start : segment.stop] = rest + record.block.start
            if len(of) > (rest is not None):
                for row in rows:
                    found = of.get(segment.first + row - segment.start, rest)
                    if found is not None:
                        table[row] = found + record.block.start
        return set(record.block.programs)

    def _place_copies(self, site: int, asked: list[tuple[GraphRecord, internals.Segment]], start: int) -> Copied:
        copied = Copied(site, start, 0, [])
        step = self.tables.row_granules(site)
        table = self.tables.host[site, 0]
        for record, segment in asked:
            named, present = record.watched[site], range(segment.first, segment.first + segment.stop - segment.start)
            positions = present if named is None else [p for p in named if p in present]
            room = (self.tables.granules - start) // step - copied.count
            if len(positions) > room:
                record.fault = LookupError(f"{len(positions)} rows of {self.tables.sites[site].name} were asked in a step that "
                                           f"has room for {max(room, 0)} more")
                continue
            for n, p in enumerate(positions):
                table[segment.start + p - segment.first] = start + (copied.count + n) * step
            if len(positions):
                copied.parts.append((record, positions, copied.count))
                copied.count += len(positions)
        return copied

    def end_step(self, scheduled: dict[str, int]) -> None:
        self._running, self.tables.busy = False, None
        if self._planned:
            self._steps.rows.append([self.tables.copied(of.site, of.start, of.count).clone() for of in self._steps.plan])
            self._planned = False

    def _hand_out(self) -> None:
        """Give each request what the steps since the last time have copied, and count what they have served."""
        steps, self._steps = self._steps, None
        if steps is None or not steps.rows:
            return
        n, self._counted = len(steps.rows), None
        for of, rows in zip(steps.plan, zip(*steps.rows, strict=True), strict=True):
            self._expected[of.site][0] += n * of.count
            together = torch.stack(rows) if n > 1 else rows[0]
            for record, positions, start in of.parts:
                if n > 1:
                    given = range(positions[0], positions[0] + n), together[:, start]
                else:
                    given = positions, together[start : start + len(positions)]
                record.taken.setdefault(of.site, []).append(given)
        for record, segment in steps.live:
            record.chunks += n
            if record.block is not None:
                self._count_edits(record, segment, n)

    def _count_edits(self, record: GraphRecord, segment: internals.Segment, steps: int) -> None:
        """Of `steps` steps, several only where each has one row that no edit names."""
        present = range(segment.first, segment.first + segment.stop - segment.start)
        for site, of in record.block.programs.items():
            self._expected[site][1] += steps * (len(present) if None in of else sum(p in of for p in present))
        for name, edits in record.edits.items():
            for n, edit in edits if name != LOGITS else ():
                record.fired[n] += steps * (edit.positions is None or any(p in present for p in edit.positions))


def _value_of(point: Point, want: Want, rows: torch.Tensor) -> torch.Tensor:
    """The asked heads and dims of values that the op has formed: [rows, width]."""
    if point.row.derive == "unembed":
        return rows
    rows = rows.unflatten(-1, point.shape)
    rows = rows if want.heads is None else rows[:, list(want.heads)]
    return rows if want.dims is None else rows[..., list(want.dims)]


def _site(point: Point) -> Site:
    raw = point.row.derive not in ("", "times_factor")
    if raw:
        # What the formula is of: the stream, or the router's logits.
        segments, width = 1, point.raw_width
    else:
        segments, width = (1, point.shape[0]) if len(point.shape) == 1 else point.shape
    return Site(point.name, point.columns.start if point.columns else 0, segments, width,
                pair=len(point.row.inputs) + len(point.row.outputs) > 1, raw=raw,
                factor=point.factor if point.row.derive == "times_factor" else 1.0, batch=point.batch_axis)


def _build_in(point: Point, site: int) -> None:
    """Have the module call the op: a hook that compilation traces into the graph."""
    if point.on_input:
        places = point.places

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [kwargs[key] if key in kwargs else args[place] if place < len(args) else None for place, key in places]
            found = [t for t in given if t is not None]
            op.tap(found[0], found[1] if len(found) > 1 else None, site)

        point.module.register_forward_pre_hook(before, with_kwargs=True)
        return
    outputs = point.row.outputs

    def after(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        several = isinstance(output, tuple)
        given = [output[place] if several else output for place in outputs if place < (len(output) if several else 1)]
        found = [t for t in given if t is not None]
        second = found[1] if len(found) > 1 else None
        op.tap(found[0], second, site)

    point.module.register_forward_hook(after)
