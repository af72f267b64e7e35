"""One engine of vLLM with our workers in it: requests on their way in and out, its sleep, its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from vlens_cli.driver import boot, internals, workers
from vlens_cli.driver.base import Captured, Request, Result, Want
from vlens_cli.driver.outlet import Slot
from vlens_cli.driver.quiet import engine_output
from vlens_cli.errors import QueryError, StartError, UsageError
from vlens_cli.families import Catalog
from vlens_cli.query import EngineSpec


class Engine:
    """What a driver stands on: it knows what a request is, and not yet which hook points there are.

    can_sleep, asleep   whether its weights could be moved off a GPU, and whether they are
    """

    def __init__(self, spec: EngineSpec, plan: boot.Plan, catalog: Catalog) -> None:
        """Build it. Raises StartError."""
        self.spec = spec
        self.plan = plan
        self.catalog = catalog
        self._llm = boot.boot(spec, plan)
        self.can_sleep = internals.can_sleep()
        self.asleep = False
        try:
            with boot.translated():
                self._workers = boot.workers(self._llm, spec)
        except BaseException:
            # Nobody has this engine to close it, and what vLLM keeps for the process goes with its last one.
            boot.shut_down(self._llm)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def sleep(self) -> int:
        """Move the weights to the host's memory and drop keys and values, until `wake`; bytes of GPU memory freed.

        Raises UsageError for an engine on a processor.
        """
        if not self.can_sleep:
            raise UsageError("sleep moves weights from a GPU to the host's memory, and this engine runs on a processor",
                             hint="`vlens engine stop` frees its memory", code="cannot_sleep")
        before = internals.free_gpu_bytes()
        self._llm.sleep(level=1)
        self.asleep = True
        return internals.free_gpu_bytes() - before

    def wake(self) -> None:
        """Bring back what `sleep` moved away. Raises StartError where another process has taken the memory."""
        try:
            self._llm.wake_up()
        except Exception as fault:
            # Whatever the allocator raises, the engine's memory is not all there.
            raise StartError(f"the engine did not wake: {boot.one_line(fault)}", code="engine_failed",
                             hint="`vlens engine stop` ends it; the next command starts a new one") from fault
        self.asleep = False

    def end_workers(self) -> None:
        """End worker processes, for a process that is about to end itself; nothing more is answered."""
        if self._llm is not None and not self._workers.local:
            internals.end_workers(self._llm)

    def close(self) -> None:
        """Free the engine, and leave other drivers of this process alone; a second call does nothing."""
        if self._llm is None:
            return
        if not self.died:
            self._call("vlens_drop")
        with engine_output():
            boot.shut_down(self._llm)
        self._llm = None

    def _generate(self, requests: Sequence[Request], keys: list[str]) -> list[Any]:
        for r, key in zip(requests, keys, strict=True):
            self.submit(key, r)
        finished: dict[str, Any] = {}
        while len(finished) < len(keys):
            finished |= self.step()
        return [finished[key] for key in keys]

    def submit(self, key: str, request: Request) -> None:
        """Give the engine a request, under a name of its own."""
        from vllm import SamplingParams

        capture = {name: want.as_json() for name, want in request.capture.items()}
        if request.edits:
            self._call("vlens_edit", key, request.edits)
        if request.slot and self._workers.local:
            self._call("vlens_slot", key, request.slot)
            capture = {}
        elif request.slot:
            # Its files are open in this process alone; rows are reduced on their way into them.
            capture = {name: replace(want, reduce=None).as_json() for name, want in request.slot.wants.items()}
        self._llm.llm_engine.add_request(key, {"prompt_token_ids": list(request.tokens)}, SamplingParams(
            max_tokens=request.max_new_tokens, temperature=0.0, ignore_eos=True, detokenize=False, skip_clone=True,
            logprobs=-1 if request.final_logprobs else None, extra_args={"vlens": {"key": key, "capture": capture}},
        ))

    def step(self) -> dict[str, Any]:
        """One forward of what is in flight; the outputs of those that have ended."""
        return {out.request_id: out for out in self._llm.llm_engine.step() if out.finished}

    def result(self, request: Request, key: str, output: Any) -> Result:
        """What an ended request gave. Raises QueryError where rows or edits are missing."""
        taken = _merged(self._workers.call("vlens_take", key))
        new = tuple(output.outputs[0].token_ids)
        captured = {name: Captured(*pair) for name, pair in taken["values"].items()}
        if request.slot:
            self._into_slot(request.slot, captured)
            captured = {}
            request.slot.check()
        elif missing := request.capture.keys() - captured.keys():
            raise QueryError(f"no rank gave a value of {min(missing)}", code="rows_missing")
        for name, one in captured.items():
            fed = len(request.tokens) + len(new) - 1
            _check_rows(name, one, request.capture[name], fed, self.catalog.token_axis(name))
        for edit, fired in zip(request.edits, taken["fired"], strict=True):
            if not fired:
                raise QueryError(f"an edit of {edit.name} was asked and never applied", code="edit_missing")
        logprobs = self._final_logprobs(output) if request.final_logprobs else None
        return Result(captured, new, taken["chunks"], tuple(taken["fired"]), logprobs)

    def _into_slot(self, slot: Slot, captured: dict[str, Captured]) -> None:
        """What came from workers in other processes; one in this process has sent it while the forward ran."""
        for name, one in captured.items():
            if "pos" in self.catalog.axes(name):
                slot.outlet.put(slot, name, one.positions, one.value)
            else:
                slot.outlet.put_whole(slot, name, one.positions, one.value)

    def _final_logprobs(self, output: Any) -> torch.Tensor:
        """[d_vocab] of the first new token, by the engine's sampler; -inf where it names none."""
        found = output.outputs[0].logprobs[0]
        logprobs = torch.full((self.catalog.dims.d_vocab,), float("-inf"))
        for token, one in found.items():
            if token < len(logprobs):
                logprobs[token] = one.logprob
        return logprobs

    def abandon(self) -> None:
        """Leave nothing of a broken-off batch in the scheduler or in the workers."""
        if self.died:
            return
        internals.abort_all(self._llm)
        self._call("vlens_drop")

    @property
    def died(self) -> bool:
        """Whether the engine has lost a worker process: it answers nothing more."""
        return self._llm is not None and self._workers.died

    def check_alive(self, fault: Exception) -> None:
        """Raises QueryError where the engine has lost a worker process, as `fault` or the engine says."""
        self._workers.check_alive(fault)

    def _call(self, method: str, *args: Any) -> Any:
        """What a method of the workers gives in the pipeline stage that has what is asked."""
        return workers.one(self._workers.call(method, *args))


def _merged(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `vlens_take` of each pipeline stage gave, as one stage would."""
    values = {name: pair for stage in stages for name, pair in stage["values"].items()}
    return {"values": values, "chunks": stages[0]["chunks"], "fired": [max(of) for of in zip(*(s["fired"] for s in stages), strict=True)]}


def _check_rows(name: str, captured: Captured, want: Want, fed: int, axis: int) -> None:
    """The rows must be exactly the asked positions; fewer, more or others are an error, never data."""
    asked = tuple(range(fed)) if want.positions is None else want.positions
    rows = len(asked) if want.reduce is None else 1
    if captured.positions != asked or captured.value.shape[axis : axis + 1] != (rows,):
        raise QueryError(f"{name} gave rows at {spanned(captured.positions)} where {spanned(asked)} were asked",
                         code="rows_missing")


def spanned(positions: tuple[int, ...]) -> str:
    return f"{len(positions)} positions {positions[0]}..{positions[-1]}" if positions else "no position"
