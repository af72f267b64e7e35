"""Fills files that are too large to hold: lays them out, sends their prompts through the engine, names them when whole."""

from __future__ import annotations

import json
import math
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, islice, starmap
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from vlens_cli.driver import blob, capture
from vlens_cli.driver.base import Captured, Request, Result, Want
from vlens_cli.driver.edits import Plan
from vlens_cli.driver.outlet import Outlet, Place, Slot
from vlens_cli.driver.shards import MOST_HEADER, Shard, Spec, lay, write_at
from vlens_cli.driver.tokens import Fed
from vlens_cli.errors import QueryError, UsageError
from vlens_cli.query import RUNNING, Prompt, Saved

if TYPE_CHECKING:
    from vlens_cli.driver.base import Edit
    from vlens_cli.driver.collect import Collection, Prompts
    from vlens_cli.driver.session import Progress, Session
    from vlens_cli.query import CaptureQuery

# Between two lines of progress.
TOLD_EVERY = 0.5
BAR = 24
# Prompts whose interventions are made together: their values are held meanwhile.
TOGETHER = 64


def run(of: Collection, prompts: Prompts, identity: dict[str, Any], spans: dict[str, tuple[int, int]],
        finished: dict[str, Any]) -> int:
    """Write every shard of `spans` that is not finished; returns how many prompts were not run again.

    Raises QueryError. What is not whole by then is taken away.
    """
    filling = Filling(of, prompts, identity)
    missing = {name: span for name, span in spans.items() if name not in finished}
    if missing:
        filling.run(missing)
    return len(prompts.tokens) - sum(stop - first for first, stop in missing.values())


class Filling:
    """The shards under way, the requests in flight, and the outlet between them."""

    def __init__(self, of: Collection, prompts: Prompts, identity: dict[str, Any]) -> None:
        self._of, self._prompts, self._identity = of, prompts, identity
        self._outlet = Outlet(of.written)
        self._shards: list[Shard] = []
        self._flying: dict[int, tuple[Shard, int]] = {}

    def run(self, spans: dict[str, tuple[int, int]]) -> None:
        n_tokens = sum(sum(self._prompts.tokens[first:stop]) for first, stop in spans.values())
        tally = Tally(self._of.progress, sum(stop - first for first, stop in spans.values()), n_tokens)
        try:
            with closing(self._of.session.stream(self._requests(spans), self._of.progress, self._outlet.raise_fault)) as ended:
                for number, _ in ended:
                    shard, tokens = self._flying.pop(number)
                    tally.add(tokens)
                    shard.left -= 1
                    if not shard.left:
                        self._outlet.then(shard.finish)
            self._outlet.close()
        except QueryError as error:
            if error.code == "output_failed" and isinstance(error.__cause__, OSError):
                # The outlet knows files by their descriptors alone.
                raise self._of.folder.not_written(error.__cause__) from error.__cause__
            raise
        finally:
            self._outlet.drop()
            for shard in self._shards:
                shard.drop()

    def _requests(self, spans: dict[str, tuple[int, int]]) -> Iterator[Request | None]:
        """Every prompt's, in order; a shard is laid out when its first is asked for."""
        self._prompts.file.seek(0)
        at, number = 0, 0
        for name, (first, stop) in spans.items():
            lines = islice(self._prompts.file, first - at, stop - at)
            records, at = [json.loads(line) for line in lines], stop
            part = Part(self._of, first, records)
            # Those that have their names are of no further use.
            self._shards = [shard for shard in self._shards if shard.file is not None]
            try:
                self._shards.append(shard := self._open(name, part, records))
                part.write_offsets(shard)
            except OSError as fault:
                raise self._of.folder.not_written(fault) from fault
            for start in range(0, len(records), TOGETHER):
                several = range(start, min(start + TOGETHER, len(records)))
                edits: Sequence[tuple[Edit, ...]] = [()] * len(several)
                if self._of.query.interventions.expressions:
                    plan = part.plan(several)
                    sources = plan.source_requests()
                    if sources:
                        # A run of their own, when what is in flight has ended.
                        yield None
                    edits = plan.edited(self._of.session.run(sources, self._of.progress)[0] if sources else ()).edits
                for n, edit in zip(several, edits, strict=True):
                    self._flying[number] = shard, len(part.fed[n].ids)
                    number += 1
                    slot = Slot(self._outlet, part.wants[n], part.places(shard, n), len(part.fed[n].ids))
                    yield Request(part.fed[n].ids, slot.wants, edits=edit, slot=slot)

    def _open(self, name: str, part: Part, records: Sequence[dict[str, Any]]) -> Shard:
        texts = {key: json.dumps(value, ensure_ascii=False)
                 for key, value in self._of.metadata(self._identity, part.first, records).items()}
        folder = self._of.folder
        return Shard(folder.path / name, folder.draft(name), part.first, part.first + len(records), part.tensors(), texts)


