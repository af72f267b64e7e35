"""What every command that asks an engine does: one query, its file, its notes, its answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlens_cli.cli import output, render
from vlens_cli.errors import BugError, UsageError
from vlens_cli.reply import BOS_NOTE

if TYPE_CHECKING:
    from vlens_cli.daemon.client import Asking
    from vlens_cli.query import EngineSpec, Query
    from vlens_cli.reply import Reply


def file_of(name: str | None, save_dtype: str | None) -> Path | None:
    """The file that `-o` names. Raises PathError where it cannot be written, UsageError for a dtype without a file."""
    if name is not None:
        return output.check_target(name)
    if save_dtype is not None:
        raise UsageError("--save-dtype is for the file of -o, and -o is not given", hint="add -o FILE.safetensors")
    return None


def pictures_of(svg: str | None, html: str | None) -> dict[str, Path]:
    """The files that `--svg` and `--html` name, by kind. Raises PathError where one cannot be written."""
    return {kind: output.check_target(name, f".{kind}", f"--{kind}")
            for kind, name in (("svg", svg), ("html", html)) if name is not None}


def draw(reply: Reply, pictures: dict[str, Path]) -> None:
    """What a reply holds as pictures, into their files. Raises QueryError where it holds none."""
    if pictures:
        from vlens_cli.cli import picture

        picture.write(reply.body, pictures)


def ask(spec: EngineSpec, query: Query, target: Path | None, how: Asking, check: Callable[[], None] = lambda: None,
        notes: bool = True) -> Reply:
    """The engine's reply; its tensors go into `target`, whole or not at all. `check` is `client.ask`'s; `notes`
    `output.progress`'s."""
    from vlens_cli.daemon import client

    with output.progress(notes) as show:
        if target is None:
            return client.ask(spec, query, show, None, how, check)
        with output.whole_file(target) as file:
            return client.ask(spec, query, show, file, how, check)


def show(reply: Reply, target: Path | None, as_json: bool, table: Callable[[dict[str, Any]], str]) -> None:
    """Notes and what was saved on stderr, then the body on stdout: JSON, or what `table` makes of it."""
    for note in reply.notes:
        if note == BOS_NOTE and not output.talks_to_a_person():
            continue
        output.say(f"note: {render.visible(note)}")
    if target is not None:
        if reply.saved is None:
            raise BugError("a bug in vlens: the engine was asked for a file and wrote none")
        output.say_saved(target, reply.saved)
    output.emit(render.to_json(reply.body) if as_json else table(reply.body))
