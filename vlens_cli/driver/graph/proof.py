"""The proof at load of a compiled engine, in the worker: the graph against the same modules run one by one.

The model's own forward runs once without its graph, eager hooks at every point, attention stood in for by the formula
that eager engines are proved with. The identities of the family prove those values (proof.py); what the graph gave for
the same tokens, in prefill and in decode steps, must equal them. An edit in the graph must move the engine's own logits
to where the same edit moves them there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vlens_cli.driver import internals
from vlens_cli.driver.base import LOGITS, Edit, Want
from vlens_cli.driver.graph.limits import FINAL
from vlens_cli.driver.graph.taps import GraphTaps
from vlens_cli.driver.locate import Locator
from vlens_cli.driver.proof import TOLERANCE, Proof
from vlens_cli.driver.replay import Replay, attend, variant
from vlens_cli.driver.taps import Taps
from vlens_cli.driver.unembed import UNEMBED_ROWS, Unembedding

REQUEST = "reference"
# An edit that moves the logits less than this many tolerances proves nothing.
LEAST_EFFECT = 4


class GraphProof:
    """Runs the reference of one engine. `config` is vLLM's."""

    def __init__(self, model: torch.nn.Module, locator: Locator, taps: GraphTaps, unembedding: Unembedding, config: Any,
                 device: torch.device) -> None:
        self._model, self._locator, self._taps, self._device = model, locator, taps, device
        self._unembedding, self._config = unembedding, config
        self._values: dict[str, torch.Tensor] = {}
        self._tokens: tuple[int, ...] = ()

    def verdict(self, values: dict[str, torch.Tensor], logits: torch.Tensor, tokens: Sequence[int], n_prompt: int
                ) -> dict[str, str]:
        """Refused names -> reasons. `values` are the graph's, of `tokens`, of which the first `n_prompt` were prefilled;
        `logits` are the engine's own after the last."""
        self._tokens = tuple(tokens)
        self._values, _ = self.reference(tokens)
        if self.final is not None:
            self._values[LOGITS] = torch.cat([self._unembedding.logits(rows) for rows in self.final.split(UNEMBED_ROWS)])
        proof = Proof(self._locator, self._taps.located, self._values, logits, tokens)
        refused = {name: why for name, why in proof.verdict().items() if name in self._taps.points}
        for name, got in values.items():
            for step, rows in (("", slice(None, n_prompt)), (" of generated tokens", slice(n_prompt, None))):
                if name in self._values and (error := relative(got[rows], self._values[name][rows])) > _limit(got.dtype):
                    refused[name] = (f"failed the proof at load: in the graph its rows{step} are off by {error:.1e} (limit "
                                     f"{_limit(got.dtype):.0e})")
        return refused

    @property
    def final(self) -> torch.Tensor | None:
        """The reference's output of the final norm."""
        return self._values.get(FINAL)

    @torch.inference_mode()
    def obeyed(self, edits: Sequence[Edit], sampled: Sequence[torch.Tensor], tokens: Sequence[int]) -> list[str]:
        """Of single edits, the names of those that moved the engine's logits of the last prompt token as they should."""
        plain = self._logits(tokens, None)
        found = []
        for edit, got, want in zip(edits, sampled, self._edited(edits, tokens), strict=True):
            limit = _limit(got.dtype)
            moved = relative(want, plain)
            if relative(got, want) <= min(limit, moved / LEAST_EFFECT):
                found.append(edit.name)
        return found

    def _edited(self, edits: Sequence[Edit], tokens: Sequence[int]) -> list[torch.Tensor]:
        """Logits [d_vocab] after the last token under each of the edits: in one run of the blocks for all, where that can
        be done, else each by a forward of its own."""
        layers = {edit.name: self._locator.catalog.layer(edit.name) for edit in edits}
        inside = [edit for edit in edits if layers[edit.name] is not None]
        try:
            replay = Replay(self._unembedding, self._locator, self._taps.located, self._config, self._device)
            stream = self._values["blocks.0.hook_resid_pre"][: len(tokens)]
            rows = replay.run(stream, [variant((edit,), layers) for edit in inside])[1:]
            replayed = {id(edit): row for edit, row in zip(inside, rows, strict=True)}
        except (LookupError, TypeError):
            replayed = {}
        return [replayed[id(edit)] if id(edit) in replayed else self._logits(tokens, edit) for edit in edits]

    def _logits(self, tokens: Sequence[int], edit: Edit | None) -> torch.Tensor:
        return self.reference(tokens, () if edit is None else (edit,), read=False)[1]

    @torch.inference_mode()
    def reference(self, tokens: Sequence[int], edits: Sequence[Edit] = (), read: bool = True
                  ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """(values of every located point [pos, ...] on the device, logits [d_vocab] after the last token) of the model
        without its graph. Raises LookupError where the model cannot be run so."""
        segment = internals.Segment(REQUEST, 0, len(tokens), 0)
        taps = Taps(lambda: [segment], self._taps.located, self._locator.module("logits"), self._device)
        names = [name for name, point in self._taps.located.items() if not point.of and point.row.derive != "unembed"]
        taps.open(REQUEST, REQUEST, dict.fromkeys(names if read else (), Want()), edits)
        ids = torch.tensor(list(tokens), device=self._device)
        positions = torch.arange(len(tokens), device=self._device)
        try:
            taps.begin_step()
            with internals.uncompiled(self._model), internals.forward_context(self._config), self._standing_in():
                hidden = self._model(input_ids=ids, positions=positions)
            taps.end_step({REQUEST: len(tokens)})
            taps.raise_fault()
            logits = self._unembedding.logits(hidden[-1:])[0]
            return {name: torch.cat([rows for _, rows in pieces]) for name, pieces in taps.take(REQUEST).pieces.items()}, logits
        finally:
            taps.drop_all()

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Within, every attention layer attends over the rows that it is given, without the engine's cache."""
        with contextlib.ExitStack() as stack:
            for i in range(self._locator.catalog.n_layers):
                module = self._locator.module("attention", i)
                module.forward = _attention(module)
                stack.callback(delattr, module, "forward")
            yield


def _attention(module: torch.nn.Module) -> Any:
    heads, kv_heads, width = internals.attention_heads(module)
    scoring = internals.attention_scoring(module)

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q = query.view(-1, heads, width)
        k, v = (t.view(len(q), kv_heads, -1) for t in (key, value))
        out = attend(q[None], k[None], v[None], scoring, 0)[0]
        return out.flatten(1) if query.ndim == 2 else out

    return forward


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; infinite where shapes or values are off."""
    if got.shape != want.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    got, want = got.double(), want.double()
    error = float((got - want).norm() / want.norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def _limit(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE[torch.float32])
