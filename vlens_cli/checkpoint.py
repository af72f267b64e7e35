"""What a checkpoint holds, read from its headers alone: light, without torch and numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vlens_cli.errors import StartError

# The safetensors package's own limit.
MAX_HEADER = 100_000_000
# Bytes of a number, by the format's name for it. Types of less than a byte are not among them.
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}
# What torch calls them, as users do.
NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "BOOL": "bool", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}
INDEX = "model.safetensors.index.json"
# What trainers leave beside the weights.
NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")


class Stored(NamedTuple):
    """One tensor of a weight file: its type by the safetensors format's name, its shape, and which bytes of the file it
    is. A pickled file does not say which: its tensors have a `key` instead."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0
    key: str = ""


def shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Tensor name -> shape, over the safetensors files that are loaded; None where the weights are not safetensors.

    Raises StartError for a file that is broken.
    """
    found = tensors(folder)
    return None if found is None else {name: stored.shape for name, stored in found.items()}


def tensors(folder: Path) -> dict[str, Stored] | None:
    """Tensor name -> where it is stored, as `shapes`. Raises StartError, also for a name that two files have."""
    files = _files(folder)
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(file).items():
            check_one_file_each(name, [found[name].file, file] if name in found else [file])
            found[name] = stored
    return found if files else None


def pickled_files(folder: Path) -> list[Path]:
    """The *.bin files that hold weights, whether an index names them or not: vLLM (0.26 to 0.32) loads every one."""
    return [file for file in sorted(folder.glob("*.bin")) if file.name not in NO_WEIGHTS]


def check_one_file_each(name: str, files: Sequence[Path]) -> None:
    """Raises StartError for a tensor that several files hold."""
    if len(files) > 1:
        raise StartError(f"two weight files hold the same tensor: {name}: {files[0].name}, {files[1].name}",
                         hint="readers differ in which of them counts; take one away", code="bad_checkpoint")


def _files(folder: Path) -> list[Path]:
    """Those that the index names, where there is one; vLLM and transformers load no others then."""
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(_shards(index))]
    files = sorted(folder.glob("*.safetensors"))
    return [file for file in files if not file.name.startswith("consolidated")] or files


def _shards(index: Path) -> set[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not all(isinstance(name, str) for name in names):
            raise ValueError("its weight_map names what are no files")
        if not names:
            raise ValueError("its weight_map names no files")
        return names
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise _broken(index, fault) from fault


def _header(file: Path) -> dict[str, Stored]:
    try:
        with file.open("rb") as f:
            length = f.read(8)
            if len(length) < 8:
                raise ValueError("it has no header")
            size = int.from_bytes(length, "little")
            if size > MAX_HEADER:
                raise ValueError("its header is too long")
            header = json.loads(f.read(size), object_pairs_hook=_once)
        header.pop("__metadata__", None)
        found = {name: _stored(file, entry, 8 + size) for name, entry in header.items()}
        _check_bytes(found, 8 + size, file.stat().st_size)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise _broken(file, fault) from fault


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys must differ: of two tensors of one name, a reader would take either."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"its header has {next(n for n in names if names.count(n) > 1)} twice")
    return found


def _stored(file: Path, entry: dict[str, Any], start: int) -> Stored:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise ValueError("its header makes no sense")
    if dtype in SIZES and end - begin != math.prod(shape) * SIZES[dtype]:
        raise ValueError(f"a tensor of {end - begin} bytes has the shape {list(shape)} of {dtype}")
    return Stored(file, dtype, shape, start + begin, start + end)


def _check_bytes(found: dict[str, Stored], start: int, size: int) -> None:
    """The tensors' bytes must follow each other without gaps or overlaps, as the format demands, and be there."""
    at = start
    for stored in sorted(found.values(), key=lambda one: (one.begin, one.end)):
        if stored.begin != at:
            raise ValueError("its tensors overlap or leave a gap")
        at = stored.end
    if at > size:
        raise ValueError("it is shorter than its header says")


def _broken(file: Path, fault: Exception) -> StartError:
    what = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault) or type(fault).__name__
    what = f"it has no {fault}" if isinstance(fault, KeyError) else what
    return StartError(f"a broken weight file: {file}: {what}", hint="fetch or save it again", code="bad_checkpoint")
