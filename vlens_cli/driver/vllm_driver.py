"""`VLLMDriver`: one model in vLLM, in this process."""

from __future__ import annotations

import json
import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vlens_cli import checkpoint, hooks, params
from vlens_cli.driver import boot, contract
from vlens_cli.driver.base import LOGITS, Captured, Edit, ForwardResult, Request, Result, Want
from vlens_cli.driver.engine import Engine, spanned
from vlens_cli.driver.flow import Flow
from vlens_cli.driver.locate import ELSEWHERE
from vlens_cli.driver.outlet import to_host
from vlens_cli.driver.proof import PROOF_TOKENS, TOLERANCE, WRITTEN_TOGETHER
from vlens_cli.driver.tokens import Tokens
from vlens_cli.driver.unembed import UNEMBED_ROWS
from vlens_cli.driver.weights import LiveWeights, as_tensor
from vlens_cli.errors import HookError, QueryError, StartError, UsageError, VlensError
from vlens_cli.families import Catalog
from vlens_cli.query import EngineSpec
from vlens_cli.reader import answer as reader

FINAL = "ln_final.hook_out"
FEATURES = frozenset({"capture", "batch", "interventions", "attention_mask", "new_tokens", "weight_access"})
STREAM = "blocks.0.hook_resid_pre"
STREAM_POINT = re.compile(r"blocks\.\d+\.hook_resid_(pre|mid|post)")
# Rows of all variants that are replayed together.
REPLAY_ROWS = 8192


