"""Writing inside the forward: an edit's formula on the selected rows of one point, in place.

Only selected entries are written, so every other row, head and column keeps its bits. A stream that the engine holds
as a pair (update, residual) is written whole into the first and zero into the others, never as a difference: that
would lose bits in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vlens_cli.driver.base import Edit

Index = tuple[Any, ...]


def on_device(edit: Edit, device: torch.device) -> Edit:
    """The edit with its tensors beside the model's, in fp32, in which its formula is computed."""
    moved = {field: t.to(device, torch.float32) for field in ("keep", "value", "direction")
             if isinstance(t := getattr(edit, field), torch.Tensor)}
    return replace(edit, **moved)


def places(of: Sequence[int]) -> slice | list[int]:
    """Places as a slice where each follows the one before: reading and writing one costs far less."""
    run = range(of[0], of[0] + len(of))
    return slice(run.start, run.stop) if list(of) == list(run) else list(of)


def selection(edit: Edit, rows: slice | list[int], t: torch.Tensor) -> Index:
    """What `edit` selects of `rows` of a tensor [rows, ...], as an index to read and to write with."""
    if edit.heads is None and edit.dims is None:
        return (rows,)
    chosen = [torch.arange(n, device=t.device) for n in t.shape]
    chosen[0] = chosen[0][rows]
    if edit.heads is not None:
        chosen[1] = torch.tensor(edit.heads, device=t.device)
    if edit.dims is not None:
        chosen[-1] = torch.tensor(edit.dims, device=t.device)
    last = len(chosen) - 1
    return tuple(c.view(-1, *[1] * (last - n)) for n, c in enumerate(chosen))


def changed(edit: Edit, x: torch.Tensor, at: slice | list[int]) -> torch.Tensor:
    """keep * x + value + along * proj(x), in fp32; `at` are the places of x's rows among the edit's positions."""
    keep, value = (_rows_of(part, x, at) for part in (edit.keep, edit.value))
    # A number that keeps nothing replaces also what is not finite, and one that keeps all does not round.
    new = torch.zeros_like(x) if _is(keep, 0) else x if _is(keep, 1) else x * keep
    if value is not None:
        new = new + value
    if edit.direction is not None:
        d = edit.direction
        new = new + edit.along * ((x @ d) / (d @ d)).unsqueeze(-1) * d
    return new.expand_as(x)


def _is(part: Any, number: float) -> bool:
    return not isinstance(part, torch.Tensor) and part == number


def _rows_of(part: Any, x: torch.Tensor, at: slice | list[int]) -> Any:
    """A part of the formula for these rows: the same for all, or one row for each of the edit's positions."""
    return part[at] if isinstance(part, torch.Tensor) and part.ndim == x.ndim else part


def write(edit: Edit, tensors: list[torch.Tensor], rows: slice | list[int], at: slice | list[int]) -> None:
    """Apply `edit` to `rows` of the tensors [rows, ...], views of the engine's own, whose sum is the value."""
    index = selection(edit, rows, tensors[0])
    x = tensors[0][index].float()
    for t in tensors[1:]:
        x = x + t[index].float()
    tensors[0][index] = changed(edit, x, at).to(tensors[0].dtype)
    for t in tensors[1:]:
        t[index] = 0
