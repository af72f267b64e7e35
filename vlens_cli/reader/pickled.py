"""Weights of pickled files, by torch, which refuses everything in them but tensors (`weights_only`)."""

from __future__ import annotations

import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vlens_cli import checkpoint
from vlens_cli.errors import INSTALL_HINT, StartError

_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "bool": "BOOL", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}


def listed(folder: str) -> dict[str, tuple[str, str, list[int]]]:
    """Tensor name -> (file, dtype by the safetensors format's name, shape). Raises StartError."""
    found: dict[str, tuple[str, str, list[int]]] = {}
    for file in checkpoint.pickled_files(Path(folder)):
        for name, t in _tensors(str(file)).items():
            checkpoint.check_one_file_each(name, [Path(found[name][0]), file] if name in found else [file])
            found[name] = (str(file), _TYPES.get(_type(t), _type(t)), list(t.shape))
    return found


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
        # torch's older format is no archive, and is not mapped.
        found = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
    except Exception as fault:  # torch raises whatever the file's own reading raises
        if type(fault).__name__ == "UnpicklingError":
            raise StartError(f"this file holds more than tensors, and is not read, because it may run what it says: {file}",
                             code="bad_checkpoint", hint="take it from a source that you trust, as safetensors") from fault
        raise StartError(f"a broken weight file: {file}: {' '.join(str(fault).split())[:200]}", code="bad_checkpoint",
                         hint="fetch or save it again") from fault
    named = found if isinstance(found, dict) else {}
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise StartError(f"no tensors stand in this file by their names, but {', '.join(map(str, named)) or type(found).__name__}: "
                         f"{file}", code="bad_checkpoint", hint="save the state dict itself: torch.save(model.state_dict(), FILE)")
    return tensors
