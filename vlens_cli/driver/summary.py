"""Rows of a captured tensor as numbers that a person reads: the body of `capture`'s reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vlens_cli.driver.base import Captured, Want

TOP = 3
LOGITS_TOP = 5
# Keys that a line of a heat map may have; a wider one fits no terminal.
MOST_MAPPED = 200

# The text of a token id.
TextOf = Callable[[int], str | None]



def hook_body(captured: Captured, want: Want, axes: tuple[str, ...], derived: bool, values: bool, rows: bool,
              text_of: TextOf, pattern: bool = False) -> dict[str, Any]:
    """One hook point's part of the reply: shape, dtype, axes, and, if `rows`, its rows of statistics.

    One row a position, or one for all that are reduced, whose `pos` is how: statistics are over the whole row (heads and dims together), in fp64; `std` is the population's
    (divisor n). `top` lists the entries that are largest by absolute value, with their indices in the model (not in the
    selection); of logits the largest by value, with the tokens' texts.

    Of attention scores and patterns (axes head, query, key) one row a head and query position: `top` lists the largest
    by value, with the keys' positions; see `_table_rows`.
    """
    value = captured.value
    body: dict[str, Any] = {
        "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "axes": list(axes),
        "derived": derived, **({} if want.reduce is None else {"reduce": want.reduce}),
    }
    for axis, chosen in (("positions", want.positions), ("heads", want.heads), ("dims", want.dims)):
        if chosen is not None:
            body[axis] = list(chosen)
    if rows and axes[-1] == "key":
        body["rows"] = _table_rows(captured, want, values, pattern)
    elif rows:
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
        for n, pos in enumerate(captured.positions if want.reduce is None else [want.reduce])
    ]
    if values:
        for row, exact in zip(rows, value.tolist(), strict=True):
            row["values"] = exact
    return rows


def _table_rows(captured: Captured, want: Want, values: bool, pattern: bool) -> list[dict[str, Any]]:
    """A row for each head and query position, head by head.

    Of a pattern `percent` are its numbers in whole hundredths, where the keys are few enough for a heat map, and
    `entropy` that of the distribution over all keys, in nats, where all were asked; of scores `min` and `max` are over
    the keys that are not masked.
    """
    value = captured.value
    lowest = torch.finfo(value.dtype).min
    return [
        {"head": n if want.heads is None else want.heads[n], "pos": pos, **numbers, **({"values": exact} if values else {})}
        for n, head in enumerate(value)
        for pos, numbers, exact in zip(captured.positions, _table_numbers(head.double(), want, pattern, lowest),
                                       head.tolist() if values else captured.positions, strict=True)
    ]


def _table_numbers(head: torch.Tensor, want: Want, pattern: bool, lowest: float) -> list[dict[str, Any]]:
    """The numbers of one head's rows, [query, key] in fp64."""
    masked = (head <= 0) if pattern else (head <= lowest)
    columns: dict[str, list[Any]] = {}
    if pattern and want.dims is None:
        columns["entropy"] = torch.special.entr(head).sum(1).tolist()
    if pattern and head.shape[1] <= MOST_MAPPED:
        columns["percent"] = (100 * head.nan_to_num()).round().int().tolist()
    if not pattern:
        columns["min"] = _visible(head.masked_fill(masked, float("inf")).amin(1))
        columns["max"] = _visible(head.masked_fill(masked, float("-inf")).amax(1))
    places = head.topk(min(TOP, head.shape[1]), dim=1).indices.tolist()
    tops = [
        [{"key": key if want.dims is None else want.dims[key], "value": float(row[key])} for key in keys if not hidden[key]]
        for row, hidden, keys in zip(head, masked, places, strict=True)
    ]
    return [{**{key: column[n] for key, column in columns.items()}, "top": top} for n, top in enumerate(tops)]


def _visible(found: torch.Tensor) -> list[float]:
    """Not a number where every asked key is masked."""
    return found.masked_fill(found.isinf(), float("nan")).tolist()


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
