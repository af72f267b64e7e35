"""`python -m vlens_cli.driver.check_hf`: every hook point of a capture against transformers, in a process of its own.

A process that has booted vLLM may not import a model's class from transformers. Nothing is taken from the engine or its
module tree: transformers' own modules are named by the family's [hf] table, and the model runs in float32 with eager
attention.

stdin is a job, {"folder", "file", "tokens"}: a model, the safetensors file of `vlens capture` on it, and the ids that
were fed to it, one prompt. stdout is {"points": name with {i} -> {"error", "layer", "layers"}, "uncompared": names}:
the largest relative error (norm of the difference over the norm of transformers' value, whole tensor) over the layers.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlens_cli.driver.hide import hide_broken_packages

hide_broken_packages()
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from vlens_cli.families import Catalog, catalog_for  # noqa: E402
from vlens_cli.hooks import fold  # noqa: E402

# Scores below it are masked.
MASKED = -60000.0


class Reference:
    """Hooks on a model in transformers; `values` has what one prompt gave, by canonical hook name, without batch axis."""

    def __init__(self, model: nn.Module, catalog: Catalog) -> None:
        self.values: dict[str, Tensor] = {}
        self._model = model
        self._catalog = catalog
        self._at = catalog.spec.hf
        self._layer = 0
        self._hook_ends()
        for i in range(catalog.n_layers):
            self._hook_block(i)

    def run(self, tokens: list[int]) -> dict[str, Tensor]:
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            self._keep("unembed.hook_out", logits)
            for i in range(self._catalog.n_layers):
                self._add_result(i)
        return self.values

    # What is kept

    def _keep(self, name: str, value: Tensor) -> None:
        """A value of a point of this model, [pos, width] or with axes of one before, in the point's own shape."""
        if name in self._catalog.points:
            shape = [self._catalog.size(axis) for axis in self._catalog.axes(name)[1:]]
            self.values[name] = value.detach().clone().reshape(value.shape[-2], *shape)

    def _module(self, role: str, i: int | None = None) -> nn.Module | None:
        """transformers' module of a role; None where the family, or this layer, has none."""
        return self._at_path(self._at.get(role, ""), i)

    def _at_path(self, path: str, i: int | None) -> nn.Module | None:
        path = path if i is None or not path else f"{self._at['layers']}.{i}.{path}"
        try:
            return self._model.get_submodule(path) if path else None
        except AttributeError:
            return None

    def _on(self, module: nn.Module | None, output: Callable[[Any], None] | None = None,
            entry: Callable[[Any], None] | None = None) -> None:
        if module is not None and output is not None:
            module.register_forward_hook(lambda m, args, out: output(out[0] if isinstance(out, tuple) else out))
        if module is not None and entry is not None:
            module.register_forward_pre_hook(
                lambda m, args, kwargs: entry(args[0] if args else kwargs["hidden_states"]), with_kwargs=True)

    def _keeps(self, name: str, factor: float = 1.0) -> Callable[[Any], None]:
        return lambda value: self._keep(name, value if factor == 1 else value * factor)

    def _factor(self, name: str) -> float:
        """A multiplier of the config; what is multiplied inside transformers' module (sqrt(d_model)) is there already."""
        row = self._catalog.row(name)
        return 1.0 if row.factor == "sqrt(d_model)" else self._catalog.factor(row)

    # Hooks

    def _hook_ends(self) -> None:
        self._on(self._module("embed"), self._keeps("hook_embed", self._factor("hook_embed")))
        self._on(self._module("pos_embed"), self._keeps("hook_pos_embed"))
        self._norm("embed_ln", self._module("embed_norm"))
        self._norm("ln_final", self._module("final_norm"))

    def _hook_block(self, i: int) -> None:
        b, block = f"blocks.{i}", self._model.get_submodule(f"{self._at['layers']}.{i}")
        self._on(block, self._keeps(f"{b}.hook_resid_post"), self._keeps(f"{b}.hook_resid_pre"))
        for norm in ("ln1", "ln2"):
            self._norm(f"{b}.{norm}", self._module(norm, i))
        self._norm(f"{b}.ln1_post", self._module("ln1_post", i), f"{b}.hook_attn_out")
        self._norm(f"{b}.ln2_post", self._module("ln2_post", i), f"{b}.hook_mlp_out")
        self._on(self._module("ln2", i) or self._module("mlp_output", i), entry=self._keeps(f"{b}.hook_resid_mid"))
        self._hook_attention(i)
        self._hook_mlp(i)
        self._hook_named(i)
        for sublayer, role in (("attn", "attn_output"), ("mlp", "mlp_output")):
            added, own = f"{b}.hook_{sublayer}_out", f"{b}.{sublayer}.hook_out"
            module = self._module(role, i) or self._module("attention", i)
            self._on(module, self._keeps(own))
            if self._module("ln1_post" if sublayer == "attn" else "ln2_post", i) is None:
                self._on(module, self._keeps(added, self._factor(added)))

    def _hook_named(self, i: int) -> None:
        """What the family's file names besides the roles."""
        b = f"blocks.{i}"
        for name, path in self._at.get("outputs", {}).items():
            self._on(self._at_path(path, i), self._keeps(f"{b}.{name}"))
        for name, path in self._at.get("inputs", {}).items():
            self._on(self._at_path(path, i), entry=self._keeps(f"{b}.{name}"))
        for name, (path, out) in self._at.get("norms", {}).items():
            self._norm(f"{b}.{name}", self._at_path(path, i), f"{b}.{out}")

    def _norm(self, name: str, norm: nn.Module | None, out: str = "") -> None:
        """A norm's output, its divisor, and its centred input over that divisor."""
        def parts(x: Tensor) -> None:
            x = x.float()
            x = x - x.mean(-1, keepdim=True) if self._catalog.spec.norm == "layer" else x
            scale = (x.square().mean(-1, keepdim=True) + _eps(norm)).sqrt()
            self._keep(f"{name}.hook_scale", scale)
            self._keep(f"{name}.hook_normalized", x / scale)

        self._on(norm, self._keeps(out or f"{name}.hook_out"), parts)

    def _hook_attention(self, i: int) -> None:
        b = f"blocks.{i}.attn"
        fused = self._module("qkv", i)
        for part, c in enumerate("qkv"):
            if fused is not None:
                self._on(fused, lambda out, part=part, c=c: self._keep(f"{b}.hook_{c}", self._part(out, part)))
            else:
                self._on(self._module(c, i), self._keeps(f"{b}.hook_{c}"))
        for c in "qk":
            self._head_norm(f"{b}.{c}_norm", self._module(f"{c}_norm", i), f"{b}.hook_{c}_normed", c)
        self._on(self._module("o", i), entry=self._keeps(f"{b}.hook_z"))
        attention = self._module("attention", i)
        attention.register_forward_pre_hook(lambda *_: self._enter(i))
        attention.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _part(self, out: Tensor, part: int) -> Tensor:
        """q, k or v of a fused projection's output: after one another, or head by head."""
        dims = self._catalog.dims
        if self._at.get("by_head"):
            return out.unflatten(-1, (dims.n_heads, 3, dims.d_head))[..., part, :].flatten(-2)
        widths = [n * dims.d_head for n in (dims.n_heads, dims.n_kv_heads, dims.n_kv_heads)]
        return out.split(widths, dim=-1)[part]

    def _head_norm(self, name: str, norm: nn.Module | None, out: str, c: str) -> None:
        """A norm of queries or keys, which may come as [1, pos, head, d], [1, head, pos, d] or [1, pos, all heads]."""
        dims = self._catalog.dims
        heads = dims.n_heads if c == "q" else dims.n_kv_heads

        def by_position(x: Tensor) -> Tensor:
            return x.transpose(1, 2) if x.ndim == 4 and self._at.get("head_first") else x

        def parts(x: Tensor) -> None:
            x = by_position(x)
            x = x - x.mean(-1, keepdim=True) if self._catalog.spec.norm == "layer" else x
            scale = (x.square().mean(-1, keepdim=True) + _eps(norm)).sqrt()
            self._keep(f"{name}.hook_scale", scale.flatten(2) if x.ndim == 4 else scale)
            self._keep(f"{name}.hook_normalized", (x / scale).reshape(1, -1, heads * dims.d_head))

        self._on(norm, lambda value: self._keep(out, by_position(value).reshape(1, -1, heads * dims.d_head)), parts)

    def _hook_mlp(self, i: int) -> None:
        m = f"blocks.{i}.mlp"
        router = self._module("router", i)
        if router is not None:
            router.register_forward_hook(lambda module, args, out: self._keep_router(m, out))
        fused = self._module("gate_up", i)
        width = self._catalog.dims.d_mlp
        for part, (role, name) in enumerate((("gate", "hook_pre"), ("up", "hook_pre_linear"))):
            if fused is not None:
                self._on(fused, lambda out, part=part, name=name: self._keep(f"{m}.{name}", out.split(width, -1)[part]))
            else:
                self._on(self._module(role, i), self._keeps(f"{m}.{name}"))
        self._on(self._module("down", i), entry=self._keeps(f"{m}.hook_post"))

    def _keep_router(self, m: str, out: tuple[Tensor, ...]) -> None:
        """Logits, weights and indices, the largest weight first: some routers do not sort."""
        logits, weights, indices = out
        order = weights.argsort(dim=-1, descending=True)
        self._keep(f"{m}.hook_router_logits", logits)
        self._keep(f"{m}.hook_expert_weights", weights.gather(-1, order))
        self._keep(f"{m}.hook_expert_indices", indices.gather(-1, order))

    # Inside an attention: the rotation and the softmax are functions, not modules

    def _enter(self, i: int) -> None:
        modelling = sys.modules[type(self._model).__module__]
        self._softmax, self._layer = nn.functional.softmax, i
        nn.functional.softmax = self._see_softmax
        seen = {"apply_rotary_pos_emb": self._see_rotation}
        if self._at.get("latent"):
            seen = {"apply_rotary_emb": self._see_part, "eager_attention_forward": self._see_attended}
        self._own = {name: getattr(modelling, name) for name in seen if hasattr(modelling, name)}
        for name in self._own:
            setattr(modelling, name, seen[name])

    def _leave(self) -> None:
        nn.functional.softmax = self._softmax
        for name, function in self._own.items():
            setattr(sys.modules[type(self._model).__module__], name, function)

    def _see_softmax(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self._softmax(x, *args, **kwargs)
        path = self._at.get("sinks")
        if path:
            # A sink is one column more than there are keys; transformers takes each row's largest score away before.
            sinks = self._model.get_parameter(f"{self._at['layers']}.{self._layer}.{path}")
            x = x - (x[..., -1:] - sinks[:, None, None])
        for name, table in (("hook_attn_scores", x), ("hook_pattern", out)):
            full = f"blocks.{self._layer}.attn.{name}"
            if full in self._catalog.points:
                self.values[full] = table[0, :, :, : table.shape[2]].detach().clone()
        return out

    def _see_rotation(self, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        turned = self._own["apply_rotary_pos_emb"](q, k, *args, **kwargs)
        for c, value in zip("qk", turned, strict=True):
            name = f"blocks.{self._layer}.attn.hook_rot_{c}"
            # [1, head, pos, width]: where only a part of each head turns, the rest is as it was before.
            value = value[0].transpose(0, 1)
            before = self.values.get(name.replace("rot_", "") + "_normed", self.values[name.replace("rot_", "")])
            if name in self._catalog.points:
                self.values[name] = torch.cat([value, before[..., value.shape[-1] :]], dim=-1).clone()
        return turned

    def _see_part(self, q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """The rotation of what turns of the queries, [1, head, pos, width], and of the one key that does."""
        turned = self._own["apply_rotary_emb"](q, k, *args)
        self._keep_heads("rot_q", turned[0])
        self._keep_heads("rot_k", turned[1])
        return turned

    def _see_attended(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        for c, value in (("q", q), ("k", k), ("v", v)):
            self._keep_heads(c, value)
        return self._own["eager_attention_forward"](module, q, k, v, *args, **kwargs)

    def _keep_heads(self, c: str, value: Tensor) -> None:
        """[1, head, pos, width] as a point's value."""
        self._keep(f"blocks.{self._layer}.attn.hook_{c}", value[0].transpose(0, 1).flatten(1))

    def _add_result(self, i: int) -> None:
        z, o = self.values.get(f"blocks.{i}.attn.hook_z"), self._module("o", i)
        if z is not None and o is not None:
            weight = o.weight.T if self._at.get("transposed") else o.weight
            self.values[f"blocks.{i}.attn.hook_result"] = torch.einsum("phd,mhd->phm", z, weight.unflatten(1, z.shape[1:]))


def _eps(norm: nn.Module | None) -> float:
    return next(float(getattr(norm, key)) for key in ("variance_epsilon", "eps") if hasattr(norm, key))


def relative_error(name: str, got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of transformers' value; of scores only where neither masks."""
    got, want = got.double(), want.double()
    if got.shape != want.shape:
        return math.inf
    if name.endswith("hook_attn_scores"):
        if ((got < MASKED) != (want < MASKED)).any():
            return math.inf
        got, want = got.masked_fill(got < MASKED, 0), want.masked_fill(want < MASKED, 0)
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    return error if error == error else math.inf


def check(folder: Path, file: Path, tokens: list[int]) -> dict[str, Any]:
    """The job's answer. Raises what transformers raises for a model that it does not load."""
    from transformers import AutoModelForCausalLM

    catalog = catalog_for(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    want = Reference(model, catalog).run(tokens)
    worst: dict[str, dict[str, Any]] = {}
    uncompared: dict[str, None] = {}
    with safe_open(file, "pt") as captured:
        there = set(captured.keys())
        for name in filter(there.__contains__, catalog.names):
            point, layer = fold(name), catalog.layer(name)
            if name not in want:
                uncompared[point] = None
                continue
            error = relative_error(name, captured.get_tensor(name), want[name])
            entry = worst.setdefault(point, {"error": -1.0, "layer": layer, "layers": 0})
            entry["layers"] += 1
            if error > entry["error"]:
                entry |= {"error": error, "layer": layer}
    return {"points": worst, "uncompared": list(uncompared)}


if __name__ == "__main__":
    job = json.load(sys.stdin)
    # What libraries print must not mix with the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer.write(json.dumps(check(Path(job["folder"]), Path(job["file"]), job["tokens"])))
    answer.close()
