"""`vlens capture -o FOLDER/`: any number of prompts, into shards. The engine reads the prompts from a file that is made here,
line by line, and writes the shards itself."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli import models, units
from vlens_cli.cli import options, output, prompts, render
from vlens_cli.errors import PromptError, QueryError, UsageError
from vlens_cli.query import CollectQuery

if TYPE_CHECKING:
    from vlens_cli.cli.capture import Typed

SHARD_BYTES = 10**9


def run(asked: Typed, check: Callable[[CollectQuery, dict[str, Any]], None], as_json: bool) -> None:
    """One such command. `check` refuses what the model, whose config it is given, does not have."""
    if asked.values:
        raise UsageError("--values prints what -o writes to files", hint="leave out one of them")
    how = options.asking(asked.keep_alive, asked.timeout, asked.no_daemon)
    edits = options.interventions_of(asked)
    model = models.resolve(asked.model)
    there = os.path.isdir(asked.output)
    folder = output.folder(asked.output)
    try:
        with _spool(folder) as spool:
            skipped: list[dict[str, str]] = []
            try:
                count = _write(spool, asked, skipped)
            except OSError as fault:
                raise QueryError(f"the prompts do not go into this folder, {fault.strerror}: {folder}", hint="make room",
                                 code="output_failed") from fault
            query = CollectQuery(
                count=count, folder=str(folder), token=os.urandom(6).hex(), hooks=asked.hooks, pos=asked.pos, head=asked.head,
                dim=asked.dim, chat=asked.chat, system=asked.system, bos=asked.bos, save_dtype=asked.save_dtype,
                one_chunk=asked.one_chunk, interventions=edits, reduce=asked.reduce,
                shard_bytes=asked.shard_size or SHARD_BYTES, max_bytes=asked.max_bytes, resume=asked.resume,
                skip_bad=asked.skip_bad)
            for bad in skipped:
                output.say(f"note: left out, {render.visible(bad['reason'])}")
            reply = _ask(asked, model, query, spool, how, partial(check, query, model.config))
    except BaseException as fault:
        if not there:
            # Made for a capture that has not begun.
            with suppress(OSError):
                folder.rmdir()
        if isinstance(fault, KeyboardInterrupt) and folder.exists():
            output.say(f"note: what is finished stays in {render.visible(str(folder))}; the same command with --resume goes on")
        raise
    for note in reply.notes:
        output.say(f"note: {render.visible(note)}")
    saved = reply.saved
    output.say(f"wrote {render.visible(str(folder))}: {units.counted(saved.tensors, 'file')}, "
               f"{units.size_text(saved.bytes)}")
    body = {**reply.body, "skipped": [*skipped, *reply.body["skipped"]]}
    output.emit(render.to_json(body) if as_json else render.collected(body))


def _ask(asked: Typed, model: models.Model, query: CollectQuery, spool: BinaryIO, how: Any, check: Callable[[], None]) -> Any:
    from vlens_cli.daemon import client

    spec = options.spec(model, asked._asdict())
    try:
        with output.progress() as show:
            return client.ask(spec, query, show, spool, how, check)
    except QueryError as error:
        if error.code == "engine_died":
            # It could not take away what it had begun.
            for draft in Path(query.folder).glob(f".*.{query.token}.*"):
                draft.unlink(missing_ok=True)
        if error.code in ("engine_died", "engine_stopped", "worker_died"):
            n_shards = len(list(Path(query.folder).glob("capture-*.safetensors")))
            error.hint = f"{units.counted(n_shards, 'shard')} finished: --resume goes on with what is there" if n_shards else (
                "no shard was finished: the same command begins again")
        raise


def _spool(folder: Path) -> BinaryIO:
    """A file without a name, where there must be room for more than it. Not buffered: closing a full one would fail again."""
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def _write(spool: BinaryIO, asked: Typed, skipped: list[dict[str, str]]) -> int:
    """All prompts, a JSON line each. Returns how many. Raises PromptError for a line that is none, unless they are to be
    left out."""
    given = prompts.sources(asked.prompts, asked.files, asked.tokens, asked.dataset, asked.column)
    on_bad = (lambda where, error: skipped.append({"where": where, "reason": error.message})) if asked.skip_bad else None
    count = 0
    for prompt, where in prompts.read(given, chat=asked.chat, system=asked.system, bos=asked.bos, on_bad=on_bad):
        line = {"text": prompt.text} if prompt.tokens is None else {"tokens": prompt.tokens}
        line |= {"where": where} | ({} if prompt.id is None else {"id": prompt.id})
        rest = memoryview(json.dumps(line).encode() + b"\n")
        while rest:
            rest = rest[spool.write(rest):]
        count += 1
    if not count:
        raise PromptError("there is no prompt", code="no_prompt", hint="; ".join(bad["reason"] for bad in skipped[:3]))
    return count
