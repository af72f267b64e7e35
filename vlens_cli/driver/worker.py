"""What runs inside a vLLM worker. vLLM imports it by the string that `boot` passes as `worker_cls`.

Methods that the driver calls are named `vlens_*` and stay thin; their arguments and results are plain data and tensors,
which `vlens_call` brings where a worker is not in the driver's own process. All ranks run them at once: one that needs
what others hold asks them, see `ranks`.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from vlens_cli.driver import attention, boot, carry, internals, structure, writes
from vlens_cli.driver.base import LOGITS, Edit, Want
from vlens_cli.driver.gather import gather
from vlens_cli.driver.graph import op
from vlens_cli.driver.graph.proof import GraphProof
from vlens_cli.driver.graph.taps import GraphTaps
from vlens_cli.driver.locate import ELSEWHERE, Locator
from vlens_cli.driver.outlet import Slot, reduced, to_host
from vlens_cli.driver.proof import TOLERANCE, Proof
from vlens_cli.driver.ranks import Ranks
from vlens_cli.driver.replay import Replay, variant
from vlens_cli.driver.taps import Record, Taps
from vlens_cli.driver.unembed import UNEMBED_ROWS, Unembedding
from vlens_cli.driver.workers import fault_of
from vlens_cli.errors import StartError
from vlens_cli.families import Catalog, catalog_for

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as EngineWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as EngineWorker


def of_last_stage(method: Callable[..., Any]) -> Callable[..., Any]:
    """Only the last pipeline stage ends in logits; the others give None."""

    @functools.wraps(method)
    def only(self: LensWorker, *args: Any) -> Any:
        return method(self, *args) if self._ends else None

    return only


class LensWorker(EngineWorker):
    """vLLM's worker, with taps."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        boot.settle_products()
        super().load_model(*args, **kwargs)
        internals.prepare_stage(self.model_runner)
        internals.let_attention_be_hooked(self.model_runner.get_model())
        internals.mend_rotation(self.model_runner.get_model())
        self._ranks = Ranks.of_process()
        self._ranks.prepare()
        self._layouts = structure.layouts(self.model_runner.get_model(), catalog_for(self.model_config.hf_config.to_dict()))
        self.vlens_take_layout(0)

    def vlens_layouts(self) -> int:
        """How many readings of the module tree there are to choose from: one but where no file describes it."""
        return len(self._layouts)

    def vlens_take_layout(self, n: int) -> None:
        """Read the module tree in one of these ways, from now on."""
        self._locate(self._layouts[n].catalog)
        self._refused |= self._layouts[n].absent

    def _locate(self, catalog: Catalog) -> None:
        model = self.model_runner.get_model()
        self._catalog = catalog
        self._locator = Locator(model, catalog, self._ranks)
        points, self._refused = self._locator.points()
        self._v2 = internals.is_v2(self.model_runner)
        self._layout = internals.Layout([], [0], [])
        asked = self.vllm_config.additional_config.get("vlens")
        self._graph = asked is not None
        self._unembedding = Unembedding(model, self._locator)
        logits = self._locator.of_last_stage("logits")
        self._ends = logits is not None
        if self._graph:
            self._taps: Taps = GraphTaps(points, asked["built"], logits, self.device, self._most_tokens(), asked["buffer"])
            internals.on_layout(self.model_runner, self._taps.planned)
        else:
            rows = self._laid_out if self._v2 else lambda: internals.step_layout(self.model_runner).segments()
            self._taps = Taps(rows, points, logits, self.device)
            if self._v2:
                internals.on_layout(self.model_runner, self._lay_out)
        self._edits: dict[str, tuple[Edit, ...]] = {}
        self._slots: dict[str, Slot] = {}
        self._replay: Replay | None = None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            asked = internals.request_extra(new).get("vlens")
            if asked:
                slot = self._slots.pop(asked["key"], None)
                wants = slot.wants if slot else {name: Want.from_json(want) for name, want in asked["capture"].items()}
                self._taps.open(new.req_id, asked["key"], wants, self._edits.pop(asked["key"], ()), slot)
        # One without rows, such as the last of steps that are scheduled ahead, has no `sample_tokens` to end it.
        if scheduler_output.total_num_scheduled_tokens:
            self._taps.begin_step()
        with self._visited():
            out = super().execute_model(scheduler_output, *args, **kwargs)
        self._scheduled = scheduler_output.num_scheduled_tokens
        if not self._v2:
            self._taps.end_step(self._scheduled)
        return out

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        out = super().sample_tokens(*args, **kwargs)
        if self._v2:
            # It forms the logits here.
            self._taps.end_step(self._scheduled)
        return out

    def determine_available_memory(self) -> int:
        with self._visited():
            return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> Any:
        with self._visited():
            return super().compile_or_warm_up_model()

    def _visited(self) -> AbstractContextManager[None]:
        """Within, the op in the engine's graphs works on this worker's tables."""
        return op.active(self._taps.tables) if self._graph else nullcontext()

    def _most_tokens(self) -> int:
        """Rows of the longest step, with those that graphs are padded to."""
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        return max(self.vllm_config.scheduler_config.max_num_batched_tokens, *sizes)

    def _lay_out(self, layout: internals.Layout) -> None:
        self._layout = layout

    def _laid_out(self) -> list[internals.Segment]:
        return self._layout.segments()

    def vlens_edit(self, key: str, edits: tuple[Edit, ...]) -> None:
        """What to change in the request `key`, which has not begun."""
        self._edits[key] = edits

    def vlens_slot(self, key: str, slot: Slot) -> None:
        """Where to send what the request `key`, which has not begun, is to keep; it says what that is."""
        self._slots[key] = slot

    def vlens_take(self, key: str) -> dict[str, Any]:
        """{"values": name -> ([pos, ...] on the host, positions), "chunks": forwards, "fired": forwards that each edit was
        applied in} of one finished request; where it has a slot, its values go there.

        Raises what a tap raised.
        """
        record = self._taps.take(key)
        if record.fault is not None:
            self._ranks.any(True)
            raise record.fault
        values: dict[str, Any] = {}
        copies = []
        # Another rank that has failed does not take part in what follows.
        failed = self._ranks.any(False)
        for name in () if failed else record.wants:
            if record.slot is None:
                value, positions = self._finish(record, name)
                host, copied = to_host(value)
                values[name] = host, positions
                copies.append(copied)
            elif not record.leaves(self._taps.points[name]):
                self._send(record, name)
        for copied in filter(None, copies):
            copied.synchronize()
        return {"values": values, "chunks": record.chunks, "fired": record.fired}

    def vlens_drop(self) -> None:
        """Forget every request: after a query that failed."""
        self._taps.drop_all()
        self._edits.clear()
        self._slots.clear()

    def vlens_state(self) -> dict[str, int]:
        """How many requests and hooks are held: none between queries."""
        return self._taps.held()

    def vlens_points(self) -> dict[str, Any]:
        """{"points": located names, "refused": name -> reason}. LookupError where the engine's heads are not the config's."""
        if not self._catalog.spec.structural:
            self._locator.check_heads()
        return {"points": list(self._taps.points), "refused": self._refused}

    def vlens_sees(self, path: str, token: str) -> bool:
        """Whether this worker can open a file of the driver's, which holds `token`."""
        try:
            return Path(path).read_text() == token
        except OSError:
            return False

    def vlens_call(self, method: str, given: str, told: bool, returned: Sequence[str], relayed: Sequence[int]
                   ) -> dict[str, str] | None:
        """One of the methods here, with what the file `given` holds; what it returns goes into the file of this stage.

        With `told` some rank cannot open files of the driver's, and rank 0 hands on what is given; it also takes what
        the stages of `relayed` return. None, or what was raised.
        """
        fault, found = None, None
        try:
            data = Path(given).read_bytes() if self._ranks.rank == 0 or not told else None
            args = carry.from_bytes(self._ranks.broadcast(data) if told else data)
            found = getattr(self, method)(*args)
            if self._ranks.at == 0 and self._ranks.stage not in relayed:
                carry.write(returned[self._ranks.stage], found)
        except Exception as raised:
            # Whatever it is, the driver must hear of it, and the other ranks must not wait for this one.
            traceback.print_exception(raised)
            fault = fault_of(raised)
        self._ranks.relay(found, relayed, returned)
        return fault

    def vlens_begin_proof(self) -> None:
        """Keep the engine's own logits of the next forward, and see that ranks go through it together."""
        self._taps.meeting = True
        if self._ends:
            self._unembedding.watch()

    @of_last_stage
    def vlens_unembed(self, rows: torch.Tensor, positions: Sequence[int], edits: tuple[Edit, ...]) -> torch.Tensor:
        """Logits [rows, d_vocab], on the device, of a few final-norm rows of one request, after its edits of them."""
        record = Record.of("", {}, {}, (writes.on_device(edit, self.device) for edit in edits))
        return _whole([logits for _, logits in self._unembedded(rows.to(self.device), record, positions)])

    @of_last_stage
    def vlens_rebuild(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [rows, d_vocab] of a few final-norm rows, from the weights, without the engine's own unembedding."""
        return self._unembedding.rebuilt(rows.to(self.device))

    @of_last_stage
    def vlens_end(self) -> dict[str, Any]:
        """Softcap and scale of the logits, and how far the rebuilt ones are off: see `Unembedding.end`."""
        return self._unembedding.end()

    @of_last_stage
    def vlens_lens(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [rows, d_vocab], on the device, of a few rows of the stream, through the final norm of each."""
        return self._unembedding.logits(self._unembedding.norm(rows.to(self.device)))

    @of_last_stage
    def vlens_directions(self, ids: list[int]) -> dict[str, Any]:
        """What the logits of some tokens are products with: see `Unembedding.directions`."""
        return self._unembedding.directions(ids)

    def vlens_head_parts(self, layer: int, z: torch.Tensor, against: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each head of a layer adds along some rows: see `Unembedding.head_parts`. None in other stages."""
        if layer not in self._locator.layers():
            return None
        return self._unembedding.head_parts(layer, z.to(self.device, self.model_config.dtype), against)

    def vlens_prove(self, key: str, tokens: Sequence[int]) -> dict[str, str]:
        """Check every located point with the values of the finished request `key` of `tokens` (every point that is read,
        at all positions); refuse those that fail, and return every refused name with its reason."""
        logits = self._unembedding.seen() if self._ends else None
        record = self._taps.take(key)
        self._taps.meeting = False
        self._check_met(record)
        values = {name: self._finish(record, name)[0] for name in record.wants if name in record.pieces}
        self._check_alike(values)
        if logits is not None:
            self._unembedding.check(values.get("ln_final.hook_out"), logits)
        proof = Proof(self._locator, self._taps.points, self._with_next_stage(values), logits, tokens)
        silent = {name: f"it never fired in the proof at load: {record.fault or 'nothing called its module'}"
                  for name in record.wants if name not in record.pieces}
        with torch.inference_mode():
            self._refused |= {**silent, **proof.verdict()}
        for name in self._refused:
            self._taps.points.pop(name, None)
        return self._refused

    def _with_next_stage(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """With the stream that enters the next pipeline stage, which the last identities of this one speak about."""
        first = f"blocks.{self._locator.layers()[0]}.hook_resid_pre"
        entering = self._ranks.from_next_stage({first: values[first]} if first in values else {}) or {}
        return {**values, **{name: value.to(self.device) for name, value in entering.items()}}

    def _check_met(self, record: Record) -> None:
        """Raises StartError where a tensor-parallel rank has read other points than this one, or joins parts in another
        order than its own."""
        if isinstance(record.fault, StartError):
            raise record.fault
        read = self._ranks.each_value(sorted(record.pieces))
        for at, names in enumerate(read):
            if lacking := set().union(*read) - set(names):
                raise StartError(f"{min(lacking)} never fired on tensor-parallel rank {at}", code="ranks_differ")
        for point in self._taps.points.values():
            marks = torch.arange(max(point.shape[0], self._ranks.tp // point.replicas))[None]
            if point.spread and not torch.equal(self._ranks.joined(self._ranks.part(marks, point.replicas), point.replicas), marks):
                raise StartError(f"{point.name} is joined in another order than that of its ranks", code="ranks_differ")

    def _check_alike(self, values: dict[str, torch.Tensor]) -> None:
        """Raises StartError for a point that tensor-parallel ranks have whole, and not all alike."""
        for name, value in values.items():
            first, *others = self._ranks.each(value)
            for at, other in enumerate(others, 1):
                error = float((other.double() - first.double()).norm() / first.double().norm().clamp_min(1e-30))
                if not error <= TOLERANCE.get(value.dtype, 0.0):
                    raise StartError(f"{name} is off by {error:.1e} on tensor-parallel rank {at} from what it is on rank 0",
                                     code="ranks_differ")

    def vlens_graph_bytes(self) -> int:
        """What the tables and buffers of a compiled engine take of the device's memory."""
        return self._taps.tables.n_bytes

    def vlens_graph_samples(self, on: bool) -> None:
        """Keep, or no longer keep, the logits that the engine samples from, for the proof of a compiled engine."""
        self._taps.watch_samples(on)

    @torch.inference_mode()
    def vlens_graph_prove(self, key: str, tokens: Sequence[int], n_prompt: int) -> dict[str, str]:
        """`vlens_prove` of a compiled engine: `tokens` are all that were fed, the first `n_prompt` of them prefilled."""
        logits = self._taps.sampled.pop(key)[-1]
        self._unembedding.learn(*self._taps.sampling)
        record = self._taps.take(key)
        if record.fault is not None:
            raise record.fault
        self._proof = GraphProof(self.model_runner.get_model(), self._locator, self._taps, self._unembedding, self.vllm_config,
                                 self.device)
        values = {name: _joined(record, name)[0] for name in record.wants if self._taps.points[name].row.derive != "unembed"}
        self._refused |= self._proof.verdict(values, logits[None], tokens, n_prompt)
        self._unembedding.check(self._proof.final, logits[None])
        for name in self._refused:
            self._taps.points.pop(name, None)
        return self._refused

    def vlens_graph_prove_writes(self, keys: Sequence[str], edits: Sequence[Edit], tokens: Sequence[int]) -> list[str]:
        """Which points obey: each of the finished requests `keys` of `tokens` has set one."""
        sampled = []
        for key in keys:
            record = self._taps.take(key)
            sampled.append(self._taps.sampled.pop(key)[-1])
            if record.fault is not None:
                raise record.fault
        pairs = [(edit, row) for edit, row in zip(edits, sampled, strict=True) if edit.name != LOGITS]
        return self._proof.obeyed([edit for edit, _ in pairs], [row for _, row in pairs], tokens)

    def vlens_replay(self, stream: torch.Tensor, edits: list[tuple[Edit, ...]]) -> torch.Tensor:
        """Last position's logits [1 + len(edits), d_vocab] of a prompt plain and under each of `edits`, from its stream
        before the first block. Raises LookupError where its blocks cannot be run one by one, or an edit is outside them."""
        if self._replay is None:
            located = self._taps.located if self._graph else self._taps.points
            self._replay = Replay(self._unembedding, self._locator, located, self.vllm_config, self.device)
        layers = {name: self._catalog.layer(name) for name in self._taps.points}
        return self._replay.run(stream, [variant(each, layers) for each in edits])

    def vlens_prove_writes(self, key: str) -> list[str]:
        """Which of the points that the finished request `key` has set (all of its positions) hold what was set, and are
        obeyed by what comes after."""
        record = self._taps.take(key)
        values = {name: self._finish(record, name)[0].to(self.device) for name in record.wants}
        with torch.inference_mode():
            held = {name for name, ((_, edit),) in record.edits.items()
                    if torch.equal(values[name], edit.value.to(values[name].dtype))}
            proof = Proof(self._locator, self._taps.points, self._with_next_stage(values))
            return sorted(held & (proof.written(record.edits.keys()) | {LOGITS}))

    def vlens_weight(self, path: str, attribute: str) -> torch.Tensor | str | None:
        """A parameter of this pipeline stage's model, on the host, its shards joined; the reason where it cannot be given."""
        try:
            layer = self._locator.at(path)
            value, how = internals.weight(layer, attribute), internals.sharding(layer, attribute)
        except LookupError as miss:
            return None if str(miss) == ELSEWHERE else str(miss)
        return gather(self._ranks.each(value), how)

    def _finish(self, record: Record, name: str) -> tuple[torch.Tensor, tuple[int, ...]]:
        """A point's value and its positions: unembedded, rebuilt or reduced where it is."""
        value, positions = self._formed(record, name)
        if self._taps.points[name].row.derive == "unembed" and positions:
            value = _whole([logits for _, logits in self._unembedded(value, record, positions, record.wants[name].dims)])
        if record.wants[name].reduce is not None and positions:
            value = reduced(record.wants[name].reduce, value)
        return value, positions

    def _formed(self, record: Record, name: str) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The rows that were kept of a point, or what is rebuilt from them; of logits the final norm's."""
        point = self._taps.points[name]
        if point.of:
            return attention.rebuild(point, record.wants[name], [_joined(record, point.source(source)) for source in point.of])
        return _joined(record, name)

    @torch.inference_mode()
    def _send(self, record: Record, name: str) -> None:
        """What is there when the request has ended, to its slot: logits in pieces, what is rebuilt one by one."""
        point, slot = self._taps.points[name], record.slot
        value, positions = self._formed(record, name)
        if point.row.derive == "unembed":
            for at, logits in self._unembedded(value, record, positions, record.wants[name].dims):
                slot.outlet.put(slot, name, at, logits)
        elif "pos" in point.row.axes:
            slot.outlet.put(slot, name, positions, value)
        else:
            slot.outlet.put_whole(slot, name, positions, value)

    @torch.inference_mode()
    def _unembedded(self, rows: torch.Tensor, record: Record, positions: Sequence[int], dims: tuple[int, ...] | None = None
                    ) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """(positions, logits [rows, d_vocab]) of final-norm rows, by the engine's own unembedding, in pieces, after their
        edits."""
        columns = slice(None) if dims is None else list(dims)
        for n, piece in enumerate(rows.split(UNEMBED_ROWS)):
            logits, at = self._unembedding.logits(piece), positions[n * UNEMBED_ROWS :][: len(piece)]
            record.change(LOGITS, [logits], at, counted=False)
            yield at, logits[:, columns]


def _whole(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _joined(record: Record, name: str) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What was kept under a name, joined in the order of positions."""
    pieces = record.pieces.get(name, [])
    positions = [p for asked, _ in pieces for p in asked]
    if not pieces:
        return torch.empty(0), ()
    rows = pieces[0][1] if len(pieces) == 1 else torch.cat([t for _, t in pieces])
    if len(set(positions)) < len(positions):
        # A preempted request is computed again from its start: the later rows are the ones that counted.
        latest = {p: n for n, p in enumerate(positions)}
        positions = sorted(latest)
        rows = rows[[latest[p] for p in positions]]
    return rows, tuple(positions)
