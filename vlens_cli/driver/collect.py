"""Answers `vlens capture -o FOLDER/`: any number of prompts, their activations into shards, memory flat.

All prompts are read, tokenized and checked first, so that a bad line in the middle is refused before anything runs and
the size of the whole is known; what is kept of them meanwhile lies in a file. `fill.py` then runs them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli import __version__, hooks, interventions
from vlens_cli.driver import boot, capture
from vlens_cli.driver.edits import Plan
from vlens_cli.driver.shards import INDEX, Folder, check_room, cut, engine_version, free_bytes
from vlens_cli.driver.tokens import Fed
from vlens_cli.errors import PromptError, QueryError, UsageError
from vlens_cli.families import Catalog
from vlens_cli.models.folder import stamps
from vlens_cli.query import SCHEMA_VERSION, CollectQuery, Prompt, Reply, Saved
from vlens_cli.units import counted, size_text

if TYPE_CHECKING:
    from vlens_cli.driver.session import Progress, Session

SHOWN_BAD = 5


@dataclass
class Rows:
    """Hook points with the same positions: of each prompt they have the same rows. `counts` has how many, by prompt; `own`
    hook points have a name of their own for where their rows begin."""

    pos: hooks.Items | None
    own: bool
    hooks: list[hooks.Selected] = field(default_factory=list)
    counts: array[int] = field(default_factory=lambda: array("Q"))


@dataclass
class Prompts:
    """The prompts as they were read: one JSON line each in `file`, and of each its tokens, the bytes of its text and the
    numbers in its attention tables. `digest` tells them from any others."""

    file: BinaryIO
    tokens: array[int] = field(default_factory=lambda: array("Q"))
    texts: array[int] = field(default_factory=lambda: array("Q"))
    tables: array[int] = field(default_factory=lambda: array("Q"))
    skipped: list[dict[str, str]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    digest: str = ""


def answer(session: Session, query: CollectQuery, progress: Progress, into: BinaryIO | None) -> Reply:
    """Raises UsageError before any engine starts, StartError, QueryError."""
    if into is None:
        raise QueryError("a collection of prompts comes through a file, and none came", code="bad_frame")
    folder = Folder(query.folder, query.token)
    try:
        with folder, tempfile.TemporaryFile(dir=query.folder) as kept:
            return Collection(session, query, progress, folder).answer(into, kept)
    except OSError as fault:
        raise folder.not_written(fault) from fault


class Collection:
    """One such query."""

    def __init__(self, session: Session, query: CollectQuery, progress: Progress, folder: Folder) -> None:
        self.session, self.query, self.progress, self.folder = session, query, progress, folder
        self.catalog: Catalog = session.catalog
        asked = hooks.resolve(map(hooks.parse, query.hooks), self.catalog, query.pos, query.head, query.dim)
        capture.check_reduction(self.catalog, asked, query.reduce)
        self.tables = [s for s in asked if self.catalog.axes(s.name)[-1] == "key"]
        usual = None if query.pos is None else hooks.parse_items(query.pos, "pos")
        self.groups: list[Rows] = []
        for selected in asked:
            group = next((g for g in self.groups if g.pos == selected.pos), None)
            if group is None:
                self.groups.append(group := Rows(selected.pos, selected.pos != usual))
            group.hooks.append(selected)
        # The torch dtype that each hook point is written in, when the engine has told its own.
        self.written: dict[str, Any] = {}
        self._sizes: tuple[list[int], int] | None = None

    def answer(self, into: BinaryIO, kept: BinaryIO) -> Reply:
        prompts = self._read(into, kept)
        identity = self._identity(prompts)
        found = self.folder.finished(identity, self.query.resume)
        done = sum(os.stat(self.folder.path / name).st_size for name in found)
        self._announce(prompts, done)
        from vlens_cli.driver import fill

        names = [s.name for group in self.groups for s in group.hooks]
        self.written = fill.written_as(self.session.dtypes(names, self.progress), self.query.save_dtype)
        self._sizes = None
        sizes = ((self._bytes_of(prompts, n), prompts.tokens[n], prompts.texts[n]) for n in range(len(prompts.tokens)))
        spans = cut(sizes, self.query.shard_bytes)
        files = [f"capture-{n:05d}-of-{len(spans):05d}.safetensors" for n in range(1, len(spans) + 1)]
        if surplus := found.keys() - set(files):
            raise QueryError(f"this folder holds a shard that this capture does not have: {min(surplus)}",
                             hint="name another folder", code="other_query")
        began = time.monotonic()
        resumed = fill.run(self, prompts, identity, dict(zip(files, spans, strict=True)), found)
        seconds = time.monotonic() - began
        metadata = {"vlens_version": __version__, "n_prompts": len(prompts.tokens), "n_tokens": sum(prompts.tokens),
                    "skipped": prompts.skipped, "query": identity}
        self.folder.write_index(metadata, files)
        return self._reply(prompts, spans, files, resumed, seconds)

    # Reading

    def _read(self, into: BinaryIO, kept: BinaryIO) -> Prompts:
        """Tokenize and check every prompt. Raises PromptError, HookError for the first bad one, or leaves it out."""
        prompts, digest = Prompts(kept), hashlib.sha256()
        with os.fdopen(os.dup(into.fileno()), "rb") as lines:
            lines.seek(0)
            for n, line in enumerate(self.session.in_turn(lines)):
                record = json.loads(line)
                try:
                    self._take_in(record, prompts, digest)
                except UsageError as error:
                    place = record["where"] or f"prompt {n}"
                    if not self.query.skip_bad:
                        error.message = f"{place}: {error.message}"
                        raise
                    prompts.skipped.append({"where": place, "reason": error.message})
        if not prompts.tokens:
            raise PromptError("no prompt is left", code="no_prompt",
                              hint="; ".join(f"{bad['where']}: {bad['reason']}" for bad in prompts.skipped[:SHOWN_BAD]))
        prompts.digest = digest.hexdigest()
        return prompts

    def _take_in(self, record: dict[str, Any], prompts: Prompts, digest: Any) -> None:
        query, tokens = self.query, record.get("tokens")
        prompt = Prompt(record.get("text"), None if tokens is None else tuple(tokens), query.chat, query.system)
        fed = self.session.tokens.feed(prompt, query.bos, shown=False)
        self.session.check_fed(fed, query.one_chunk)
        if query.interventions.expressions:
            # Making it checks it against this prompt.
            Plan(self.session, query.interventions, [self.session.tokens.feed(Prompt(tokens=fed.ids), None)], query.bos)
        counts = [self.rows(self.positions(group, fed), fed) for group in self.groups]
        tables = sum(self._numbers(s, fed, counts[n]) for n, group in enumerate(self.groups) for s in group.hooks
                     if s in self.tables)
        line = json.dumps({"ids": fed.ids, "text": fed.text, **({"id": record["id"]} if "id" in record else {}),
                           "where": record["where"]}, separators=(",", ":")).encode() + b"\n"
        prompts.file.write(line)
        digest.update(line)
        prompts.tokens.append(len(fed.ids))
        prompts.texts.append(len(line))
        prompts.tables.append(tables)
        for group, count in zip(self.groups, counts, strict=True):
            group.counts.append(count)
        prompts.notes |= dict.fromkeys(fed.notes)

    def positions(self, group: Rows, fed: Fed) -> tuple[int, ...] | None:
        """Which positions of a prompt are kept, or reduced; None: all. Raises HookError for one that it does not have."""
        found = capture.positions_of(self.session, hooks.Selected("", group.pos), fed)
        return (len(fed.ids) - 1 if found is None else found[-1],) if self.query.reduce == "last" else found

    def rows(self, positions: tuple[int, ...] | None, fed: Fed) -> int:
        """How many rows that are in the file."""
        return 1 if self.query.reduce else len(fed.ids) if positions is None else len(positions)

    def _numbers(self, selected: hooks.Selected, fed: Fed, rows: int) -> int:
        """In one [head, query, key]."""
        heads = self.catalog.size("head") if selected.head is None else len(selected.head)
        keys = capture.key_positions(self.session, selected, fed)
        return heads * rows * (len(fed.ids) if keys is None else len(keys))

    # Sizes

    def row(self, selected: hooks.Selected) -> tuple[int, ...]:
        """The shape of one row."""
        sizes = [self.catalog.size(axis) for axis in self.catalog.axes(selected.name)[1:]]
        if selected.head is not None:
            sizes[-2] = len(selected.head)
        if selected.dim is not None:
            sizes[-1] = len(selected.dim)
        return tuple(sizes)

    def kind(self, name: str) -> tuple[str, int]:
        """The format's name of a hook point's type in the file, and bytes a number; before the engine has said what it
        gives, its own dtype's."""
        if not self.written:
            return "", boot.BYTES[self.query.save_dtype or self.session.plan.dtype]
        from vlens_cli.driver.blob import DTYPES

        return DTYPES[self.written[name]], self.written[name].itemsize

    def row_bytes(self, selected: hooks.Selected) -> int:
        return math.prod(self.row(selected)) * self.kind(selected.name)[1]

    def _row_bytes(self) -> list[int]:
        """Of a row of all hook points of each group, tables aside."""
        return [sum(self.row_bytes(s) for s in group.hooks if s not in self.tables)
                for group in self.groups]

    def _bytes_of(self, prompts: Prompts, n: int) -> int:
        if self._sizes is None:
            self._sizes = self._row_bytes(), self.kind(self.tables[0].name)[1] if self.tables else 0
        rows, entry = self._sizes
        return sum(group.counts[n] * size for group, size in zip(self.groups, rows, strict=True)) + (
            prompts.tables[n] * entry + 4 * prompts.tokens[n])

    def _announce(self, prompts: Prompts, done: int) -> None:
        """Say how large it will be; refuse what the disk does not hold. Raises UsageError."""
        total = sum(self._bytes_of(prompts, n) for n in range(len(prompts.tokens)))
        free = free_bytes(self.query.folder)
        if self.tables:
            # They are formed whole, one after the other.
            self.session.check_memory(boot.BYTES[self.session.plan.dtype] * max(prompts.tables) // len(self.tables))
        check_room(total, free + done, self.query.folder, self.query.max_bytes)
        before = f", {size_text(done)} of them there" if done else ""
        n_prompts = len(prompts.tokens)
        self.progress(f"note: {counted(n_prompts, 'prompt')} of {counted(sum(prompts.tokens), 'token')}: "
                      f"{size_text(total)} to write{before}, {size_text(free)} free")

    # What a reply and the files say

    def _identity(self, prompts: Prompts) -> dict[str, Any]:
        """What must be the same for --resume to go on: all that decides the values, and how they are cut into shards."""
        query, spec = self.query, self.session.spec
        read = [one.value.of.path for one in map(interventions.parse, query.interventions.expressions)
                if isinstance(one.value, interventions.Tensor) and isinstance(one.value.of, interventions.File)]
        identity = {
            "model": spec.name, "revision": spec.revision, "model_files": _hash(stamps(spec.model)),
            "dtype": self.session.plan.dtype, "written_as": query.save_dtype, "vllm_version": engine_version(),
            "chunk": self.session.plan.chunk, "compiled": self.session.plan.built is not None,
            "hooks": [[s.name, repr(s.pos), s.head, s.dim, repr(s.key)] for group in self.groups for s in group.hooks],
            "reduce": query.reduce, "interventions": _hash(query.interventions),
            "intervention_files": _hash([_stamp(path) for path in read]),
            "shard_size": query.shard_bytes, "n_prompts": len(prompts.tokens), "prompts": prompts.digest,
        }
        # As it is read back: lists, no tuples.
        return json.loads(json.dumps(identity))

    def metadata(self, identity: dict[str, Any], first: int, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Of one shard, whose prompts are `records`."""
        catalog, spec = self.catalog, self.session.spec
        asked = {s.name: s for group in self.groups for s in group.hooks}
        return {
            "model": spec.name, "folder": spec.model, "revision": spec.revision, "dtype": self.session.plan.dtype,
            "family": catalog.family, "vlens_version": __version__, "vllm_version": engine_version(), "query": identity,
            "reduce": self.query.reduce,
            "prompts": [{"prompt": first + n, "text": record["text"], "where": record["where"],
                         **({"id": record["id"]} if "id" in record else {})} for n, record in enumerate(records)],
            "axes": {name: list(catalog.axes(name)) for name in asked},
            "heads": {name: list(s.head) for name, s in asked.items() if s.head is not None},
            "dims": {name: list(s.dim) for name, s in asked.items() if s.dim is not None},
            "hooks": {name: catalog.definition(name) for name in asked},
            "derived": {name: catalog.derived(name) for name in asked},
            "aliases": {name: list(catalog.aliases(name)) for name in asked},
        }

    def _reply(self, prompts: Prompts, spans: Sequence[tuple[int, int]], files: Sequence[str], resumed: int,
               seconds: float) -> Reply:
        sizes = [os.stat(self.folder.path / name).st_size for name in files]
        n_tokens = sum(prompts.tokens)
        body = {
            "schema_version": SCHEMA_VERSION, "command": "capture", "vlens": __version__,
            "model": self.session.model_body(), "folder": str(self.folder.path), "index": INDEX,
            "n_prompts": len(prompts.tokens), "n_tokens": n_tokens, "n_resumed": resumed, "bytes": sum(sizes),
            "shards": [{"file": name, "prompts": list(span), "bytes": size}
                       for name, span, size in zip(files, spans, sizes, strict=True)],
            "skipped": prompts.skipped, "seconds": {"forward": round(seconds, 6), "ended": round(time.time(), 6)},
        }
        bad = [f"left out, {one['where']}: {one['reason']}" for one in prompts.skipped]
        more = [f"and {len(bad) - SHOWN_BAD} more, which {INDEX} names"] if len(bad) > SHOWN_BAD else []
        return Reply(body, (*self.session.plan.notes, *prompts.notes, *bad[:SHOWN_BAD], *more), Saved(len(files), sum(sizes)))


def _hash(what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _stamp(path: str) -> Any:
    try:
        found = os.stat(path)
    except OSError:
        # Whoever reads it says so.
        return path, None
    return path, found.st_size, found.st_mtime_ns
