"""`VLLMDriver`: one model in vLLM, in this process."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from vlens_cli import hooks, params
from vlens_cli.driver import boot, internals
from vlens_cli.driver.base import LOGITS, Captured, Edit, ForwardResult, Request, Result, Want
from vlens_cli.driver.gather import Sharding
from vlens_cli.driver.proof import PROOF_TOKENS, WRITTEN_TOGETHER
from vlens_cli.driver.tokens import Tokens
from vlens_cli.driver.unembed import UNEMBED_ROWS
from vlens_cli.driver.weights import LiveWeights
from vlens_cli.errors import LOG_HINT, HookError, QueryError, StartError, UsageError, VlensError
from vlens_cli.families import Catalog
from vlens_cli.query import EngineSpec

# Other queries run between two batches of one, so a batch is about as long as they may be kept waiting; fewer tokens
# than these do not fill a processor.
BATCH_SECONDS = 1.0
LEAST_BATCH = 512


class VLLMDriver:
    """Runs forwards of one model and reads inside them.

    supported_hook_points        canonical names that the proof at load has passed, in the order of the forward
    non_fireable_hook_points     other names of the catalog -> why they are refused
    non_editable_hook_points     names that can be read, or not even that -> why they cannot be changed
    provides_sequence_logits     logits of every position, not only the last
    """

    provides_sequence_logits = True

    def __init__(self, spec: EngineSpec, plan: boot.Plan, catalog: Catalog) -> None:
        """Build the engine and prove its points. Raises StartError."""
        self.spec = spec
        self.plan = plan
        self.catalog = catalog
        self._rate = 0.0
        self._llm = boot.boot(spec, plan)
        with boot.translated():
            located = self._call("vlens_points")
        self.non_fireable_hook_points: dict[str, str] = {**located["refused"], **self._prove(located["points"])}
        self.supported_hook_points = tuple(n for n in catalog.names if n not in self.non_fireable_hook_points)
        self.non_editable_hook_points = self._prove_writes()

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of this model. Raises StartError where its folder has none."""
        return Tokens(self.spec.model).tokenizer

    def __enter__(self) -> VLLMDriver:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def supports(self, feature: str) -> bool:
        return feature in {"capture", "batch", "sequence_logits"}

    def run(
        self, requests: Sequence[Request], cancelled: Callable[[], bool] = lambda: False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """All requests, in batches of about a second; results in their order.

        `cancelled` is asked between two steps of the engine, `between` is called between two batches, when no request
        is in flight: it may run others. Raises UsageError before the forward for what this model cannot do,
        QueryError after it.
        """
        for request in requests:
            self._check(request)
        results: list[Result] = []
        while len(results) < len(requests):
            if results:
                between()
            results += self._run_batch(self._batch(requests[len(results) :]), cancelled)
        return results

    def unembed(self, final: Captured, edits: Sequence[Edit] = ()) -> Iterator[torch.Tensor]:
        """Logits of one request's captured final-norm rows, after its `edits` of the logits: pieces [a few hundred,
        d_vocab] on the engine's device, in order."""
        edits = tuple(edit for edit in edits if edit.name == LOGITS)
        for n, piece in enumerate(final.value.split(UNEMBED_ROWS)):
            yield self._call("vlens_unembed", piece, final.positions[n * UNEMBED_ROWS :][: len(piece)], edits)

    def lens(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of rows of the stream [rows, d_model], through the engine's final norm of each: pieces as `unembed`'s."""
        for piece in rows.split(UNEMBED_ROWS):
            yield self._call("vlens_lens", piece)

    def directions(self, ids: list[int]) -> dict[str, Any]:
        """What the logits of some tokens are products with: see `Unembedding.directions`."""
        return self._call("vlens_directions", ids)

    def head_parts(self, layer: int, z: torch.Tensor, against: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each head of a layer adds along some rows: see `Unembedding.head_parts`."""
        return self._call("vlens_head_parts", layer, z, against)

    def _batch(self, requests: Sequence[Request]) -> Sequence[Request]:
        """As many of the first requests as the engine does in about a second, one at least."""
        tokens = list(accumulate(len(r.tokens) + r.max_new_tokens for r in requests))
        return requests[: max(1, bisect_right(tokens, max(LEAST_BATCH, self._rate * BATCH_SECONDS)))]

    def _run_batch(self, requests: Sequence[Request], cancelled: Callable[[], bool]) -> list[Result]:
        keys = [uuid.uuid4().hex for _ in requests]
        began = time.monotonic()
        try:
            outputs = self._generate(requests, keys, cancelled)
            results = [self._result(r, key, out) for r, key, out in zip(requests, keys, outputs, strict=True)]
        except VlensError:
            self._abandon()
            raise
        except Exception as fault:
            # The seam: whatever vLLM, torch or a tap raised in the middle of an accepted query.
            self._abandon()
            raise QueryError(f"the forward failed: {type(fault).__name__}: {boot.one_line(fault)}",
                             hint=LOG_HINT) from fault
        except BaseException:
            self._abandon()
            raise
        fed = sum(len(r.tokens) + r.max_new_tokens for r in requests)
        if fed >= LEAST_BATCH:
            self._rate = fed / (time.monotonic() - began)
        return results

    def forward(
        self,
        input_ids: Any,
        *,
        capture: Sequence[str] = (),
        intervene: dict[str, Any] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        attention_mask: Any = None,
    ) -> ForwardResult:
        """TransformerLens' `Driver.forward`: token ids [pos], [batch, pos] or a ragged list of lists.

        `capture` names hook points, one each, by any of their names, which are the keys of what comes back; tensors
        keep a batch axis, right-padded (captures 0, logits -inf).
        Raises UsageError for what this version does not do (edits, masks) and for unknown names.
        """
        if intervene or attention_mask is not None:
            raise UsageError("this version of the driver takes no interventions and no attention mask")
        asked = {name: self._canonical(name) for name in capture}
        names = dict.fromkeys([*asked.values(), *([LOGITS] if return_logits else [])], Want())
        prompts = _ragged(input_ids)
        results = self.run([Request(ids, names, max_new_tokens) for ids in prompts])
        captured = {name: _padded([r.captured[is_].value for r in results], 0.0) for name, is_ in asked.items()}
        logits = _padded([r.captured[LOGITS].value for r in results], float("-inf")) if return_logits else None
        new = torch.nn.utils.rnn.pad_sequence([torch.tensor(r.new_tokens) for r in results], batch_first=True)
        return ForwardResult(logits, captured, new, results)

    def get_param(self, name: str) -> torch.Tensor:
        """TransformerLens' `Driver.get_param`: a live weight, by any of its names, without selectors.

        Raises UsageError for an unknown name, with near ones.
        """
        weights = params.of_model(self.spec.model)
        (param,) = params.resolve([params.ParamRequest(name, name)], weights)
        return self.weights(weights).tensor(param).clone()

    def weights(self, names: params.Weights) -> LiveWeights:
        """The engine's weights, under the names of its model."""
        return LiveWeights(names, self._fetch)

    def _fetch(self, path: str, attribute: str) -> list[tuple[torch.Tensor, Sharding]]:
        """A parameter's shards. Raises QueryError where the engine does not give it."""
        found = self._call("vlens_weight", path, attribute)
        if isinstance(found, str):
            raise QueryError(f"{path}.{attribute}: {found}", hint="--from checkpoint", code="not_in_engine")
        return [found]

    def close(self) -> None:
        """Free the engine; a second call does nothing."""
        if self._llm is None:
            return
        self._call("vlens_drop")
        boot.shut_down(self._llm)
        self._llm = None

    def _prove(self, points: list[str]) -> dict[str, str]:
        """One short forward with every point captured, checked in the worker; refused names -> reasons."""
        tokens = self._proof_tokens()
        key = uuid.uuid4().hex
        self._call("vlens_watch_logits")
        with boot.translated():
            self._generate([Request(tokens, dict.fromkeys(points, Want()))], [key])
            refused = self._call("vlens_prove", key, tokens)
        if len(refused) == len(self.catalog.names):
            raise StartError(f"no hook point of this model passed the proof at load: {next(iter(refused.values()))}",
                             hint="`vlens hooks` lists the families that this version reads", code="proof_failed")
        return refused

    def _prove_writes(self) -> dict[str, str]:
        """Set every editable point to values of its own, neighbours in different forwards, and see in the worker that
        the points after them obey; names that cannot be edited -> reasons."""
        editable = [n for n in self.supported_hook_points if self.catalog.editable(n)]
        tokens = self._proof_tokens()
        requests = [Request(tokens, dict.fromkeys(self.supported_hook_points, Want()), edits=self._set_all(names, len(tokens)))
                    for group in WRITTEN_TOGETHER
                    if (names := [n for n in editable if n.endswith(tuple(group))])]
        keys = [uuid.uuid4().hex for _ in requests]
        with boot.translated():
            outputs = self._generate(requests, keys)
            proved = {name for key in keys for name in self._call("vlens_prove_writes", key)}
        for request, out in zip(requests, outputs, strict=True):
            for edit in request.edits:
                if edit.name == LOGITS and out.outputs[0].token_ids[0] != int(edit.value[-1].argmax()):
                    proved.discard(LOGITS)
        return {
            **{n: "it is formed for you, and nothing in the engine follows from it" for n in self.catalog.names
               if not self.catalog.editable(n)},
            **{n: "the proof at load did not see what comes after it obey" for n in editable if n not in proved},
            **self.non_fireable_hook_points,
        }

    def _set_all(self, names: Sequence[str], rows: int) -> tuple[Edit, ...]:
        """An edit a name that sets `rows` positions to normal noise, in the engine's dtype."""
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, self.plan.dtype)
        shapes = ([rows, *(self.catalog.size(axis) for axis in self.catalog.axes(n)[1:])] for n in names)
        return tuple(Edit(n, tuple(range(rows)), keep=0.0, value=torch.randn(shape, generator=generator).to(dtype))
                     for n, shape in zip(names, shapes, strict=True))

    def _proof_tokens(self) -> tuple[int, ...]:
        return _proof_tokens(self.catalog.dims.d_vocab, min(PROOF_TOKENS, self.plan.max_len, self.plan.chunk))

    def _canonical(self, name: str) -> str:
        """Raises HookError, with near names, the range of layers or the reason of a refusal."""
        found = hooks.resolve([hooks.parse(name)], self.catalog)
        if len(found) > 1 or found[0] != hooks.Selected(found[0].name, None, None, None):
            raise UsageError(f"forward captures single hook points, without patterns and brackets: {name}",
                             hint="one name each: [f'blocks.{i}.hook_resid_post' for i in range(4)]")
        return found[0].name


    def _check(self, request: Request) -> None:
        if self._llm is None:
            raise UsageError("this driver is closed", code="closed")
        boot.check_tokens(request.tokens, self.catalog.dims.d_vocab, self.plan, request.max_new_tokens)
        for edit in request.edits:
            self._check_edit(edit, len(request.tokens) + request.max_new_tokens - 1)
        for name in request.capture:
            if name in self.non_fireable_hook_points:
                raise HookError(f"{name} is refused: {self.non_fireable_hook_points[name]}", code="hook_refused")
            if name not in self.catalog.points:
                raise HookError(f"no such hook point in this model: {name}")

    def _check_edit(self, edit: Edit, fed: int) -> None:
        """Raises UsageError, before the forward, for what would not be applied as it was meant."""
        if edit.name in self.non_editable_hook_points:
            raise HookError(f"{edit.name} cannot be edited: {self.non_editable_hook_points[edit.name]}", code="not_editable")
        sizes = [self.catalog.size(axis) for axis in self.catalog.axes(edit.name)[1:]]
        if edit.heads is not None and len(sizes) < 2:
            raise HookError(f"{edit.name} has no heads", code="no_heads")
        _check_indices(edit, edit.positions, fed, "position")
        _check_indices(edit, edit.heads, sizes[0], "head")
        _check_indices(edit, edit.dims, sizes[-1], "dim")
        row = [len(edit.dims) if edit.dims is not None else sizes[-1]]
        row = [len(edit.heads) if edit.heads is not None else sizes[0], *row] if len(sizes) > 1 else row
        for part in (edit.keep, edit.value):
            _check_part(edit, part, row)
        if edit.direction is not None and list(edit.direction.shape) != row[-1:]:
            raise UsageError(f"{edit.name} takes a direction of {row[-1]} numbers; this one has {list(edit.direction.shape)}",
                             code="wrong_width")

    def _generate(self, requests: Sequence[Request], keys: list[str],
                  cancelled: Callable[[], bool] = lambda: False) -> list[Any]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        for r, key in zip(requests, keys, strict=True):
            capture = {name: want.as_json() for name, want in r.capture.items()}
            if r.edits:
                self._call("vlens_edit", key, r.edits)
            engine.add_request(key, {"prompt_token_ids": list(r.tokens)}, SamplingParams(
                max_tokens=r.max_new_tokens, temperature=0.0, ignore_eos=True, detokenize=False,
                extra_args={"vlens": {"key": key, "capture": capture}},
            ))
        finished: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            if cancelled():
                raise QueryError("the query was broken off: its asker has left", code="cancelled")
            finished |= {out.request_id: out for out in engine.step() if out.finished}
        return [finished[key] for key in keys]

    def _result(self, request: Request, key: str, output: Any) -> Result:
        taken = self._call("vlens_take", key)
        new = tuple(output.outputs[0].token_ids)
        captured = {name: Captured(*pair) for name, pair in taken["values"].items()}
        for name, want in request.capture.items():
            _check_rows(name, captured[name], want, len(request.tokens) + len(new) - 1)
        for edit, fired in zip(request.edits, taken["fired"], strict=True):
            if not fired:
                raise QueryError(f"an edit of {edit.name} was asked and never applied", code="edit_missing")
        return Result(captured, new, taken["chunks"], tuple(taken["fired"]))

    def _abandon(self) -> None:
        """Leave nothing of a broken-off batch in the scheduler or in the worker."""
        internals.abort_all(self._llm)
        self._call("vlens_drop")

    def _call(self, method: str, *args: Any) -> Any:
        """One method of the single rank's worker, in this process."""
        return self._llm.collective_rpc(method, args=args)[0]


def _check_indices(edit: Edit, indices: tuple[int, ...] | None, size: int, what: str) -> None:
    if indices is not None and not (indices and all(0 <= i < size for i in indices)):
        raise HookError(f"{edit.name} has {what}s 0 to {size - 1}; asked were {list(indices)}",
                        code=f"{what.replace('position', 'pos')}_out_of_range")


def _check_part(edit: Edit, part: Any, row: list[int]) -> None:
    """A factor or a value must be a number, one row of the selection, or a row for each of its positions."""
    if not isinstance(part, torch.Tensor):
        return
    shape, rows = list(part.shape), None if edit.positions is None else [len(edit.positions), *row]
    if shape not in (row, row[-1:], rows) and not (len(shape) == len(row) + 1 and shape[1:] == row and edit.positions is None):
        raise UsageError(f"an edit of {edit.name} takes {row}{f' or {rows}' if rows else ''} numbers; this value has {shape}",
                         code="wrong_width")


def _check_rows(name: str, captured: Captured, want: Want, fed: int) -> None:
    """The rows must be exactly the asked positions; fewer, more or others are an error, never data."""
    asked = tuple(range(fed)) if want.positions is None else want.positions
    if captured.positions != asked or len(captured.value) != len(asked):
        raise QueryError(f"{name} gave rows at {_span(captured.positions)} where {_span(asked)} were asked",
                         code="rows_missing")


def _span(positions: tuple[int, ...]) -> str:
    return f"{len(positions)} positions {positions[0]}..{positions[-1]}" if positions else "no position"


def _proof_tokens(d_vocab: int, count: int) -> tuple[int, ...]:
    """Different ids spread over the vocabulary, so that no two rows of the proof are alike."""
    return tuple((3 + n * max(1, d_vocab // (count + 1))) % d_vocab for n in range(max(count, 1)))


def _ragged(input_ids: Any) -> list[tuple[int, ...]]:
    rows = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    rows = rows if rows and not isinstance(rows[0], int) else [rows]
    return [tuple(row.tolist() if hasattr(row, "tolist") else row) for row in rows]


def _padded(values: list[torch.Tensor], fill: float) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
