"""Checkpoints made by hand, small and odd, for the tests of `vlens param`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "intermediate_size": 10, "vocab_size": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in {
        "input_layernorm": (8,), "post_attention_layernorm": (8,), "self_attn.q_proj": (12, 8),
        "self_attn.k_proj": (6, 8), "self_attn.v_proj": (6, 8), "self_attn.o_proj": (8, 12), "mlp.gate_proj": (10, 8),
        "mlp.up_proj": (10, 8), "mlp.down_proj": (8, 10),
    }.items()},
}  # fmt: skip
TYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "uint16": "BF16", "uint8": "U8", "int32": "I32",
         "int8": "I8", "int64": "I64", "bool": "BOOL"}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


def write(path: Path, arrays: dict[str, np.ndarray], types: dict[str, str] | None = None) -> None:
    """A safetensors file, by hand: `types` names the format's type where numpy has none of its own."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        kind = (types or {}).get(name) or TYPES[str(array.dtype)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values()))


def model(folder: Path, arrays: dict[str, np.ndarray] | None = None, types: dict[str, str] | None = None,
          **config: object) -> Path:
    """A folder with one weight file and a config; a setting of `...` is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in {**CONFIG, **config}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(settings))
    write(folder / "model.safetensors", tensors() if arrays is None else arrays, types)
    return folder
