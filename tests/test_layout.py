"""The layout language: views against what slicing and reshaping by hand give."""

from __future__ import annotations

import numpy as np
import pytest

from vlens_cli import layout
from vlens_cli.errors import BugError
from vlens_cli.families import FAMILIES, param_rows

SIZES = {"head": 4, "kv_head": 2, "d_head": 3, "d_model": 5, "d_mlp": 7}
QKV = "(head d_head + kv_head d_head + kv_head d_head) d_model"


def seen(text: str, stored: np.ndarray, axes: str, sizes=None) -> np.ndarray:
    view = layout.view(text, stored.shape, SIZES if sizes is None else sizes).ordered(axes.split())
    strides = [stride * stored.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(stored.reshape(-1)[view.offset :], view.shape, strides)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_rows_of_heads():
    stored = numbers(12, 5)
    assert np.array_equal(seen("(head d_head) d_model", stored, "head d_model d_head"),
                          stored.reshape(4, 3, 5).transpose(0, 2, 1))


def test_columns_of_heads():
    stored = numbers(5, 12)
    assert np.array_equal(seen("d_model (head d_head)", stored, "head d_head d_model"),
                          stored.reshape(5, 4, 3).transpose(1, 2, 0))


@pytest.mark.parametrize(("part", "rows"), [(0, slice(0, 12)), (1, slice(12, 18)), (2, slice(18, 24))])
def test_parts_of_a_fused_tensor(part, rows):
    stored = numbers(24, 5)
    products = ["head d_head", "kv_head d_head", "kv_head d_head"]
    products[part] = f"[{products[part]}]"
    head = "kv_head" if part else "head"
    found = seen(f"({' + '.join(products)}) d_model", stored, f"{head} d_head d_model")
    assert np.array_equal(found, stored[rows].reshape(-1, 3, 5))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_parts_inside_each_head(part):
    stored = numbers(36, 5)
    parts = ["d_head"] * 3
    parts[part] = "[d_head]"
    found = seen(f"(head ({' + '.join(parts)})) d_model", stored, "head d_head d_model")
    assert np.array_equal(found, stored.reshape(4, 3, 3, 5)[:, part])


def test_columns_of_a_fused_tensor_and_a_part_after_it():
    stored = numbers(5, 14)
    assert np.array_equal(seen("d_model (d_mlp + [d_mlp])", stored, "d_model d_mlp"), stored[:, 7:])


@pytest.mark.parametrize("part", [0, 1])
def test_columns_that_alternate(part):
    stored = numbers(5, 14)
    parts = ("(d_mlp ([1] + 1))", "(d_mlp (1 + [1]))")
    assert np.array_equal(seen(f"d_model {parts[part]}", stored, "d_model d_mlp"), stored[:, part::2])


def test_rows_before_the_first():
    stored = numbers(10, 5)
    assert np.array_equal(seen("(2 + [n_ctx]) d_model", stored, "n_ctx d_model"), stored[2:])


def test_an_axis_of_unknown_length_is_what_fits():
    assert seen("n_ctx d_model", numbers(8, 5), "n_ctx d_model", {}).shape == (8, 5)
    assert seen("(head d_head) d_model", numbers(8, 5), "head d_head d_model", {"head": 4}).shape == (4, 2, 5)
    with pytest.raises(ValueError, match="not known"):
        seen("(head d_head) d_model", numbers(8, 5), "head d_head d_model", {})
    with pytest.raises(ValueError, match="does not divide"):
        seen("(head d_head) d_model", numbers(9, 5), "head d_head d_model", {"head": 4})


@pytest.mark.parametrize("shape", [(12, 6), (11, 5), (12,), (12, 5, 1), ()])
def test_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        layout.view("(head d_head) d_model", shape, SIZES)


def test_the_shape_of_a_layout():
    assert layout.sized(QKV.replace("head d_head +", "[head d_head] +", 1), SIZES) == (24, 5)
    with pytest.raises(KeyError):
        layout.sized("n_ctx d_model", SIZES)


def test_a_whole_tensor():
    view = layout.whole((2, 3, 4))
    assert (view.offset, view.shape, view.strides) == (0, (2, 3, 4), (12, 4, 1))
    assert layout.whole(()).shape == ()


@pytest.mark.parametrize("text", ["", "a (b", "a)", "(a + b)", "(a + [b] + [c])", "([a]", "a]", "(a +) b", "a - b", "()", "([2] + n)"])
def test_what_is_no_layout_is_a_bug(text):
    with pytest.raises(BugError):
        layout.parse(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_a_family_names_its_axes_once(family):
    rows = param_rows.load(family).values()
    for row in rows:
        expected = sorted(axis for axis in row.axes if "{e}" not in row.tensor or axis != row.axes[0])
        assert sorted(chosen(layout.parse(row.layout))) == expected, row.name
        if row.live:
            assert sorted(chosen(layout.parse(row.live))) == sorted(row.axes), row.name


def chosen(product) -> list[str]:
    names = []
    for factor in product:
        names += chosen(factor.parts[factor.chosen]) if isinstance(factor, layout.Sum) else [factor] * (factor != 1)
    return names
