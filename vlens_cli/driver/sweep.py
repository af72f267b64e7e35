"""A sweep: one patch from the source at each layer, position or head, or at each pair of them; a number for each.

Planning is apart from running: `plan_cells` says what every cell patches, `_request` makes its forward, `_run` turns
its logits into the metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from vlens_cli import hooks, interventions
from vlens_cli.driver import blob, effect, patch, targets
from vlens_cli.driver.base import LOGITS, Captured, Edit, Request, Result, Want
from vlens_cli.driver.capture import token_rows
from vlens_cli.driver.edits import Edited, Plan, check_aligned, positions_in, union
from vlens_cli.driver.targets import Target
from vlens_cli.driver.tokens import Fed
from vlens_cli.driver.values import cut
from vlens_cli.errors import HookError, UsageError
from vlens_cli.families import Catalog
from vlens_cli.query import PatchQuery, Reply, Saved

if TYPE_CHECKING:
    from vlens_cli.driver.session import Progress, Session

# Logits that are held at once where a metric needs whole rows.
PIECE_BYTES = 1 << 28
ALIGNED_HINT = ("choose a --source of the prompt's number of tokens: a sweep takes each position from the same one; "
                "without --sweep, -i '...[pos=3] = @source[pos=4]' patches one from another")


@dataclass(frozen=True)
class Part:
    """What one hook point takes from the source in one cell."""

    name: str
    positions: tuple[int, ...]
    heads: tuple[int, ...] | None
    dims: tuple[int, ...] | None


Cells = dict[tuple[int, ...], tuple[Part, ...]]


@dataclass(frozen=True)
class Sweep:
    """What is swept: the prompt and its source, the cells by their indices, and the grid's lengths."""

    fed: Fed
    source_fed: Fed
    cells: Cells
    extents: tuple[int, ...]


@dataclass(frozen=True)
class Ends:
    """The two runs that every cell lies between, and the edits of the base run, which are part of every cell."""

    base: Result
    source: Result
    edited: Edited


def answer(session: Session, query: PatchQuery, fed: Sequence[Fed], asked: Sequence[Target], plan: Plan,
           progress: Progress, into: BinaryIO | None) -> Reply:
    """The sweep of one prompt over one source. Raises UsageError before any forward, StartError, QueryError."""
    sweep = _plan(session, query, fed, plan)
    if asked:
        effect.metric(query.metric, asked, True)
    ends, seconds = _ends(session, sweep, plan, progress)
    asked, notes = _targets(session, asked, ends)
    metric = effect.metric(query.metric, asked, True)
    requests = [_request(parts, sweep.fed, ends, metric) for parts in sweep.cells.values()]
    raw, more = _run(session, requests, metric, progress)
    found = _found(query, sweep, asked, metric, ends, raw, session.catalog)
    body = patch.head(session) | {
        "prompts": [{
            "text": sweep.fed.text, "chunks": ends.base.chunks, "tokens": token_rows(sweep.fed),
            "edits": ends.edited.body(ends.base.fired),
            "base": patch.run_body(session, query, ends.base, False),
            "source": patch.run_body(session, query, ends.source, False),
        }],
        "sweep": found, "seconds": {"forward": round(seconds + more, 6)},
    }
    spaced = targets.spaced(asked, session.tokens)
    notes = (*session.plan.notes, *sweep.fed.notes, *ends.edited.notes, *notes,
             *targets.notes(spaced, patch.row_of(ends.base)))
    return Reply(body, tuple(dict.fromkeys(notes)), None if into is None else _save(session, into, sweep, ends, found))


def _found(query: PatchQuery, sweep: Sweep, asked: Sequence[Target], metric: effect.Metric, ends: Ends,
           raw: Sequence[float], catalog: Catalog) -> dict[str, Any]:
    """The `sweep` of the reply."""
    base, source = (metric.of_whole(patch.row_of(run)) for run in (ends.base, ends.source))
    values = {at: metric.value(x, base, source) for at, x in zip(sweep.cells, raw, strict=True)}
    return {
        "axes": list(query.sweep), "hooks": list(query.hooks), "metric": metric.name,
        "targets": [target.body() for target in asked], "cells": len(values),
        "base": metric.value(base, base, source), "source": metric.value(source, base, source),
        "grid": _nested(values, sweep.extents),
        **({"head_axes": head_axes(sweep.cells, catalog)} if "head" in query.sweep else {}),
        "tokens": token_rows(sweep.fed), "source_tokens": token_rows(sweep.source_fed),
    }


