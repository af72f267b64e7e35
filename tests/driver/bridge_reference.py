#!/usr/bin/env python3
"""What TransformerLens' own bridge over transformers caches: `bridge_reference.py FOLDER OUT.safetensors TOKENS...`

A process of its own, since transformers' model classes do not load where vLLM has run. Tensors keep their batch axis;
the key `loss` is the loss of the prompt.
"""

from __future__ import annotations

import os
import sys

for _name in ("torchvision", "torchaudio", "torchcodec"):  # not needed; broken beside some builds of torch
    sys.modules[_name] = None  # type: ignore[assignment]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformer_lens.model_bridge import TransformerBridge  # noqa: E402

if __name__ == "__main__":
    bridge = TransformerBridge.boot_transformers(sys.argv[1], dtype=torch.float32)
    tokens = torch.tensor([[int(token) for token in sys.argv[3:]]])
    logits, cache = bridge.run_with_cache(tokens)
    found = {name: value for name, value in cache.items() if isinstance(value, torch.Tensor)}
    found |= {"logits": logits, "loss": bridge(tokens, return_type="loss")}
    save_file({name: value.detach().clone().contiguous() for name, value in found.items()}, sys.argv[2])
