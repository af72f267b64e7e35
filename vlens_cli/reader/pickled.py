"""Weights of pickled files, by torch, which refuses everything in them but tensors (`weights_only`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vlens_cli.errors import INSTALL_HINT, StartError

_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "bool": "BOOL", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}


def listed(folder: str) -> dict[str, tuple[str, str, list[int]]]:
    """Tensor name -> (file, dtype by the safetensors format's name, shape). Raises StartError."""
    files = [file for file in sorted(Path(folder).glob("*.bin")) if file.name != "training_args.bin"]
    return {name: (str(file), _TYPES.get(_type(t), _type(t)), list(t.shape))
            for file in files for name, t in _tensors(str(file)).items()}


def flat(file: str, name: str) -> np.ndarray:
    """The bytes of one tensor, row-major."""
    import torch

    return _tensors(file)[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _type(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@cache
def _tensors(file: str) -> dict[str, Any]:
    try:
        import torch
    except ImportError as fault:
        raise StartError("torch, which reads pickled weights, is not installed", hint=INSTALL_HINT,
                         code="no_engine") from fault
    try:
        found = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as fault:  # torch raises whatever the file's own reading raises
        raise StartError(f"a broken weight file: {file}: {' '.join(str(fault).split())[:200]}", code="bad_checkpoint",
                         hint="fetch or save it again") from fault
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