# What is swept


def _plan(session: Session, query: PatchQuery, fed: Sequence[Fed], plan: Plan) -> Sweep:
    if len(fed) != 1:
        raise UsageError(f"a sweep is over one prompt, and there are {len(fed)}", hint="run one command for each",
                         code="sweep_prompts")
    if not plan.sources:
        raise UsageError("a sweep patches from a source run, and none is given", code="no_source",
                         hint='add --source "The Colosseum is in"')
    if query.max_new_tokens > 1:
        raise UsageError("a sweep reads the logits after the prompt, and generates nothing",
                         hint="leave out --max-tokens", code="sweep_generates")
    (one,), source, n_tokens = fed, plan.sources[0], len(fed[0].ids)
    check_aligned(one, source, ALIGNED_HINT)
    swept = _hooks(query, session.catalog)
    places = [hook.pos and positions_in(session, hook.pos, one, n_tokens) for hook in swept]
    cells = plan_cells(swept, places, query.sweep, session.catalog, n_tokens)
    return Sweep(one, source, cells, _extents(query.sweep, swept, session.catalog, n_tokens))


def _hooks(query: PatchQuery, catalog: Catalog) -> tuple[hooks.Selected, ...]:
    """The hook points that are patched. Raises HookError for one that cannot be, or that has not the swept axes."""
    swept = hooks.resolve(map(hooks.parse, query.hooks), catalog)
    for hook in swept:
        interventions.check_editable(catalog, hook.name)
        if "layer" in query.sweep and catalog.layer(hook.name) is None:
            raise HookError(f"{hook.name} is in no layer, and layers are swept", code="no_layer",
                            hint="--hook 'blocks.*.hook_resid_post'")
        if "head" in query.sweep and len(catalog.axes(hook.name)) < 3:
            raise HookError(f"{hook.name} has no heads, and heads are swept", code="no_heads",
                            hint="--hook 'blocks.*.attn.hook_z'")
    return swept


def plan_cells(swept: Sequence[hooks.Selected], places: Sequence[tuple[int, ...] | None], axes: Sequence[str],
               catalog: Catalog, n_tokens: int) -> Cells:
    """What each cell patches, by its indices (layer, position, head, as `axes` has them), ascending.

    An axis that is not swept is patched whole, as far as the hook's selectors go: a cell may patch several positions,
    heads or hook points at once. `places` are the positions that each hook selects, None for all.
    """
    cells: dict[tuple[int, ...], list[Part]] = {}
    for hook, positions in zip(swept, places, strict=True):
        positions = positions or tuple(range(n_tokens))
        for at_layer, at_pos, at_head in product(*_choices(hook, positions, axes, catalog)):
            at = {"layer": at_layer, "pos": at_pos, "head": at_head}
            part = Part(hook.name, positions if at_pos is None else (at_pos,),
                        hook.head if at_head is None else (at_head,), hook.dim)
            cells.setdefault(tuple(at[axis] for axis in axes), []).append(part)
    return {at: tuple(cells[at]) for at in sorted(cells)}


def _choices(hook: hooks.Selected, positions: tuple[int, ...], axes: Sequence[str], catalog: Catalog
             ) -> Iterator[Sequence[int | None]]:
    """The layers, positions and heads that a hook point has a cell for; None where that axis is not swept."""
    yield [catalog.layer(hook.name) if "layer" in axes else None]
    yield positions if "pos" in axes else [None]
    yield (hook.head or range(catalog.size(catalog.axes(hook.name)[1]))) if "head" in axes else [None]


def head_axes(cells: Cells, catalog: Catalog) -> list[str]:
    """What the swept heads are: `head`, `kv_head`, or both where the hook points differ."""
    return sorted({catalog.axes(part.name)[1] for parts in cells.values() for part in parts})


def _extents(axes: Sequence[str], swept: Sequence[hooks.Selected], catalog: Catalog, n_tokens: int
             ) -> tuple[int, ...]:
    """The grid's lengths: all layers, positions and heads, whether patched or not."""
    heads = max((catalog.size(catalog.axes(hook.name)[1]) for hook in swept), default=0) if "head" in axes else 0
    return tuple({"layer": catalog.n_layers, "pos": n_tokens, "head": heads}[axis] for axis in axes)