def written_as(dtypes: dict[str, torch.dtype], save_dtype: str | None) -> dict[str, torch.dtype]:
    """What each hook point is written in: whole numbers, such as those of experts, are not cast."""
    cast = getattr(torch, save_dtype) if save_dtype else None
    return {name: cast if cast and dtype.is_floating_point else dtype for name, dtype in dtypes.items()}


# What a count of forwards may take in a header that is laid out before they are counted.
MOST_CHUNKS = 10**6


def one_file(session: Session, query: CaptureQuery, fed: Sequence[Fed], requests: Sequence[Request], into: BinaryIO,
             progress: Progress) -> tuple[list[Result], float, float, Saved]:
    """(results whose tensors have no data, seconds of the forward, when it ended, what was written) of a capture that goes
    into one file while its forward runs. Raises UsageError, QueryError."""
    written = written_as(session.dtypes([*requests[0].capture], progress), query.save_dtype)
    shaped = [_empty(session, request, written) for request in requests]

    def about() -> dict[str, str]:
        wants = [request.capture for request in requests]
        return blob.about_capture(session.spec, session.plan.dtype, session.catalog, fed, wants, shaped)

    keys = blob.keys_of(shaped)
    specs = {key: (blob.DTYPES[t.dtype], tuple(t.shape)) for (n, name), key in keys.items()
             for t in [shaped[n].captured[name].value]}
    laid = lay(specs, about())
    if len(laid.header) > MOST_HEADER:
        raise UsageError(f"one file of {len(specs):,} tensors has a header that readers refuse", code="header_too_large",
                         hint="-o FOLDER/ joins the rows of prompts")
    os.ftruncate(into.fileno(), laid.size)
    outlet = Outlet(written)
    tally = Tally(progress, len(requests), sum(len(request.tokens) for request in requests))

    def slotted(n: int, request: Request) -> Request:
        places = {}
        for name, captured in shaped[n].captured.items():
            row_bytes = math.prod(captured.value.shape[1:]) * captured.value.itemsize
            places[name] = Place(into.fileno(), laid.starts[keys[n, name]], row_bytes)
        return replace(request, slot=Slot(outlet, request.capture, places, len(request.tokens)))

    began = time.monotonic()
    try:
        with closing(session.stream(starmap(slotted, enumerate(requests)), progress, outlet.raise_fault)) as ended:
            for n, result in ended:
                shaped[n] = replace(result, captured=shaped[n].captured)
                tally.add(len(requests[n].tokens))
        seconds, at = time.monotonic() - began, time.time()
        write_at(into.fileno(), 0, lay(specs, about(), len(laid.header)).header)
        outlet.close()
    except OSError as fault:
        raise QueryError(f"the file could not be written, {fault.strerror}", code="output_failed") from fault
    finally:
        outlet.drop()
    return shaped, seconds, at, Saved(len(specs), laid.size)


def _empty(session: Session, request: Request, written: dict[str, torch.dtype]) -> Result:
    """The result that a request will have, without data."""
    captured = {}
    for name, want in request.capture.items():
        positions = tuple(range(len(request.tokens))) if want.positions is None else want.positions
        shape = capture.shape_of(session.catalog, name, want, len(request.tokens))
        captured[name] = Captured(torch.empty(shape, dtype=written[name], device="meta"), positions)
    return Result(captured, (), MOST_CHUNKS)


