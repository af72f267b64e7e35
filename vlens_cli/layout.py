"""How a weight lies in a stored tensor: the language of the families' `[params]` tables, and strided views.

    layout  := dim+                              one for each dimension of the stored tensor
    dim     := axis | '(' sum ')'
    sum     := product ('+' product)*            parts, one after the other
    product := factor+                           the first varies slowest; '[' product ']' is the part that is meant
    factor  := axis | number | '(' sum ')'       a part that is meant may be the number 1: one element, and no axis

`(head d_head) d_model` is a query projection whose rows are the heads' rows in turn;
`([head d_head] + kv_head d_head + kv_head d_head) d_model` are the queries of a fused one. Since every axis has one
stride in such a tensor, each weight is a view: permuted and cut, never computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from vlens_cli.errors import BugError


class Sum(NamedTuple):
    """Parts that lie behind each other; `chosen` is the one that is meant."""

    parts: tuple[tuple[Any, ...], ...]
    chosen: int


Factor = str | int | Sum
Product = tuple[Factor, ...]


class View(NamedTuple):
    """Elements `offset + sum(index * stride)` of a flat tensor, for every index below `shape`; counted in elements."""

    offset: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def ordered(self, axes: Sequence[str]) -> View:
        """The same elements with the axes in another order."""
        places = [self.axes.index(axis) for axis in axes]
        shape, strides = ([numbers[place] for place in places] for numbers in (self.shape, self.strides))
        return View(self.offset, tuple(axes), tuple(shape), tuple(strides))


def whole(shape: Sequence[int]) -> View:
    """All of a tensor, its axes without names."""
    strides = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
    return View(0, ("",) * len(shape), tuple(shape), strides)


def view(layout: str, shape: Sequence[int], sizes: Mapping[str, int]) -> View:
    """The part that a layout means, in a stored tensor of this shape, its axes in the layout's order.

    `sizes` are known lengths of axes; one unknown axis a dimension follows from the shape.
    Raises ValueError where shape and sizes contradict each other.
    """
    dims = parse(layout)
    if len(dims) != len(shape):
        raise ValueError(f"it has the shape {list(shape)}, and {layout} is expected")
    sizes = dict(sizes)
    for dim, stored in zip(dims, shape, strict=True):
        _solve(dim, stored, sizes)
        if _size(dim, sizes) != stored:
            raise ValueError(f"it has the shape {list(shape)}, and {layout} is {[_size(d, sizes) for d in dims]}")
    offset, axes = _walk(dims, 1, sizes)
    axes.reverse()
    names, lengths, strides = zip(*axes, strict=True)
    return View(offset, names, lengths, strides)


def sized(layout: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a stored tensor. Raises KeyError for an axis whose length is not known."""
    return tuple(_size(dim, sizes) for dim in parse(layout))


def _solve(dim: Factor, stored: int, sizes: dict[str, int]) -> None:
    """Give the one unknown axis of a dimension the length that makes it fit; a length is linear in each axis."""
    unknown = {name for name in _names(dim) if name not in sizes}
    if not unknown:
        return
    (name, *more) = unknown
    if more:
        raise ValueError(f"the lengths of {', '.join(sorted(unknown))} are not known")
    none, one = (_size(dim, sizes | {name: n}) for n in (0, 1))
    sizes[name], rest = divmod(stored - none, one - none)
    if rest or sizes[name] < 0:
        raise ValueError(f"a length of {stored} does not divide into {name}")


def _names(factor: Factor) -> Iterator[str]:
    if isinstance(factor, str):
        yield factor
    elif isinstance(factor, Sum):
        yield from (name for part in factor.parts for each in part for name in _names(each))


def _size(factor: Factor, sizes: Mapping[str, int]) -> int:
    if isinstance(factor, Sum):
        return sum(math.prod(_size(each, sizes) for each in part) for part in factor.parts)
    return factor if isinstance(factor, int) else sizes[factor]


def _walk(product: Product, stride: int, sizes: Mapping[str, int]) -> tuple[int, list[tuple[str, int, int]]]:
    """(offset, (axis, length, stride) from the fastest) of the part that is meant; its last factor has this stride."""
    offset, axes = 0, []
    for factor in reversed(product):
        if isinstance(factor, Sum):
            ahead = factor.parts[: factor.chosen]
            started, found = _walk(factor.parts[factor.chosen], stride, sizes)
            offset += started + stride * sum(math.prod(_size(each, sizes) for each in part) for part in ahead)
            axes += found
        elif isinstance(factor, str):
            axes.append((factor, sizes[factor], stride))
        stride *= _size(factor, sizes)
    return offset, axes


@cache
def parse(text: str) -> Product:
    """A layout as factors, one a dimension. Raises BugError: layouts are our own data."""
    tokens = re.findall(r"[A-Za-z_]\w*|\d+|[()\[\]+]|\S", text)
    product, rest = _product(tokens, text)
    if rest or not product:
        raise _fault(text)
    return product


def _product(tokens: list[str], text: str) -> tuple[Product, list[str]]:
    factors: list[Factor] = []
    while tokens and tokens[0] not in (")", "]", "+"):
        head, *tokens = tokens
        if head == "(":
            inner, tokens = _sum(tokens, text)
            factors.append(inner)
        elif re.fullmatch(r"\w+", head):
            factors.append(int(head) if head.isdigit() else head)
        else:
            raise _fault(text)
    return tuple(factors), tokens


def _sum(tokens: list[str], text: str) -> tuple[Sum, list[str]]:
    """The parts up to the closing bracket, and what follows it."""
    parts: list[Product] = []
    chosen: list[int] = []
    while True:
        marked = tokens[:1] == ["["]
        part, tokens = _product(tokens[marked:], text)
        if marked:
            chosen.append(len(parts))
        if not part or (marked and tokens[:1] != ["]"]):
            raise _fault(text)
        parts.append(part)
        head, *tokens = tokens[marked:] or [""]
        if head == ")":
            break
        if head != "+":
            raise _fault(text)
    if len(chosen) != (len(parts) > 1) or any(type(f) is int and f != 1 for n in chosen for f in parts[n]):
        raise _fault(text)
    return Sum(tuple(parts), chosen[0] if chosen else 0), tokens


def _fault(text: str) -> BugError:
    return BugError(f"a bug in vlens: a layout that is none: {text}")
