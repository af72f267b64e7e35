"""Rows of a captured tensor as numbers that a person reads: the body of `capture`'s reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vlens_cli.driver.base import Captured, Want

TOP = 3
LOGITS_TOP = 5

# The text of a token id.
TextOf = Callable[[int], str | None]


def hook_body(captured: Captured, want: Want, axes: tuple[str, ...], derived: bool, values: bool, rows: bool,
              text_of: TextOf) -> dict[str, Any]:
    """One hook point's part of the reply: shape, dtype, axes, and, if `rows`, one row of statistics a position.

    Statistics are over the whole row (heads and dims together), in fp64; `std` is the population's (divisor n).
    `top` lists the entries that are largest by absolute value, with their indices in the model (not in the selection);
    of logits the largest by value, with the tokens' texts.
    """
    value = captured.value
    body: dict[str, Any] = {
        "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "axes": list(axes),
        "derived": derived, "positions": list(captured.positions),
    }
    if want.heads is not None:
        body["heads"] = list(want.heads)
    if want.dims is not None:
        body["dims"] = list(want.dims)
    if rows:
        body["rows"] = _rows(captured, want, values, text_of if axes[-1] == "d_vocab" else None)
    return body


def _rows(captured: Captured, want: Want, values: bool, text_of: TextOf | None) -> list[dict[str, Any]]:
    value = captured.value
    flat = value.reshape(len(value), -1).double()
    columns = {
        "norm": flat.norm(dim=1), "mean": flat.mean(1), "std": flat.std(1, unbiased=False),
        "min": flat.amin(1), "max": flat.amax(1),
    }
    lists = {key: column.tolist() for key, column in columns.items()}
    if text_of is None:
        tops = _tops(flat, flat.abs(), TOP, value.shape[1:], want)
    else:
        tops = _tops(flat, flat, LOGITS_TOP, value.shape[1:], want)
        tops = [[{**entry, "text": text_of(entry["dim"])} for entry in row] for row in tops]
    rows = [
        {"pos": pos, **{key: column[n] for key, column in lists.items()}, "top": tops[n]}
        for n, pos in enumerate(captured.positions)
    ]
    if values:
        for row, exact in zip(rows, value.tolist(), strict=True):
            row["values"] = exact
    return rows


def _tops(flat: torch.Tensor, order: torch.Tensor, count: int, shape: torch.Size, want: Want
          ) -> list[list[dict[str, Any]]]:
    # NaN sorts as the largest, so that a broken row shows it first.
    places = order.topk(min(count, order.shape[1]), dim=1).indices
    entries = flat.gather(1, places)
    return [
        [{**_index(place, shape, want), "value": entry} for place, entry in zip(row, numbers, strict=True)]
        for row, numbers in zip(places.tolist(), entries.tolist(), strict=True)
    ]


def _index(place: int, shape: torch.Size, want: Want) -> dict[str, int]:
    dim = place % shape[-1]
    index = {"dim": dim if want.dims is None else want.dims[dim]}
    if len(shape) > 1:
        head = place // shape[-1]
        index["head"] = head if want.heads is None else want.heads[head]
    return index
