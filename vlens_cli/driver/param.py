"""Answers `vlens param`, where a name or the user wants the engine: weights as they are in it, or beside it on disk."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli import __version__, params
from vlens_cli.driver import boot
from vlens_cli.query import RUNNING, SCHEMA_VERSION, ParamQuery, Reply, Saved

if TYPE_CHECKING:
    from vlens_cli.driver.session import Progress, Session
    from vlens_cli.params import Param, Weights
    from vlens_cli.reader.arrays import Numbers


def answer(session: Session, query: ParamQuery, progress: Progress, into: BinaryIO | None) -> Reply:
    """Raises UsageError before any engine starts, where headers tell; StartError, QueryError."""
    weights = params.of_model(session.spec.model)
    found = params.resolve(params.requested(query.names, weights), weights)
    if query.values:
        params.check_values(found)
    numbers = _numbers(session, query, weights, found, progress)
    model = session.model_body()
    entries = [_entry(session, query, weights, param) for param in found]
    body = {
        "schema_version": SCHEMA_VERSION, "command": "param", "vlens": __version__, "model": model,
        **({"compare": query.compare} if query.compare else {}), "params": _described(query, found, entries, numbers),
    }
    return Reply(body, (*session.plan.notes, *params.notes(found, weights)), _saved(into, model, entries, numbers))


def _is_live(query: ParamQuery, param: Param) -> bool:
    return query.live or param.view is None


def _numbers(session: Session, query: ParamQuery, weights: Weights, found: tuple[Param, ...], progress: Progress
             ) -> list[Numbers]:
    live_numbers = sum(math.prod(param.shape) for param in found if _is_live(query, param))
    session.check_memory(boot.BYTES[session.plan.dtype] * live_numbers)
    driver = session.driver(progress)
    progress(RUNNING)
    from vlens_cli.driver.weights import as_numbers
    from vlens_cli.reader import answer as reader

    live = driver.weights(weights)
    return [as_numbers(live.tensor(param)).chosen(param.select) if _is_live(query, param)
            else reader.mapped(params.reading(param, weights, query.raw)) for param in found]


def _entry(session: Session, query: ParamQuery, weights: Weights, param: Param) -> dict[str, Any]:
    if not _is_live(query, param):
        return params.entry(param, weights, params.CHECKPOINT, query.raw)
    return params.entry(param, weights, params.ENGINE) | {"dtype": session.plan.dtype}


def _described(query: ParamQuery, found: tuple[Param, ...], entries: list[dict[str, Any]], numbers: list[Numbers]
               ) -> list[dict[str, Any]]:
    from vlens_cli.reader import answer as reader

    return [entry | reader.described(one, other, query.values, query.svd)
            for entry, one, other in zip(entries, numbers, _others(query, found), strict=True)]


def _saved(into: BinaryIO | None, model: dict[str, Any], entries: list[dict[str, Any]], numbers: list[Numbers]
           ) -> Saved | None:
    if into is None:
        return None
    from vlens_cli.driver import blob
    from vlens_cli.reader import answer as reader

    metadata = params.metadata(model, entries, __version__, blob.engine_version())
    return Saved(*reader.saved(into, [entry["name"] for entry in entries], numbers, metadata))


def _others(query: ParamQuery, found: tuple[Param, ...]) -> list[Numbers | None]:
    """The same weights of the checkpoint that is compared with."""
    if query.compare is None:
        return [None] * len(found)
    from vlens_cli.reader import answer as reader

    weights = params.of_model(query.compare)
    theirs = params.of_other(params.requested(query.names, weights), found, weights, query.compare)
    return [reader.mapped(params.reading(param, weights, query.raw)) for param in theirs]
