"""Captured tensors -> a safetensors file, with what it takes to know later what they are.

The file is written here and not by the safetensors package, because that package joins all tensors in memory first,
or wants a path; a capture of gigabytes goes into an open file, tensor by tensor, without a copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from vlens_cli import __version__
from vlens_cli.driver.base import Result, Want
from vlens_cli.driver.shards import engine_version, lay
from vlens_cli.driver.tokens import Fed
from vlens_cli.errors import BugError, QueryError
from vlens_cli.families import Catalog
from vlens_cli.query import EngineSpec, Saved

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.int64: "I64", torch.int32: "I32"}


def write_capture(
    file: BinaryIO, spec: EngineSpec, dtype: str, catalog: Catalog, fed: Sequence[Fed], wants: Sequence[dict[str, Want]],
    results: Sequence[Result], save_dtype: str | None,
) -> Saved:
    """Write the file of one capture: key = canonical hook name, after `N/` where there are several prompts.

    Metadata values are JSON texts; `prompt`, `tokens`, `chunks` are lists of each where there are several prompts.
    """
    keys = keys_of(results)
    cast = getattr(torch, save_dtype) if save_dtype else None
    values = {key: results[n].captured[name].value for (n, name), key in keys.items()}
    # Whole numbers name something, such as experts, and are not cast.
    tensors = {key: (narrow(key, t, cast) if cast and t.is_floating_point() else t).contiguous() for key, t in values.items()}
    return write_safetensors(file, tensors, about_capture(spec, dtype, catalog, fed, wants, results))


def keys_of(results: Sequence[Result]) -> dict[tuple[int, str], str]:
    """(prompt, hook point) -> key in the file of one capture."""
    return {(n, name): name if len(results) == 1 else f"{n}/{name}"
            for n, result in enumerate(results) for name in result.captured}


def about_capture(spec: EngineSpec, dtype: str, catalog: Catalog, fed: Sequence[Fed], wants: Sequence[dict[str, Want]],
                  results: Sequence[Result]) -> dict[str, str]:
    """The metadata of one capture's file."""
    keys = keys_of(results)
    hooks = list(dict.fromkeys(name for _, name in keys))
    reduce = next((want.reduce for wanted in wants for want in wanted.values()), None)
    metadata = origin(spec, dtype, catalog, fed, [r.chunks for r in results]) | {
        "heads": _chosen(keys, wants, "heads"), "dims": _chosen(keys, wants, "dims"),
        "axes": {name: list(catalog.axes(name)) for name in hooks},
        "hooks": {name: catalog.definition(name) for name in hooks},
        "derived": {name: catalog.derived(name) for name in hooks},
        "aliases": {name: list(catalog.aliases(name)) for name in hooks},
        **({} if reduce is None else {"reduce": reduce}),
    }
    positions = _dumps_shared({key: results[n].captured[name].positions for (n, name), key in keys.items()})
    return texts(metadata) | {"positions": positions}


def origin(spec: EngineSpec, dtype: str, catalog: Catalog, fed: Sequence[Fed], chunks: Sequence[int]) -> dict[str, Any]:
    """Metadata that say where a file's tensors come from: model, prompts, versions."""
    return {
        "model": spec.name, "folder": spec.model, "revision": spec.revision, "dtype": dtype, "family": catalog.family,
        "prompt": _one([f.text for f in fed]), "tokens": _one([list(f.ids) for f in fed]),
        "pieces": _one([list(f.pieces) for f in fed]), "chunks": _one(list(chunks)),
        "vlens_version": __version__, "vllm_version": engine_version(),
    }


def texts(metadata: dict[str, Any]) -> dict[str, str]:
    """Each value as JSON text: the format holds nothing but texts."""
    return {key: json.dumps(value) for key, value in metadata.items()}


@dataclass(frozen=True)
class Pieces:
    """A tensor that is written as it is made, along its first axis, and is never whole in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Iterable[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(file: BinaryIO, tensors: dict[str, torch.Tensor | Pieces], metadata: dict[str, str]) -> Saved:
    """A safetensors file, from its start. `tensors` are contiguous and on the host, or made in pieces, which may lie anywhere.
    """
    laid = lay({key: (DTYPES[t.dtype], tuple(t.shape)) for key, t in tensors.items()}, metadata)
    file.write(laid.header)
    for key, t in tensors.items():
        parts = [t] if isinstance(t, torch.Tensor) else (narrow(key, p, t.dtype).cpu().contiguous() for p in t.parts)
        written = sum(file.write(p.view(torch.uint8).numpy().data) for p in parts if p.numel())
        if written != t.nbytes:
            raise BugError(f"a bug in vlens: {key} was made in {written} bytes, not {t.nbytes}")
    file.flush()
    return Saved(len(tensors), laid.size)


def narrow(name: str, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the dtype that it is written in. Raises QueryError where that would make infinities of numbers."""
    out, spilled = narrowed(t, dtype)
    if spilled is not None and spilled:
        raise too_narrow(name, dtype)
    return out


def narrowed(t: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor in another dtype, and whether a number of it became infinite, [] on its device; None where none can."""
    out = t.to(dtype)
    if not (t.is_floating_point() and dtype.is_floating_point) or torch.finfo(dtype).max >= torch.finfo(t.dtype).max:
        return out, None
    return out, (out.isinf() & t.isfinite()).any()


def too_narrow(name: str, dtype: torch.dtype) -> QueryError:
    return QueryError(f"{name} has values that {str(dtype).removeprefix('torch.')} does not hold: beyond "
                      f"{torch.finfo(dtype).max:.5g}", hint="--dtype-out bfloat16, or float32", code="too_narrow")


def _dumps_shared(lists: dict[str, tuple[int, ...]]) -> str:
    """`json.dumps`, of lists most of which are equal: many hook points of one prompt have the same positions."""
    texts = {one: json.dumps(one) for one in set(lists.values())}
    return "{" + ", ".join(f"{json.dumps(key)}: {texts[one]}" for key, one in lists.items()) + "}"


def _one(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def _chosen(keys: dict[tuple[int, str], str], wants: Sequence[dict[str, Want]], axis: str) -> dict[str, list[int]]:
    chosen = {key: getattr(wants[n][name], axis) for (n, name), key in keys.items()}
    return {key: list(indices) for key, indices in chosen.items() if indices is not None}
