"""Causal tracing by transformers' own forward hooks: what the grids of `vlens patch --sweep` are tested against.

Shares nothing with vlens.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from reference import TREES, Widths, load  # (hides packages and goes offline first)

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

Change = Callable[[Tensor], Tensor]


def hooked(model: nn.Module, point: str, layer: int, change: Change) -> torch.utils.hooks.RemovableHandle:
    """Have `change` see, and replace, the point [batch, pos, width] of one layer."""
    tree = TREES[model.config.model_type]
    block = model.get_submodule(f"{tree.layers}.{layer}")
    if point == "z":  # the input of the output projection
        return block.get_submodule(tree.o).register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    path = {"resid_post": "", "attn_out": tree.attn_output or tree.attention, "mlp_out": tree.mlp_output}[point]

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return block.get_submodule(path).register_forward_hook(after)


def last_logits(model: nn.Module, tokens: list[int], batch: int = 1) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens] * batch), use_cache=False).logits[:, -1].clone()


def values_of(model: nn.Module, tokens: list[int], point: str, layers: set[int]) -> tuple[Tensor, dict[int, Tensor]]:
    """The last logits of a run, and its values [pos, width] at the point of these layers."""
    kept: dict[int, Tensor] = {}

    def keep(layer: int) -> Change:
        return lambda x: kept.setdefault(layer, x[0].clone()).unsqueeze(0)

    handles = [hooked(model, point, layer, keep(layer)) for layer in layers]
    logits = last_logits(model, tokens)
    for handle in handles:
        handle.remove()
    return logits[0], kept


def patched(model: nn.Module, prompt: list[int], point: str, layer: int, cells: list[Any], source: Tensor) -> Tensor:
    """The last logits [cells, d_vocab] of one layer's cells."""
    widths = Widths.of(model.config)

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        for row, (_, positions, heads) in enumerate(cells):
            columns = range(x.shape[-1])
            if heads is not None:
                columns = [widths.d_head * head + d for head in heads for d in range(widths.d_head)]
            for position in positions:
                x[row, position, list(columns)] = source[position, list(columns)]
        return x

    handle = hooked(model, point, layer, change)
    logits = last_logits(model, prompt, len(cells))
    handle.remove()
    return logits


def write(folder: str, prompt: list[int], source: list[int], point: str, cells: list[Any], out: str) -> None:
    """`cells` are [layer, positions, heads], where heads may be null; `point` is resid_post, attn_out, mlp_out or z. `out`
    gets the last position's logits [d_vocab] of the runs `base` and `source`, and `cells` [cells, d_vocab]: the prompt's
    run, in which the point of one layer is replaced by the source run's value at these positions (and heads). Cells of one
    layer run as a batch."""
    model = load(Path(folder), torch.float32)
    assert len(prompt) == len(source)
    of_source, kept = values_of(model, source, point, {layer for layer, *_ in cells})
    by_layer = [(layer, list(some)) for layer, some in groupby(cells, key=lambda cell: cell[0])]
    rows = [patched(model, prompt, point, layer, some, kept[layer]) for layer, some in by_layer]
    save_file({"base": last_logits(model, prompt)[0], "source": of_source.contiguous(), "cells": torch.cat(rows)}, out)
