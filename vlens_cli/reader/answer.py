"""What a weight's reply holds beside its name and shape, and its file: the same whoever read the numbers."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, BinaryIO

import numpy as np

from vlens_cli.errors import QueryError, UsageError
from vlens_cli.reader import arrays
from vlens_cli.reader.arrays import Numbers

def mapped(reading: Mapping[str, Any]) -> Numbers:
    """The numbers that a reading (`params.reading`) names, of files that are mapped and not yet read.

    Raises QueryError where a file cannot be read.
    """
    if "scale" in reading:
        return Numbers(_dequantized(reading), "F32").chosen(reading["select"])
    pieces = [_piece(piece, reading["dtype"]) for piece in reading["pieces"]]
    raw, done = pieces[0]
    if reading["stacked"]:
        # A copy, of the chosen entries alone.
        chosen = reading["select"][0]
        raw = np.stack([pieces[n][0] for n in (range(len(pieces)) if chosen is None else chosen)])
        return Numbers(raw, reading["dtype"]).chosen([None, *reading["select"][1:]])
    return Numbers(raw, reading["dtype"], done).chosen(reading["select"])


def _dequantized(reading: Mapping[str, Any]) -> np.ndarray:
    """float32 numbers: the stored ones, times the scale that their block of rows and columns shares."""
    (piece,), scale = reading["pieces"], reading["scale"]
    rows, columns = scale["shape"]
    whole = piece | {"offset": 0, "shape": [rows, columns], "strides": [columns, 1]}
    raw, done = _piece(whole, reading["dtype"])
    scales, _ = _piece(scale["piece"], scale["dtype"])
    high, wide = scale["block"]
    factors = arrays.decode(scales, scale["dtype"]).reshape(-(-rows // high), -(-columns // wide))
    factors = np.repeat(factors, wide, axis=1)[:, :columns]
    out = np.empty((rows, columns), np.float32)
    for row in range(rows):
        out[row] = arrays.decode(raw[row], reading["dtype"]) * factors[row // high]
    done()
    strides = [stride * out.itemsize for stride in piece["strides"]]
    return np.lib.stride_tricks.as_strided(out.reshape(-1)[piece["offset"] :], piece["shape"], strides)


def _piece(piece: Mapping[str, Any], dtype: str) -> tuple[np.ndarray, Callable[[], None]]:
    """(a view of a stored tensor, what to call when a part of it has been used)."""
    raw_type = np.dtype(arrays.RAW[dtype])
    if 0 in piece["shape"]:
        return np.empty(piece["shape"], raw_type), lambda: None
    if piece["key"]:
        from vlens_cli.reader import pickled

        flat, done = pickled.flat(piece["file"], piece["key"]).view(raw_type), lambda: None
    else:
        memory = _map(piece["file"])
        count = (piece["end"] - piece["begin"]) // raw_type.itemsize
        flat = np.frombuffer(memory, raw_type, count, piece["begin"])
        # What was read is in the system's cache, and need not count as this process's too.
        done = partial(memory.madvise, mmap.MADV_DONTNEED)
    strides = [stride * raw_type.itemsize for stride in piece["strides"]]
    raw = np.lib.stride_tricks.as_strided(flat[piece["offset"] :], piece["shape"], strides, writeable=False)
    return raw, done


@cache
def _map(file: str) -> mmap.mmap:
    try:
        with open(file, "rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as fault:
        raise QueryError(f"the weight file cannot be read: {file}: {fault}", code="bad_checkpoint") from fault


def described(numbers: Numbers, other: Numbers | None, values: bool, svd: int | None) -> dict[str, Any]:
    """Statistics, and what else was asked: singular values, a comparison with `other`, all values."""
    found = arrays.statistics(numbers)
    if svd is not None:
        found["singular_values"] = _singular_values(numbers, svd, found["nonfinite"])
    if other is not None:
        if numbers.raw.shape != other.raw.shape:
            raise UsageError(f"the two weights have different shapes: {list(numbers.raw.shape)} and "
                             f"{list(other.raw.shape)}", code="other_shape")
        found["compare"] = arrays.comparison(numbers, other)
    if values:
        found["values"] = numbers.tolist()
    return found


def _singular_values(numbers: Numbers, count: int, nonfinite: int) -> Any:
    if numbers.raw.ndim < 2:
        raise UsageError("--svd is for matrices, and this weight has one axis", code="no_matrix")
    if nonfinite:
        raise QueryError("a matrix that holds NaN or infinities has no singular values", code="not_finite")
    return arrays.singular_values(numbers, count)


def saved(file: BinaryIO, names: Iterable[str], tensors: Sequence[Numbers], metadata: Mapping[str, Any]
          ) -> tuple[int, int]:
    """Write the file of `-o`: key = the name that was asked, metadata values as JSON texts. (Tensors, bytes)."""
    texts = {key: json.dumps(value) for key, value in metadata.items()}
    return arrays.write(file, dict(zip(names, tensors, strict=True)), texts)
