"""Answers `vlens logits`: what the model says of the next token at each position.

Rows of the final norm's output are captured, and unembedded in pieces after the forward: one position asked is one
row unembedded, and [pos, d_vocab] is never whole in memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli import __version__, hooks, lens
from vlens_cli.driver import attribution, capture, targets
from vlens_cli.driver.base import LOGITS, Edit, Request, Result, Want
from vlens_cli.driver.edits import edits_for
from vlens_cli.driver.tokens import Fed
from vlens_cli.errors import PromptError, UsageError
from vlens_cli.query import SCHEMA_VERSION, LogitsQuery, Reply, Saved

if TYPE_CHECKING:
    import torch

    from vlens_cli.driver.readout import Distribution
    from vlens_cli.driver.session import Progress, Session

FINAL = "ln_final.hook_out"
# float32 copies of one piece of logits that the statistics hold at a time.
PIECE_COPIES = 4
# Beyond it exp() leaves the range of float64.
MOST_NATS = 709.0


@dataclass(frozen=True)
class Asked:
    """One prompt's part of a query.

    positions  whose logits are shown or written; `rows` those that are unembedded, for the loss more
    explained  those whose logits are taken apart
    wants      what its forward keeps; `edits` what is changed in it
    """

    fed: Fed
    positions: tuple[int, ...]
    rows: tuple[int, ...]
    explained: tuple[int, ...]
    wants: dict[str, Want]
    edits: tuple[Edit, ...] = ()


@dataclass
class Read:
    """What was read of one prompt so far: an object a position, the loss of each row that has a next token, an object a
    position of each point of the lens, what each part of the stream adds; what the last position's logits say of the targets."""

    positions: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    lens: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    attribution: list[dict[str, Any]] = field(default_factory=list)


def answer(session: Session, query: LogitsQuery, progress: Progress, into: BinaryIO | None) -> Reply:
    """Raises UsageError before any engine starts, StartError, QueryError."""
    fed = session.feed(query.prompts, query.bos, query.one_chunk)
    d_vocab = session.catalog.dims.d_vocab
    chosen = targets.resolve(query.targets, session.tokens, d_vocab, query.target_prefix)
    pair = targets.resolve(query.diff or (), session.tokens, d_vocab, query.target_prefix)
    if pair and pair[0].id == pair[1].id:
        raise UsageError(f"both tokens of --diff are the same one, #{pair[0].id}", code="same_token",
                         hint='two that differ: --diff " Paris" " Rome"')
    points = lens.points(query.lens, session.catalog)
    asked = [_asked(session, query, f, points) for f in fed]
    session.check_memory(_size(session, asked))
    edited = edits_for(session, query.interventions, fed, progress, bos=query.bos)
    asked = [replace(a, edits=edits) for a, edits in zip(asked, edited.edits, strict=True)]
    if query.attribution:
        attribution.check_edits(asked[0].edits)
    reader = Reader(session, query, chosen, pair, progress)
    results, seconds = session.run([Request(a.fed.ids, a.wants, edits=a.edits) for a in asked], progress)
    began = time.monotonic()
    explained = _explained(chosen, pair) if query.attribution else []
    reads = [Read(attribution=attribution.attribute(session, r, a.explained, explained, bool(a.edits)) if explained else [])
             for a, r in zip(asked, results, strict=True)]
    saved = _read_all(reader, asked, results, reads, points, into)
    prompts = [
        {"text": a.fed.text, "chunks": result.chunks, "tokens": capture.token_rows(a.fed)}
        | ({"edits": edited.body(result.fired)} if edited.labels else {})
        | {"positions": read.positions}
        | ({"loss": _loss(read.losses)} if query.loss else {})
        | ({"attribution": read.attribution} if explained else {})
        | ({"lens": [{"hook": name, "layer": session.catalog.layer(name), "positions": read.lens[name]} for name in points]}
           if points else {})
        for a, result, read in zip(asked, results, reads, strict=True)
    ]
    body = {"schema_version": SCHEMA_VERSION, "command": "logits", "vlens": __version__, "model": session.model_body(),
            "targets": [t.body() for t in chosen], "diff": [t.body() for t in pair] or None, "prompts": prompts,
            "seconds": {"forward": round(seconds, 6), "readout": round(time.monotonic() - began, 6)}}
    notes = [*session.plan.notes, *(note for f in fed for note in f.notes), *edited.notes,
             *(note for read in reads for note in read.notes)]
    return Reply(body, tuple(dict.fromkeys(notes)), saved)


