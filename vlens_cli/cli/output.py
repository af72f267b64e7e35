"""The three places that output goes to: standard output (data), standard error (what is said), a file (whole)."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import click

from vlens_cli.cli.render import LEFT_TO_RIGHT, from_here, to_json, visible
from vlens_cli.errors import PathError, QueryError, UsageError, VlensError
from vlens_cli.reply import SCHEMA_VERSION, Saved
from vlens_cli.units import counted, size_text


def wants_json(as_json: bool, as_table: bool) -> bool:
    """`--json` and `--table` decide; without them a terminal gets tables and anything else JSON."""
    if sys.stdout is None:
        # Before anything is opened: a file would take the free descriptor 1, and what prints there would write into it.
        raise QueryError("standard output is closed", code="output_failed")
    if as_json and as_table:
        raise UsageError("--json and --table exclude each other", hint="give one of them")
    return as_json or not (as_table or on_terminal())


def on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def talks_to_a_person() -> bool:
    """Whether standard error is a terminal that somebody reads: some CI systems give a log's writer one."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return sys.stderr is not None and sys.stderr.isatty() and not in_ci


def ensure_stderr() -> None:
    """Give a process that was started without standard error one that goes nowhere.

    Python's None there makes `print(file=sys.stderr)` write to standard output, and the next file opened would be 2.
    """
    if sys.stderr is None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        if nowhere != 2:
            os.close(nowhere)
        sys.stderr = open(2, "w", closefd=False)


def emit(text: str) -> None:
    """Write to standard output and flush, so that a failure surfaces here and not at exit."""
    if sys.stdout is None:
        raise QueryError("standard output is closed", code="output_failed")
    encoding = sys.stdout.encoding or "utf-8"
    if "utf" not in encoding.lower():
        # What it orders is written as escapes there.
        text = text.replace(LEFT_TO_RIGHT, "")
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A line on standard error; lost where nobody takes it."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(notes: bool = True) -> Iterator[Callable[[str], None]]:
    """A function that shows what is waited for, in one line of the terminal that is gone afterwards; where a line cannot be
    taken back, or nobody watches, it does nothing. What begins with `note: ` is said and stays, anywhere, if `notes`."""
    tty = talks_to_a_person() and os.environ.get("TERM") != "dumb"
    # A copy of the descriptor: the client points the original elsewhere while the engine talks.
    with os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace") as terminal:

        def show(text: str) -> None:
            stays = text.startswith("note: ")
            if notes if stays else tty:
                # Whoever no longer reads it does not end the query.
                with suppress(OSError):
                    terminal.write("\r\x1b[K" * tty + visible(text) + "\n" * stays)
                    terminal.flush()

        try:
            yield show
        finally:
            show("")


def report(error: VlensError, as_json: bool) -> None:
    """An error on standard error, and with `--json` its object on standard output."""
    lines = [visible(line) for line in error.message.split("\n")]
    say(f"{_red('error:')} " + "\n".join(lines) + (f"\n\nhint: {visible(error.hint)}" if error.hint else ""))
    if as_json:
        try:
            emit(to_json({"schema_version": SCHEMA_VERSION, "error": error.as_dict()}))
        except (OSError, QueryError):
            discard_stdout()
    elif error.code == "output_failed":
        discard_stdout()


def _red(word: str) -> str:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty()
    return word if plain else click.style(word, fg="red", bold=True)


def reader_gone() -> bool:
    """Whether nobody reads standard output any more, which tells `| head` from a broken pipe of ours."""
    poller = select.poll()
    poller.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))


def discard_stdout() -> None:
    """Let what is still buffered go nowhere: Python flushes at exit, and would complain again."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


# Files


def check_target(name: str, suffix: str = ".safetensors", option: str = "-o") -> Path:
    """The file that an option names, its links followed; raises PathError where it could not be written."""
    import tempfile

    path = Path(os.path.realpath(name))
    if path.suffix != suffix:
        raise PathError(f"{option} writes {suffix[1:]}, and this name does not end in {suffix}: {name}",
                        hint=f"{option} {Path(name).stem or 'out'}{suffix}")  # fmt: skip
    if not path.parent.is_dir():
        raise PathError(f"there is no such folder: {path.parent}", hint=f"mkdir -p '{path.parent}'")
    if path.is_dir():
        raise PathError(f"{option} names a folder: {name}", hint=f"{option} {name.rstrip('/')}/out{suffix}")
    if path.exists() and not path.is_file():
        raise PathError(f"{option} names something that is not a file: {name}")
    try:
        # The permission bits do not tell of read-only mounts, or of root; making a file does.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise PathError(f"this folder cannot be written, {error.strerror}: {path.parent}",
                        hint="name a file in a folder that you own") from error  # fmt: skip
    return path


def names_folder(name: str | None) -> bool:
    """Whether `-o` means a folder: it ends in a slash, or is one and is not called as a file would be."""
    return name is not None and (name.endswith("/") or os.path.isdir(name) and not name.endswith(".safetensors"))


def folder(name: str) -> Path:
    """The folder that `-o` names, made where it is not there. Raises PathError where it cannot be written."""
    import tempfile

    path = Path(os.path.realpath(name))
    if not path.parent.is_dir():
        raise PathError(f"there is no such folder: {path.parent}", hint=f"mkdir -p '{path.parent}'")
    if path.exists() and not path.is_dir():
        raise PathError(f"this is a file, and -o NAME/ means a folder: {path}", hint="leave out the slash, or name another")
    try:
        path.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise PathError(f"this folder cannot be written, {error.strerror}: {path}",
                        hint="name a folder that you own") from error
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the path's name at the end: whoever looks sees the old file or the whole new one.

    Nothing is left behind on failure.
    """
    # Opened by hand, not by tempfile, so that the mode follows the umask.
    draft = path.parent / f".vlens-{os.urandom(6).hex()}.tmp"
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            yield file
        if not (path.exists() and _exchanged(draft, path)):
            os.replace(draft, path)
    except OSError as error:
        raise QueryError(f"the file could not be written, {error.strerror}: {path}", code="output_failed") from error
    except QueryError as error:
        if error.code == "output_failed":
            # The engine knows the file by its descriptor alone.
            error.message += f": {path}"
        raise
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def _exchanged(draft: Path, path: Path) -> bool:
    """Give each of two files the other's name, at once (renameat2, Linux); whether that can be done here. A rename over a
    large file waits, on ext4, until the new one is on the disk."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2
    return renameat2 is not None and renameat2(here, os.fsencode(draft), here, os.fsencode(path), exchange) == 0


def say_saved(path: Path, saved: Saved) -> None:
    """What went into the file of `-o`."""
    say(f"wrote {name_of(path)}: {counted(saved.tensors, 'tensor')}, {size_text(saved.bytes)}")


def name_of(path: Path) -> str:
    """A file as it is named from where the user stands."""
    return visible(from_here(str(path)))
