"""A model's live weights, by every name that a weight has.

The engine's own tensors are gathered over ranks; TransformerLens' are views of them, and a checkpoint's tensor is put
together of the TransformerLens weights that it holds: permuted and cut, never computed, so that every bit stays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vlens_cli import layout, params
from vlens_cli.checkpoint import NAMES
from vlens_cli.driver.blob import DTYPES
from vlens_cli.errors import QueryError, UsageError
from vlens_cli.families.param_rows import ParamRow
from vlens_cli.params import Param, Weights
from vlens_cli.reader import answer as reader
from vlens_cli.reader.arrays import RAW, Numbers

# (path of a module, name of its parameter) -> the parameter, gathered over ranks.
Fetch = Callable[[str, str], torch.Tensor]


def as_tensor(numbers: Numbers) -> torch.Tensor:
    """Numbers of a type that torch has, as a tensor of their own."""
    raw = np.ascontiguousarray(numbers.raw)
    dtype = getattr(torch, NAMES[numbers.dtype])
    return torch.from_numpy(raw.view(f"i{raw.itemsize}").copy()).view(dtype)


def as_numbers(tensor: torch.Tensor) -> Numbers:
    """A tensor on the host as numbers, without a copy."""
    dtype = DTYPES[tensor.dtype]
    bits = tensor if RAW[dtype].startswith("f") else tensor.view(torch.int16)
    return Numbers(bits.numpy().view(RAW[dtype]), dtype)


class LiveWeights:
    """The weights of one query; each tensor of the engine is fetched once."""

    def __init__(self, weights: Weights, fetch: Fetch) -> None:
        self._weights = weights
        self._fetch = fetch
        self._tensors: dict[str, torch.Tensor] = {}

    def tensor(self, param: Param) -> torch.Tensor:
        """All of a weight, in the engine's dtype, on the host; its selection is not applied.

        Raises UsageError for a tensor of the checkpoint that the engine does not keep, QueryError where the engine's
        shapes are not what the names mean.
        """
        name = self._weights.aliases.get(param.name, param.name)
        if name in self._weights.rows:
            found = self._lens(name)
        elif name in self._weights.stored:
            found = self._stored(name)
        else:
            found = self._engine(*self._weights.rows[self._weights.live[name][0]])
        if tuple(found.shape) != param.shape:
            raise QueryError(f"the engine's {param.name} has the shape {list(found.shape)}, and the checkpoint's "
                             f"{list(param.shape)}", code="shapes_differ")
        return found

    def _lens(self, name: str) -> torch.Tensor:
        row, layer = self._weights.rows[name]
        if self._weights.is_tied(row):
            return self._in_order(*self._weights.rows[row.tied], row.axes)
        found = self._in_order(row, layer, row.axes)
        if row.axes[0] == "expert" and row.module == "experts":
            self._check_experts(name, found)
        return found

    def _check_experts(self, name: str, found: torch.Tensor) -> None:
        """Kernels for experts shuffle weights without a change of shape (vLLM 0.26 to 0.32: FlashInfer, AMX, ROCm), and
        nothing says so: what is not the checkpoint's cannot be told from what is shuffled."""
        numbers = reader.mapped(params.reading(self._weights.param(name), self._weights))
        if not torch.equal(as_tensor(numbers).to(found.dtype), found):
            raise QueryError(f"the engine keeps {name} in its kernel's own order", hint="--from checkpoint",
                             code="not_in_engine")

    def _in_order(self, row: ParamRow, layer: str, axes: tuple[str, ...]) -> torch.Tensor:
        whole = self._engine(row, layer)
        try:
            view = layout.view(row.live, whole.shape, self._weights.sizes).ordered(axes)
        except ValueError as fault:
            raise QueryError(f"the engine's {self._weights.live_name(row, layer)} is not what its row says: {fault}",
                             code="shapes_differ") from fault
        return whole.as_strided(view.shape, view.strides, view.offset)

    def _stored(self, tensor: str) -> torch.Tensor:
        """A checkpoint's tensor, of the weights that lie in it."""
        names = self._weights.holders.get(tensor)
        if not names:
            raise UsageError(f"the engine keeps no weight of this name: {tensor}", hint="--from checkpoint",
                             code="not_in_engine")
        (row, layer) = self._weights.rows[names[0]]
        if len(names) == 1 and row.layout == row.live:
            return self._engine(row, layer)
        return self._put_together(tensor, names)

    def _put_together(self, tensor: str, names: list[str]) -> torch.Tensor:
        shape = self._weights.stored[tensor].shape
        parts = [(self._weights.rows[name], self._lens(name)) for name in names]
        out = torch.empty(shape, dtype=parts[0][1].dtype)
        filled = 0
        for (row, layer), part in parts:
            if "{e}" in row.tensor:
                part = part[self._weights.tensors_of(row, layer).index(tensor)]
            axes = [axis for axis in row.axes if "{e}" not in row.tensor or axis != row.axes[0]]
            view = layout.view(row.layout, shape, self._weights.sizes).ordered(axes)
            out.as_strided(view.shape, view.strides, view.offset).copy_(part)
            filled += part.numel()
        if filled != out.numel():
            raise UsageError(f"the engine keeps only a part of this tensor: {tensor}", hint="--from checkpoint",
                             code="not_in_engine")
        return out

    def _engine(self, row: ParamRow, layer: str) -> torch.Tensor:
        """The engine's tensor that a weight lies in, gathered; rows of a padded vocabulary are cut."""
        if not row.module:
            raise UsageError(f"the engine keeps no weight of this name: {row.name.replace('{i}', layer)}",
                             hint="--from checkpoint", code="not_in_engine")
        name = self._weights.live_name(row, layer)
        if name not in self._tensors:
            path, _, attribute = name.rpartition(".")
            whole = self._fetch(path, attribute)
            if row.live.startswith("d_vocab"):
                whole = whole[: self._weights.catalog.dims.d_vocab]
            self._tensors[name] = whole.contiguous()
        return self._tensors[name]
