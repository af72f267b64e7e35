"""Models for vLLM whose layers look usual and, but for the first two, are not: Llama's modules under Llama's names.

`register` tells vLLM of them, as a plugin does. `points` says in plain torch, from a checkpoint's weights, what every
point of such a model is.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import silu

SCALE = 0.5


class Llama:
    """What Llama's blocks do to the stream; subclasses say where an odd one differs. x [pos, d_model]."""

    def stream(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        """(what is added last, what it is added to)."""
        mid = x + block.attend(block.ln1(x))
        return block.feed(block.ln2(mid)), mid


class Scaled(Llama):
    """What a sublayer gives is halved before it is added."""

    def stream(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        mid = x + SCALE * block.attend(block.ln1(x))
        return SCALE * block.feed(block.ln2(mid)), mid


class Parallel(Llama):
    """Attention and MLP read one stream, each through its own norm."""

    def stream(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        added = block.attend(block.ln1(x))
        return block.feed(block.ln2(x)), x + added


class NormedStream(Llama):
    """The norm before attention is the stream from there on."""

    def stream(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        mid = block.ln1(x)
        mid = mid + block.attend(mid)
        return block.feed(block.ln2(mid)), mid


class NormedOutput(Llama):
    """The second norm is applied to what attention gives, and not before the MLP."""

    def stream(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        mid = x + block.ln2(block.attend(block.ln1(x)))
        return block.feed(mid), mid


class HalfNormed(Llama):
    """The norms see half of the stream and something else."""

    def stream(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        mid = x + block.attend(block.ln1(SCALE * x + 1))
        return block.feed(block.ln2(SCALE * mid + 1)), mid


class Gated(Llama):
    """Half of what each head gives reaches the output projection."""

    half_z = True


class SwappedGate(Llama):
    """The first half of the MLP is multiplied, and the second gates."""

    swapped_gate = True


ODD = {"Usual": Llama, "Scaled": Scaled, "Parallel": Parallel, "NormedStream": NormedStream, "NormedOutput": NormedOutput,
       "HalfNormed": HalfNormed, "Gated": Gated, "SwappedGate": SwappedGate}


# For vLLM


def register() -> None:
    """Tell vLLM of every class of `ODD`: a config.json names its architecture NAMEForCausalLM."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

    for name, shape in ODD.items():
        layer = type(f"{name}Layer", (LlamaDecoderLayer,), {"__init__": _layer_init(shape), "forward": _layer_forward(shape)})
        causal = type(f"{name}ForCausalLM", (LlamaForCausalLM,), {"__init__": _model_init(layer)})
        ModelRegistry.register_model(f"{name}ForCausalLM", causal)


def _layer_init(shape: type[Llama]):
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    def __init__(self, *args, **kwargs) -> None:
        LlamaDecoderLayer.__init__(self, *args, **kwargs)
        if hasattr(shape, "swapped_gate"):
            self.mlp.act_fn = MulAndSilu()
        if hasattr(shape, "half_z"):
            self.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (SCALE * args[0], *args[1:]))

    return __init__


def _layer_forward(shape: type[Llama]):
    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x = hidden_states if residual is None else hidden_states + residual
        return shape().stream(_Live(self, positions), x)

    return forward


def _model_init(layer: type[nn.Module]):
    from vllm.model_executor.models.llama import LlamaForCausalLM

    def __init__(self, *, vllm_config, prefix: str = "") -> None:
        LlamaForCausalLM.__init__(self, vllm_config=vllm_config, prefix=prefix, layer_type=layer)

    return __init__


class MulAndSilu(nn.Module):
    """x * silu(y)."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return first * silu(second)


class _Live:
    """The sublayers of a live block of vLLM's Llama."""

    def __init__(self, layer: nn.Module, positions: Tensor) -> None:
        self.attend = lambda x: layer.self_attn(positions=positions, hidden_states=x)
        self.feed = layer.mlp
        self.ln1, self.ln2 = layer.input_layernorm, layer.post_attention_layernorm


# In plain torch


class Block:
    """The same sublayers from a checkpoint's weights, in float64; `seen` keeps what each point is. Config of tiny.py."""

    heads, kv_heads, width, eps, theta = 4, 2, 32, 1e-6, 10000.0

    def __init__(self, weights: dict[str, Tensor], i: int, shape: type[Llama], seen: dict[str, Tensor]) -> None:
        self._weights, self._at, self._name, self._shape, self._seen = weights, f"model.layers.{i}", f"blocks.{i}", shape, seen

    def _keep(self, name: str, value: Tensor) -> Tensor:
        self._seen[f"{self._name}.{name}"] = value
        return value

    def _linear(self, x: Tensor, path: str) -> Tensor:
        return x @ self._weights[f"{self._at}.{path}.weight"].T

    def _norm(self, x: Tensor, name: str, path: str) -> Tensor:
        scale = self._keep(f"{name}.hook_scale", (x.square().mean(-1, keepdim=True) + self.eps).sqrt())
        return self._keep(f"{name}.hook_out", self._keep(f"{name}.hook_normalized", x / scale) * self._weights[f"{self._at}.{path}.weight"])

    def ln1(self, x: Tensor) -> Tensor:
        return self._norm(x, "ln1", "input_layernorm")

    def ln2(self, x: Tensor) -> Tensor:
        return self._norm(x, "ln2", "post_attention_layernorm")

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x)).double()[:, None] * self.theta ** (-torch.arange(0, self.width, 2).double() / self.width)
        cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (self._keep(f"attn.hook_{part}", self._linear(x, f"self_attn.{part}_proj").unflatten(-1, (heads, -1)))
                   for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)))
        q, k = (self._keep(f"attn.hook_rot_{part}", self._rotated(t)) for part, t in (("q", q), ("k", k)))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.width)
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        self._keep("attn.hook_attn_scores", scores.masked_fill(hidden, torch.finfo(torch.float32).min))
        pattern = self._keep("attn.hook_pattern", scores.masked_fill(hidden, -math.inf).softmax(-1))
        z = torch.einsum("hqk,khd->qhd", pattern, v)
        z = self._keep("attn.hook_z", z * (SCALE if hasattr(self._shape, "half_z") else 1))
        columns = self._weights[f"{self._at}.self_attn.o_proj.weight"].unflatten(1, (self.heads, -1))
        result = self._keep("attn.hook_result", torch.einsum("phd,mhd->phm", z, columns))
        return self._keep("attn.hook_out", result.sum(1))

    def feed(self, x: Tensor) -> Tensor:
        first, second = self._linear(x, "mlp.gate_proj"), self._linear(x, "mlp.up_proj")
        gate, linear = (second, first) if hasattr(self._shape, "swapped_gate") else (first, second)
        self._keep("mlp.hook_pre", gate), self._keep("mlp.hook_pre_linear", linear)
        return self._keep("mlp.hook_out", self._linear(self._keep("mlp.hook_post", silu(gate) * linear), "mlp.down_proj"))


def points(folder: Path, name: str, tokens: list[int]) -> dict[str, Tensor]:
    """hook point -> value in float64, for every point that this model has in the sense of its name."""
    weights = {key: value.double() for key, value in load_file(folder / "model.safetensors").items()}
    seen: dict[str, Tensor] = {}
    shape = ODD[name]
    x = seen["hook_embed"] = weights["model.embed_tokens.weight"][tokens]
    layers = sum(key.endswith("input_layernorm.weight") for key in weights)
    for i in range(layers):
        seen[f"blocks.{i}.hook_resid_pre"] = x
        added, mid = shape().stream(Block(weights, i, shape, seen), x)
        seen[f"blocks.{i}.hook_mlp_out"] = added
        if shape is not Parallel:
            seen[f"blocks.{i}.hook_resid_mid"] = mid
        if shape is not NormedStream:
            seen[f"blocks.{i}.hook_attn_out"] = mid - x
        x = seen[f"blocks.{i}.hook_resid_post"] = mid + added
    scale = seen["ln_final.hook_scale"] = (x.square().mean(-1, keepdim=True) + Block.eps).sqrt()
    seen["ln_final.hook_normalized"] = x / scale
    seen["ln_final.hook_out"] = x / scale * weights["model.norm.weight"]
    seen["unembed.hook_out"] = seen["ln_final.hook_out"] @ weights["lm_head.weight"].T
    return seen
