"""Numbers as they are stored: decoded, summed up, compared and written, against numpy and torch on the whole array."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest

from vlens_cli.reader import arrays
from vlens_cli.reader.arrays import Numbers


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def f32(*shape: int) -> Numbers:
    return Numbers(generator().standard_normal(shape, dtype=np.float32), "F32")


@pytest.mark.parametrize("shape", [(7,), (600, 700), (3, 50, 1000), (2, 3, 4), (1, 1)])
def test_statistics_are_those_of_the_whole(shape):
    numbers = f32(*shape)
    x = numbers.raw.astype(np.float64)
    got = arrays.statistics(numbers)
    assert got["count"] == x.size and got["nonfinite"] == 0 and got["sparsity"] == 0
    assert (got["min"], got["max"]) == (x.min(), x.max())
    for name, want in (("norm", np.linalg.norm(x)), ("mean", x.mean()), ("std", x.std())):
        assert got[name] == pytest.approx(want, rel=1e-12, abs=1e-15), name
    counts, edges = np.histogram(x, 32) if x.size > 1 else ([1], [x.min(), x.max()])
    assert got["histogram"]["counts"] == list(counts) and sum(counts) == x.size
    assert got["histogram"]["edges"] == pytest.approx(list(edges), rel=1e-12)


@pytest.mark.parametrize("low, high", [(0, 1), (-3, 5), (1, 1 + 1e-13), (0, 1e-300), (1e300, 1.7e308), (-5, -4)])
def test_the_histogram_is_numpys(low, high):
    x = generator().uniform(0, 1, 100_000) * (high - low) + low
    x[:2] = low, high
    edges = np.linspace(low, high, 33)
    with np.errstate(all="ignore"):
        assert arrays._histogram(x, edges).tolist() == np.histogram(x, edges)[0].tolist()


def test_values_on_the_edges_of_the_histogram():
    x = generator().integers(0, 33, 50_000) / 32
    assert arrays.statistics(Numbers(x, "F64"))["histogram"]["counts"] == np.histogram(x, 32)[0].tolist()
    grid = generator().integers(0, 321, 50_000) / 10 - 7.3
    assert arrays.statistics(Numbers(grid, "F64"))["histogram"]["counts"] == np.histogram(grid, 32)[0].tolist()


def test_statistics_of_odd_tensors():
    assert arrays.statistics(Numbers(np.empty((0, 4), np.float32), "F32")) == {"count": 0, "nonfinite": 0}
    zeros = arrays.statistics(Numbers(np.zeros((3, 3), np.float32), "F32"))
    assert (zeros["sparsity"], zeros["std"], zeros["norm"]) == (1, 0, 0)
    assert zeros["histogram"] == {"edges": [0, 0], "counts": [9]}
    scalar = arrays.statistics(Numbers(np.float32(2.5).reshape(()), "F32"))
    assert (scalar["count"], scalar["mean"], scalar["std"]) == (1, 2.5, 0)


def test_statistics_of_what_is_not_finite():
    x = np.array([1, np.nan, 3, np.inf], np.float32)
    got = arrays.statistics(Numbers(x, "F32"))
    assert got["nonfinite"] == 2 and all(math.isnan(got[name]) for name in ("norm", "mean", "std", "min", "max"))
    assert sum(got["histogram"]["counts"]) == 2 and got["histogram"]["edges"][0] == 1
    infinite = arrays.statistics(Numbers(np.array([1, -np.inf], np.float32), "F32"))
    assert (infinite["min"], infinite["max"], infinite["norm"]) == (-math.inf, 1, math.inf)
    assert arrays.statistics(Numbers(np.array([np.nan]), "F64"))["histogram"] is None


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_every_bit_pattern_is_worth_what_torch_says(name):
    import torch

    dtype = {"bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
             "float8_e8m0fnu": "F8_E8M0"}[name]
    torch_dtype = getattr(torch, name)
    bits = torch.arange(2 ** (8 * torch_dtype.itemsize)).to(torch.uint8 if torch_dtype.itemsize == 1 else torch.uint16)
    want = bits.view(torch_dtype).to(torch.float32).double().numpy()
    got = arrays.decode(bits.numpy().view(arrays.RAW[dtype]), dtype)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)]))


def test_permuted_numbers_are_written_in_their_own_order():
    numbers = f32(300, 400)
    permuted = Numbers(numbers.raw.T, "F32")
    assert b"".join(p.tobytes() for p in permuted.pieces()) == np.ascontiguousarray(numbers.raw.T).tobytes()
    assert arrays.statistics(permuted) == arrays.statistics(numbers)
    assert max(len(piece) for piece in permuted.pieces()) <= arrays.PIECE


def test_selections_keep_every_axis():
    numbers = f32(6, 5, 4)
    assert numbers.chosen([(2,), None, (0, 3)]).raw.tolist() == numbers.raw[2:3][:, :, [0, 3]].tolist()
    assert numbers.chosen([(1, 2, 3), (0,), None]).raw.shape == (3, 1, 4)
    assert numbers.chosen([None, None, (1, 2)]).raw.base is not None


def test_values_are_exact():
    big = Numbers(np.array([[2**62 + 1, -1]], np.int64), "I64")
    assert big.tolist() == [[2**62 + 1, -1]]
    assert Numbers(np.array([1, 0], np.uint8), "BOOL").tolist() == [True, False]
    assert Numbers(np.array([0x3F81], np.uint16), "BF16").tolist() == [1.0078125]
    assert Numbers(np.array([0.1], np.float32), "F32").tolist() == [float(np.float32(0.1))]
    assert Numbers(np.float32(3).reshape(()), "F32").tolist() == 3.0
    assert Numbers(np.empty((0, 2), np.float32), "F32").tolist() == []


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (5000, 8), (8, 5000), (1, 4)])
def test_singular_values(shape):
    numbers = f32(*shape)
    want = np.linalg.svd(numbers.raw.astype(np.float64), compute_uv=False)[:5]
    assert arrays.singular_values(numbers, 5) == pytest.approx(want.tolist(), rel=1e-10)


def test_singular_values_of_a_stack_are_each_matrixs():
    numbers = f32(3, 6, 4)
    want = np.linalg.svd(numbers.raw.astype(np.float64), compute_uv=False)[:, :2]
    assert np.allclose(arrays.singular_values(numbers, 2), want, rtol=1e-10)


def test_a_comparison_is_of_the_two_as_vectors():
    one, other = f32(300, 400), Numbers(generator().standard_normal((400, 300)).T, "F64")
    x, y = one.raw.astype(np.float64).ravel(), other.raw.ravel()
    got = arrays.comparison(one, other)
    assert got["difference_norm"] == pytest.approx(np.linalg.norm(x - y), rel=1e-12)
    assert got["relative"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)
    assert got["cosine"] == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    assert arrays.comparison(one, one) == {"difference_norm": 0, "relative": 0, "cosine": pytest.approx(1, rel=1e-14)}
    nothing = Numbers(np.zeros(3), "F64")
    assert math.isnan(arrays.comparison(nothing, nothing)["cosine"])


def test_a_file_is_what_safetensors_reads():
    from safetensors.numpy import load

    file = io.BytesIO()
    tensors = {"a": f32(70, 50), "b c": Numbers(f32(4, 6).raw.T, "F32"), "none": Numbers(np.empty((0, 3), "f4"), "F32"),
               "one": Numbers(np.int64(7).reshape(()), "I64")}
    assert arrays.write(file, tensors, {"x": json.dumps([1])}) == (4, len(file.getvalue()))
    found = load(file.getvalue())
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[key], numbers.raw) for key, numbers in tensors.items())
