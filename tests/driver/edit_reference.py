#!/usr/bin/env python3
"""What an edit does, by transformers: the logits of a prompt in whose forward one value was changed.

    edit_reference.py JOB.json          {"folder", "tokens": [...], "edits": FILE.safetensors, "cases": [...], "out"}

A case is a list of edits {"name", "positions", "heads", "dims", "keep", "value", "direction", "along"} (the last four as
numbers, or as names of tensors in the file); `out` gets `logits/N` [pos, d_vocab] of each case, and `got/N/NAME` of the
points that it edits, after the edit. With "fp64" also `exact/N`, the logits of a float64 run.

Each point is changed where transformers' own modules form it. The formula is written out here, with masks over the
whole tensor, and shares nothing with vlens: keep * x + value + along * (x . d / d . d) d at the selected entries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference import TREES, Widths, load  # noqa: F401  (hides packages and goes offline first)

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402


def edited(x: Tensor, edit: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """x [pos, ...] -> the same shape; entries that the edit does not select are as they were."""
    keep, value, direction = (tensors[part] if isinstance(part, str) else part
                              for part in (edit["keep"], edit["value"], edit["direction"]))
    chosen = [list(range(n)) for n in x.shape]
    for axis, key in ((0, "positions"), (1 if x.ndim == 3 else None, "heads"), (x.ndim - 1, "dims")):
        if axis is not None and edit[key] is not None:
            chosen[axis] = edit[key]
    index = torch.meshgrid(*map(torch.tensor, chosen), indexing="ij")
    part = x[index]
    new = part * keep + (0 if value is None else value)
    if direction is not None:
        new = new + edit["along"] * (part * direction).sum(-1, keepdim=True) / direction.square().sum() * direction
    out = x.clone()
    out[index] = new.to(x.dtype)
    return out


class Editor:
    """A loaded model whose forward obeys the edits of the running case."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.model, self.tensors = model, tensors
        self.tree, self.widths = TREES[model.config.model_type], Widths.of(model.config)
        self.case: list[dict[str, Any]] = []
        self.got: dict[str, Tensor] = {}
        self.layer = 0
        self._hook_all()

    def run(self, tokens: list[int], case: list[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        self.case, self.got = case, {}
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return self._change("unembed.hook_out", logits)[0], self.got

    def close(self) -> None:
        """Put the modelling module back as it was."""
        self.modelling.apply_rotary_pos_emb = self.rotate
        self.modelling.torch = torch

    def _change(self, name: str, x: Tensor, heads: int | None = None) -> Tensor:
        """x [1, pos, width], its last axis split into heads where they are given."""
        mine = [edit for edit in self.case if edit["name"] == name]
        if not mine:
            return x
        flat = x[0] if heads is None else x[0].unflatten(-1, (heads, -1))
        for edit in mine:
            flat = edited(flat, edit, self.tensors)
        self.got[name] = flat.clone()
        return flat.reshape(x.shape)

    def _on_output(self, path: str, name: str, heads: int | None = None) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (self._change(name, output[0], heads), *output[1:])
            return self._change(name, output, heads)

        self.model.get_submodule(path).register_forward_hook(hook)

    def _on_parts(self, path: str, parts: list[tuple[str, int, int | None]]) -> None:
        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            pieces = output.split([width for _, width, _ in parts], dim=-1)
            return torch.cat([self._change(n, p, heads) for (n, _, heads), p in zip(parts, pieces, strict=True)], -1)

        self.model.get_submodule(path).register_forward_hook(hook)

    def _on_input(self, path: str, name: str, heads: int | None = None, in_place: bool = False) -> None:
        """`in_place` for a stream that transformers also keeps under another name, to be added to later."""

        def hook(_: nn.Module, args: tuple, kwargs: dict) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            new = self._change(name, x, heads)
            if in_place:
                x.copy_(new)
                return None
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

        self.model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def _on_norm(self, path: str, name: str) -> None:
        """A norm's stream before its weight: recomputed from its input where an edit asks for it."""

        def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            if not any(edit["name"] == name for edit in self.case):
                return output
            x = args[0]
            normalized = x / (x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).sqrt()
            return (module.weight * self._change(name, normalized)).to(output.dtype)

        self.model.get_submodule(path).register_forward_hook(hook)

    def _hook_all(self) -> None:
        self._on_output(self.tree.embed, "hook_embed")
        for i in range(self.widths.layers):
            self._hook_block(i)
        self._on_norm(self.tree.final_norm, "ln_final.hook_normalized")
        self._hook_rotation()

    def _hook_block(self, i: int) -> None:
        tree, w, at, block = self.tree, self.widths, f"blocks.{i}", f"{self.tree.layers}.{i}"
        self._on_input(block, f"{at}.hook_resid_pre", in_place=True)
        self._on_norm(f"{block}.{tree.ln1}", f"{at}.ln1.hook_normalized")
        heads = {"q": w.heads, "k": w.kv_heads, "v": w.kv_heads}
        if tree.qkv:
            self._on_parts(f"{block}.{tree.qkv}", [(f"{at}.attn.hook_{c}", width, heads[c])
                                                  for c, width in zip("qkv", w.qkv_parts, strict=True)])
        else:
            for c in "qkv":
                self._on_output(f"{block}.{getattr(tree, c)}", f"{at}.attn.hook_{c}", heads[c])
        self._on_input(f"{block}.{tree.o}", f"{at}.attn.hook_z", w.heads)
        self._on_output(f"{block}.{tree.attention}", f"{at}.hook_attn_out")
        self._on_input(f"{block}.{tree.ln2}", f"{at}.hook_resid_mid", in_place=True)
        self._on_norm(f"{block}.{tree.ln2}", f"{at}.ln2.hook_normalized")
        pre, linear = f"{at}.mlp.hook_pre", f"{at}.mlp.hook_pre_linear"
        if tree.gate_up:
            self._on_parts(f"{block}.{tree.gate_up}", [(pre, w.d_mlp, None), (linear, w.d_mlp, None)])
        else:
            self._on_output(f"{block}.{tree.gate}", pre)
            self._on_output(f"{block}.{tree.up}", linear)
        self._on_input(f"{block}.{tree.down}", f"{at}.mlp.hook_post")
        self._on_output(f"{block}.{tree.mlp}", f"{at}.hook_mlp_out")
        self._on_output(block, f"{at}.hook_resid_post")

    def _hook_rotation(self) -> None:
        modelling = self.modelling = sys.modules[type(self.model).__module__]
        rotate: Callable[..., tuple[Tensor, Tensor]] = modelling.apply_rotary_pos_emb
        self.rotate = rotate

        def rotate_and_change(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            turned = zip(("rot_q", "rot_k"), rotate(q, k, *args, **kwargs), strict=True)
            q, k = (self._change(f"blocks.{self.layer}.attn.hook_{n}", t.transpose(1, 2).flatten(2), t.shape[1])
                    .unflatten(-1, (t.shape[1], -1)).transpose(1, 2) for n, t in turned)
            return q, k

        modelling.apply_rotary_pos_emb = rotate_and_change
        for i in range(self.widths.layers):
            attention = self.model.get_submodule(f"{self.tree.layers}.{i}.{self.tree.attention}")
            attention.register_forward_pre_hook(lambda *_, i=i: setattr(self, "layer", i))


def main(job: dict[str, Any]) -> None:
    tensors = load_file(job["edits"])
    out: dict[str, Tensor] = {}
    if job["fp64"]:
        exact = Editor(load(Path(job["folder"]), torch.float64), {key: t.double() for key, t in tensors.items()})
        out |= {f"exact/{n}": exact.run(job["tokens"], case)[0] for n, case in enumerate(job["cases"])}
        exact.close()
    editor = Editor(load(Path(job["folder"]), torch.float32), tensors)
    for n, case in enumerate(job["cases"]):
        out[f"logits/{n}"], got = editor.run(job["tokens"], case)
        out |= {f"got/{n}/{name}": value for name, value in got.items()}
    save_file({key: t.contiguous() for key, t in out.items()}, job["out"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
