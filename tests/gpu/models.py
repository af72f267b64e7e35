"""Models of real shape with random weights, made on the spot on a GPU. They share no code with vlens."""

from __future__ import annotations

import json
import math
from pathlib import Path

# The shape of Llama 3 8B: 16 GB in bf16.
LLAMA_8B = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256,
    max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", tie_word_embeddings=False,
    attention_bias=False, mlp_bias=False, bos_token_id=128000, eos_token_id=128001, torch_dtype="bfloat16",
)
# The same tree, small enough for a processor: to try the scripts.
SMALL = LLAMA_8B | dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=1024, bos_token_id=1,
                        eos_token_id=2, torch_dtype="float32")


def write(folder: Path, config: dict) -> Path:
    """Weights whose streams keep their size from layer to layer, a shard for every few layers; once a folder."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, config["torch_dtype"])
    index: dict[str, str] = {}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=dtype).mul_(0.7 / math.sqrt(shape[-1])).cpu()

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(config["hidden_size"], device=device, generator=generator)).to(dtype).cpu()

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    d, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    for i in range(config["num_hidden_layers"]):
        b = f"model.layers.{i}"
        save(f"layer-{i:03}.safetensors", {
            f"{b}.input_layernorm.weight": norm(), f"{b}.post_attention_layernorm.weight": norm(),
            f"{b}.self_attn.q_proj.weight": random(q, d), f"{b}.self_attn.k_proj.weight": random(kv, d),
            f"{b}.self_attn.v_proj.weight": random(kv, d), f"{b}.self_attn.o_proj.weight": random(d, q),
            f"{b}.mlp.gate_proj.weight": random(mlp, d), f"{b}.mlp.up_proj.weight": random(mlp, d),
            f"{b}.mlp.down_proj.weight": random(d, mlp),
        })
    save("ends.safetensors", {"model.embed_tokens.weight": random(config["vocab_size"], d) * math.sqrt(d) * 0.05,
                              "model.norm.weight": norm(), "lm_head.weight": random(config["vocab_size"], d)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
