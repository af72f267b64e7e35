"""Plain values and tensors <-> one safetensors file: what a call of a worker in another process is given and returns.

vLLM's own calls are pickled, and copy a tensor several times; they carry the name of a method and of such files alone.
The tree of values is JSON in the file's metadata, in which a tensor is its key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save

from vlens_cli.driver.base import Edit
from vlens_cli.driver.blob import write_safetensors
from vlens_cli.errors import BugError

TREE = "tree"


def write(path: str | Path, value: Any) -> None:
    """`value` as a file: numbers, texts, None, lists, tuples, dicts with texts as keys, tensors and edits."""
    tensors: dict[str, torch.Tensor] = {}
    tree = {TREE: json.dumps(_plain(value, tensors))}
    with open(path, "wb") as file:
        write_safetensors(file, tensors, tree)


def read(path: str | Path) -> Any:
    """What `write` wrote; tensors are copies on the host."""
    with safe_open(path, "pt") as file:
        return _value(json.loads(file.metadata()[TREE]), lambda key: file.get_tensor(key).clone())


def to_bytes(value: Any) -> bytes:
    """The same file as bytes, for another machine."""
    tensors: dict[str, torch.Tensor] = {}
    tree = {TREE: json.dumps(_plain(value, tensors))}
    return save({key: t.clone() for key, t in tensors.items()}, tree)


def from_bytes(data: bytes) -> Any:
    tensors = load(data)
    size = int.from_bytes(data[:8], "little")
    tree = json.loads(data[8 : 8 + size])["__metadata__"][TREE]
    return _value(json.loads(tree), tensors.__getitem__)


def _plain(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            key = str(len(tensors))
            tensors[key] = value.detach().cpu().contiguous().view(-1)  # a single number has no axis to be written along
            return {"tensor": key, "shape": list(value.shape)}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_plain(each, tensors) for each in value]
        case tuple() | range():
            return {"tuple": [_plain(each, tensors) for each in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: _plain(each, tensors) for key, each in value.items()}}
        case Edit():
            return {"edit": {field.name: _plain(getattr(value, field.name), tensors) for field in fields(value)}}
    raise BugError(f"a bug in vlens: ranks are given a {type(value).__name__}")


def _value(plain: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    match plain:
        case {"tensor": key, "shape": shape}:
            return tensor(key).view(shape)
        case {"tuple": of}:
            return tuple(_value(each, tensor) for each in of)
        case {"dict": of}:
            return {key: _value(each, tensor) for key, each in of.items()}
        case {"edit": of}:
            return Edit(**{name: _value(each, tensor) for name, each in of.items()})
        case list():
            return [_value(each, tensor) for each in plain]
    return plain
