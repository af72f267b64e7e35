"""Stored numbers as numpy arrays of their raw bits: what they are worth, their statistics, and their bytes for a file.

An array of a type that numpy has not (bfloat16, the 8-bit floats) is an array of unsigned integers of its size; `dtype`
beside it is the safetensors format's name. Everything works through the array in pieces: memory stays small, and a
view of a mapped file is read as it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

RAW = {
    "F64": "f8", "F32": "f4", "F16": "f2", "BF16": "u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "BOOL": "u1", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1",
}
# The arrays of one fit into a core's cache, and are not given back to the system at each step.
PIECE = 2**14
WINDOW = 2**21
BINS = 32


class Numbers(NamedTuple):
    """One tensor: `raw` bits [any shape, any strides] of type `dtype`. `done` is called when a piece has been used."""

    raw: np.ndarray
    dtype: str
    done: Callable[[], None] = lambda: None

    def pieces(self) -> Iterator[np.ndarray]:
        """The raw bits in order, as flat arrays of at most `PIECE` numbers."""
        return (self._copied(piece) for piece in _pieces(self.raw))

    def _copied(self, piece: np.ndarray) -> np.ndarray:
        """A part of `raw`, flat, holding no more of a mapped file than `WINDOW`: a permuted part reaches over all."""
        if not piece.size:
            return piece.reshape(-1).copy()
        out = np.empty(piece.shape, piece.dtype)
        axis = max(range(piece.ndim), key=lambda n: piece.strides[n] * piece.shape[n], default=0)
        step = max(1, WINDOW // max(1, piece.strides[axis])) if piece.ndim else 1
        for start in range(0, piece.shape[axis] if piece.ndim else 1, step):
            window = (*(slice(None),) * axis, slice(start, start + step)) if piece.ndim else ()
            out[window] = piece[window]
            self.done()
        return out.reshape(-1)

    def any_order(self) -> Numbers:
        """The same numbers in the order in which they are stored, which is the fastest to read."""
        order = sorted(range(self.raw.ndim), key=lambda axis: -self.raw.strides[axis])
        return Numbers(self.raw.transpose(order), self.dtype, self.done)

    def values(self) -> Iterator[np.ndarray]:
        """What the pieces are worth, as float64."""
        return (decode(piece, self.dtype) for piece in self.pieces())

    def chosen(self, select: Sequence[Sequence[int] | None]) -> Numbers:
        """The indices of each axis that were chosen (None: all), with every axis kept."""
        raw = self.raw
        for axis, indices in enumerate(select):
            if indices is not None:
                raw = raw[(slice(None),) * axis + (_as_slice(indices),)]
        return Numbers(raw, self.dtype, self.done)

    def tolist(self) -> Any:
        """All values, exactly, as nested lists."""
        flat = np.concatenate([np.empty(0), *self.values()])
        if self.dtype[0] in "IU":
            return self.raw.tolist()
        return (flat.astype(bool) if self.dtype == "BOOL" else flat).reshape(self.raw.shape).tolist()


def _as_slice(indices: Sequence[int]) -> slice | list[int]:
    """A view where it can be one, and not a copy."""
    first, last = indices[0], indices[-1]
    return slice(first, last + 1) if last - first + 1 == len(indices) else list(indices)


def _pieces(raw: np.ndarray) -> Iterator[np.ndarray]:
    if raw.size <= PIECE:
        yield raw
        return
    inner = raw[0].size
    if inner > PIECE:
        for each in raw:
            yield from _pieces(each)
        return
    rows = PIECE // inner
    for start in range(0, len(raw), rows):
        yield raw[start : start + rows]


# What bits are worth


def decode(bits: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values of raw bits; exact but for 64-bit integers beyond 2**53."""
    if dtype in _SMALL:
        return _SMALL[dtype]()[bits]
    if dtype == "BF16":
        bits = (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # numpy warns of signalling NaN
        return bits.astype(np.float64)


def _table(exponent_bits: int, mantissa_bits: int, infinite: bool) -> np.ndarray:
    """The 256 values of an 8-bit float: sign, exponent, mantissa (IEEE 754's way; e4m3fn has no infinities)."""
    bits = np.arange(256)
    sign = np.where(bits >> 7, -1.0, 1.0)
    exponent = (bits >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (bits & (2**mantissa_bits - 1)) / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    values = sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    if infinite:
        top = exponent == 2**exponent_bits - 1
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    else:
        values[[0x7F, 0xFF]] = np.nan
    return values


def _powers() -> np.ndarray:
    """e8m0fnu: powers of two, 255 is not a number."""
    values = 2.0 ** (np.arange(256) - 127.0)
    values[255] = np.nan
    return values


_SMALL: dict[str, Callable[[], np.ndarray]] = {
    "F8_E4M3": lambda: _table(4, 3, infinite=False), "F8_E5M2": lambda: _table(5, 2, infinite=True), "F8_E8M0": _powers,
}


# Statistics


def statistics(numbers: Numbers) -> dict[str, Any]:
    """norm, mean, std, min, max, sparsity, histogram and nonfinite of all values, in float64.

    `std` is the population's (divisor n), `sparsity` the share of exact zeros, `nonfinite` the count of infinities and
    NaN. The histogram counts the finite values in 32 bins of equal width between the smallest and the largest, `edges`
    has 33 entries. Of a tensor without numbers only the zero counts are given.
    """
    numbers = numbers.any_order()
    count = numbers.raw.size
    if not count:
        return {"count": 0, "nonfinite": 0}
    total = squares = zeros = nonfinite = 0
    low, high, finite_low, finite_high = math.inf, -math.inf, math.inf, -math.inf
    with np.errstate(all="ignore"):
        for x in numbers.values():
            total += float(x.sum())
            squares += float(x @ x)
            zeros += len(x) - int(np.count_nonzero(x))
            low, high = float(np.minimum(low, x.min())), float(np.maximum(high, x.max()))
            finite = x if math.isfinite(squares) else x[np.isfinite(x)]
            nonfinite += len(x) - len(finite)
            if len(finite):
                finite_low, finite_high = min(finite_low, float(finite.min())), max(finite_high, float(finite.max()))
        mean = total / count
        spread, bins = _second_pass(numbers, mean, finite_low, finite_high)
    return {
        "count": count, "norm": math.sqrt(squares) if squares == squares else math.nan, "mean": mean,
        "std": math.sqrt(spread / count) if spread == spread else math.nan, "min": low, "max": high,
        "sparsity": zeros / count, "nonfinite": nonfinite, "histogram": bins,
    }


def _second_pass(numbers: Numbers, mean: float, low: float, high: float) -> tuple[float, dict[str, Any] | None]:
    """(sum of squared distances from the mean, histogram of the finite values)."""
    if low > high:
        return math.nan, None
    edges = np.linspace(low, high, BINS + 1) if low < high else np.array([low, high])
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    spread = 0.0
    for x in numbers.values():
        off = x - mean
        spread += float(off @ off)
        counts += _histogram(x if math.isfinite(mean) else x[np.isfinite(x)], edges)
    return spread, {"edges": edges.tolist(), "counts": counts.tolist()}


def _histogram(x: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """np.histogram of finite values, in a quarter of its time."""
    last = len(edges) - 2
    scale = (last + 1) / (edges[-1] - edges[0]) if edges[0] < edges[-1] else math.inf
    # How far, in bins, rounding may have moved a value or an edge.
    slack = 16 * np.finfo(np.float64).eps * (last + 2 + max(abs(edges[0]), abs(edges[-1])) * scale)
    if not slack < 0.25:
        return np.histogram(x, edges)[0]
    places = (x - edges[0]) * scale
    bins = places.astype(np.uint8)
    # Those beside an edge are compared with it, all others are where they seem to be. Squares, because numpy's absolute
    # value of mixed signs takes longer than all the rest.
    places -= np.rint(places)
    places *= places
    unsure = np.flatnonzero(places < slack * slack)
    if len(unsure):
        bins[unsure] = np.clip(np.searchsorted(edges, x[unsure], side="right") - 1, 0, last)
    return np.bincount(bins, minlength=last + 1)


def singular_values(numbers: Numbers, count: int) -> Any:
    """The largest singular values of a matrix, descending; of a stack of matrices one list for each."""
    if numbers.raw.ndim > 2:
        return [singular_values(Numbers(each, numbers.dtype, numbers.done), count) for each in numbers.raw]
    raw = numbers.raw if numbers.raw.shape[0] >= numbers.raw.shape[1] else numbers.raw.T
    width = raw.shape[1]
    factor = np.empty((0, width))
    # The triangular factor of all rows has their singular values: rows are taken a piece at a time.
    rows = max(4 * width, PIECE // max(width, 1))
    for start in range(0, len(raw), rows):
        piece = raw[start : start + rows]
        block = decode(np.ascontiguousarray(piece).reshape(-1), numbers.dtype).reshape(piece.shape)
        factor = np.linalg.qr(np.concatenate([factor, block]), mode="r")
        numbers.done()
    return np.linalg.svd(factor, compute_uv=False)[:count].tolist()


def comparison(one: Numbers, other: Numbers) -> dict[str, float]:
    """The norm of `one - other`, that norm over the norm of `one`, and the cosine of the two as vectors.

    Both have one shape; they are read in the same order.
    """
    order = sorted(range(one.raw.ndim), key=lambda axis: -one.raw.strides[axis])
    pair = [Numbers(n.raw.transpose(order), n.dtype, n.done) for n in (one, other)]
    distance = product = mine = theirs = 0.0
    with np.errstate(all="ignore"):
        for x, y in zip(pair[0].values(), pair[1].values(), strict=True):
            off = x - y
            distance += float(off @ off)
            product += float(x @ y)
            mine += float(x @ x)
            theirs += float(y @ y)
        return {
            "difference_norm": math.sqrt(distance) if distance == distance else math.nan,
            "relative": float(np.sqrt(np.float64(distance) / np.float64(mine))),
            "cosine": float(np.float64(product) / np.sqrt(np.float64(mine) * np.float64(theirs))),
        }


# A file


def write(file: BinaryIO, tensors: dict[str, Numbers], metadata: dict[str, str]) -> tuple[int, int]:
    """A safetensors file of all of them; (how many, bytes)."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, numbers in tensors.items():
        begin, end = end, end + numbers.raw.nbytes
        entries[key] = {"dtype": numbers.dtype, "shape": list(numbers.raw.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, ensure_ascii=False).encode()
    # Padded, so that the tensors begin at a multiple of 8 and a reader can map them.
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for numbers in tensors.values():
        for piece in numbers.pieces():
            file.write(piece.data)
    file.flush()
    return len(tensors), 8 + len(header) + end
