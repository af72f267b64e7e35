#!/usr/bin/env python3
"""What every hook point is, by transformers: the numbers that vlens is tested against.

    reference.py MODEL_FOLDER PROMPTS.json OUT.safetensors [--dtype float32|bfloat16] [--fp64]

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
import math
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

for _name in ("torchvision", "torchaudio", "torchcodec"):  # not needed; broken beside some builds of torch
    sys.modules[_name] = None  # type: ignore[assignment]
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.functional import gelu, linear, relu, silu  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def gelu_tanh(x: Tensor) -> Tensor:
    """Hendrycks and Gimpel 2016, the approximation with tanh."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": silu, "relu": relu, "gelu": gelu, "gelu_new": gelu_tanh, "gelu_pytorch_tanh": gelu_tanh, "gelu_bloom": gelu_tanh,
}


@dataclass(frozen=True)
class Tree:
    """Where a family's modules lie, and what cannot be seen there.

    `q`, `k`, `v` are either three linear layers or the parts of one (`qkv`, in that order, or head by head where
    `by_head`); so `gate`, `up` and `gate_up`. An MLP without `up` has one projection before its activation.
    """

    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    pos_embed: str | None = None
    pos_offset: int = 0
    embed_norm: str | None = None
    final_norm: str = "model.norm"
    unembed: str = "lm_head"
    norm: str = "rms"  # or rms_plus_one, where the weight is 1 + w, or layer
    parallel: bool = False  # attention and MLP read one stream, and there is none between them
    ln1: str | None = "input_layernorm"
    ln1_post: str | None = None
    ln2: str | None = "post_attention_layernorm"
    ln2_post: str | None = None
    attention: str = "self_attn"
    attn_output: str | None = None  # where it is not the attention's
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    by_head: bool = False
    rotation: str | None = "halves"  # which pairs turn: (j, j + half), or (2j, 2j + 1) for "pairs"
    q_norm: str | None = None
    k_norm: str | None = None
    head_first: bool = False  # the norms of q and k see [head, pos, d_head]
    sinks: str | None = None
    alibi: bool = False
    o: str = "self_attn.o_proj"
    mlp_output: str = "mlp"
    gate: str = "mlp.gate_proj"
    up: str | None = "mlp.up_proj"
    gate_up: str | None = None
    down: str = "mlp.down_proj"
    latent: bool = False  # keys and values of all heads are projections of one row, and one key that turns (DeepSeek-V2)
    router: str | None = None
    shared: str | None = None  # experts that every position has
    experts: str = "mlp.experts"
    activation: str | None = None  # where no key of the config names it
    transposed: bool = False  # linear layers keep [in, out]


