"""The unembedding of the live model, in the worker: rows of the stream -> logits.

`logits` are the engine's own (`compute_logits`); `directions` and `head_parts` are what explains them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vlens_cli.driver import internals
from vlens_cli.driver.locate import Locator

# Rows unembedded at once: 256 x 150,000 fp32 logits are 150 MB.
UNEMBED_ROWS = 256
# Columns of the unembedding that are cast to float32 at once.
REBUILD_COLUMNS = 16384


class Unembedding:
    """The end of one model: final norm, unembedding, softcap, scale."""

    def __init__(self, model: torch.nn.Module, locator: Locator) -> None:
        self._model = model
        self._locator = locator
        self._ranks = locator.ranks
        self._d_vocab = locator.catalog.dims.d_vocab
        self._head: internals.Head | None = None
        self._rebuild_error = float("inf")

    def watch(self) -> None:
        """Learn at the next forward what the engine unembeds with, and keep its logits for the proof."""
        self._handle = self._locator.module("logits").register_forward_hook(self._learn, with_kwargs=True)

    def _learn(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        self.learn(module, args, kwargs)
        self._seen = output[:, : self._d_vocab].clone()

    def learn(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take from a call of the module that forms the logits what the engine unembeds with."""
        self._head = internals.unembedding(module, args, kwargs)
        numbers = [n for n in (self._head.softcap, self._head.scale) if n is not None]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"the engine's softcap and scale of logits are not finite: {numbers}")

    def seen(self) -> torch.Tensor:
        """The logits [rows, d_vocab] that the watched forward gave."""
        self._handle.remove()
        seen, self._seen = self._seen, None
        return seen

    @torch.inference_mode()
    def norm(self, rows: torch.Tensor) -> torch.Tensor:
        """The final norm of rows of the stream; vLLM's norms write in place, hence the copy."""
        out = self._locator.module("ln_final")(rows.clone())
        return out[0] if isinstance(out, tuple) else out

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, d_vocab] logits of a few final-norm rows, by the engine's own unembedding."""
        logits = self._model.compute_logits(rows)[:, : self._d_vocab]
        return self._widened(logits)

    def _widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Up to the model's vocabulary: a token that the unembedding lacks cannot come."""
        missing = self._d_vocab - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits

    @torch.inference_mode()
    def rebuilt(self, rows: torch.Tensor) -> torch.Tensor:
        """The same from the weights, in float32: rows @ unembedding + bias, softcap, then scale, cut to the vocabulary."""
        head, rows = self._head, rows.float()
        pieces = [rows @ piece.float().T for piece in head.weight.split(REBUILD_COLUMNS)]
        logits = torch.cat(pieces, dim=1)
        if head.bias is not None:
            logits = logits + head.bias.float()
        logits = self._ranks.joined(logits)[:, : self._d_vocab]
        if head.softcap:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return self._widened(logits * head.scale)

    def check(self, rows: torch.Tensor | None, seen: torch.Tensor) -> None:
        """Compare the rebuilt logits of the watched forward's last final-norm row with the engine's own."""
        got = self.rebuilt(rows[-1:]) if rows is not None and self._head is not None else None
        largest = seen.abs().max()
        self._rebuild_error = float("inf") if got is None else float((got - seen[-1:]).abs().max() / largest)

    def end(self) -> dict[str, Any]:
        """What follows the unembedding (softcap, scale), and how far the rebuilt logits are from the engine's, relative to
        the largest."""
        return {"softcap": self._head and self._head.softcap, "scale": self._head and self._head.scale,
                "rebuild_error": self._rebuild_error}

    @torch.inference_mode()
    def directions(self, ids: list[int]) -> dict[str, Any]:
        """What the logits of some tokens are products with, in float32 on the host; n tokens.

        unembed [n, d_model], bias [n]     of the unembedding: logit = scale * softcap(final-norm row . unembed + bias)
        weight [n, d_model], constant [n]  the same with the final norm drawn in: row of the stream . weight / divisor
                                           + constant, where a norm that centres has centred the weight instead
        softcap, scale                     what follows
        """
        head, d_model = self._head, self._locator.catalog.dims.d_model
        rows = self._ranks.rows_of(head.weight, ids)
        bias = torch.zeros(len(ids)) if head.bias is None else self._ranks.rows_of(head.bias, ids)
        weight, shift = self._norm_affine(d_model)
        drawn_in = rows * weight
        if self._locator.catalog.spec.norm == "layer":
            drawn_in = drawn_in - drawn_in.mean(1, keepdim=True)
        return {"unembed": rows.cpu(), "bias": bias.cpu(), "weight": drawn_in.cpu(),
                "constant": (rows @ shift).cpu() + bias.cpu(), "softcap": head.softcap, "scale": head.scale}

    def _norm_affine(self, d_model: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the final norm multiplies each normalized entry with, and adds to it: [d_model] each."""
        norm, kind = self._locator.module("ln_final"), self._locator.catalog.spec.norm
        ones = torch.ones(d_model, device=self._head.weight.device)
        shift = internals.norm_affine(norm, 0 * ones, kind)
        return internals.norm_affine(norm, ones, kind) - shift, shift

    @torch.inference_mode()
    def head_parts(self, layer: int, z: torch.Tensor, against: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each head's output through its columns of the output projection, times a row: z [pos, head, d_head] and
        `against` [n, pos, d_model] -> heads [n, pos, head], and what the projection's bias gives: bias [n, pos]."""
        o = self._locator.module("o", layer)
        heads = z.shape[1]
        # Row h of a position holds head h alone.
        alone = torch.diag_embed(z.transpose(1, 2)).permute(0, 3, 2, 1).reshape(len(z) * heads, -1)
        bias = self._ranks.linear(o, torch.zeros_like(alone[:1])).float()
        out = self._ranks.linear(o, alone).float().view(len(z), heads, -1) - bias
        against = against.to(out.device)
        return {"heads": torch.einsum("rhd,nrd->nrh", out, against).cpu(),
                "bias": torch.einsum("d,nrd->nr", bias[0], against).cpu()}