def _asked(session: Session, query: LogitsQuery, fed: Fed, points: Sequence[str]) -> Asked:
    """Raises HookError for a position that the prompt lacks, PromptError for a loss of one token."""
    items = None if query.pos is None else hooks.parse_items(query.pos, "pos")
    n = len(fed.ids)
    positions = capture.positions_of(session, hooks.Selected(LOGITS, items), fed)
    positions = tuple(range(n)) if positions is None else positions
    if query.loss and n < 2:
        raise PromptError("a prompt of one token has no loss: it predicts no token of the prompt", code="no_next_token")
    rows = tuple(sorted({*positions, *range(n - 1)})) if query.loss else positions
    explained = () if not query.attribution else positions if query.pos else (n - 1,)
    parts = attribution.wants(session.catalog, explained) if explained else {}
    wants = _together({FINAL: Want(rows)}, {name: Want(positions) for name in points}, parts)
    return Asked(fed, positions, rows, explained, wants)


def _together(*asked: dict[str, Want]) -> dict[str, Want]:
    """Whole rows of each hook point at all positions that any of `asked` has."""
    names = dict.fromkeys(name for wants in asked for name in wants)
    every = {name: {p for wants in asked if name in wants for p in wants[name].positions} for name in names}
    return {name: Want(tuple(sorted(positions))) for name, positions in every.items()}


def _explained(chosen: Sequence[targets.Target], pair: Sequence[targets.Target]) -> list[attribution.Explained]:
    """Each target's logit, and the difference."""
    found = [attribution.Explained({"target": t.body()}, {t.id: 1}) for t in chosen]
    if pair:
        a, b = pair
        found.append(attribution.Explained({"diff": [a.body(), b.body()]}, {b.id: -1, a.id: 1} if a.id != b.id else {a.id: 0}))
    return found


def _size(session: Session, asked: Sequence[Asked]) -> int:
    """Bytes of the captured rows, and of the piece of logits that is held at a time."""
    from vlens_cli.driver.unembed import UNEMBED_ROWS

    rows = min(UNEMBED_ROWS, max(len(a.rows) for a in asked))
    piece = PIECE_COPIES * 4 * rows * session.catalog.dims.d_vocab
    return piece + capture.size(session, [a.fed for a in asked], [a.wants for a in asked])


class Reader:
    """Unembeds captured rows and reads statistics off them."""

    def __init__(self, session: Session, query: LogitsQuery, chosen: Sequence[targets.Target],
                 diff: Sequence[targets.Target], progress: Progress) -> None:
        """Raises HookError where this engine's logits failed the proof at load."""
        self.session = session
        self._driver = session.driver(progress)
        self._driver.check_readable(LOGITS)
        self.query = query
        self._targets = [target.id for target in chosen]
        self._diff = [target.id for target in diff]
        self._spaced = targets.spaced([*chosen, *diff], session.tokens)

    def pieces(self, asked: Asked, result: Result, read: Read) -> Iterator[torch.Tensor]:
        """The logits of the asked positions, [pos, d_vocab] in pieces; what is read off them goes into `read`."""
        from vlens_cli.driver import readout

        shown_at, done = set(asked.positions), 0
        for logits in self._unembedded(asked, result):
            rows = asked.rows[done : done + len(logits)]
            done += len(logits)
            whole = readout.distribution(logits)
            if self.query.loss:
                read.losses += _losses(whole, rows, asked.fed.ids)
            kept = [n for n, pos in enumerate(rows) if pos in shown_at]
            if kept:
                shown = whole if len(kept) == len(rows) else whole.only(kept)
                read.positions += self._entries(shown, [rows[n] for n in kept], self.query.values)
                read.notes = targets.notes(self._spaced, shown.logits[-1])
                yield shown.logits

    def _unembedded(self, asked: Asked, result: Result) -> Iterator[torch.Tensor]:
        return self.session.in_turn(self._driver.unembed(result.captured[FINAL].at(asked.rows), asked.edits))

    def lens(self, name: str, asked: Asked, result: Result, read: Read) -> Iterator[torch.Tensor]:
        """The logits of one hook point's rows, each through the final norm of that row and the unembedding, in pieces; what
        is read off them goes into `read`."""
        from vlens_cli.driver import readout

        positions = read.lens.setdefault(name, [])
        for logits in self.session.in_turn(self._driver.lens(result.captured[name].at(asked.positions).value)):
            rows = asked.positions[len(positions) : len(positions) + len(logits)]
            positions += self._entries(readout.distribution(logits), rows, values=False)
            yield logits

    def _entries(self, rows: Distribution, positions: Sequence[int], values: bool) -> list[dict[str, Any]]:
        from vlens_cli.driver import readout

        ids = [*self._targets, *self._diff]
        found = readout.entries(rows, positions, self.query.top, ids, self.session.tokens.text_of)
        for entry in found:
            picked = entry.pop("targets", [])
            if self._targets:
                entry["targets"] = picked[: len(self._targets)]
            if self._diff:
                a, b = picked[len(self._targets) :]
                entry["diff"] = {"a": a, "b": b, "logit": a["logit"] - b["logit"]}
        if values:
            for entry, exact in zip(found, rows.logits.tolist(), strict=True):
                entry["values"] = exact
        return found


