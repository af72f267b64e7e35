"""The one custom op of compiled mode, `vlens::tap`.

A graph holds its name and the number of a site, nothing else: no address and no tensor of ours, so that compiled graphs
can be kept on disk and served to the next engine. What a site means is looked up when the op runs, and where CUDA graphs
are captured: the tables that are active then, whose addresses stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import library


class Visited(Protocol):
    """What the op calls."""

    def visit(self, x: torch.Tensor, residual: torch.Tensor | None, site: int) -> None: ...


_active: Visited | None = None
_library = library.Library("vlens", "FRAGMENT")
_library.define("tap(Tensor(a!) x, Tensor(b!)? residual, int site) -> ()")


def _tap(x: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
    if _active is not None:
        _active.visit(x, residual, site)


def _fake(x: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
    """Nothing to compute where shapes alone are traced."""


for _key in ("CPU", "CUDA"):
    _library.impl("tap", _tap, _key)
library.register_fake("vlens::tap", _fake, lib=_library)
tap = torch.ops.vlens.tap


@contextlib.contextmanager
def active(tables: Visited) -> Iterator[None]:
    """Within, the op works on these tables; outside, as where vlens runs a module itself, it does nothing."""
    global _active
    before, _active = _active, tables
    try:
        yield
    finally:
        _active = before
