"""Whether there is room for an engine: estimated before it is started, and said where it ran out of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlens_cli import checkpoint, memory
from vlens_cli.driver import boot

# What an engine takes beside weights, keys and values at least: Python, torch and vLLM (0.32, CPU: 0.7 to 0.9 GB
# resident); on a GPU its context and the kernels (0.26, H200: 0.6 GB).
OVERHEAD = 600 * 10**6


def needed(folder: Path, config: dict[str, Any], plan: boot.Plan, ranks: int = 1) -> int:
    """Bytes that an engine takes at least, of this machine's memory or of each rank's GPU; an estimate that refuses nothing
    that would fit."""
    weights, each = _weight_bytes(folder, config, plan.dtype), plan.kv_bytes + OVERHEAD
    return weights // ranks + each if _runs_on_gpu() else weights + ranks * each


def _weight_bytes(folder: Path, config: dict[str, Any], dtype: str) -> int:
    shapes = checkpoint.shapes(folder)
    if shapes is not None and not config.get("quantization_config"):
        return sum(map(math.prod, shapes.values())) * boot.BYTES[dtype]
    files = [file for file in folder.iterdir() if file.name.endswith((".safetensors", ".bin"))]
    stored = sum(file.stat().st_size for file in files if file.name != "training_args.bin")
    if config.get("quantization_config"):
        return stored
    return stored * boot.BYTES[dtype] // boot.BYTES[boot.checkpoint_dtype(config)]


@contextmanager
def room_for(n_bytes: int) -> Iterator[None]:
    """Start an engine inside: it is refused where `n_bytes` are not free, and a shortage that comes nevertheless is told
    with what is free then and who holds the most. Raises StartError."""
    where = memory.gpus()[:1] if _runs_on_gpu() else ()
    if any(pool.free < n_bytes for pool in where or [memory.machine()]):
        raise memory.shortage(n_bytes, where or [memory.machine()])
    kills = memory.kills()
    try:
        yield
    except Exception as fault:
        lost = getattr(fault, "code", "") == "worker_died" and memory.kills() > kills
        # Whatever class it has: torch, vLLM and C++ raise their own.
        if not (lost or memory.is_short(fault)):
            raise
        pools = [memory.machine(), *memory.gpus()[: len(where)]]
        raise memory.shortage(n_bytes, pools, boot.one_line(fault)) from fault


def _runs_on_gpu() -> bool:
    """Whether the engine would use a GPU, without importing it: PyTorch's builds for the processor say so."""
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