GEMMA2 = Tree(
    norm="rms_plus_one", ln1_post="post_attention_layernorm", ln2="pre_feedforward_layernorm",
    ln2_post="post_feedforward_layernorm",
)
TREES = {
    "llama": Tree(),
    "mistral": Tree(),
    "qwen2": Tree(),
    "qwen3": Tree(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    "phi3": Tree(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    "gemma": Tree(norm="rms_plus_one"),
    "gemma2": GEMMA2,
    "gemma3_text": replace(GEMMA2, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", head_first=True),
    "mixtral": Tree(router="mlp.gate"),
    "qwen3_moe": Tree(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", router="mlp.gate"),
    "gpt2": Tree(
        layers="transformer.h", embed="transformer.wte", pos_embed="transformer.wpe", final_norm="transformer.ln_f",
        norm="layer", ln1="ln_1", ln2="ln_2", attention="attn", qkv="attn.c_attn", rotation=None, o="attn.c_proj",
        gate="mlp.c_fc", up=None, down="mlp.c_proj", transposed=True,
    ),
    "opt": Tree(
        layers="model.decoder.layers", embed="model.decoder.embed_tokens", pos_embed="model.decoder.embed_positions",
        pos_offset=2, final_norm="model.decoder.final_layer_norm", norm="layer", ln1="self_attn_layer_norm",
        ln2="final_layer_norm", rotation=None, o="self_attn.out_proj", mlp_output="fc2", gate="fc1", up=None, down="fc2",
    ),
    "gpt_neox": Tree(
        layers="gpt_neox.layers", embed="gpt_neox.embed_in", final_norm="gpt_neox.final_layer_norm",
        norm="layer", parallel=True, attention="attention", qkv="attention.query_key_value", by_head=True,
        o="attention.dense", gate="mlp.dense_h_to_4h", up=None, down="mlp.dense_4h_to_h",
    ),
    "olmo2": Tree(
        ln1=None, ln1_post="post_attention_layernorm", ln2=None, ln2_post="post_feedforward_layernorm",
        q_norm="self_attn.q_norm", k_norm="self_attn.k_norm",
    ),
    "starcoder2": Tree(norm="layer", gate="mlp.c_fc", up=None, down="mlp.c_proj"),
    "stablelm": Tree(norm="layer"),
    "cohere": Tree(norm="layer", parallel=True, ln2=None, rotation="pairs"),
    "granite": Tree(),
    "glm4": Tree(
        ln1_post="post_self_attn_layernorm", ln2_post="post_mlp_layernorm", gate_up="mlp.gate_up_proj", rotation="pairs",
    ),
    "bloom": Tree(
        layers="transformer.h", embed="transformer.word_embeddings", embed_norm="transformer.word_embeddings_layernorm",
        final_norm="transformer.ln_f", norm="layer", attention="self_attention", attn_output="self_attention.dense",
        qkv="self_attention.query_key_value", by_head=True, rotation=None, alibi=True, o="self_attention.dense",
        mlp_output="mlp.dense_4h_to_h", gate="mlp.dense_h_to_4h", up=None, down="mlp.dense_4h_to_h", activation="gelu_bloom",
    ),
    "gpt_oss": Tree(router="mlp.router", sinks="self_attn.sinks"),
    "deepseek_v2": Tree(latent=True, rotation="pairs", router="mlp.gate", shared="mlp.shared_experts"),
    "helium": Tree(rotation="pairs"),
    "ernie4_5": Tree(rotation="pairs"),
    "falcon": Tree(
        layers="transformer.h", embed="transformer.word_embeddings", final_norm="transformer.ln_f", norm="layer",
        parallel=True, ln2=None, attention="self_attention", qkv="self_attention.query_key_value",
        o="self_attention.dense", gate="mlp.dense_h_to_4h", up=None, down="mlp.dense_4h_to_h",
    ),
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
        one_kv_head = config.model_type == "falcon" and config.multi_query and not config.new_decoder_architecture
        keys = ("ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size")
        widths = [getattr(config, key) for key in keys if getattr(config, key, None)]
        four = config.model_type in ("bloom", "gpt2")  # what a config of these calls intermediate_size means nothing
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=1 if one_kv_head else getattr(config, "num_key_value_heads", None) or heads,
            d_head=getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads,
            d_mlp=4 * config.hidden_size if four else widths[0],
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
        self.tokens: list[int] = []
        self._rotation = "apply_rotary_emb" if self.tree.latent else "apply_rotary_pos_emb"
        self._rotate = getattr(self.modelling, self._rotation, None)
        self._attend = getattr(self.modelling, "eager_attention_forward", None)
        self._hook_all()

    def run(self, tokens: list[int]) -> Captures:
        """Every hook point of one prompt, run alone."""
        self.captures, self.tokens = {}, tokens
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        self._keep("unembed.hook_out", logits)
        self._add_norm_parts()
        self._add_head_norm_parts()
        self._add_results()
        return self.captures

    def close(self) -> None:
        if self.tree.rotation:
            setattr(self.modelling, self._rotation, self._rotate)
        if self.tree.latent:
            self.modelling.eager_attention_forward = self._attend
        self.modelling.torch = torch  # a float64 run's stand-in

    def block(self, i: int) -> nn.Module:
        return self.model.get_submodule(f"{self.tree.layers}.{i}")

    # -- hooks

    def _keep(self, name: str, value: Tensor, heads: int | None = None) -> None:
        """Keep a copy, without the batch axis; `heads` splits the last axis into [head, d_head]."""
        assert name not in self.captures, f"{name} fired twice"
        if value.ndim > 2:  # some modules see [pos, width]
            assert value.shape[0] == 1, f"{name} has a batch axis of {value.shape[0]}"
            value = value[0]
        assert len(value) == len(self.tokens), f"{name} has {len(value)} rows"
        self.captures[name] = value.clone() if heads is None else value.clone().unflatten(-1, (heads, -1))

    def _on_input(self, module: nn.Module, name: str, heads: int | None = None) -> None:
        def hook(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self._keep(name, args[0] if args else kwargs["hidden_states"], heads)

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _on_output(self, module: nn.Module, name: str, heads: int | None = None, factor: float = 1.0,
                   head_first: bool = False) -> None:
        def hook(_: nn.Module, __: tuple, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            value = value.transpose(1, 2) if head_first else value
            self._keep(name, value if factor == 1 else value * factor, heads)

        module.register_forward_hook(hook)

    def _on_parts(self, module: nn.Module, split: Any, parts: list[tuple[str, int | None]]) -> None:
        """A fused linear layer: `split` gives the pieces of its output, (name, heads) says what each is."""

        def hook(_: nn.Module, __: tuple, output: Tensor) -> None:
            for (name, heads), piece in zip(parts, split(output, -1), strict=True):
                self._keep(name, piece, heads)

        module.register_forward_hook(hook)

    def split_qkv(self, t: Tensor, dim: int) -> list[Tensor]:
        """q, k and v of what a fused projection gives, or of its weight or bias, along `dim`."""
        if not self.tree.by_head:
            return list(t.split(self.widths.qkv_parts, dim=dim))
        dim %= t.ndim
        return [part.flatten(dim, dim + 1) for part in t.unflatten(dim, (self.widths.heads, 3, -1)).unbind(dim + 1)]

    def split_mlp(self, t: Tensor, dim: int) -> list[Tensor]:
        return list(t.split(self.widths.d_mlp, dim=dim))

    def _hook_all(self) -> None:
        tree = self.tree
        self._on_output(self.model.get_submodule(tree.embed), "hook_embed", factor=embedding_multiplier(self.config))
        if tree.pos_embed:
            self._on_output(self.model.get_submodule(tree.pos_embed), "hook_pos_embed")
        if tree.embed_norm:
            self._on_output(self.model.get_submodule(tree.embed_norm), "embed_ln.hook_out")
        for i in range(self.widths.layers):
            self._hook_block(i)
        self._on_output(self.model.get_submodule(tree.final_norm), "ln_final.hook_out")
        if tree.latent:
            self._hook_latent_functions()
        elif tree.rotation:
            self._hook_rotation()
        for i in range(self.widths.layers):
            self._hook_softmax(i)

    def _hook_block(self, i: int) -> None:
        tree, block, at = self.tree, self.block(i), f"blocks.{i}"
        self._on_input(block, f"{at}.hook_resid_pre")
        for name, path in (("ln1", tree.ln1), ("ln2", tree.ln2)):
            if path:
                self._on_output(block.get_submodule(path), f"{at}.{name}.hook_out")
        self._hook_attention(i)
        if not tree.parallel:
            self._on_input(block.get_submodule(tree.ln2 or tree.mlp_output), f"{at}.hook_resid_mid")
        self._hook_mlp(i)
        self._hook_added(i, "attn", tree.attn_output or tree.attention, tree.ln1_post)
        self._hook_added(i, "mlp", tree.mlp_output, tree.ln2_post)
        self._on_output(block, f"{at}.hook_resid_post")

    def _hook_attention(self, i: int) -> None:
        tree, widths, block, at = self.tree, self.widths, self.block(i), f"blocks.{i}.attn"
        heads = {"q": widths.heads, "k": widths.kv_heads, "v": widths.kv_heads}
        self._on_input(block.get_submodule(tree.o), f"{at}.hook_z", widths.heads)
        if tree.latent:
            return self._hook_latent(i)
        if tree.qkv:
            parts = [(f"{at}.hook_{c}", heads[c]) for c in "qkv"]
            self._on_parts(block.get_submodule(tree.qkv), self.split_qkv, parts)
        else:
            for c in "qkv":
                self._on_output(block.get_submodule(getattr(tree, c)), f"{at}.hook_{c}", heads[c])
        for c, path in (("q", tree.q_norm), ("k", tree.k_norm)):
            if path:
                norm = block.get_submodule(path)
                all_heads = norm.weight.shape == (heads[c] * widths.d_head,)
                self._on_output(norm, f"{at}.hook_{c}_normed", heads[c] if all_heads else None, head_first=tree.head_first)

    def _hook_latent(self, i: int) -> None:
        attention, at, heads = self.block(i).get_submodule(self.tree.attention), f"blocks.{i}.attn", self.widths.heads
        if self.config.q_lora_rank is None:
            self._on_output(attention.q_proj, f"{at}.q_proj.hook_out", heads)
        else:
            self._on_output(attention.q_a_proj, f"{at}.q_a_proj.hook_out")
            self._on_output(attention.q_a_layernorm, f"{at}.hook_q_latent")
            self._on_output(attention.q_b_proj, f"{at}.q_b_proj.hook_out", heads)
        self._on_output(attention.kv_a_proj_with_mqa, f"{at}.kv_a_proj_with_mqa.hook_out")
        self._on_input(attention.kv_a_layernorm, f"{at}.kv_a_layernorm.hook_in")
        self._on_output(attention.kv_a_layernorm, f"{at}.hook_kv_latent")

        def projected(_: nn.Module, __: tuple, output: Tensor) -> None:  # of [1, 1, pos, width]
            self._keep(f"{at}.kv_b_proj.hook_out", output[:, 0], heads)

        attention.kv_b_proj.register_forward_hook(projected)
        attention.register_forward_pre_hook(lambda *_: setattr(self, "layer", i))

    def _hook_latent_functions(self) -> None:
        """The rotation of a part of the queries, [1, head, pos, d], and of one key, [1, 1, pos, d]; then queries, keys and
        values as the attention gets them, [1, head, pos, d]."""

        def rotate_and_keep(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            q, k = self._rotate(q, k, *args)
            self._keep(f"blocks.{self.layer}.attn.hook_rot_q", q.transpose(1, 2))
            self._keep(f"blocks.{self.layer}.attn.hook_rot_k", k[:, 0])
            return q, k

        def attend_and_keep(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            for c, value in (("q", q), ("k", k), ("v", v)):
                self._keep(f"blocks.{self.layer}.attn.hook_{c}", value.transpose(1, 2))
            return self._attend(module, q, k, v, *args, **kwargs)

        self.modelling.apply_rotary_emb = rotate_and_keep
        self.modelling.eager_attention_forward = attend_and_keep

    def _hook_shared(self, i: int) -> None:
        shared, at = self.block(i).get_submodule(self.tree.shared), f"blocks.{i}.mlp.shared_experts"
        self._on_output(shared.gate_proj, f"{at}.hook_pre")
        self._on_output(shared.up_proj, f"{at}.hook_pre_linear")
        self._on_input(shared.down_proj, f"{at}.hook_post")
        self._on_output(shared, f"{at}.hook_out")

    def _hook_mlp(self, i: int) -> None:
        tree, block, at = self.tree, self.block(i), f"blocks.{i}.mlp"
        if self.has_experts(i):
            if tree.shared:
                self._hook_shared(i)
            def keep(_: nn.Module, __: tuple, output: tuple) -> None:
                logits, weights, indices = output
                order = weights.argsort(dim=-1, descending=True)  # some routers do not sort
                self._keep(f"{at}.hook_router_logits", logits)
                self._keep(f"{at}.hook_expert_weights", weights.gather(-1, order))
                self._keep(f"{at}.hook_expert_indices", indices.gather(-1, order))

            block.get_submodule(tree.router).register_forward_hook(keep)
            return
        if tree.gate_up:
            parts = [(f"{at}.hook_pre", None), (f"{at}.hook_pre_linear", None)]
            self._on_parts(block.get_submodule(tree.gate_up), self.split_mlp, parts)
        else:
            self._on_output(block.get_submodule(tree.gate), f"{at}.hook_pre")
            if tree.up:
                self._on_output(block.get_submodule(tree.up), f"{at}.hook_pre_linear")
        self._on_input(block.get_submodule(tree.down), f"{at}.hook_post")

    def has_experts(self, i: int) -> bool:
        """Whether a layer's MLP is a mixture of experts: some families mix the two."""
        dense = i in (getattr(self.config, "mlp_only_layers", None) or ()) or i < getattr(
            self.config, "first_k_dense_replace", 0)
        return self.tree.router is not None and not dense

    def _hook_added(self, i: int, sublayer: str, output: str, post: str | None) -> None:
        """What a sublayer gives, and what is added to the stream, where a norm or a multiplier comes between."""
        block, at, factor = self.block(i), f"blocks.{i}", getattr(self.config, "residual_multiplier", 1.0)
        if post or factor != 1:
            self._on_output(block.get_submodule(output), f"{at}.{sublayer}.hook_out")
        self._on_output(block.get_submodule(post or output), f"{at}.hook_{sublayer}_out", factor=factor)

    def _hook_rotation(self) -> None:
        """Rotation is a function of the modelling module, called once in each attention on [1, head, pos, d_head], or on
        the first of d_head where the rest does not turn."""

        def rotate_and_keep(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            q, k = self._rotate(q, k, *args, **kwargs)
            assert self.layer is not None, "rotation outside an attention"
            at = f"blocks.{self.layer}.attn"
            for c, turned in (("q", q), ("k", k)):
                still = self.captures[f"{at}.hook_{c}"][..., turned.shape[-1] :]
                self._keep(f"{at}.hook_rot_{c}", torch.cat([turned.transpose(1, 2), still[None]], dim=-1))
            return q, k

        self.modelling.apply_rotary_pos_emb = rotate_and_keep
        for i in range(self.widths.layers):
            attention = self.block(i).get_submodule(self.tree.attention)
            attention.register_forward_pre_hook(lambda *_, i=i: setattr(self, "layer", i))

    def _hook_softmax(self, i: int) -> None:
        """What the softmax inside an attention is given and what it gives, [1, head, query, key], without sinks (with which
        a row is given less its maximum: what their column lost is given back)."""
        softmax, sinks = nn.functional.softmax, self.tree.sinks and self.block(i).get_parameter(self.tree.sinks)

        def keep(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = softmax(x, *args, **kwargs)
            if sinks is not None:
                x = x - (x[..., -1:] - sinks[:, None, None])
            for name, table in (("attn_scores", x), ("pattern", out)):
                assert f"blocks.{i}.attn.hook_{name}" not in self.captures, f"{name} fired twice"
                kept = table[0, :, :, : len(self.tokens)].clone()
                self.captures[f"blocks.{i}.attn.hook_{name}"] = kept.to(self.captures[f"blocks.{i}.attn.hook_q"].dtype)
            return out

        def swap(by: Any) -> Any:
            return lambda *_: setattr(nn.functional, "softmax", by)

        attention = self.block(i).get_submodule(self.tree.attention)
        attention.register_forward_pre_hook(swap(keep))
        attention.register_forward_hook(swap(softmax), always_call=True)

    def _add_results(self) -> None:
        """Each head's z through its columns of the output projection: no module forms it."""
        for i in range(self.widths.layers):
            z = self.captures[f"blocks.{i}.attn.hook_z"]
            weight = self.block(i).get_submodule(self.tree.o).weight.double()
            weight = (weight.T if self.tree.transposed else weight).unflatten(1, z.shape[1:])
            with torch.no_grad():
                result = torch.einsum("phd,mhd->phm", z.double(), weight)
            self.captures[f"blocks.{i}.attn.hook_result"] = result.to(z.dtype)

    def _add_head_norm_parts(self) -> None:
        """The same as _add_norm_parts for norms of queries and keys, over each head or over all."""
        for i in range(self.widths.layers):
            for c, path in (("q", self.tree.q_norm), ("k", self.tree.k_norm)):
                if path:
                    x = self.captures[f"blocks.{i}.attn.hook_{c}"]
                    seen = as_normed(self.block(i).get_submodule(path), x if x.dtype == torch.float64 else x.float())
                    centred = self.centred(seen)
                    scale = root_mean_square(centred, norm_eps(self.config))
                    self.captures[f"blocks.{i}.attn.{c}_norm.hook_scale"] = scale.to(x.dtype)
                    self.captures[f"blocks.{i}.attn.{c}_norm.hook_normalized"] = (centred / scale).to(x.dtype).view_as(x)

    def norm_sources(self) -> dict[str, str]:
        """Norm -> what it normalizes, by hook names."""
        tree, sources = self.tree, {"ln_final": f"blocks.{self.widths.layers - 1}.hook_resid_post"}
        if tree.embed_norm:
            sources["embed_ln"] = "hook_embed"
        for i in range(self.widths.layers):
            at = f"blocks.{i}"
            between = f"{at}.hook_resid_pre" if tree.parallel else f"{at}.hook_resid_mid"
            found = {"ln1": f"{at}.hook_resid_pre", "ln2": between, "ln1_post": f"{at}.attn.hook_out",
                     "ln2_post": f"{at}.mlp.hook_out"}
            sources |= {f"{at}.{name}": source for name, source in found.items() if getattr(tree, name)}
            if tree.latent:
                sources[f"{at}.attn.kv_a_layernorm"] = f"{at}.attn.kv_a_layernorm.hook_in"
            if tree.latent and self.config.q_lora_rank is not None:
                sources[f"{at}.attn.q_a_layernorm"] = f"{at}.attn.q_a_proj.hook_out"
        return sources

    def norm_module(self, name: str) -> nn.Module:
        outside = {"ln_final": self.tree.final_norm, "embed_ln": self.tree.embed_norm}
        if name in outside:
            return self.model.get_submodule(outside[name])
        _, i, *norm = name.split(".")
        path = getattr(self.tree, norm[0]) if len(norm) == 1 else f"{self.tree.attention}.{norm[1]}"
        return self.block(int(i)).get_submodule(path)

    def norm_output(self, name: str) -> str:
        """The hook name of a norm's output: after a sublayer, what is added to the stream."""
        block, _, norm = name.rpartition(".")
        outputs = {"ln1_post": "hook_attn_out", "ln2_post": "hook_mlp_out", "q_a_layernorm": "hook_q_latent",
                   "kv_a_layernorm": "hook_kv_latent"}
        return f"{block}.{outputs[norm]}" if norm in outputs else f"{name}.hook_out"

    def _add_norm_parts(self) -> None:
        """hook_scale, the divisor, and hook_normalized, before the weight: no module forms them."""
        for name, source in self.norm_sources().items():
            x = self.captures[source]
            at_least_float32 = x if x.dtype == torch.float64 else x.float()  # as transformers' norms compute
            centred = self.centred(at_least_float32)
            scale = root_mean_square(centred, norm_eps(self.config))
            self.captures[f"{name}.hook_scale"] = scale.to(x.dtype)
            self.captures[f"{name}.hook_normalized"] = (centred / scale).to(x.dtype)

    def centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.tree.norm == "layer" else x


def norm_eps(config: Any) -> float:
    keys = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    return next((getattr(config, key) for key in keys if getattr(config, key, None)), 1e-5)  # opt names none: torch's


def embedding_multiplier(config: Any) -> float:
    """What is multiplied onto the embedding outside its module."""
    return getattr(config, "embedding_multiplier", 1.0)


def root_mean_square(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


# -- what must hold


Identity = tuple[str, Tensor, Tensor, bool]  # its kind, what was captured, what it must be, whether bit by bit


def identities(probe: Probe, values: Captures) -> Iterator[Identity]:
    """Everything that the model's definition says of one prompt's captures, in float64 from the captured neighbours."""
    n = probe.widths.layers
    yield from embedding_identities(probe, values)
    for i in range(n):
        yield from block_identities(probe, values, i)
        if i + 1 < n:
            at = f"blocks.{i + 1}.hook_resid_pre"
            yield "resid_pre[i+1] = resid_post[i]", values[at], values[f"blocks.{i}.hook_resid_post"], True
    for name, source in probe.norm_sources().items():
        yield from norm_identities(probe, values, name, values[source])
    yield "logits = ln_final.hook_out @ unembedding", values["unembed.hook_out"], logits(probe, values), False


def embedding_identities(probe: Probe, values: Captures) -> Iterator[Identity]:
    tree, config, first = probe.tree, probe.config, values["blocks.0.hook_resid_pre"]
    scale = config.hidden_size**0.5 if tree.norm == "rms_plus_one" else embedding_multiplier(config)
    weight = probe.model.get_submodule(tree.embed).weight
    yield "embed = rows of the embedding", values["hook_embed"], weight[probe.tokens].double() * scale, False
    if tree.pos_embed:
        at = slice(tree.pos_offset, tree.pos_offset + len(probe.tokens))
        yield "pos_embed = rows", values["hook_pos_embed"], probe.model.get_submodule(tree.pos_embed).weight[at], True
        yield "resid_pre[0] = embed + pos_embed", first, values["hook_embed"] + values["hook_pos_embed"], True
    else:
        yield "resid_pre[0] = embed", first, values["embed_ln.hook_out" if tree.embed_norm else "hook_embed"], True


def logits(probe: Probe, values: Captures) -> Tensor:
    config = probe.config
    found = apply(probe.model.get_submodule(probe.tree.unembed), values["ln_final.hook_out"])
    found = found * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(found / cap) * cap if cap else found


def block_identities(probe: Probe, values: Captures, i: int) -> Iterator[Identity]:
    tree = probe.tree
    v = {name.removeprefix(f"blocks.{i}."): value for name, value in values.items() if name.startswith(f"blocks.{i}.")}
    pre, post, attn_out, mlp_out = (v[f"hook_{name}"] for name in ("resid_pre", "resid_post", "attn_out", "mlp_out"))
    if tree.parallel:
        yield "resid_post = resid_pre + attn_out + mlp_out", post, pre.double() + attn_out.double() + mlp_out.double(), False
    else:
        yield "resid_mid = resid_pre + attn_out", v["hook_resid_mid"], pre + attn_out, True
        yield "resid_post = resid_mid + mlp_out", post, v["hook_resid_mid"] + mlp_out, True
    if "attn.hook_out" in v and not tree.ln1_post:
        factor = probe.config.residual_multiplier
        yield "attn_out = multiplier * attention", attn_out, v["attn.hook_out"].double() * factor, False
        yield "mlp_out = multiplier * MLP", mlp_out, v["mlp.hook_out"].double() * factor, False
    yield from attention_identities(probe, v, i)
    yield from mlp_identities(probe, v, i)


def attention_identities(probe: Probe, v: Captures, i: int) -> Iterator[Identity]:
    tree, config, block = probe.tree, probe.config, probe.block(i)
    attn_out = apply(block.get_submodule(tree.o), v["attn.hook_z"].flatten(1), tree.transposed)
    yield "attention = z @ W_O", v.get("attn.hook_out", v["hook_attn_out"]), attn_out, False
    o = block.get_submodule(tree.o)
    summed = v["attn.hook_result"].double().sum(1) + (0 if getattr(o, "bias", None) is None else o.bias.double())
    yield "results, summed over heads = attention", summed, v.get("attn.hook_out", v["hook_attn_out"]), False
    if tree.latent:
        yield from latent_identities(probe, v, i)
        return
    source = v["ln1.hook_out" if tree.ln1 else "hook_resid_pre"].double()
    weights, biases = qkv_weights(probe, block)
    for c, weight, bias in zip("qkv", weights, biases, strict=True):
        product = linear(source, weight, bias)
        yield f"{c} = its input @ W + b", v[f"attn.hook_{c}"].flatten(1), product, False
    q, k = v["attn.hook_q"].double(), v["attn.hook_k"].double()
    if tree.q_norm and tree.k_norm:
        for c, x in (("q", q), ("k", k)):
            norm = block.get_submodule(getattr(tree, f"{c}_norm"))
            yield f"{c}_normed = norm({c})", v[f"attn.hook_{c}_normed"], head_norm(probe, norm, x), False
            yield from head_norm_identities(probe, norm, v, c)
        q, k = v["attn.hook_q_normed"].double(), v["attn.hook_k_normed"].double()
    if tree.rotation:
        angles, scale = rotary_angles(config, i, probe.widths.d_head, len(q), v["attn.hook_q"].dtype)
        yield "rot_q = rotation of q", v["attn.hook_rot_q"], rotated(q, angles, scale, tree.rotation), False
        yield "rot_k = rotation of k", v["attn.hook_rot_k"], rotated(k, angles, scale, tree.rotation), False
        q, k = v["attn.hook_rot_q"].double(), v["attn.hook_rot_k"].double()
    z = attention(probe, i, q, k, v["attn.hook_v"].double())
    yield "z = softmax(q k) v", v["attn.hook_z"], z, False
    yield from table_identities(probe, i, v, q, k)


def latent_identities(probe: Probe, v: Captures, i: int) -> Iterator[Identity]:
    """DeepSeek-V2, section 2.1 and appendix C, without its norms: what is projected, cut, turned and joined, up to z."""
    config, attention_of = probe.config, probe.block(i).get_submodule(probe.tree.attention)
    source = v["ln1.hook_out"]
    if config.q_lora_rank is None:
        before = v["attn.q_proj.hook_out"].double()
        yield "q_proj = its input @ W", before.flatten(1), apply(attention_of.q_proj, source), False
    else:
        before = v["attn.q_b_proj.hook_out"].double()
        yield "q_a_proj = its input @ W", v["attn.q_a_proj.hook_out"], apply(attention_of.q_a_proj, source), False
        yield "q_b_proj = its input @ W", before.flatten(1), apply(attention_of.q_b_proj, v["attn.hook_q_latent"]), False
    row = v["attn.kv_a_proj_with_mqa.hook_out"].double()
    yield "kv_a_proj = its input @ W", row, apply(attention_of.kv_a_proj_with_mqa, source), False
    latent, key = row.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    yield "kv_a_layernorm's input = the row's first columns", v["attn.kv_a_layernorm.hook_in"], latent, True
    both = v["attn.kv_b_proj.hook_out"].double()
    yield "kv_b_proj = its input @ W", both.flatten(1), apply(attention_of.kv_b_proj, v["attn.hook_kv_latent"]), False
    angles, scale = rotary_angles(config, i, config.qk_rope_head_dim, len(row), v["attn.hook_rot_q"].dtype)
    still, turning = before.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    rot_q, rot_k = v["attn.hook_rot_q"].double(), v["attn.hook_rot_k"].double()
    yield "rot_q = rotation of q", rot_q, rotated(turning, angles, scale, probe.tree.rotation), False
    yield "rot_k = rotation of k", rot_k, rotated(key[:, None], angles, scale, probe.tree.rotation)[:, 0], False
    q, k, value = (v[f"attn.hook_{c}"].double() for c in "qkv")
    yield "q = its parts", q, torch.cat([still, rot_q], dim=-1), True
    yield "k = its parts", k, torch.cat([both[..., : still.shape[-1]], rot_k[:, None].expand_as(rot_q)], dim=-1), True
    yield "v = its part", value, both[..., still.shape[-1] :], True
    yield "z = softmax(q k) v", v["attn.hook_z"], attention(probe, i, q, k, value), False
    yield from table_identities(probe, i, v, q, k)


def head_norm_identities(probe: Probe, norm: nn.Module, v: Captures, c: str) -> Iterator[Identity]:
    scale, normalized = (v[f"attn.{c}_norm.hook_{part}"].double() for part in ("scale", "normalized"))
    seen = as_normed(norm, normalized)
    yield f"{c}_norm: normalized * scale = {c}", seen * scale, probe.centred(as_normed(norm, v[f"attn.hook_{c}"].double())), False
    yield f"{c}_normed = normalized * weight", v[f"attn.hook_{c}_normed"], weighed(probe, norm, seen).view_as(normalized), False


def table_identities(probe: Probe, i: int, v: Captures, q: Tensor, k: Tensor) -> Iterator[Identity]:
    """Scores and pattern by the formulas; and the pattern times v is z."""
    want, table = scores_of(probe, i, q, k), v["attn.hook_pattern"].double()
    hidden, scores = want.isinf(), v["attn.hook_attn_scores"].double()
    yield "scores are lowest where hidden", (scores < -60000).float(), hidden.float(), True
    yield "scores = q k", scores.masked_fill(hidden, 0), want.masked_fill(hidden, 0), False
    yield "pattern = softmax of scores", table, pattern_of(probe, i, want), False
    values = v["attn.hook_v"].double().repeat_interleave(len(table) // v["attn.hook_v"].shape[1], dim=1)
    yield "pattern v = z", torch.einsum("hqk,khd->qhd", table, values), v["attn.hook_z"], False


def mlp_identities(probe: Probe, v: Captures, i: int) -> Iterator[Identity]:
    tree, block = probe.tree, probe.block(i)
    source = v["ln2.hook_out" if tree.ln2 else "ln1.hook_out" if tree.parallel else "hook_resid_mid"].double()
    out = v.get("mlp.hook_out", v["hook_mlp_out"])
    if probe.has_experts(i):
        yield from expert_identities(probe, v, i, source, out)
        return
    weights, biases = mlp_weights(probe, block)
    for name, weight, bias in zip(("pre", "pre_linear"), weights, biases):
        yield f"{name} = its input @ W", v[f"mlp.hook_{name}"], linear(source, weight, bias), False
    post = activation(probe)(v["mlp.hook_pre"].double())
    post = post * v["mlp.hook_pre_linear"].double() if "mlp.hook_pre_linear" in v else post
    yield "post = act(pre) * pre_linear", v["mlp.hook_post"], post, False
    yield "MLP = post @ W_out", out, apply(block.get_submodule(tree.down), v["mlp.hook_post"], tree.transposed), False


def expert_identities(probe: Probe, v: Captures, i: int, source: Tensor, out: Tensor) -> Iterator[Identity]:
    config, block = probe.config, probe.block(i)
    weights, chosen = v["mlp.hook_expert_weights"].double(), v["mlp.hook_expert_indices"]
    yield "router_logits = its input @ W", v["mlp.hook_router_logits"], apply(block.get_submodule(probe.tree.router), source), False
    shares, most = v["mlp.hook_router_logits"].double().softmax(-1).topk(config.num_experts_per_tok)
    if getattr(config, "norm_topk_prob", True):
        shares = shares / shares.sum(-1, keepdim=True)
    yield "expert_indices = the largest", chosen, most, True
    yield "expert_weights = softmax of the logits", v["mlp.hook_expert_weights"], shares, False
    experts = block.get_submodule(probe.tree.experts)
    total = torch.zeros_like(source)
    for row in range(len(source)):
        for weight, e in zip(weights[row], chosen[row].tolist()):
            total[row] += weight * expert(probe, experts, e, source[row])
    if probe.tree.shared:
        at, shared = "mlp.shared_experts.hook", block.get_submodule(probe.tree.shared)
        pre, up = v[f"{at}_pre"].double(), v[f"{at}_pre_linear"].double()
        yield "shared pre = its input @ W", pre, apply(shared.gate_proj, source), False
        yield "shared pre_linear = its input @ W", up, apply(shared.up_proj, source), False
        yield "shared post = act(pre) * pre_linear", v[f"{at}_post"], activation(probe)(pre) * up, False
        yield "shared = post @ W_out", v[f"{at}_out"], apply(shared.down_proj, v[f"{at}_post"]), False
        total += v[f"{at}_out"].double()
    yield "MLP = the chosen experts, weighed", out, total, False


def expert(probe: Probe, experts: nn.Module, e: int, x: Tensor) -> Tensor:
    """One expert's MLP of one row; gpt-oss' has weights [in, out], gate and up in turn, biases, and limits (its model
    card's clamped SwiGLU)."""
    if not hasattr(experts, "gate_up_proj_bias"):
        gate, up = linear(x, experts.gate_up_proj[e].double()).chunk(2)
        return linear(activation(probe)(gate) * up, experts.down_proj[e].double())
    config = probe.config
    both = linear(x, experts.gate_up_proj[e].double().T, experts.gate_up_proj_bias[e].double())
    gate, up = both[::2].clamp(max=config.swiglu_limit), both[1::2].clamp(-config.swiglu_limit, config.swiglu_limit)
    inner = (up + 1) * gate * torch.sigmoid(config.swiglu_alpha * gate)
    return linear(inner, experts.down_proj[e].double().T, experts.down_proj_bias[e].double())


def activation(probe: Probe) -> Any:
    keys = ("hidden_activation", "hidden_act", "activation_function", "activation")
    name = probe.tree.activation or next(getattr(probe.config, k) for k in keys if getattr(probe.config, k, None))
    return ACTIVATIONS[name]


def norm_identities(probe: Probe, v: Captures, name: str, source: Tensor) -> Iterator[Identity]:
    scale, normalized = v[f"{name}.hook_scale"], v[f"{name}.hook_normalized"]
    centred = probe.centred(source.double())
    yield "scale = sqrt(mean(x^2) + eps)", scale, root_mean_square(centred, norm_eps(probe.config)), False
    yield "normalized * scale = x", normalized.double() * scale.double(), centred, False
    out = weighed(probe, probe.norm_module(name), normalized.double())
    yield "norm's output = normalized * weight", v[probe.norm_output(name)], out, False


def weighed(probe: Probe, norm: nn.Module, x: Tensor) -> Tensor:
    """A normalized x after a norm's weight and bias."""
    weight = norm.weight.double() + (1 if probe.tree.norm == "rms_plus_one" else 0)
    bias = getattr(norm, "bias", None)
    return x * weight + (0 if bias is None else bias.double())


def head_norm(probe: Probe, norm: nn.Module, x: Tensor) -> Tensor:
    """q or k [pos, head, d_head] after its norm, over each head or, where the weight says so, over all of them."""
    centred = probe.centred(as_normed(norm, x))
    return weighed(probe, norm, centred / root_mean_square(centred, norm_eps(probe.config))).view_as(x)


def as_normed(norm: nn.Module, x: Tensor) -> Tensor:
    return x.flatten(1) if norm.weight.numel() == x[0].numel() else x


def apply(layer: nn.Module, x: Tensor, transposed: bool = False) -> Tensor:
    """A linear layer in float64."""
    weight, bias = layer.weight.double(), getattr(layer, "bias", None)
    return linear(x.double(), weight.T if transposed else weight, None if bias is None else bias.double())


Weights = tuple[list[Tensor], list[Tensor | None]]  # in float64


def fused_weights(probe: Probe, layer: nn.Module, split: Any) -> Weights:
    """The parts of a fused linear layer: `split` cuts along its output."""
    weight = layer.weight.double().T if probe.tree.transposed else layer.weight.double()
    parts = split(weight, 0)
    bias = getattr(layer, "bias", None)
    return parts, [None] * len(parts) if bias is None else split(bias.double(), 0)


def separate_weights(probe: Probe, layers: list[nn.Module]) -> Weights:
    weights = [m.weight.double().T if probe.tree.transposed else m.weight.double() for m in layers]
    return weights, [None if m.bias is None else m.bias.double() for m in layers]


def qkv_weights(probe: Probe, block: nn.Module) -> Weights:
    if probe.tree.qkv:
        return fused_weights(probe, block.get_submodule(probe.tree.qkv), probe.split_qkv)
    return separate_weights(probe, [block.get_submodule(getattr(probe.tree, c)) for c in "qkv"])


def mlp_weights(probe: Probe, block: nn.Module) -> Weights:
    """Of gate and up, or of the one projection before the activation."""
    if probe.tree.gate_up:
        return fused_weights(probe, block.get_submodule(probe.tree.gate_up), probe.split_mlp)
    return separate_weights(probe, [block.get_submodule(path) for path in (probe.tree.gate, probe.tree.up) if path])


def rotary_angles(config: Any, i: int, d_head: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """([pos, pair] angles in float64, factor on their sine and cosine). Frequencies are float32 ones whatever the run's
    dtype: they belong to the model as every implementation defines it. So is their product with the position, except in a
    float64 run."""
    rope = config.rope_parameters
    if "rope_type" not in rope:  # a set for each type of layer
        rope = rope[config.layer_types[i]]
    width = int(d_head * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies, scale = 1.0 / rope["rope_theta"] ** exponents, 1.0
    if rope["rope_type"] == "llama3":
        frequencies = llama3_frequencies(rope, frequencies)
    elif rope["rope_type"] == "yarn":
        frequencies, scale = yarn_frequencies(rope, frequencies), 0.1 * math.log(rope["factor"]) + 1
    else:
        assert rope["rope_type"] == "default", f"no formula here for rotation of type {rope['rope_type']}"
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.outer(torch.arange(positions, dtype=precision), frequencies.to(precision)).double(), scale


def llama3_frequencies(rope: dict[str, Any], plain: Tensor) -> Tensor:
    """Llama 3.1: a frequency that turns less than low_freq_factor times over the original length is divided by the factor,
    one that turns more than high_freq_factor times stays, and between them they go over into each other."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / rope["factor"] * (1 - kept) + plain * kept


def yarn_frequencies(rope: dict[str, Any], plain: Tensor) -> Tensor:
    """Peng et al. 2023, section 3.2: pairs that turn more than beta_fast times over the original length stay, those that
    turn less than beta_slow times are divided by the factor, with a ramp between."""
    width, length = 2 * len(plain), rope["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = pair(rope["beta_fast"]), pair(rope["beta_slow"])
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    divided = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope["factor"] * divided + plain * (1 - divided)


def rotated(x: Tensor, angles: Tensor, scale: float, pairs: str) -> Tensor:
    """x [pos, head, d_head]: turn pairs as complex numbers, (j, j + half) or (2j, 2j + 1); what lies beyond the rotated
    width stays."""
    half = angles.shape[-1]
    turning, rest = x.double().split([2 * half, x.shape[-1] - 2 * half], dim=-1)
    first, second = turning.chunk(2, dim=-1) if pairs == "halves" else (turning[..., ::2], turning[..., 1::2])
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None, :] * scale
    parts = [turned.real, turned.imag]
    whole = torch.cat(parts, dim=-1) if pairs == "halves" else torch.stack(parts, dim=-1).flatten(-2)
    return torch.cat([whole, rest], dim=-1)


def window(config: Any, i: int) -> int | None:
    """How many keys a query of layer i sees, itself included; None for all."""
    width = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return width if width and (kinds is None or kinds[i] == "sliding_attention") else None


def attention_scale(probe: Probe) -> float:
    config = probe.config
    if scalar := getattr(config, "query_pre_attn_scalar", None):
        return scalar**-0.5
    if probe.tree.latent:
        assert config.rope_parameters["rope_type"] == "default", "no formula here for the scale of a stretched rotation"
        return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    return getattr(config, "attention_multiplier", None) or probe.widths.d_head**-0.5


def alibi_slopes(heads: int) -> Tensor:
    """Press et al. 2022: powers of 2^(-8/heads), for a number of heads that is a power of two."""
    assert heads & (heads - 1) == 0
    return 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)


def scores_of(probe: Probe, i: int, q: Tensor, k: Tensor) -> Tensor:
    """Scores in float64, [head, query, key], -inf where hidden: q [pos, head, d_head], k with fewer heads."""
    tree, config = probe.tree, probe.config
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * attention_scale(probe)
    if cap := getattr(config, "attn_logit_softcapping", None):
        scores = torch.tanh(scores / cap) * cap
    if tree.alibi:
        scores = scores + alibi_slopes(q.shape[1])[:, None, None] * torch.arange(len(k))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
    visible = (distance >= 0) & (distance < (window(config, i) or len(q)))
    return scores.masked_fill(~visible, -torch.inf)


def pattern_of(probe: Probe, i: int, scores: Tensor) -> Tensor:
    if probe.tree.sinks:
        sinks = probe.block(i).get_parameter(probe.tree.sinks).double()
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    return scores.softmax(-1)[..., : scores.shape[1]]


def attention(probe: Probe, i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float64: q [pos, head, d_head], k and v with fewer heads; [pos, head, d_head]."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", pattern_of(probe, i, scores_of(probe, i, q, k)), v)


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
    expected = {"hook_embed": (probe.config.hidden_size,), "unembed.hook_out": (probe.config.vocab_size,)}
    if probe.tree.pos_embed:
        expected["hook_pos_embed"] = (probe.config.hidden_size,)
    for name in probe.norm_sources():
        width = probe.norm_module(name).weight.shape[-1]
        expected |= {f"{name}.hook_scale": (1,), f"{name}.hook_normalized": (width,), probe.norm_output(name): (width,)}
    for i in range(probe.widths.layers):
        expected |= {f"blocks.{i}.{name}": shape for name, shape in block_shapes(probe, i).items()}
    found = {name: tuple(value.shape) for name, value in values.items()}
    tables = {f"blocks.{i}.attn.hook_{name}": (probe.widths.heads, positions, positions)
              for i in range(probe.widths.layers) for name in ("attn_scores", "pattern")}
    assert found == {name: (positions, *shape) for name, shape in expected.items()} | tables
    for name, value in values.items():
        assert value.isfinite().all(), f"{name} is not finite"


def block_shapes(probe: Probe, i: int) -> dict[str, tuple[int, ...]]:
    """Every name of one block but its norms' -> its shape without positions."""
    tree, widths, config = probe.tree, probe.widths, probe.config
    d_model, q, kv = (config.hidden_size,), (widths.heads, widths.d_head), (widths.kv_heads, widths.d_head)
    streams = ("resid_pre", "resid_post", "attn_out", "mlp_out") + (() if tree.parallel else ("resid_mid",))
    block: dict[str, tuple[int, ...]] = {f"hook_{name}": d_model for name in streams}
    turned = ("", "rot_") if tree.rotation else ("",)
    if tree.latent:
        block |= {"attn.hook_z": q, "attn.hook_result": (widths.heads, *d_model)}
        return block | latent_shapes(probe) | mlp_shapes(probe, i)
    block |= {f"attn.hook_{turn}{c}": shape for turn in turned for c, shape in (("q", q), ("k", kv))}
    block |= {"attn.hook_v": kv, "attn.hook_z": q, "attn.hook_result": (widths.heads, *d_model)}
    if tree.q_norm:
        block |= {"attn.hook_q_normed": q, "attn.hook_k_normed": kv}
        for c, path, shape in (("q", tree.q_norm, q), ("k", tree.k_norm, kv)):
            over_all = probe.block(i).get_submodule(path).weight.numel() == shape[0] * shape[1]
            block |= {f"attn.{c}_norm.hook_scale": (1,) if over_all else (shape[0], 1), f"attn.{c}_norm.hook_normalized": shape}
    if tree.ln1_post or getattr(config, "residual_multiplier", 1.0) != 1:
        block |= {"attn.hook_out": d_model, "mlp.hook_out": d_model}
    return block | mlp_shapes(probe, i)


def latent_shapes(probe: Probe) -> dict[str, tuple[int, ...]]:
    config, heads, d_head = probe.config, probe.widths.heads, probe.widths.d_head
    latent, still, turning = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    found = {"kv_a_proj_with_mqa.hook_out": (latent + turning,), "kv_a_layernorm.hook_in": (latent,), "hook_rot_k": (turning,),
             "kv_b_proj.hook_out": (heads, still + d_head), "hook_rot_q": (heads, turning), "hook_q": (heads, still + turning),
             "hook_k": (heads, still + turning), "hook_v": (heads, d_head)}
    if config.q_lora_rank is None:
        found["q_proj.hook_out"] = (heads, still + turning)
    else:
        found |= {"q_a_proj.hook_out": (config.q_lora_rank,), "q_b_proj.hook_out": (heads, still + turning)}
    return {f"attn.{name}": shape for name, shape in found.items()}


def mlp_shapes(probe: Probe, i: int) -> dict[str, tuple[int, ...]]:
    tree, config = probe.tree, probe.config
    if probe.has_experts(i):
        k, n = config.num_experts_per_tok, getattr(config, "n_routed_experts", None) or config.num_local_experts
        chosen = {"mlp.hook_router_logits": (n,), "mlp.hook_expert_weights": (k,), "mlp.hook_expert_indices": (k,)}
        if tree.shared:
            width = config.moe_intermediate_size * config.n_shared_experts
            chosen |= {f"mlp.shared_experts.hook_{name}": (width,) for name in ("pre", "pre_linear", "post")}
            chosen["mlp.shared_experts.hook_out"] = (config.hidden_size,)
        return chosen
    inside = ("pre", "pre_linear", "post") if tree.up or tree.gate_up else ("pre", "post")
    return {f"mlp.hook_{name}": (probe.widths.d_mlp,) for name in inside}


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
                tensors[f"{p}/{name}"] = (value.float() if value.dtype == torch.float64 else value).contiguous()
    finally:
        probe.close()
    save_file(tensors, out, {"identities": json.dumps(errors)})
    return errors


def main(arguments: list[str]) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1:])
