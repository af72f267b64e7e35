"""Answers `vlens capture`: activations of prompts, at hook points."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli import __version__, hooks
from vlens_cli.driver import boot, shards
from vlens_cli.driver.base import Request, Result, Want
from vlens_cli.driver.edits import Edited, edits_for
from vlens_cli.driver.tokens import Fed
from vlens_cli.errors import UsageError
from vlens_cli.families import TOKEN_AXES
from vlens_cli.query import SCHEMA_VERSION, CaptureQuery, Reply, Saved
from vlens_cli.units import counted, size_text

if TYPE_CHECKING:
    from vlens_cli.driver.session import Progress, Session
    from vlens_cli.families import Catalog

# Who writes a large file wants the file; statistics of more rows than these take longer than the file does.
ROWS_BESIDE_FILE = 20_000


def answer(session: Session, query: CaptureQuery, progress: Progress, into: BinaryIO | None) -> Reply:
    """Raises UsageError before any engine starts, StartError, QueryError."""
    fed = session.feed(query.prompts, query.bos, query.one_chunk)
    asked = hooks.resolve(map(hooks.parse, query.hooks), session.catalog, pos=query.pos, head=query.head, dim=query.dim)
    check_reduction(session.catalog, asked, query.reduce)
    wants = [{s.name: want_of(session, s, f, query.reduce) for s in asked} for f in fed]
    n_rows = sum(_rows(session.catalog, name, want, len(f.ids))
                 for f, wanted in zip(fed, wants, strict=True) for name, want in wanted.items())
    leaves = into is not None and n_rows > ROWS_BESIDE_FILE
    session.check_memory(_largest(session, fed, wants) if leaves else size(session, fed, wants))
    if into is not None:
        _check_disk(session, query, fed, wants, into, progress if leaves else None)
    edited = edits_for(session, query.interventions, fed, progress, bos=query.bos)
    requests = [Request(f.ids, want, edits=edits) for f, want, edits in zip(fed, wants, edited.edits, strict=True)]
    saved: Saved | None = None
    if leaves:
        from vlens_cli.driver import fill

        results, seconds, ended, saved = fill.one_file(session, query, fed, requests, into, progress)
    else:
        results, seconds = session.run(requests, progress)
        ended = time.time()
        if into is not None:
            from vlens_cli.driver import blob

            saved = blob.write_capture(into, session.spec, session.plan.dtype, session.catalog, fed, wants, results,
                                       query.save_dtype)
    left_out = [f"the statistics of {n_rows} rows are left out beside the file; without -o they are printed"] * leaves
    return Reply(
        body=_body(session, query, fed, wants, results, edited, not leaves)
        | {"seconds": {"forward": round(seconds, 6), "ended": round(ended, 6)}},
        notes=tuple(dict.fromkeys(
            [*session.plan.notes, *(note for f in fed for note in f.notes), *edited.notes, *left_out])),
        saved=saved,
    )


def _check_disk(session: Session, query: CaptureQuery, fed: Sequence[Fed], wants: Sequence[dict[str, Want]], into: BinaryIO,
                progress: Progress | None) -> None:
    """Refuse what the disk of the open file does not hold; say how large it will be, where there is somebody to be told.
    Raises UsageError."""
    n_bytes = boot.BYTES[query.save_dtype or session.plan.dtype] * sum(
        _numbers(session.catalog, name, want, len(f.ids))
        for f, wanted in zip(fed, wants, strict=True) for name, want in wanted.items())
    free = shards.free_bytes(into.fileno())
    shards.check_room(n_bytes, free, "the folder of -o", query.max_bytes)
    if progress is not None:
        progress(f"note: {counted(len(fed), 'prompt')} of {counted(sum(len(f.ids) for f in fed), 'token')}: "
                 f"{size_text(n_bytes)} to write, {size_text(free)} free")


def want_of(session: Session, selected: hooks.Selected, fed: Fed, reduce: str | None = None) -> Want:
    """What a selection means in one prompt; the last of several positions is the only one."""
    dims = key_positions(session, selected, fed) if selected.key is not None else selected.dim
    positions = positions_of(session, selected, fed)
    if reduce == "last":
        return Want((len(fed.ids) - 1 if positions is None else positions[-1],), selected.head, dims)
    return Want(positions, selected.head, dims, reduce)


def check_reduction(catalog: Catalog, asked: Sequence[hooks.Selected], reduce: str | None) -> None:
    """Raises UsageError for hook points whose rows do not come down to one: a pattern's are of different lengths, and the
    numbers of experts are no measures."""
    odd = [s.name for s in asked if catalog.axes(s.name)[-1] == "key" or s.name.endswith("hook_expert_indices")]
    if reduce not in (None, "last") and odd:
        raise UsageError(f"the rows of {odd[0]} have no {reduce}", hint="--reduce last, or ask for it by itself",
                         code="not_reducible")


def positions_of(session: Session, selected: hooks.Selected, fed: Fed) -> tuple[int, ...] | None:
    """The positions that a selection means in one prompt; None for all."""
    return None if selected.pos is None else _positions(session, selected.pos, fed)


def key_positions(session: Session, selected: hooks.Selected, fed: Fed) -> tuple[int, ...] | None:
    """The keys that a selection means in one prompt; None for all."""
    return None if selected.key is None else _positions(session, selected.key, fed)


def _positions(session: Session, items: hooks.Items, fed: Fed) -> tuple[int, ...]:
    tokens = tuple(text or "" for text in fed.texts)
    return hooks.positions(items, len(fed.ids), lambda text: session.tokens.spans(fed, text), tokens=tokens)


def size(session: Session, fed: Sequence[Fed], wants: Sequence[dict[str, Want]]) -> int:
    """Bytes of what is asked, and of what it is rebuilt from."""
    catalog = session.catalog
    return boot.BYTES[session.plan.dtype] * sum(
        _numbers(catalog, name, want, len(f.ids))
        + sum(_numbers(catalog, source, Want(), len(f.ids)) for source in catalog.sources(name))
        for f, wanted in zip(fed, wants, strict=True) for name, want in wanted.items()
    )


def _largest(session: Session, fed: Sequence[Fed], wants: Sequence[dict[str, Want]]) -> int:
    """Bytes of what is there at once where captures leave while the forward runs: what the rebuilt points of one prompt are
    rebuilt from, and the largest of them."""
    catalog = session.catalog
    return boot.BYTES[session.plan.dtype] * max(
        sum(_numbers(catalog, source, Want(), len(f.ids)) for name in wanted for source in catalog.sources(name))
        + max((_numbers(catalog, name, want, len(f.ids)) for name, want in wanted.items() if catalog.sources(name)), default=0)
        for f, wanted in zip(fed, wants, strict=True)
    )


def _rows(catalog: Catalog, name: str, want: Want, n_tokens: int) -> int:
    """Rows of statistics: one a position, or, of attention patterns and scores, one a head and query position."""
    positions = 1 if want.reduce else n_tokens if want.positions is None else len(want.positions)
    if catalog.axes(name)[-1] != "key":
        return positions
    return positions * (catalog.size("head") if want.heads is None else len(want.heads))


def _numbers(catalog: Catalog, name: str, want: Want, n_tokens: int) -> int:
    return math.prod(shape_of(catalog, name, want, n_tokens))


def shape_of(catalog: Catalog, name: str, want: Want, n_tokens: int) -> tuple[int, ...]:
    """The shape of what is captured of a prompt."""
    axes = catalog.axes(name)
    sizes = {axis: n_tokens if axis in TOKEN_AXES else catalog.size(axis) for axis in axes}
    head = next((axis for axis in axes if axis in ("head", "kv_head")), None)
    for axis, chosen in ((axes[catalog.token_axis(name)], want.positions), (head, want.heads), (axes[-1], want.dims)):
        if chosen is not None:
            sizes[axis] = len(chosen)
    if want.reduce:
        sizes[axes[catalog.token_axis(name)]] = 1
    return tuple(sizes[axis] for axis in axes)


def token_rows(fed: Fed) -> list[dict[str, Any]]:
    """The `tokens` list of a reply."""
    return [{"pos": n, "id": i, "text": t, "piece": p}
            for n, (i, t, p) in enumerate(zip(fed.ids, fed.texts, fed.pieces, strict=True))]


def _body(session: Session, query: CaptureQuery, fed: Sequence[Fed], wants: Sequence[dict[str, Want]],
          results: Sequence[Result], edited: Edited, rows: bool) -> dict[str, Any]:
    from vlens_cli.driver import summary

    catalog = session.catalog
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "capture",
        "vlens": __version__,
        "model": session.model_body(),
        "prompts": [
            {
                "text": f.text,
                "chunks": result.chunks,
                "tokens": token_rows(f),
                **({} if prompt.id is None else {"id": prompt.id}),
                **({"edits": edited.body(result.fired)} if edited.labels else {}),
                "hooks": {
                    name: summary.hook_body(captured, want[name], catalog.axes(name), catalog.derived(name),
                                            query.values, rows, session.tokens.text_of, catalog.row(name).derive == "pattern")
                    for name, captured in result.captured.items()
                },
            }
            for prompt, f, want, result in zip(query.prompts, fed, wants, results, strict=True)
        ],
    }
