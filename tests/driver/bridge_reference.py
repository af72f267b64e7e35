#!/usr/bin/env python3
"""What TransformerLens' own bridge over transformers caches; `compare.BRIDGE` asks for it.

A process of its own, since transformers' model classes do not load where vLLM has run.
"""

from __future__ import annotations

import os
import sys

for _name in ("torchvision", "torchaudio", "torchcodec"):  # not needed; broken beside some builds of torch
    sys.modules[_name] = None  # type: ignore[assignment]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from served import serve  # noqa: E402
from transformer_lens.model_bridge import TransformerBridge  # noqa: E402


def write(folder: str, tokens: list[int], out: str) -> None:
    """`out` gets what is cached of a prompt, by name, with a batch axis; `logits` and `loss` are the prompt's."""
    bridge = TransformerBridge.boot_transformers(folder, dtype=torch.float32)
    ids = torch.tensor([tokens])
    logits, cache = bridge.run_with_cache(ids)
    found = {name: value for name, value in cache.items() if isinstance(value, torch.Tensor)}
    found |= {"logits": logits, "loss": bridge(ids, return_type="loss")}
    save_file({name: value.detach().clone().contiguous() for name, value in found.items()}, out)


if __name__ == "__main__":
    serve({"cache": write})