class Part:
    """The prompts of one shard: what each keeps, and where it lies."""

    def __init__(self, of: Collection, first: int, records: Sequence[dict[str, Any]]) -> None:
        self._of, self.first = of, first
        self.fed = [Fed(tuple(record["ids"]), (), (), record["text"]) for record in records]
        self._shared: dict[tuple[Any, ...], dict[str, Want]] = {}
        self.positions = [[of.positions(group, fed) for group in of.groups] for fed in self.fed]
        self.wants = [self._wants(fed, positions) for fed, positions in zip(self.fed, self.positions, strict=True)]
        counts = [[of.rows(positions, fed) for positions in each]
                  for fed, each in zip(self.fed, self.positions, strict=True)]
        # Of each group, where each prompt's rows begin, and the end.
        self._offsets = [list(accumulate((each[g] for each in counts), initial=0)) for g in range(len(of.groups))]
        self._prefix = f"{first}:{first + len(records)}"

    def _wants(self, fed: Fed, positions: Sequence[tuple[int, ...] | None]) -> dict[str, Want]:
        """One object for all prompts of which the same is asked."""
        keys = [capture.key_positions(self._of.session, s, fed) for s in self._of.tables]
        asked = (*positions, *keys)
        if asked not in self._shared:
            dims = dict(zip((s.name for s in self._of.tables), keys, strict=True))
            reduce = self._of.query.reduce if self._of.query.reduce != "last" else None
            self._shared[asked] = {s.name: Want(at, s.head, dims.get(s.name, s.dim), reduce)
                                   for group, at in zip(self._of.groups, positions, strict=True) for s in group.hooks}
        return self._shared[asked]

    def plan(self, several: Sequence[int]) -> Plan:
        """The interventions in some of the prompts, whose texts are looked up for it."""
        tokens = self._of.session.tokens
        fed = [tokens.feed(Prompt(tokens=self.fed[n].ids), None) for n in several]
        return Plan(self._of.session, self._of.query.interventions, fed, self._of.query.bos)

    def tensors(self) -> dict[str, Spec]:
        """Everything in the shard, in order."""
        found: dict[str, Spec] = {
            f"{self._prefix}/tokens": ("I32", (sum(len(fed.ids) for fed in self.fed),)),
            f"{self._prefix}/token_offsets": ("I64", (len(self.fed) + 1,)),
        }
        for group, offsets in zip(self._of.groups, self._offsets, strict=True):
            for key in self._row_keys(group):
                found[f"{key}offsets"], found[f"{key}positions"] = ("I64", (len(self.fed) + 1,)), ("I32", (offsets[-1],))
            for s in group.hooks:
                kind = self._of.kind(s.name)[0]
                if s not in self._of.tables:
                    found[f"{self._prefix}/{s.name}"] = kind, (offsets[-1], *self._of.row(s))
                    continue
                for n, fed in enumerate(self.fed):
                    want, rows = self.wants[n][s.name], offsets[n + 1] - offsets[n]
                    heads = self._of.catalog.size("head") if want.heads is None else len(want.heads)
                    keys = len(fed.ids) if want.dims is None else len(want.dims)
                    found[f"{self.first + n}/{s.name}"] = kind, (heads, rows, keys)
        return found

    def _row_keys(self, group: Any) -> list[str]:
        """What stands before `offsets` and `positions` of a group's rows. A reduced row is of no position."""
        if self._of.query.reduce not in (None, "last"):
            return []
        return [f"{self._prefix}/{s.name}." for s in group.hooks] if group.own else [f"{self._prefix}/"]

    def write_offsets(self, shard: Shard) -> None:
        """What is known before the forward: tokens, offsets, positions."""
        def put(key: str, kind: str, numbers: Iterator[int] | Sequence[int]) -> None:
            write_at(shard.file, shard.starts[key], array(kind, numbers).tobytes())

        put(f"{self._prefix}/tokens", "i", (i for fed in self.fed for i in fed.ids))
        put(f"{self._prefix}/token_offsets", "q", accumulate((len(fed.ids) for fed in self.fed), initial=0))
        for g, group in enumerate(self._of.groups):
            for key in self._row_keys(group):
                put(f"{key}offsets", "q", self._offsets[g])
                put(f"{key}positions", "i", (p for fed, each in zip(self.fed, self.positions, strict=True)
                                             for p in (range(len(fed.ids)) if each[g] is None else each[g])))

    def places(self, shard: Shard, n: int) -> dict[str, Place]:
        """Where each hook point of prompt `n` lies."""
        found = {}
        for group, offsets in zip(self._of.groups, self._offsets, strict=True):
            for s in group.hooks:
                if s in self._of.tables:
                    found[s.name] = Place(shard.file, shard.starts[f"{self.first + n}/{s.name}"], 0)
                else:
                    row_bytes = self._of.row_bytes(s)
                    start = shard.starts[f"{self._prefix}/{s.name}"] + offsets[n] * row_bytes
                    found[s.name] = Place(shard.file, start, row_bytes)
        return found


class Tally:
    """How far it is: a line of progress twice a second."""

    def __init__(self, progress: Progress, n_prompts: int, n_tokens: int) -> None:
        self._progress, self._all = progress, (n_prompts, n_tokens)
        self._prompts = self._tokens = 0
        self._began = self._told = time.monotonic()

    def add(self, tokens: int) -> None:
        self._prompts, self._tokens = self._prompts + 1, self._tokens + tokens
        now = time.monotonic()
        if now - self._told >= TOLD_EVERY:
            self._told = now
            rate = self._tokens / (now - self._began)
            left = round((self._all[1] - self._tokens) / rate)
            marks = "#" * (BAR * self._tokens // self._all[1])
            self._progress(f"{RUNNING} [{marks:.<{BAR}}] {self._prompts:,} of {self._all[0]:,} prompts, {rate:,.0f} tokens/s, "
                           f"{left // 60}:{left % 60:02d} left")
