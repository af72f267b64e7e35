#!/usr/bin/env python3
"""What every hook point is, by transformers: the numbers that vlens is tested against.

    reference.py MODEL_FOLDER PROMPTS.json OUT.safetensors [--dtype float32|bfloat16] [--fp64]
    reference.py --serve                   jobs and answers as JSON lines, until stdin ends: importing takes the longest

PROMPTS.json is a list of lists of token ids. Each prompt runs alone, with eager attention, and gives the tensors
`p/NAME` (p counts prompts), NAME in TransformerLens' classic spelling, shapes without a batch axis.

The values come from forward hooks on transformers' own modules. Before anything is written, each is checked against
what the model's definition says of it (`identities`), computed here in float64 from the weights and its neighbours; so
a hook on the wrong module or side fails. The largest errors are in the file's metadata, under `identities`.

`--fp64` runs the model in float64, for error budgets, and writes the values rounded to float32.

Nothing here is shared with vlens: it must not inherit its mistakes. A family is a row of `TREES`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for _name in ("torchvision", "torchaudio", "torchcodec"):  # not needed; broken beside some builds of torch
    sys.modules[_name] = None  # type: ignore[assignment]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import linear, silu  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}
ACTIVATIONS = {"silu": silu}


@dataclass(frozen=True)
class Tree:
    """Where a family's modules lie. `q`, `k`, `v` are either three linear layers or the parts of one
    (`qkv`, in that order); so `gate`, `up` and `gate_up`."""

    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    unembed: str = "lm_head"
    ln1: str = "input_layernorm"
    ln2: str = "post_attention_layernorm"
    attention: str = "self_attn"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    o: str = "self_attn.o_proj"
    mlp: str = "mlp"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    down: str = "mlp.down_proj"


TREES = {
    "llama": Tree(),
    "mistral": Tree(),
    "qwen2": Tree(),
    "qwen3": Tree(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    "phi3": Tree(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
}

Captures = dict[str, Tensor]


@dataclass(frozen=True)
class Widths:
    """Counts and widths, from the configuration alone."""

    layers: int
    heads: int
    kv_heads: int
    d_head: int
    d_mlp: int

    @classmethod
    def of(cls, config: Any) -> Widths:
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            d_head=getattr(config, "head_dim", None) or config.hidden_size // heads,
            d_mlp=config.intermediate_size,
        )

    @property
    def qkv_parts(self) -> list[int]:
        return [self.heads * self.d_head, self.kv_heads * self.d_head, self.kv_heads * self.d_head]


class Probe:
    """A loaded model with hooks on every module that a hook point needs. `run` gives one prompt's captures; `close`
    puts the modelling module back as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config = model.config
        self.tree = TREES[self.config.model_type]
        self.widths = Widths.of(self.config)
        self.captures: Captures = {}
        self.layer: int | None = None  # whose attention is running, for the rotation
        self.modelling = sys.modules[type(model).__module__]
        self._rotate = self.modelling.apply_rotary_pos_emb
        self._hook_all()

    def run(self, tokens: list[int]) -> Captures:
        """Every hook point of one prompt, run alone."""
        self.captures = {}
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        self._keep("unembed.hook_out", logits)
        self._add_norm_parts()
        return self.captures

    def close(self) -> None:
        self.modelling.apply_rotary_pos_emb = self._rotate
        self.modelling.torch = torch  # a float64 run's stand-in

    def block(self, i: int) -> nn.Module:
        return self.model.get_submodule(f"{self.tree.layers}.{i}")

    # -- hooks

    def _keep(self, name: str, value: Tensor, heads: int | None = None) -> None:
        """Keep a copy, without the batch axis; `heads` splits the last axis into [head, d_head]."""
        assert value.shape[0] == 1, f"{name} has a batch axis of {value.shape[0]}"
        assert name not in self.captures, f"{name} fired twice"
        value = value[0].clone()
        self.captures[name] = value if heads is None else value.unflatten(-1, (heads, -1))

    def _on_input(self, module: nn.Module, name: str, heads: int | None = None) -> None:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self._keep(name, args[0] if args else kwargs["hidden_states"], heads)

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _on_output(self, module: nn.Module, name: str, heads: int | None = None) -> None:
        def hook(_: nn.Module, __: tuple, output: Any) -> None:
            self._keep(name, output[0] if isinstance(output, tuple) else output, heads)

        module.register_forward_hook(hook)

    def _on_parts(self, module: nn.Module, parts: list[tuple[str, int, int | None]]) -> None:
        """A fused linear layer: (name, width, heads) a part, in order along the output."""

        def hook(_: nn.Module, __: tuple, output: Tensor) -> None:
            pieces = output.split([width for _, width, _ in parts], dim=-1)
            for (name, _, heads), piece in zip(parts, pieces, strict=True):
                self._keep(name, piece, heads)

        module.register_forward_hook(hook)

    def _hook_all(self) -> None:
        self._on_output(self.model.get_submodule(self.tree.embed), "hook_embed")
        for i in range(self.widths.layers):
            self._hook_block(i)
        self._on_output(self.model.get_submodule(self.tree.final_norm), "ln_final.hook_out")
        self._hook_rotation()

    def _hook_block(self, i: int) -> None:
        tree, widths, block, at = self.tree, self.widths, self.block(i), f"blocks.{i}"
        self._on_input(block, f"{at}.hook_resid_pre")
        self._on_output(block.get_submodule(tree.ln1), f"{at}.ln1.hook_out")
        heads = {"q": widths.heads, "k": widths.kv_heads, "v": widths.kv_heads}
        if tree.qkv:
            parts = [(f"{at}.attn.hook_{c}", width, heads[c]) for c, width in zip("qkv", widths.qkv_parts)]
            self._on_parts(block.get_submodule(tree.qkv), parts)
        else:
            for c in "qkv":
                self._on_output(block.get_submodule(getattr(tree, c)), f"{at}.attn.hook_{c}", heads[c])
        if tree.q_norm and tree.k_norm:
            self._on_output(block.get_submodule(tree.q_norm), f"{at}.attn.hook_q_normed")
            self._on_output(block.get_submodule(tree.k_norm), f"{at}.attn.hook_k_normed")
        self._on_input(block.get_submodule(tree.o), f"{at}.attn.hook_z", widths.heads)
        self._on_output(block.get_submodule(tree.attention), f"{at}.hook_attn_out")
        self._on_input(block.get_submodule(tree.ln2), f"{at}.hook_resid_mid")
        self._on_output(block.get_submodule(tree.ln2), f"{at}.ln2.hook_out")
        pre, pre_linear = f"{at}.mlp.hook_pre", f"{at}.mlp.hook_pre_linear"
        if tree.gate_up:
            parts = [(pre, widths.d_mlp, None), (pre_linear, widths.d_mlp, None)]
            self._on_parts(block.get_submodule(tree.gate_up), parts)
        else:
            self._on_output(block.get_submodule(tree.gate), pre)
            self._on_output(block.get_submodule(tree.up), pre_linear)
        self._on_input(block.get_submodule(tree.down), f"{at}.mlp.hook_post")
        self._on_output(block.get_submodule(tree.mlp), f"{at}.hook_mlp_out")
        self._on_output(block, f"{at}.hook_resid_post")

    def _hook_rotation(self) -> None:
        """Rotation is a function of the modelling module, called once in each attention on [1, head, pos, d_head]."""

        def rotate_and_keep(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            q, k = self._rotate(q, k, *args, **kwargs)
            assert self.layer is not None, "rotation outside an attention"
            self._keep(f"blocks.{self.layer}.attn.hook_rot_q", q.transpose(1, 2))
            self._keep(f"blocks.{self.layer}.attn.hook_rot_k", k.transpose(1, 2))
            return q, k

        self.modelling.apply_rotary_pos_emb = rotate_and_keep
        for i in range(self.widths.layers):
            attention = self.block(i).get_submodule(self.tree.attention)
            attention.register_forward_pre_hook(lambda *_, i=i: setattr(self, "layer", i))

    def _add_norm_parts(self) -> None:
        """hook_scale, the divisor, and hook_normalized, before the weight: no module forms them."""
        values, last = self.captures, self.widths.layers - 1
        sources = {"ln_final": values[f"blocks.{last}.hook_resid_post"]}
        for i in range(self.widths.layers):
            sources[f"blocks.{i}.ln1"] = values[f"blocks.{i}.hook_resid_pre"]
            sources[f"blocks.{i}.ln2"] = values[f"blocks.{i}.hook_resid_mid"]
        for name, x in sources.items():
            at_least_float32 = x if x.dtype == torch.float64 else x.float()  # as transformers' norms compute
            scale = root_mean_square(at_least_float32, self.config.rms_norm_eps)
            values[f"{name}.hook_scale"] = scale.to(x.dtype)
            values[f"{name}.hook_normalized"] = (at_least_float32 / scale).to(x.dtype)


def root_mean_square(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


# -- what must hold


Identity = tuple[str, Tensor, Tensor, bool]  # its kind, what was captured, what it must be, whether bit by bit


def identities(probe: Probe, values: Captures) -> Iterator[Identity]:
    """Everything that the model's definition says of one prompt's captures, in float64 from the captured neighbours."""
    tree, n = probe.tree, probe.widths.layers
    yield "resid_pre[0] = embed", values["blocks.0.hook_resid_pre"], values["hook_embed"], True
    for i in range(n):
        yield from block_identities(probe, values, i)
        if i + 1 < n:
            at = f"blocks.{i + 1}.hook_resid_pre"
            yield "resid_pre[i+1] = resid_post[i]", values[at], values[f"blocks.{i}.hook_resid_post"], True
    final_norm = probe.model.get_submodule(tree.final_norm)
    yield from norm_identities(probe, values, "ln_final", values[f"blocks.{n - 1}.hook_resid_post"], final_norm)
    logits = apply(probe.model.get_submodule(tree.unembed), values["ln_final.hook_out"])
    yield "logits = ln_final.hook_out @ unembedding", values["unembed.hook_out"], logits, False


def block_identities(probe: Probe, values: Captures, i: int) -> Iterator[Identity]:
    tree, config, block = probe.tree, probe.config, probe.block(i)
    v = {name.removeprefix(f"blocks.{i}."): value for name, value in values.items() if name.startswith(f"blocks.{i}.")}
    yield "resid_mid = resid_pre + attn_out", v["hook_resid_mid"], v["hook_resid_pre"] + v["hook_attn_out"], True
    yield "resid_post = resid_mid + mlp_out", v["hook_resid_post"], v["hook_resid_mid"] + v["hook_mlp_out"], True
    yield from norm_identities(probe, v, "ln1", v["hook_resid_pre"], block.get_submodule(tree.ln1))
    yield from norm_identities(probe, v, "ln2", v["hook_resid_mid"], block.get_submodule(tree.ln2))

    weights, biases = qkv_weights(probe, block)
    for c, weight, bias in zip("qkv", weights, biases, strict=True):
        product = linear(v["ln1.hook_out"].double(), weight, bias)
        yield f"{c} = ln1.hook_out @ W + b", v[f"attn.hook_{c}"].flatten(1), product, False
    q, k = v["attn.hook_q"].double(), v["attn.hook_k"].double()
    if tree.q_norm and tree.k_norm:
        q = q / root_mean_square(q, config.rms_norm_eps) * block.get_submodule(tree.q_norm).weight.double()
        k = k / root_mean_square(k, config.rms_norm_eps) * block.get_submodule(tree.k_norm).weight.double()
        yield "q_normed = norm(q)", v["attn.hook_q_normed"], q, False
        yield "k_normed = norm(k)", v["attn.hook_k_normed"], k, False
        q, k = v["attn.hook_q_normed"].double(), v["attn.hook_k_normed"].double()
    angles = rotary_angles(config, probe.widths.d_head, len(q), v["attn.hook_q"].dtype)
    yield "rot_q = rotation of q", v["attn.hook_rot_q"], rotated(q, angles), False
    yield "rot_k = rotation of k", v["attn.hook_rot_k"], rotated(k, angles), False
    z = attention(v["attn.hook_rot_q"], v["attn.hook_rot_k"], v["attn.hook_v"], window(config, i))
    yield "z = softmax(rot_q rot_k) v", v["attn.hook_z"], z, False
    attn_out = apply(block.get_submodule(tree.o), v["attn.hook_z"].flatten(1))
    yield "attn_out = z @ W_O", v["hook_attn_out"], attn_out, False

    for name, weight in zip(("pre", "pre_linear"), mlp_weights(probe, block), strict=True):
        yield f"{name} = ln2.hook_out @ W", v[f"mlp.hook_{name}"], linear(v["ln2.hook_out"].double(), weight), False
    post = ACTIVATIONS[config.hidden_act](v["mlp.hook_pre"].double()) * v["mlp.hook_pre_linear"].double()
    yield "post = act(pre) * pre_linear", v["mlp.hook_post"], post, False
    mlp_out = apply(block.get_submodule(tree.down), v["mlp.hook_post"])
    yield "mlp_out = post @ W_out", v["hook_mlp_out"], mlp_out, False


def norm_identities(probe: Probe, v: Captures, name: str, source: Tensor, norm: nn.Module) -> Iterator[Identity]:
    scale, normalized = v[f"{name}.hook_scale"], v[f"{name}.hook_normalized"]
    expected = root_mean_square(source.double(), probe.config.rms_norm_eps)
    yield "scale = sqrt(mean(x^2) + eps)", scale, expected, False
    yield "normalized * scale = x", normalized.double() * scale.double(), source, False
    yield "norm's output = normalized * weight", v[f"{name}.hook_out"], normalized.double() * norm.weight.double(), False


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer in float64."""
    bias = layer.bias
    return linear(x.double(), layer.weight.double(), None if bias is None else bias.double())


def qkv_weights(probe: Probe, block: nn.Module) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of q, k and v, in float64."""
    if probe.tree.qkv:
        fused = block.get_submodule(probe.tree.qkv)
        assert fused.bias is None
        return list(fused.weight.double().split(probe.widths.qkv_parts)), [None] * 3
    layers = [block.get_submodule(getattr(probe.tree, c)) for c in "qkv"]
    return [m.weight.double() for m in layers], [None if m.bias is None else m.bias.double() for m in layers]


def mlp_weights(probe: Probe, block: nn.Module) -> list[Tensor]:
    """Weights of gate and up, in float64."""
    if probe.tree.gate_up:
        return list(block.get_submodule(probe.tree.gate_up).weight.double().split(probe.widths.d_mlp))
    return [block.get_submodule(name).weight.double() for name in (probe.tree.gate, probe.tree.up)]


def rotary_angles(config: Any, d_head: int, positions: int, dtype: torch.dtype) -> Tensor:
    """[pos, pair] angles in float64. Frequencies are float32 ones whatever the run's dtype: they belong to the model as
    every implementation defines it. So is their product with the position, except in a float64 run."""
    rope = config.rope_parameters
    assert rope["rope_type"] == "default", f"no formula here for rotation of type {rope['rope_type']}"
    width = int(d_head * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1.0 / rope["rope_theta"] ** exponents
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.outer(torch.arange(positions, dtype=precision), frequencies.to(precision)).double()


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [pos, head, d_head]: turn the pairs (j, j + half) as complex numbers; what lies beyond the rotated width stays."""
    half = angles.shape[-1]
    first, second, rest = x.double().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    return torch.cat([turned.real, turned.imag, rest], dim=-1)


def window(config: Any, i: int) -> int | None:
    """How many keys a query of layer i sees, itself included; None for all."""
    width = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return width if width and (kinds is None or kinds[i] == "sliding_attention") else None


def attention(q: Tensor, k: Tensor, v: Tensor, seen: int | None) -> Tensor:
    """Plain causal attention in float64: q [pos, head, d_head], k and v with fewer heads; [pos, head, d_head]."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    visible = (distance >= 0) & (distance < (seen or len(q)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def check(probe: Probe, values: Captures) -> dict[str, float]:
    """Assert every identity; give each kind's largest relative error (norm of the difference over norm)."""
    errors: dict[str, float] = {}
    with torch.no_grad():
        for kind, got, want, exact in identities(probe, values):
            tolerance = 0.0 if exact else TOLERANCE[values["hook_embed"].dtype]
            assert got.shape == want.shape, f"{kind}: {tuple(got.shape)} is not {tuple(want.shape)}"
            error = ((got.double() - want.double()).norm() / want.double().norm()).item()
            assert error <= tolerance, f"{kind}: relative error {error:.2e}, more than {tolerance:.0e}"
            errors[kind] = max(errors.get(kind, 0.0), error)
    return errors


def check_shapes(probe: Probe, values: Captures, positions: int) -> None:
    """Every name is there, and no other, in its shape."""
    widths, config = probe.widths, probe.config
    d_model, q, kv = (config.hidden_size,), (widths.heads, widths.d_head), (widths.kv_heads, widths.d_head)
    norm = {"hook_scale": (1,), "hook_normalized": d_model, "hook_out": d_model}
    block: dict[str, tuple[int, ...]] = {
        **{f"hook_{name}": d_model for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")},
        **{f"{ln}.{name}": shape for ln in ("ln1", "ln2") for name, shape in norm.items()},
        **{f"attn.hook_{name}": q for name in ("q", "rot_q", "z")},
        **{f"attn.hook_{name}": kv for name in ("k", "v", "rot_k")},
        **{f"mlp.hook_{name}": (widths.d_mlp,) for name in ("pre", "pre_linear", "post")},
    }
    if probe.tree.q_norm:
        block |= {"attn.hook_q_normed": q, "attn.hook_k_normed": kv}
    expected = {
        "hook_embed": d_model,
        **{f"ln_final.{name}": shape for name, shape in norm.items()},
        "unembed.hook_out": (config.vocab_size,),
        **{f"blocks.{i}.{name}": shape for i in range(widths.layers) for name, shape in block.items()},
    }
    found = {name: tuple(value.shape) for name, value in values.items()}
    assert found == {name: (positions, *shape) for name, shape in expected.items()}
    for name, value in values.items():
        assert value.isfinite().all(), f"{name} is not finite"


# -- float64


class _Float64Torch(types.ModuleType):
    """Stands for `torch` in a modelling module, whose norms, rotation and softmax go through float32 by name."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def load(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model, by transformers, with eager attention. Float64 starts from the float32 weights and frequencies."""
    at = torch.float32 if dtype == torch.float64 else dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=at, attn_implementation="eager").eval()
    if model.config.model_type not in TREES:
        raise ValueError(f"reference.py has no row for the family {model.config.model_type!r}")
    if dtype == torch.float64:
        model.double()
        sys.modules[type(model).__module__].torch = _Float64Torch("torch")  # type: ignore[attr-defined]
    return model


def write(folder: str, prompts: list[list[int]], out: str, dtype: str = "float32", fp64: bool = False) -> dict[str, float]:
    """Run and check every prompt, then write; the largest error of each kind of identity."""
    probe = Probe(load(Path(folder), torch.float64 if fp64 else getattr(torch, dtype)))
    tensors: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    try:
        for p, tokens in enumerate(prompts):
            values = probe.run(tokens)
            check_shapes(probe, values, len(tokens))
            for kind, error in check(probe, values).items():
                errors[kind] = max(errors.get(kind, 0.0), error)
            for name, value in values.items():
                tensors[f"{p}/{name}"] = (value.float() if fp64 else value).contiguous()
    finally:
        probe.close()
    save_file(tensors, out, {"identities": json.dumps(errors)})
    return errors


def serve() -> None:
    """A line of stdin is a JSON object of `write`'s arguments; a line of stdout is `{"error": null or a traceback}`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    for line in sys.stdin:
        error = None
        try:
            write(**json.loads(line))
        except Exception:  # the asker gets it whole, and the next job is another
            error = traceback.format_exc()
        print(json.dumps({"error": error}), file=answers, flush=True)


def main(arguments: list[str]) -> None:
    if arguments == ["--serve"]:
        return serve()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--fp64", action="store_true", help="run in float64, write float32")
    options = parser.parse_args(arguments)
    prompts = json.loads(options.prompts.read_text())
    for kind, error in write(options.model, prompts, options.out, options.dtype, options.fp64).items():
        print(f"{error:9.2e}  {kind}")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
