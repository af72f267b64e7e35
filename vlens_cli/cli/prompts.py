"""Prompts from the command line: arguments, files, standard input, token ids.

Standard input is read only where `-` asks for it: a prompt beside an open, silent pipe must not wait.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import click

from vlens_cli.cli.options import LITERAL
from vlens_cli.errors import PathError, PromptError, UsageError
from vlens_cli.hooks import looks_like_hook
from vlens_cli.query import Prompt

class Sources(NamedTuple):
    """Where the prompts of one command line come from, as typed. `n_literal` arguments, the last, are text as is; `dataset`
    is a Parquet file, and its prompts are in `column`."""

    arguments: Sequence[str] = ()
    files: Sequence[str] = ()
    tokens: Sequence[str] = ()
    n_literal: int = 0
    dataset: str | None = None
    column: str | None = None


def sources(arguments: Sequence[str], files: Sequence[str], tokens: Sequence[str], dataset: str | None = None,
            column: str | None = None) -> Sources:
    """The sources of the command that runs now, which is a PromptCommand."""
    return Sources(arguments, files, tokens, click.get_current_context().meta[LITERAL], dataset, column)


# A prompt and where it was read: a file and line, or "" where it was typed.
Placed = tuple[Prompt, str]
# Takes a bad line, which is then left out: where it was read, and its error.
OnBad = Callable[[str, PromptError], None]


def collect(given: Sources, *, chat: bool, system: str | None, bos: bool | None, on_bad: OnBad | None = None
            ) -> tuple[Prompt, ...]:
    """All prompts: arguments, then the lines of files, then token ids, then a data set's. Raises PromptError, PathError or
    UsageError."""
    found = [prompt for prompt, _ in read(given, chat=chat, system=system, bos=bos, on_bad=on_bad)]
    if not found:
        raise _no_prompt()
    return tuple(prompt._replace(chat=chat, system=system) for prompt in found)


def read(given: Sources, *, chat: bool, system: str | None, bos: bool | None, on_bad: OnBad | None = None) -> Iterator[Placed]:
    """The same one by one, as files are read, without `chat` and `system` in them."""
    if system is not None and not chat:
        raise UsageError("--system is a message of the chat template, and --chat is not given", hint="add --chat")
    if [*given.arguments[: len(given.arguments) - given.n_literal], *given.files].count("-") > 1:
        raise UsageError("standard input is asked for twice, and can be read once")
    if not (given.arguments or given.files or given.tokens or given.dataset):
        raise _no_prompt()
    data = ()
    if given.dataset:
        from vlens_cli.cli import dataset

        data = dataset.read(given.dataset, given.column, _text, _ids, on_bad)
    for prompt, where in chain(((p, "") for p in _arguments(given)), _lines(given.files, on_bad),
                               ((typed_ids(text), "") for text in given.tokens), data):
        if (chat or bos is not None) and prompt.tokens:
            raise UsageError(f"{'--chat' if chat else '--bos'} changes text, and token ids are fed as they are")
        yield prompt, where


def _no_prompt() -> PromptError:
    return PromptError("there is no prompt", hint='type one: "The Eiffel Tower is in", or -f FILE, or - for standard input',
                       code="no_prompt")


def _arguments(given: Sources) -> Iterator[Prompt]:
    n_plain = len(given.arguments) - given.n_literal
    for place, text in enumerate(given.arguments):
        if place >= n_plain:
            yield _text(text, "the prompt")
        elif text == "-":
            yield _text(re.sub(r"\r?\n\Z", "", _read("-")), "standard input")
        elif looks_like_hook(text):
            raise UsageError(
                f"this prompt is a hook name: {text}",
                hint="quote the pattern, so that the shell leaves its braces alone: --hook 'blocks.{0,5}...'; "
                "if it is the prompt, put it after `--`",
                code="prompt_is_hook",
            )
        else:
            yield _text(text, "the prompt")


# What Python makes of bytes that are no text.
_SURROGATE = re.compile("[\ud800-\udfff]")


def _as_utf8(text: str) -> str:
    """An argument that a locale without UTF-8 has let through byte by byte, as the text that was typed."""
    try:
        return os.fsencode(text).decode("utf-8") if any("\udc80" <= char <= "\udcff" for char in text) else text
    except UnicodeError:
        return text


def tokens(texts: Iterable[str]) -> tuple[str, ...]:
    """Tokens as they were typed. Raises UsageError for what cannot be one."""
    found = tuple(map(_as_utf8, texts))
    for text in found:
        if not text or _SURROGATE.search(text):
            raise UsageError("a target is not UTF-8 text" if text else "a target is empty", hint='--target " Paris"')
    return found


def _text(text: str, where: str) -> Prompt:
    text = _as_utf8(text)
    if not text:
        raise PromptError(f"{where} is empty", hint="type some text, or --tokens with the ids to feed")
    if _SURROGATE.search(text):
        raise PromptError(f"{where} is not UTF-8 text")
    return Prompt(text=text)


def _ids(ids: Iterable[Any], where: str) -> Prompt:
    tokens = tuple(ids)
    if not tokens:
        raise PromptError(f"{where} is empty")
    wrong = next((token for token in tokens if type(token) is not int or token < 0), None)
    if wrong is not None:
        raise PromptError(f"{where} holds something that is not a token id: {wrong}", hint="--tokens 1,2,3")
    return Prompt(tokens=tokens)


def one(text: str, what: str, chat: bool, system: str | None) -> Prompt:
    """A prompt of an option that is no file and no `-`, as the others are fed."""
    return _text(text, what)._replace(chat=chat, system=system)


def typed_ids(text: str, where: str = "--tokens") -> Prompt:
    parts = [part for part in re.split(r"[,\s]+", text) if part]
    return _ids((int(part) if re.fullmatch(r"[0-9]{1,15}", part) else part for part in parts), where)


# Files


def _lines(files: Sequence[str], on_bad: OnBad | None) -> Iterator[Placed]:
    for name in files:
        where = "standard input" if name == "-" else name
        lines = _read_lines(name, where)
        first = next(lines, "")
        second = next(lines, None)
        if not first and second is None:
            raise PromptError(f"there is no prompt in {where}", code="no_prompt")
        as_json = name.endswith((".jsonl", ".json")) or isinstance(first, str) and _is_json(first)
        for n, line in enumerate(chain([first], [] if second is None else [second], lines), 1):
            if as_json and isinstance(line, str) and not line.strip():
                continue
            try:
                if isinstance(line, PromptError):
                    raise line
                yield (_record if as_json else _text)(line, f"{where}:{n}"), f"{where}:{n}"
            except PromptError as error:
                if on_bad is None:
                    raise
                on_bad(f"{where}:{n}", error)


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _record(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON: {error}", hint="each line is a JSON string or object") from error
    fields = {"prompt": record} if isinstance(record, str) else record
    given = [key for key in ("prompt", "text", "tokens") if key in fields] if isinstance(fields, dict) else []
    if len(given) != 1:
        raise PromptError(
            f"{where} is neither a string nor an object with one of prompt, text and tokens",
            hint='such as {"prompt": "The Eiffel Tower is in"} or {"tokens": [1, 2, 3]}',
        )
    value, wanted = fields[given[0]], list if given[0] == "tokens" else str
    if not isinstance(value, wanted):
        raise PromptError(f"{where}: {given[0]} is not a {'list of ids' if wanted is list else 'string'}")
    found = _ids(value, where) if wanted is list else _text(value, where)
    name = fields.get("id")
    if name is not None and type(name) not in (str, int):
        raise PromptError(f"{where}: id is neither a string nor a whole number")
    return found if name is None else found._replace(id=name)


def _read_lines(name: str, where: str) -> Iterator[str | PromptError]:
    """Line by line, without their ends; an error in the place of what is no text."""
    with _opened(name) as file:
        try:
            for n, line in enumerate(file, 1):
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                try:
                    yield line.decode("utf-8-sig" if n == 1 else "utf-8")
                except UnicodeDecodeError:
                    yield PromptError(f"{where}:{n} is not UTF-8 text")
        except OSError as error:
            raise PathError(f"this file cannot be read, {error.strerror}: {name}") from error


def _read(name: str) -> str:
    try:
        with _opened(name) as file:
            return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{'standard input' if name == '-' else name} is not UTF-8 text") from error
    except OSError as error:
        raise PathError(f"this file cannot be read, {error.strerror}: {name}") from error


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        if sys.stdin is None:
            raise PromptError("standard input is closed", code="no_prompt")
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")
    except OSError as error:
        raise PathError(f"this file cannot be read, {error.strerror}: {name}") from error
    with file:
        yield file