def _losses(whole: Distribution, rows: Sequence[int], ids: Sequence[int]) -> list[float]:
    """-log p of the prompt's next token at each row that has one, in nats."""
    import torch

    following = torch.tensor([ids[p + 1] for p in rows if p + 1 < len(ids)], device=whole.logits.device)
    picked = whole.logits[: len(following)].gather(1, following[:, None])
    return (whole.log_sum[: len(following)] - picked[:, 0].double()).tolist()


def _loss(losses: list[float]) -> dict[str, Any]:
    mean = math.fsum(losses) / len(losses)
    return {"mean": mean, "perplexity": math.inf if mean > MOST_NATS else math.exp(mean), "per_token": losses}


def _read_all(reader: Reader, asked: Sequence[Asked], results: Sequence[Result], reads: Sequence[Read], points: Sequence[str],
              into: BinaryIO | None) -> Saved | None:
    """Read every prompt; where a file is asked the pieces go into it as they are read."""
    made = [{"logits": reader.pieces(a, result, read)}
            | {f"lens/{name}": reader.lens(name, a, result, read) for name in points}
            for a, result, read in zip(asked, results, reads, strict=True)]
    if into is not None:
        return _write(reader, asked, results, reads, made, into)
    for parts in made:
        for pieces in parts.values():
            for _ in pieces:
                pass
    return None


def _write(reader: Reader, asked: Sequence[Asked], results: Sequence[Result], reads: Sequence[Read],
           made: Sequence[dict[str, Iterator[torch.Tensor]]], into: BinaryIO) -> Saved:
    """Keys `logits` and `lens/HOOK`, [pos, d_vocab] of the asked positions, and `attribution`; after `N/` where there are
    several prompts."""
    import torch

    from vlens_cli.driver import blob

    session, save_dtype = reader.session, reader.query.save_dtype
    dtype = getattr(torch, save_dtype or session.plan.dtype)
    tensors: dict[str, Any] = {}
    positions: dict[str, list[int]] = {}
    for n, (a, read, parts) in enumerate(zip(asked, reads, made, strict=True)):
        prefix = "" if len(asked) == 1 else f"{n}/"
        shape = len(a.positions), session.catalog.dims.d_vocab
        tensors |= {prefix + key: blob.Pieces(shape, dtype, pieces) for key, pieces in parts.items()}
        added = attribution.tensors(read.attribution)
        tensors |= {prefix + key: blob.narrow(key, t, getattr(torch, save_dtype or "float32")) for key, t in added.items()}
        positions |= {prefix + key: list(a.positions) for key in parts} | {prefix + key: list(a.explained) for key in added}
    fed, chunks = [a.fed for a in asked], [r.chunks for r in results]
    metadata = blob.origin(session.spec, session.plan.dtype, session.catalog, fed, chunks) | {
        "positions": positions, "axes": {key: ["pos", "d_vocab"] for key in made[0]} | attribution.axes(reads[0].attribution),
        "hooks": {"logits": session.catalog.definition(LOGITS)},
        "aliases": {"logits": [LOGITS, *session.catalog.aliases(LOGITS)]},
        **({"attribution": attribution.labels(reads[0].attribution)} if reads[0].attribution else {}),
    }
    return blob.write_safetensors(into, tensors, blob.texts(metadata))
