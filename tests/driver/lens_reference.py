"""Rows of a stream through the end of a model, by transformers: what the lens is tested against."""

from __future__ import annotations

from pathlib import Path

import torch
from reference import TREES, Tree  # first: it hides what breaks transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def write(folder: str, rows: str, out: str) -> None:
    """Each tensor [pos, d_model] of the file `rows` stands in for the input of the model's final norm in a run of the whole
    model, so that norm, unembedding, softcap and scale are the model's own; `out` gets its logits [pos, d_vocab] under
    the same key."""
    model = AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32, attn_implementation="eager").eval()
    norm = model.get_submodule(TREES.get(model.config.model_type, Tree()).final_norm)
    logits = {}
    for key, value in load_file(rows).items():
        handle = norm.register_forward_pre_hook(lambda module, args, value=value: (value[None],))
        with torch.no_grad():
            logits[key] = model(input_ids=torch.zeros(1, len(value), dtype=torch.int64), use_cache=False).logits[0].clone()
        handle.remove()
    save_file(logits, out)
