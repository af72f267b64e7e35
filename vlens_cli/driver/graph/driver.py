"""`CompiledDriver`: a `VLLMDriver` whose engine runs compiled graphs, with some hook points built in."""

from __future__ import annotations

import uuid
from collections.abc import Sequence


from vlens_cli.driver import boot
from vlens_cli.driver.base import LOGITS, Edit, Request, Want
from vlens_cli.driver.graph import limits
from vlens_cli.driver.vllm_driver import VLLMDriver
from vlens_cli.errors import LOG_HINT, StartError
from vlens_cli.families import Catalog
from vlens_cli.query import EngineSpec

# Decode steps run other graphs than prefill does.
PROOF_STEPS = 3


def driver_for(spec: EngineSpec, plan: boot.Plan, catalog: Catalog) -> VLLMDriver:
    """The driver that a plan asks for, its engine started and its points proved. Raises StartError."""
    return (VLLMDriver if plan.built is None else CompiledDriver)(spec, plan, catalog)


class CompiledDriver(VLLMDriver):
    """Its points are those of `plan.built`, what is rebuilt from them, and the logits where the final norm's output is
    among them; every other is refused."""

    @property
    def room(self) -> tuple[int, int]:
        """Bytes for captured rows of one step, and for edits."""
        return limits.room(self.plan)

    def needs(self, request: Request) -> tuple[int, int]:
        return limits.needs(request, self.catalog, self.plan)

    def _check(self, request: Request) -> None:
        super()._check(request)
        limits.check(request, self.catalog, self.plan)

    def _prove(self, points: list[str]) -> dict[str, str]:
        """One request of a few tokens and decode steps, every built point captured, against the model without its graph."""
        self.buffer_bytes = self._call("vlens_graph_bytes")
        tokens = self._proof_tokens()
        steps = min(PROOF_STEPS, self.plan.max_len - len(tokens) + 1)
        key = uuid.uuid4().hex
        with boot.translated():
            self._call("vlens_graph_samples", True)
            (out,) = self._generate([Request(tokens, dict.fromkeys(self._read(points), Want()), steps)], [key])
            refused = self._call("vlens_graph_prove", key, (*tokens, *out.outputs[0].token_ids[:-1]), len(tokens))
        if not set(points) - refused.keys():
            raise StartError(f"no hook point of this model passed the proof at load: {next(iter(refused.values()))}",
                             hint=f"without --compile the engine is eager; {LOG_HINT}", code="proof_failed")
        absent = {name: limits.missing(name, self.catalog) for name in self.catalog.names if name not in points}
        return {**refused, **absent}

    def _prove_writes(self) -> dict[str, str]:
        """A request for each editable point that sets it alone: the engine's logits must follow."""
        editable = {n: limits.why_not_edited(self.catalog.row(n)) for n in self.supported_hook_points
                    if self.catalog.editable(n)}
        proved = set()
        edits = [self._noise(name) for name, why in editable.items() if not why]
        while edits:
            requests = [Request(self._proof_tokens(), edits=(edit,)) for edit in edits]
            requests = requests[: limits.fitting(map(self.needs, requests), self.plan)]
            proved |= self._obeyed(requests)
            edits = edits[len(requests) :]
        self._call("vlens_graph_samples", False)
        return {
            **{n: "it is formed for you, and nothing in the engine follows from it" for n in self.catalog.names
               if not self.catalog.editable(n)},
            **{n: why or "the proof at load did not see what comes after it obey" for n, why in editable.items()
               if n not in proved},
            **self.non_fireable_hook_points,
        }

    def _obeyed(self, requests: Sequence[Request]) -> set[str]:
        keys = [uuid.uuid4().hex for _ in requests]
        edits = [request.edits[0] for request in requests]
        with boot.translated():
            outputs = self._generate(requests, keys)
            proved = set(self._call("vlens_graph_prove_writes", keys, edits, requests[0].tokens))
        # The logits are set outside the graph, and the engine samples from them.
        return proved | {LOGITS for edit, out in zip(edits, outputs, strict=True)
                         if edit.name == LOGITS and out.outputs[0].token_ids[0] == int(edit.value[-1].argmax())}

    def _noise(self, name: str) -> Edit:
        (edit,) = self._set_all([name], len(self._proof_tokens()))
        return edit
