"""The resident engine as a driver of this process: each forward is a capture query, its tensors come through a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vlens_cli import env, hooks, params
from vlens_cli.daemon import client
from vlens_cli.driver import boot, contract
from vlens_cli.driver.base import LOGITS, Edit, ForwardResult
from vlens_cli.driver.tokens import Tokens
from vlens_cli.errors import UsageError
from vlens_cli.families import catalog_for
from vlens_cli.models import Model
from vlens_cli.query import CaptureQuery, EngineSpec, Interventions, ParamQuery, Prompt, StartQuery


class ResidentDriver:
    """`VLLMDriver`'s `forward`, on an engine that stays when this driver is closed. One new token; noise is drawn here.

    supported_hook_points are those of the catalog: what failed the engine's proof at load is refused when it is asked.
    """

    provides_sequence_logits = True
    non_fireable_hook_points: Mapping[str, str] = {}

    def __init__(self, spec: EngineSpec, found: Model) -> None:
        """Start the engine, or find it. Raises StartError."""
        self.spec = spec
        self.catalog = catalog_for(found.config)
        self.plan = boot.plan(spec, found.config, self.catalog)
        self.architecture: str = found.config["architectures"][0]
        self.supported_hook_points = self.catalog.names
        self._closed = False
        self._ask(StartQuery(), None)

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of this model. Raises PromptError where its folder has none."""
        return Tokens(self.spec.model).tokenizer

    def close(self) -> None:
        """The engine stays, for as long as it was told to."""
        self._closed = True

    def forward(
        self, input_ids: Any, *, capture: Sequence[str] = (), intervene: Mapping[str, Any] | None = None,
        max_new_tokens: int = 1, return_logits: bool = True, attention_mask: Any = None, feed_last: bool = False,
    ) -> ForwardResult:
        """`VLLMDriver.forward`, for one new token that is not fed. Raises UsageError, QueryError."""
        if self._closed:
            raise UsageError("this driver is closed", code="closed")
        if max_new_tokens != 1 or feed_last:
            raise UsageError("a bridge to the resident engine generates one token", hint="open one in this process")
        at = contract.spans(input_ids, attention_mask)
        asked = {name: self._canonical(name) for name in capture}
        names = [*dict.fromkeys([*asked.values(), LOGITS])]
        found = [self._one(span, names, contract.edits(intervene, self.catalog, self._canonical, span, len(span.ids)))
                 for span in at]
        values = {name: contract.put_back([one[name] for one in found], at, 0.0, self.catalog.token_axes(name))
                  for name in {*asked.values()}}
        logits = [one[LOGITS] for one in found]
        return ForwardResult(
            logits=contract.put_back(logits, at, float("-inf")) if return_logits else None,
            captured={name: values[is_] for name, is_ in asked.items()},
            new_tokens=torch.stack([one[-1:].argmax(-1) for one in logits]), raw_output=found,
            rows=tuple(range(span.start, span.start + len(span.ids)) for span in at),
        )

    def get_param(self, name: str) -> torch.Tensor:
        """A whole live weight, by any of its names, on the host. Raises UsageError, QueryError."""
        params.one(name, params.of_model(self.spec.model))
        with tempfile.TemporaryDirectory(prefix="vlens-") as folder:
            out = Path(folder) / "out.safetensors"
            self._ask(ParamQuery((name,), live=True), out)
            return load_file(out)[name]

    def probe_logit_reconstruction(self) -> bool:
        """Whether logits can be rebuilt here: the weights are in the engine."""
        return False

    def _canonical(self, name: str) -> str:
        (found,) = hooks.resolve([hooks.parse(name)], self.catalog)
        return found.name

    def _one(self, span: contract.Span, names: Sequence[str], edits: Sequence[Edit]) -> dict[str, torch.Tensor]:
        """Captured tensors of one prompt."""
        with tempfile.TemporaryDirectory(prefix="vlens-") as folder:
            values = Path(folder) / "values.safetensors"
            expressions, tensors = _expressions(edits, values)
            if tensors:
                save_file(tensors, values)
            query = CaptureQuery((Prompt(tokens=span.ids),), tuple(names), interventions=Interventions(expressions))
            out = Path(folder) / "out.safetensors"
            self._ask(query, out)
            return load_file(out)

    def _ask(self, query: Any, out: Path | None) -> None:
        how = client.Asking(daemon=True, keep_alive=env.seconds(env.keep_alive_text()), timeout=None)
        silent: Callable[[str], None] = lambda text: None  # noqa: E731
        if out is None:
            client.ask(self.spec, query, silent, None, how)
            return
        with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            client.ask(self.spec, query, silent, file, how)


def _expressions(edits: Sequence[Edit], file: Path) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    """Edits in the language of `-i`, and the tensors that they find in `file`."""
    tensors: dict[str, torch.Tensor] = {}
    expressions = []
    for n, edit in enumerate(edits):
        chosen = (("pos", edit.positions), ("head", edit.heads), ("dim", edit.dims))
        where = edit.name + "".join(f"[{axis}={','.join(map(str, of))}]" for axis, of in chosen if of is not None)
        part = edit.value if edit.direction is None else edit.direction
        if isinstance(part, torch.Tensor):
            tensors[f"v{n}"] = part.contiguous()
        reference = f'"{file}":v{n}'
        expressions.append(f"{where} {_change(edit, reference)}")
    return tuple(expressions), tensors


def _change(edit: Edit, ref: str) -> str:
    if edit.direction is not None:
        if abs(edit.along) != 1:
            raise UsageError("a bridge to the resident engine projects with a factor of 1 or -1")
        return f"{'+=' if edit.along > 0 else '-='} proj({ref})"
    value = ref if isinstance(edit.value, torch.Tensor) else repr(float(edit.value or 0.0))
    if edit.keep == 0:
        return f"= {value}"
    return f"*= {edit.keep!r}" if edit.value is None else f"+= {value}"
