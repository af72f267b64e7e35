"""Quantized checkpoints: which tensors are, by which scheme, and what scales them. Light.

A number of a supported scheme is the stored one (8 bits) times a scale: of the whole tensor, of its row, or of its
block. Whatever packs several numbers into one, or shifts them, is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from vlens_cli.checkpoint import NAMES, Stored
from vlens_cli.errors import UsageError

_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = ("_scale_inv", "_scale")
# What stands instead of a packed weight: gptq and awq, compressed-tensors, mxfp4.
_PACKED = ("qweight", "weight_packed", "weight_blocks", "_blocks")
_FLOATS = ("F64", "F32", "F16", "BF16")


class Scale(NamedTuple):
    """What a stored tensor is multiplied with: another one, and how many rows and columns share one of its numbers."""

    tensor: str
    block: tuple[int, int]
    words: str


def scheme(config: Mapping[str, Any]) -> str:
    """What the config calls its quantization, or nothing."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, dict):
        return "quantized" if found else ""
    parts = [found.get("quant_method"), found.get("format")]
    bits = found.get("bits") or found.get("w_bit")
    return " ".join([str(part) for part in parts if part] + [f"{bits} bits"] * bool(bits)) or "quantized"


def scale_of(name: str, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> Scale | None:
    """What dequantizes a tensor; None for one that is as it is. Raises UsageError for a scheme that is not undone."""
    tensor = stored[name]
    scale = next((name + end for end in _SCALES if name + end in stored), None)
    if tensor.dtype in _FLOATS and scale is None:
        return None
    words = scheme(config)
    if not words and scale is None:
        return None
    others = [key for key in stored if key.startswith(f"{name}_scale") and key != scale]
    if others:
        raise _refused(name, f"{words}, scaled by {others[0]} too")
    if scale is None and (not name.endswith("weight") or tensor.dtype not in (*_EIGHT_BITS, "U8", "I32")):
        # Indices, zero points and other integers that quantized checkpoints hold beside their weights.
        raise _refused(name, words)
    if scale is None or tensor.dtype not in _EIGHT_BITS or f"{name}_zero_point" in stored or len(tensor.shape) != 2:
        raise _refused(name, words or f"{tensor.dtype} with {scale}")
    block = _block(tensor.shape, stored[scale].shape, config)
    if block is None or stored[scale].dtype not in _FLOATS:
        raise _refused(name, f"{words}, scales {stored[scale].dtype} {list(stored[scale].shape)}")
    shared = {tensor.shape: "one scale for all", (1, tensor.shape[1]): "a scale for each row"}
    where = shared.get(block, f"a scale for each block of {block[0]} x {block[1]}")
    return Scale(scale, block, f"{words or 'scaled'}: {NAMES[tensor.dtype]}, {where}")


def _block(shape: tuple[int, ...], scales: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many rows and columns share a scale; None where the shapes do not say."""
    rows, columns = shape
    if math.prod(scales) == 1:
        return rows, columns
    if scales in ((rows,), (rows, 1)):
        return 1, columns
    named = (config.get("quantization_config") or {}).get("weight_block_size")
    if isinstance(named, list) and len(named) == 2 and scales == (-(-rows // named[0]), -(-columns // named[1])):
        return named[0], named[1]
    return None


def packed(name: str, stored: Mapping[str, Stored], config: Mapping[str, Any]) -> str | None:
    """The packed tensor that stands for a weight: another one, or itself where it holds several numbers in one."""
    if name in stored:
        return name if stored[name].dtype in ("U8", "I32", "I64") and scheme(config) else None
    stem = name.removesuffix("weight")
    return next((stem + end for end in _PACKED if stem + end in stored), None)


def _refused(name: str, words: str) -> UsageError:
    return UsageError(f"{name} is quantized ({words}), and vlens does not undo this scheme",
                      hint="--raw gives the numbers as they are stored", code="quantized")


def refused_as_packed(asked: str, tensor: str, config: Mapping[str, Any]) -> UsageError:
    """A weight that is only there packed."""
    return UsageError(f"{asked} is packed in this checkpoint ({scheme(config) or 'quantized'}): {tensor}",
                      hint=f"vlens param --raw {tensor} gives the numbers as they are stored", code="quantized")
