"""Answers `vlens capture`: activations of prompts, at hook points."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli import __version__, hooks
from vlens_cli.driver import boot
from vlens_cli.driver.base import Request, Result, Want
from vlens_cli.driver.edits import Edited, edits_for
from vlens_cli.driver.tokens import Fed
from vlens_cli.families import TOKEN_AXES
from vlens_cli.query import SCHEMA_VERSION, CaptureQuery, Reply

if TYPE_CHECKING:
    from vlens_cli.driver.session import Progress, Session
    from vlens_cli.families import Catalog

# Who writes a large file wants the file; statistics of more rows than these take longer than the file does.
ROWS_BESIDE_FILE = 20_000


def answer(session: Session, query: CaptureQuery, progress: Progress, into: BinaryIO | None) -> Reply:
    """Raises UsageError before any engine starts, StartError, QueryError."""
    fed = session.feed(query.prompts, query.bos, query.one_chunk)
    asked = hooks.resolve(map(hooks.parse, query.hooks), session.catalog, pos=query.pos, head=query.head, dim=query.dim)
    wants = [{s.name: want_of(session, s, f) for s in asked} for f in fed]
    session.check_memory(size(session, fed, wants))
    edited = edits_for(session, query.interventions, fed, progress, bos=query.bos)
    results, seconds = session.run(
        [Request(f.ids, want, edits=edits) for f, want, edits in zip(fed, wants, edited.edits, strict=True)], progress)
    ended = time.time()
    from vlens_cli.driver import blob, summary

    n_rows = sum(summary.row_count(c, session.catalog.axes(name)) for r in results for name, c in r.captured.items())
    with_rows = n_rows <= ROWS_BESIDE_FILE or into is None
    left_out = [] if with_rows else [
        f"the statistics of {n_rows} rows are left out beside the file; without -o they are printed"]
    return Reply(
        body=_body(session, query, fed, wants, results, edited, with_rows)
        | {"seconds": {"forward": round(seconds, 6), "ended": round(ended, 6)}},
        notes=tuple(dict.fromkeys(
            [*session.plan.notes, *(note for f in fed for note in f.notes), *edited.notes, *left_out])),
        saved=None if into is None else blob.write_capture(
            into, session.spec, session.plan.dtype, session.catalog, fed, wants, results, query.save_dtype),
    )


def want_of(session: Session, selected: hooks.Selected, fed: Fed) -> Want:
    """What a selection means in one prompt."""
    dims = key_positions(session, selected, fed) if selected.key is not None else selected.dim
    return Want(positions_of(session, selected, fed), selected.head, dims)


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


def _numbers(catalog: Catalog, name: str, want: Want, n_tokens: int) -> int:
    axes = catalog.axes(name)
    sizes = {axis: n_tokens if axis in TOKEN_AXES else catalog.size(axis) for axis in axes}
    head = next((axis for axis in axes if axis in ("head", "kv_head")), None)
    for axis, chosen in ((axes[catalog.token_axis(name)], want.positions), (head, want.heads), (axes[-1], want.dims)):
        if chosen is not None:
            sizes[axis] = len(chosen)
    return math.prod(sizes.values())


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
                **({"edits": edited.body(result.fired)} if edited.labels else {}),
                "hooks": {
                    name: summary.hook_body(captured, want[name], catalog.axes(name), catalog.derived(name),
                                            query.values, rows, session.tokens.text_of, catalog.row(name).derive == "pattern")
                    for name, captured in result.captured.items()
                },
            }
            for f, want, result in zip(fed, wants, results, strict=True)
        ],
    }
