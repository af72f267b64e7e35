"""What an edit does, by transformers: the logits of a prompt in whose forward one value was changed.

Each point is changed where transformers' own modules form it. The formula is written out here, with masks over the
whole tensor, and shares nothing with vlens: keep * x + value + along * (x . d / d . d) d at the selected entries.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from reference import Captures, Probe, load, norm_eps, root_mean_square, weighed  # (hides packages, goes offline first)

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


class Editor(Probe):
    """A loaded model whose forward obeys the edits of the running case: what the probe would keep is changed first, in
    place, so that whatever transformers does with the same tensor later sees the change."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.case: list[dict[str, Any]] = []
        self.got: Captures = {}
        super().__init__(model)
        for name in self.norm_sources():
            self._on_norm(name)

    def logits(self, tokens: list[int], case: list[dict[str, Any]]) -> Tensor:
        """[pos, d_vocab]; `got` then has the points that the case edits, after the edit."""
        self.case, self.got, self.captures, self.tokens = case, {}, {}, tokens
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            self._keep("unembed.hook_out", logits)
        return logits[0]

    def _change(self, name: str, x: Tensor) -> None:
        """x [pos, ...], a view of what the model goes on with."""
        for edit in self.case:
            if edit["name"] == name:
                x.copy_(edited(x, edit, self.tensors))
                self.got[name] = x.clone()

    def _keep(self, name: str, value: Tensor, heads: int | None = None) -> None:
        rows = value[0] if value.ndim > 2 else value
        self._change(name, rows if heads is None else rows.unflatten(-1, (heads, -1)))
        super()._keep(name, value, heads)

    def _on_output(self, module: nn.Module, name: str, heads: int | None = None, factor: float = 1.0,
                   head_first: bool = False) -> None:
        """A multiplier that no module has: the value is changed as it will be, and taken back."""
        if factor == 1:
            return super()._on_output(module, name, heads, factor, head_first)

        def hook(_: nn.Module, __: tuple, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            times = value * factor
            self._keep(name, times, heads)
            if name in self.got:
                value.copy_(times / factor)

        module.register_forward_hook(hook)
        return None

    def _on_parts(self, module: nn.Module, split: Any, parts: list[tuple[str, int | None]]) -> None:
        """Parts that lie head by head are no views when they are joined."""
        if not self.tree.by_head:
            return super()._on_parts(module, split, parts)

        def hook(_: nn.Module, __: tuple, output: Tensor) -> None:
            views = output.unflatten(-1, (self.widths.heads, 3, -1)).unbind(-2)
            for (name, heads), view in zip(parts, views, strict=True):
                flat = view.flatten(-2)
                self._keep(name, flat, heads)
                view.copy_(flat.view_as(view))

        module.register_forward_hook(hook)
        return None

    def _hook_mlp(self, i: int) -> None:
        super()._hook_mlp(i)
        if self.has_experts(i):
            self.block(i).get_submodule(self.tree.router).register_forward_hook(lambda _, __, out: self._route(i, *out))

    def _route(self, i: int, logits: Tensor, weights: Tensor, indices: Tensor) -> None:
        """A router module chooses before its hook can change the logits: choose again."""
        if f"blocks.{i}.mlp.hook_router_logits" in self.got:
            shares, chosen = logits.softmax(-1).topk(indices.shape[-1])
            normalized = getattr(self.config, "norm_topk_prob", True)
            weights.copy_(shares / shares.sum(-1, keepdim=True) if normalized else shares)
            indices.copy_(chosen)

    def _on_norm(self, name: str) -> None:
        """A norm's stream before its weight: recomputed from its input where an edit asks for it."""

        def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
            if any(edit["name"] == f"{name}.hook_normalized" for edit in self.case):
                centred = self.centred(args[0])
                normalized = centred / root_mean_square(centred, norm_eps(self.config))
                self._change(f"{name}.hook_normalized", normalized[0] if normalized.ndim > 2 else normalized)
                output.copy_(weighed(self, module, normalized.double()))

        self.norm_module(name).register_forward_hook(hook)

    def _hook_rotation(self) -> None:
        super()._hook_rotation()
        keep = self.modelling.apply_rotary_pos_emb

        def rotate_change_and_keep(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            # Kept by the probe as a copy, which is not what the model goes on with.
            case, self.case = self.case, []
            turned = keep(q, k, *args, **kwargs)
            self.case = case
            for c, t in zip("qk", turned, strict=True):
                if t.shape[-1] == self.widths.d_head:
                    self._change(f"blocks.{self.layer}.attn.hook_rot_{c}", t.transpose(1, 2)[0])
            return turned

        self.modelling.apply_rotary_pos_emb = rotate_change_and_keep


def write(folder: str, tokens: list[int], edits: str, cases: list[list[dict[str, Any]]], out: str, fp64: bool) -> None:
    """A case is a list of edits {"name", "positions", "heads", "dims", "keep", "value", "direction", "along"} (the last four
    as numbers, or as names of tensors in the file `edits`); `out` gets `logits/N` [pos, d_vocab] of each case, and
    `got/N/NAME` of the points that it edits, after the edit. With `fp64` also `exact/N`, the logits of a float64 run."""
    tensors = load_file(edits)
    found: dict[str, Tensor] = {}
    if fp64:
        exact = {key: t.double() for key, t in tensors.items()}
        with closing(Editor(load(Path(folder), torch.float64), exact)) as editor:
            found |= {f"exact/{n}": editor.logits(tokens, case) for n, case in enumerate(cases)}
    with closing(Editor(load(Path(folder), torch.float32), tensors)) as editor:
        for n, case in enumerate(cases):
            found[f"logits/{n}"] = editor.logits(tokens, case)
            found |= {f"got/{n}/{name}": value for name, value in editor.got.items()}
    save_file({key: t.contiguous() for key, t in found.items()}, out)