def _nested(values: dict[tuple[int, ...], float | None], extents: Sequence[int], at: tuple[int, ...] = ()) -> Any:
    """Lists in lists, None where there is no cell."""
    if len(at) == len(extents):
        return values.get(at)
    return [_nested(values, extents, (*at, n)) for n in range(extents[len(at)])]


# Running


def _ends(session: Session, sweep: Sweep, plan: Plan, progress: Progress) -> tuple[Ends, float]:
    """The source run, with all that the cells take of it, then the base run; and their seconds."""
    taken = _taken(sweep.cells)
    requests = plan.source_requests(also=lambda source: union(patch.last(source), taken))
    (source,), seconds = session.run(requests, progress)
    edited = plan.edited([source])
    request = Request(sweep.fed.ids, patch.last(sweep.fed), edits=edited.edits[0])
    (base,), more = session.run([request], progress)
    return Ends(base, source, edited), seconds + more


def _taken(cells: Cells) -> dict[str, Want]:
    """What all cells together take of the source: whole rows."""
    found: dict[str, set[int]] = {}
    for parts in cells.values():
        for part in parts:
            found.setdefault(part.name, set()).update(part.positions)
    return {name: Want(tuple(sorted(positions))) for name, positions in found.items()}


def _request(parts: Sequence[Part], fed: Fed, ends: Ends, metric: effect.Metric) -> Request:
    """One cell: the base run with its parts set to the source's values."""
    set_to_source = [_edit(part, ends.source.captured[part.name]) for part in parts]
    want = Want((len(fed.ids) - 1,), dims=metric.dims)
    return Request(fed.ids, {LOGITS: want}, edits=(*ends.edited.edits[0], *set_to_source))


def _edit(part: Part, captured: Captured) -> Edit:
    rows = [captured.positions.index(position) for position in part.positions]
    value = cut(captured.value[rows], Want(None, part.heads, part.dims))
    return Edit(part.name, part.positions, part.heads, part.dims, keep=0.0, value=value)


def _run(session: Session, requests: Sequence[Request], metric: effect.Metric, progress: Progress
         ) -> tuple[list[float], float]:
    """(the metric's raw value of each request, seconds). Where it needs whole rows, a piece of them is held at once."""
    piece = len(requests) if metric.dims else max(1, PIECE_BYTES // (4 * session.catalog.dims.d_vocab))
    raw: list[float] = []
    seconds = 0.0
    for begin in range(0, len(requests), max(1, piece)):
        results, more = session.run(requests[begin : begin + piece], progress, variants=True)
        raw += [_raw(result, metric) for result in results]
        seconds += more
    return raw, seconds


def _raw(result: Result, metric: effect.Metric) -> float:
    return metric.raw(result.captured[LOGITS].value[-1])


def _targets(session: Session, asked: Sequence[Target], ends: Ends) -> tuple[Sequence[Target], tuple[str, ...]]:
    """Those asked; else what the source and the base would say next, in this order, and a note that says so."""
    if asked:
        return asked, ()
    found = [targets.of_id(int(patch.row_of(run).argmax()), session.tokens) for run in (ends.source, ends.base)]
    if found[0].id == found[1].id:
        raise UsageError(f"the source and the prompt have the same likeliest next token, {found[0].typed}"
                         f"{'' if found[0].text is None else f' {hooks.quoted(found[0].text)}'}",
                         hint='say which logits to compare: --target " Rome" --target " Paris"', code="no_target")
    names = [target.typed if target.text is None else hooks.quoted(target.text) for target in found]
    return found, (f"the targets are the likeliest tokens after the source, {names[0]}, and the prompt, {names[1]}",)


def _save(session: Session, into: BinaryIO, sweep: Sweep, ends: Ends, found: dict[str, Any]) -> Saved:
    """The file of `-o`: `grid` in fp64, NaN where there is no cell, with all else of the sweep as metadata."""
    grid = torch.tensor(_with_nan(found["grid"]), dtype=torch.float64)
    origin = blob.origin(session.spec, session.plan.dtype, session.catalog, [sweep.fed], [ends.base.chunks])
    left_out = ("grid", "tokens", "source_tokens")
    metadata = origin | {key: value for key, value in found.items() if key not in left_out}
    metadata["source_tokens"] = list(sweep.source_fed.ids)
    return blob.write_safetensors(into, {"grid": grid}, blob.texts(metadata))


def _with_nan(grid: Any) -> Any:
    if isinstance(grid, list):
        return [_with_nan(item) for item in grid]
    return math.nan if grid is None else grid
