"""What compiled mode builds in and what fits into its memory: known from the catalog, before torch is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vlens_cli import hooks
from vlens_cli.driver.base import LOGITS, Edit, Request
from vlens_cli.errors import UsageError
from vlens_cli.query import COMPILE_HOOKS

if TYPE_CHECKING:
    from vlens_cli.driver.boot import Plan
    from vlens_cli.families import Catalog, Row

FINAL = "ln_final.hook_out"
# MiB of device memory for captured rows of one step and for edits; edits get a quarter.
DEFAULT_BUFFER = 256
PROGRAM_SHARE = 4
GRANULE = 128
# A program's step and its rows are padded nowhere; its first word and the step's eight are these bytes.
STEP_BYTES = 36
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def built(patterns: Sequence[str], catalog: Catalog) -> tuple[str, ...]:
    """The points that an engine builds into its graph, in the order of the forward.

    Of the default set, those that the family has. Raises HookError or UsageError for a name that cannot be built in.
    """
    if tuple(patterns) == COMPILE_HOOKS:
        found = {name for pattern in patterns for name in catalog.names if _like(pattern, catalog.row(name).hook)}
        return tuple(name for name in catalog.names if name in found and not why_not(catalog.row(name)))
    asked = hooks.resolve(map(hooks.parse, patterns), catalog)
    for one in asked:
        if one != hooks.Selected(one.name, None, None, None):
            raise UsageError(f"--compile-hooks takes hook points without brackets: {one.name}", code="compile_selector",
                             hint="the query says which positions, heads and dims")
    names = {one.name for one in asked}
    reasons = {name: why_not(catalog.row(name)) for name in names}
    if bad := next((name for name in catalog.names if reasons.get(name)), None):
        raise UsageError(f"{bad} cannot be built into the graph: {reasons[bad]}", code="not_compilable",
                         hint="leave it out, or ask it of an eager engine, without --compile")
    return tuple(name for name in catalog.names if name in names)


def _like(pattern: str, hook: str) -> bool:
    return pattern.replace("*", "{i}") == hook


def why_not(row: Row) -> str:
    """Why a row cannot be built in, or nothing."""
    if row.of:
        return f"it is rebuilt from {' and '.join(row.of)}, and given where those are built in"
    if row.hook == LOGITS:
        return f"it is given where {FINAL} is built in"
    if row.interleaved:
        return "its parts lie head by head in one tensor"
    if row.derive in ("scale", "normalized") and not {"head", "kv_head"}.isdisjoint(row.axes):
        return "it is formed head by head"
    if row.derive not in ("", "times_factor", "scale", "normalized", "expert_weights", "expert_indices"):
        return f"it is formed by {row.derive}"
    return ""


def why_not_edited(row: Row) -> str:
    """Why a built point cannot be changed in the graph though eager engines change it, or nothing."""
    return "the graph never forms it; an eager engine changes it" if row.derive == "normalized" else ""


def missing(name: str, catalog: Catalog) -> str:
    """Why a compiled engine does not give a point that it was not built with."""
    row = catalog.row(name)
    if why := why_not(row):
        return f"this engine is compiled, and {why}"
    return f"this engine is compiled without it: --compile-hooks '{name.replace(f'.{catalog.layer(name)}.', '.*.')}' builds it in"


def capture_bytes(request: Request, catalog: Catalog, chunk: int, itemsize: int) -> int:
    """Bytes of captured rows that a request takes in one step at most."""
    fed = len(request.tokens) + request.max_new_tokens - 1
    total = 0
    for name, want in request.capture.items():
        rows = fed if want.positions is None else len(want.positions)
        for source in catalog.sources(name) or (name,):
            total += min(rows, chunk) * _row_bytes(source, catalog, itemsize)
    return total


def needs(request: Request, catalog: Catalog, plan: Plan) -> tuple[int, int]:
    """Bytes that a request takes at most of (captured rows of one step, edits)."""
    return capture_bytes(request, catalog, plan.chunk, ITEMSIZE[plan.dtype]), edit_bytes(request.edits, catalog)


def fitting(needed: Iterable[tuple[int, int]], plan: Plan) -> int:
    """How many of the first requests, by their `needs`, can be in flight together, one at least."""
    rows, edits = room(plan)
    n = 0
    for n, (of_rows, of_edits) in enumerate(needed, 1):
        rows, edits = rows - of_rows, edits - of_edits
        if min(rows, edits) < 0:
            return max(1, n - 1)
    return n


def check(request: Request, catalog: Catalog, plan: Plan) -> None:
    """Raises UsageError, with both numbers, for a request that does not fit alone."""
    for what, needed, there in zip(("captures in one forward", "edits"), needs(request, catalog, plan), room(plan), strict=True):
        if needed > there:
            raise UsageError(
                f"{what} of {_mib(needed)} do not fit into the {_mib(there)} that this compiled engine keeps for them",
                code="buffer_too_small", hint=f"--compile-buffer {-(-needed * (plan.buffer >> 20) // there)} is enough; or ask "
                "for fewer hooks or positions, or of an eager engine, without --compile")


def room(plan: Plan) -> tuple[int, int]:
    """Bytes for (captured rows of one step, edits)."""
    edits = plan.buffer // PROGRAM_SHARE
    return (plan.buffer - edits) // GRANULE * GRANULE, edits


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


def _row_bytes(name: str, catalog: Catalog, itemsize: int) -> int:
    """Bytes of one copied row, with what pads it."""
    row = catalog.row(name)
    width = catalog.dims.d_model
    if row.derive in ("", "times_factor"):
        width = 1
        for axis in row.axes[1:]:
            width *= catalog.size(axis)
    elif row.derive in ("scale", "normalized"):
        width *= len(row.inputs) + len(row.outputs)
    elif row.derive.startswith("expert"):
        width, itemsize = catalog.dims.n_experts, 4
    return -(-width * itemsize // GRANULE) * GRANULE


def edit_bytes(edits: Sequence[Edit], catalog: Catalog) -> int:
    """Bytes that a request's edits take at most, logits' aside, which are changed outside the graph."""
    total = 0
    for edit in edits:
        if edit.name == LOGITS:
            continue
        axes = catalog.axes(edit.name)[1:]
        width = 1
        for axis in axes:
            width *= catalog.size(axis)
        each = max((len(part) for part in (edit.keep, edit.value) if _ndim(part) > len(axes)), default=1)
        parts = sum(_ndim(part) > 0 for part in (edit.keep, edit.value)) * each
        parts += (edit.direction is not None) + (edit.heads is not None or edit.dims is not None)
        programs = 1 + max(each, len(edit.positions or ()))
        total += 4 * width * parts + STEP_BYTES * programs
    return total


def _ndim(part: Any) -> int:
    return getattr(part, "ndim", 0)