class VLLMDriver(Engine):
    """Runs forwards of one model and reads inside them.

    architecture                 the model's class, as its config.json names it
    supported_hook_points        canonical names that the proof at load has passed, in the order of the forward
    non_fireable_hook_points     other names of the catalog -> why they are refused
    non_editable_hook_points     names that can be read, or not even that -> why they cannot be changed
    provides_sequence_logits     logits of every position, not only the last
    buffer_bytes                 what a compiled engine's tables and buffers take of the device's memory
    """

    def __init__(self, spec: EngineSpec, plan: boot.Plan, catalog: Catalog) -> None:
        """Build the engine and prove its points. Raises StartError."""
        super().__init__(spec, plan, catalog)
        self.architecture: str = _architecture(spec.model)
        # Tokens a second, as last seen.
        self.rate = 0.0
        self._replays = True
        self.buffer_bytes = 0
        try:
            self._find_points()
            if spec.tp > 1:
                self._check_shards()
        except BaseException as fault:
            # Nobody has this driver to close it, and what vLLM keeps for the process goes with its last engine.
            boot.shut_down(self._llm)
            if isinstance(fault, QueryError):
                # A question of the start's own.
                raise StartError(fault.message, hint=fault.hint, code=fault.code) from fault
            raise

    def _find_points(self) -> None:
        """Have the worker locate the catalog's points, and prove them."""
        self.non_fireable_hook_points: dict[str, str] = self._choose_layout()
        self.supported_hook_points = tuple(n for n in self.catalog.names if n not in self.non_fireable_hook_points)
        self.non_editable_hook_points = self._prove_writes()
        self._end = contract.agreed(self._workers.call("vlens_end"))
        self.provides_sequence_logits = LOGITS in self.supported_hook_points or (
            FINAL in self.supported_hook_points and self.probe_logit_reconstruction())

    def _choose_layout(self) -> dict[str, str]:
        """Of the ways to read the module tree take the one that the proof at load refuses least of; refused names -> reasons."""
        found: list[dict[str, str]] = []
        for n in range(self._call("vlens_layouts")):
            if n:
                self._call("vlens_take_layout", n)
            found.append(self._located_and_proved())
            if not any(STREAM_POINT.fullmatch(name) for name in found[n]):
                return found[n]
        best = min(found, key=len)
        if len(found) > 1:
            self._call("vlens_take_layout", found.index(best))
            best = self._located_and_proved()
        if len(best) == len(self.catalog.names):
            raise StartError(f"no hook point of this model passed the proof at load: {next(iter(best.values()))}",
                             hint="`vlens hooks` lists the families that this version reads", code="proof_failed")
        return best

    def _located_and_proved(self) -> dict[str, str]:
        with boot.translated():
            stages = self._workers.call("vlens_points")
        located = {name for stage in stages for name in stage["points"]}
        refused = self._refused([stage["refused"] for stage in stages])
        return {**refused, **self._prove([name for name in self.catalog.names if name in located])}

    def _check_shards(self) -> None:
        """See that a layer's weights, joined over the ranks, are the checkpoint's: then head 3 is head 3 everywhere.

        Raises StartError. What the engine keeps in another form (quantized, or in its kernel's order) is not compared.
        """
        if checkpoint.shapes(Path(self.spec.model)) is None:
            return  # pickled: there is nothing to compare with that could be read by itself
        weights = params.of_model(self.spec.model)
        live, dtype = self.weights(weights), getattr(torch, self.plan.dtype)
        for name in ("attn.W_Q", "attn.W_K", "attn.W_V", "attn.W_O", "mlp.W_gate", "mlp.W_in", "mlp.W_out"):
            param = weights.param(f"blocks.0.{name}") if f"blocks.0.{name}" in weights.rows else None
            if param is None or "expert" in weights.rows[param.name][0].axes:
                continue
            try:
                found = live.tensor(param)
            except VlensError as miss:
                if miss.code != "not_in_engine":
                    raise
                continue
            if not torch.equal(found, as_tensor(reader.mapped(params.reading(param, weights))).to(dtype)):
                raise StartError(f"{param.name}, joined over the ranks, is not the checkpoint's: their shards lie in another "
                                 "order", code="ranks_differ")

    def _refused(self, stages: Sequence[dict[str, str]]) -> dict[str, str]:
        """What no pipeline stage gives: a point that one refuses because another has its layer is that one's."""
        own = {name: why for stage in stages for name, why in stage.items() if why != ELSEWHERE}
        lost = {name: why for stage in stages for name, why in stage.items() if all(name in each for each in stages)}
        return {**lost, **own}

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of this model. Raises StartError where its folder has none."""
        return Tokens(self.spec.model).tokenizer

    def supports(self, feature: str) -> bool:
        """Whether this driver has a capability, by a word of ours or of TransformerLens' KNOWN_FEATURES."""
        return feature in FEATURES or feature == "sequence_logits" and self.provides_sequence_logits

    def run(
        self, requests: Sequence[Request], cancelled: Callable[[], bool] = lambda: False,
        between: Callable[[], None] = lambda: None, waiting: Callable[[], bool] = lambda: False,
    ) -> list[Result]:
        """All requests; results in their order.

        `cancelled` is asked between two steps of the engine. Where `waiting` says so, asked about every second, `between`
        is called when no request is in flight: it may run others. Raises UsageError before the forward for what this
        model cannot do, QueryError after it.
        """
        for request in requests:
            self._check(request)
        found = dict(Flow(self, cancelled, between, waiting).run(iter(requests)))
        return [found[n] for n in range(len(requests))]

    def stream(
        self, requests: Iterator[Request | None], cancelled: Callable[[], bool] = lambda: False,
        between: Callable[[], None] = lambda: None, waiting: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Result]]:
        """`run` of any number of requests, each asked for when it is about to be computed: (number, result) as they end.
        None among them: what is before it ends first. Close it where it is left early."""
        return Flow(self, cancelled, between, waiting).run(map(self._checked, requests))

    def _checked(self, request: Request | None) -> Request | None:
        if request is not None:
            self._check(request)
        return request

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

    def run_variants(
        self, requests: Sequence[Request], cancelled: Callable[[], bool] = lambda: False,
        between: Callable[[], None] = lambda: None, waiting: Callable[[], bool] = lambda: False,
    ) -> list[Result]:
        """`run` for many edits of one prompt of which only the last position's logits are asked. What they share is
        computed once, where this model allows it (see `replay`); else they run as any requests do.

        Results have no new tokens.
        """
        groups = self._variants(requests)
        if groups is None:
            return self.run(requests, cancelled, between, waiting)
        last = len(requests[0].tokens) - 1
        (base,) = self.run([Request(requests[0].tokens, {STREAM: Want(), LOGITS: Want((last,))})], cancelled)
        results: list[Result] = []
        for group in groups:
            if results:
                between()
            if cancelled():
                raise QueryError("the query was broken off: its asker has left", code="cancelled")
            rows = self._replayed(base, group)
            if rows is None:
                return self.run(requests, cancelled, between, waiting)
            results += [Result({LOGITS: Captured(_cut_dims(row[None], r.capture[LOGITS].dims), (last,))}, (), 1)
                        for r, row in zip(group, rows, strict=True)]
        return results

    def _variants(self, requests: Sequence[Request]) -> list[Sequence[Request]] | None:
        """Requests in groups that fit into memory; None where they are not variants of one prompt that can be replayed."""
        tokens = requests[0].tokens if requests else ()
        names = {edit.name for r in requests for edit in r.edits}
        alike = all(r.tokens == tokens and r.max_new_tokens == 1 and r.edits and r.capture.keys() == {LOGITS}
                    and r.capture[LOGITS].positions == (len(tokens) - 1,) for r in requests)
        if not alike or len(requests) < 2 or STREAM in self.non_fireable_hook_points or not self._replays or self.spec.pp > 1:
            return None
        if any(self.catalog.layer(name) is None for name in names & self.catalog.points.keys()):
            return None
        for request in requests:
            self._check(request)
        size = max(1, REPLAY_ROWS // len(tokens))
        return [requests[n : n + size] for n in range(0, len(requests), size)]

    def _replayed(self, base: Result, group: Sequence[Request]) -> torch.Tensor | None:
        """[requests, d_vocab] logits; None, now and for ever, where the replay of the plain prompt is not what the engine
        has just computed."""
        try:
            logits, copied = to_host(self._call("vlens_replay", base.captured[STREAM].value, [r.edits for r in group]))
            if copied is not None:
                copied.synchronize()
        except Exception as fault:
            # Whatever a block of another form raises when it is called alone: the engine's own way remains.
            warnings.warn(f"variants run as separate requests: {type(fault).__name__}: {boot.one_line(fault)}", stacklevel=2)
            self._replays = False
            return None
        engine = base.captured[LOGITS].value[0].double()
        error = float((logits[0].double() - engine).norm() / engine.norm())
        self._replays = error <= TOLERANCE[logits.dtype]
        if not self._replays:
            warnings.warn(f"variants run as separate requests: replayed logits are off by {error:.1e}", stacklevel=2)
            return None
        return logits[1:]

    def forward(
        self,
        input_ids: Any,
        *,
        capture: Sequence[str] = (),
        intervene: Mapping[str, Any] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        attention_mask: Any = None,
        feed_last: bool = False,
    ) -> ForwardResult:
        """TransformerLens' `Driver.forward`: token ids [pos], [batch, pos] or a ragged list of lists.

        capture         hook points, one each, by any of their names, which are the keys of what comes back
        intervene       hook name -> spec, or list of specs in order: `contract.edits`
        max_new_tokens  all but the last of them are fed, and have rows; with `feed_last` the last one too
        attention_mask  of the ids' shape, 0 at padding on the left or the right: rows come back at their own places

        Logits are the engine's own; where the proof at load refused those, rebuilt ones; where neither can be had
        (`provides_sequence_logits` is False) log-probabilities after the prompt, -inf elsewhere.
        Raises UsageError before the forward, QueryError after it.
        """
        if isinstance(capture, str) or type(max_new_tokens) is not int or max_new_tokens < 1:
            raise UsageError("capture is a list of names, and max_new_tokens a whole number above 0")
        at = contract.spans(input_ids, attention_mask)
        asked = {name: self._canonical(name) for name in capture}
        new = max_new_tokens + feed_last
        source = self._logits_source if return_logits else None
        wants = dict.fromkeys([*asked.values(), *([source] if source else [])], Want())
        edits = [contract.edits(intervene, self.catalog, self._canonical, span, len(span.ids) + new - 1) for span in at]
        results = self.run([Request(span.ids, wants, new, edit, return_logits and source is None)
                            for span, edit in zip(at, edits, strict=True)])
        values = {name: contract.put_back([r.captured[name].value for r in results], at, 0.0, self.catalog.token_axes(name))
                  for name in {*asked.values()}}
        captured = {name: values[is_] for name, is_ in asked.items()}
        logits = [self._logits_of(r, len(span.ids)) for r, span in zip(results, at, strict=True)] if return_logits else None
        return ForwardResult(
            logits=None if logits is None else contract.put_back(logits, at, float("-inf")), captured=captured,
            new_tokens=torch.tensor([r.new_tokens[:max_new_tokens] for r in results]), raw_output=results,
            rows=tuple(range(span.start, span.start + len(span.ids) + new - 1) for span in at),
        )

    @property
    def _logits_source(self) -> str | None:
        """The hook point that logits come from; None where the sampler's log-probabilities must do."""
        if LOGITS in self.supported_hook_points:
            return LOGITS
        return FINAL if self.provides_sequence_logits else None

    def _logits_of(self, result: Result, prompt: int) -> torch.Tensor:
        """[pos, d_vocab] of every fed token."""
        if self._logits_source == LOGITS:
            return result.captured[LOGITS].value
        if self._logits_source == FINAL:
            rows = result.captured[FINAL].value
            return torch.cat([self._call("vlens_rebuild", piece).cpu() for piece in rows.split(UNEMBED_ROWS)])
        logits = torch.full((prompt + len(result.new_tokens) - 1, self.catalog.dims.d_vocab), float("-inf"))
        logits[prompt - 1] = result.final_logprobs
        return logits

    def probe_logit_reconstruction(self) -> bool:
        """Whether logits rebuilt from the weights (final norm @ unembedding + bias, softcap, scale) equalled the engine's
        own at load."""
        return self._end["rebuild_error"] <= TOLERANCE[getattr(torch, self.plan.dtype)]

    def get_param(self, name: str) -> torch.Tensor:
        """TransformerLens' `Driver.get_param`: a whole live weight, by any of its names, on the host.

        Raises UsageError for an unknown name, with near ones, QueryError where the engine does not give it.
        """
        weights = params.of_model(self.spec.model)
        return self.weights(weights).tensor(params.one(name, weights)).clone()

    def weights(self, names: params.Weights) -> LiveWeights:
        """The engine's weights, under the names of its model."""
        return LiveWeights(names, self._fetch)

    def _fetch(self, path: str, attribute: str) -> torch.Tensor:
        """A parameter, its shards joined. Raises QueryError where the engine does not give it."""
        found = self._call("vlens_weight", path, attribute)
        if not isinstance(found, torch.Tensor):
            raise QueryError(f"{path}.{attribute}: {found}", hint="--from checkpoint", code="not_in_engine")
        return found


    def _prove(self, points: list[str]) -> dict[str, str]:
        """One short forward with every point captured that is not rebuilt, checked in the worker; refused names -> reasons."""
        tokens = self._proof_tokens()
        key = uuid.uuid4().hex
        self._call("vlens_begin_proof")
        with boot.translated():
            self._generate([Request(tokens, dict.fromkeys(self._read(points), Want()))], [key])
            return self._refused(self._workers.call("vlens_prove", key, tokens))

    def _prove_writes(self) -> dict[str, str]:
        """Set every editable point to values of its own, neighbours in different forwards, and see in the worker that
        the points after them obey; names that cannot be edited -> reasons."""
        editable = [n for n in self.supported_hook_points if self.catalog.editable(n)]
        tokens = self._proof_tokens()
        read = self._read(self.supported_hook_points)
        requests = [Request(tokens, dict.fromkeys(read, Want()), edits=self._set_all(names, len(tokens)))
                    for group in WRITTEN_TOGETHER
                    if (names := [n for n in editable if n.endswith(tuple(group))])]
        keys = [uuid.uuid4().hex for _ in requests]
        with boot.translated():
            outputs = self._generate(requests, keys)
            proved = {name for key in keys for stage in self._workers.call("vlens_prove_writes", key) for name in stage}
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

    def _read(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are read in the forward, and not rebuilt from others."""
        return [name for name in names if not self.catalog.sources(name)]

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
            _check_formed(edit, len(request.tokens) - 1, request.capture.get(LOGITS))
        for name in request.capture:
            self.check_readable(name)

    def check_readable(self, name: str) -> None:
        """Raises HookError for a canonical name that this engine does not give."""
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
            _check_part(edit, part, row, fed)
        if edit.direction is not None and list(edit.direction.shape) != row[-1:]:
            raise UsageError(f"{edit.name} takes a direction of {row[-1]} numbers; this one has {list(edit.direction.shape)}",
                             code="wrong_width")


    # Bytes of what requests in flight share, besides keys and values.
    room: tuple[int, ...] = ()

    def needs(self, request: Request) -> tuple[int, ...]:
        """What a request takes of each `room` at most."""
        return ()


def _check_formed(edit: Edit, last: int, kept: Want | None) -> None:
    """The engine forms logits where it samples, after the prompt and after each new token; others are formed to be kept."""
    if edit.name != LOGITS or edit.positions is None or max(edit.positions) >= last:
        return
    if kept is None or kept.positions is not None and not set(kept.positions) & set(edit.positions):
        raise HookError(f"{edit.name} is formed here at the prompt's last position, {last}, and at generated ones; this edits "
                        f"{spanned(tuple(sorted(edit.positions)))} alone, and nothing follows from them", code="not_formed")


def _check_indices(edit: Edit, indices: tuple[int, ...] | None, size: int, what: str) -> None:
    if indices is not None and not (indices and all(0 <= i < size for i in indices)):
        raise HookError(f"{edit.name} has {what}s 0 to {size - 1}; asked were {list(indices)}",
                        code=f"{what.replace('position', 'pos')}_out_of_range")
    if indices is not None and len(set(indices)) < len(indices):
        raise HookError(f"{edit.name} is edited twice at one {what}: {list(indices)}", code="index_twice",
                        hint="give two edits, which are applied in order")


def _check_part(edit: Edit, part: Any, row: list[int], fed: int) -> None:
    """A factor or a value must be a number, one row of the selection, or a row for each of its positions (of all `fed`
    tokens where it has none): one row too few would be spread over the others without a word."""
    if not isinstance(part, torch.Tensor):
        return
    shape, rows = list(part.shape), [fed if edit.positions is None else len(edit.positions), *row]
    if shape not in (row, row[-1:], rows):
        raise UsageError(f"an edit of {edit.name} takes {row} or {rows} numbers; this value has {shape}", code="wrong_width")


def _cut_dims(rows: torch.Tensor, dims: tuple[int, ...] | None) -> torch.Tensor:
    return rows if dims is None else rows[:, list(dims)]


def _proof_tokens(d_vocab: int, count: int) -> tuple[int, ...]:
    """Different ids spread over the vocabulary, so that no two rows of the proof are alike."""
    return tuple((3 + n * max(1, d_vocab // (count + 1))) % d_vocab for n in range(max(count, 1)))


def _architecture(folder: str) -> str:
    named = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["architectures"]
    return named if isinstance(named, str) else named[0]
