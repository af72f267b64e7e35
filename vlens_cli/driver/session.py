"""One model, ready for queries: checks them without an engine, starts it when the first one passes, answers.

torch and vLLM are imported when the engine is started: a query that is refused has not waited for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from vlens_cli import checkpoint, memory
from vlens_cli.driver import boot, room
from vlens_cli.driver.base import Request, Result, Want
from vlens_cli.driver.tokens import Fed, Tokens
from vlens_cli.errors import PromptError, QueryError, StartError, UsageError
from vlens_cli.families import catalog_for, check_checkpoint
from vlens_cli.models.folder import stamps
from vlens_cli.query import RUNNING, CollectQuery, EngineSpec, Prompt, Query, Reply, SleepQuery, StartQuery

if TYPE_CHECKING:
    import torch

    from vlens_cli.driver.vllm_driver import VLLMDriver

Progress = Callable[[str], None]
Piece = TypeVar("Piece")
# Characters or token ids.
SMALL = 2000
# How long other queries may be kept waiting.
PIECE_SECONDS = 1.0
# A capture is joined from its pieces, and cast: it may be there twice for a moment.
MEMORY_SHARE = 0.4


class Session:
    """Answers queries about one model in this process. `config` is its parsed config.json."""

    def __init__(self, spec: EngineSpec, config: dict[str, Any]) -> None:
        self._stamps = stamps(spec.model)
        self.spec = spec
        self._config = config
        self.catalog = catalog_for(config)
        found = checkpoint.shapes(Path(spec.model))
        if found is not None:
            check_checkpoint(self.catalog, config, found)
        self.plan = boot.plan(spec, config, self.catalog)
        self.tokens = Tokens(spec.model, self.plan.max_len)
        self._driver: VLLMDriver | None = None
        self._cancelled: Callable[[], bool] = lambda: False
        self._between: Callable[[], None] = lambda: None
        self._waiting: Callable[[], bool] = lambda: False
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def started(self) -> bool:
        """Whether the engine runs."""
        return self._driver is not None

    def proof(self) -> dict[str, Any]:
        """What the running engine has proved at load: the names that passed, and the others with the reason."""
        driver = self._driver
        editable = {name for name in driver.supported_hook_points if name not in driver.non_editable_hook_points}
        return {
            "dtype": self.plan.dtype, "passed": list(driver.supported_hook_points),
            "refused": dict(driver.non_fireable_hook_points),
            "not_editable": {name: driver.non_editable_hook_points[name] for name in driver.supported_hook_points
                             if self.catalog.editable(name) and name not in editable},
        }

    def watch(self, cancelled: Callable[[], bool], between: Callable[[], None], waiting: Callable[[], bool]) -> None:
        """Until the next call: break a query off between two steps when `cancelled` says so, and call `between`
        between two pieces of a large one, with no request in flight, when others are `waiting`."""
        self._cancelled, self._between, self._waiting = cancelled, between, waiting

    @staticmethod
    def is_small(query: Any) -> bool:
        """Whether a query may run between two pieces of a large one: about a second's work."""
        prompts, more = getattr(query, "prompts", ()), getattr(query, "max_new_tokens", 1)
        size = sum(len(p.text or p.tokens or ()) + more for p in prompts)
        return size <= SMALL and not getattr(query, "sweep", ()) and not isinstance(query, CollectQuery)

    def answer(self, query: Query, progress: Progress, into: BinaryIO | None = None) -> Reply:
        """Answer any query, its tensors into the open file `into`. Raises UsageError before any engine starts,
        StartError, QueryError."""
        if isinstance(query, StartQuery):
            self.driver(progress)
            return Reply({"model": self.model_body()}, self.plan.notes)
        if isinstance(query, SleepQuery):
            return Reply({"model": self.model_body(), "freed_bytes": self.sleep()})
        return import_module(f"vlens_cli.driver.{query.verb}").answer(self, query, progress, into)

    def feed(self, prompts: Sequence[Prompt], bos: bool | None, one_chunk: bool = False) -> list[Fed]:
        """The tokens of each prompt. Raises PromptError for what this engine does not take."""
        fed = [self.tokens.feed(prompt, bos) for prompt in prompts]
        for one in fed:
            self.check_fed(one, one_chunk)
        return fed

    def run(self, requests: Sequence[Request], progress: Progress, variants: bool = False) -> tuple[list[Result], float]:
        """(results in order, seconds that their forwards took), by the engine, which the first call starts; `variants` of
        one prompt compute once what they share."""
        driver = self.driver(progress)
        progress(RUNNING)
        began, watched = time.monotonic(), (self._cancelled, self._between, self._waiting)
        if variants:
            return driver.run_variants(requests, *watched), time.monotonic() - began
        return driver.run(requests, *watched), time.monotonic() - began

    def stream(self, requests: Iterator[Request | None], progress: Progress, check: Callable[[], None]
               ) -> Iterator[tuple[int, Result]]:
        """(number, result) of any number of requests as they end, see `VLLMDriver.stream`; `check` is called before each
        step, and may raise."""
        cancelled = self._cancelled
        driver = self.driver(progress)
        progress(RUNNING)

        def broken_off() -> bool:
            check()
            return cancelled()

        return driver.stream(requests, broken_off, self._between, self._waiting)

    def dtypes(self, names: Sequence[str], progress: Progress) -> dict[str, torch.dtype]:
        """What the engine gives each hook point in, by a forward of the shortest prompt."""
        new = [name for name in names if name not in self._dtypes]
        if new:
            request = Request((0,) * self.plan.shortest_prompt, {name: Want((0,)) for name in new})
            ((result,), _) = self.run([request], progress)
            self._dtypes |= {name: captured.value.dtype for name, captured in result.captured.items()}
        return {name: self._dtypes[name] for name in names}

    def in_turn(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The same pieces; about every second other queries are answered between two of them, and the rest is broken off
        when the asker has left."""
        cancelled, between = self._cancelled, self._between
        began = time.monotonic()
        for piece in pieces:
            yield piece
            if cancelled():
                raise QueryError("the query was broken off: its asker has left", code="cancelled")
            if time.monotonic() - began > PIECE_SECONDS:
                between()
                began = time.monotonic()

    def driver(self, progress: Progress) -> VLLMDriver:
        """The engine, started by the first call."""
        if self._driver is None:
            progress(f"starting the engine for {self.spec.name}")
            with room.room_for(room.needed(Path(self.spec.model), self._config, self.plan, self.spec.tp * self.spec.pp)):
                with boot.translated():
                    from vlens_cli.driver.graph.driver import driver_for
                    self._check_pickled()
                driver = driver_for(self.spec, self.plan, self.catalog)
            if stamps(self.spec.model) != self._stamps:
                driver.close()
                raise StartError("the model's files were changed while the engine read them", code="model_changed",
                                 hint="run it again when they are all written")
            self._driver = driver
        if self._driver.asleep:
            progress("waking the engine")
            self._driver.wake()
        return self._driver

    @property
    def died(self) -> bool:
        """Whether the engine has lost a worker process, and answers nothing more."""
        return self._driver is not None and self._driver.died

    @property
    def asleep(self) -> bool:
        return self._driver is not None and self._driver.asleep

    @property
    def buffer_bytes(self) -> int:
        """What a compiled engine's tables and buffers take of the device's memory."""
        return 0 if self._driver is None else self._driver.buffer_bytes

    @property
    def can_sleep(self) -> bool:
        """Whether an engine runs that could be put to sleep."""
        return self._driver is not None and self._driver.can_sleep and not self._driver.asleep

    def sleep(self) -> int:
        """Put the engine to sleep until the next query; bytes of GPU memory that this freed. Raises UsageError for an
        engine that cannot."""
        return 0 if self._driver is None or self._driver.asleep else self._driver.sleep()

    def _check_pickled(self) -> None:
        """What __init__ does for safetensors, for *.bin: their names can only be read by torch."""
        if checkpoint.shapes(Path(self.spec.model)) is None:
            from vlens_cli.reader import pickled

            check_checkpoint(self.catalog, self._config, pickled.listed(self.spec.model))

    def end_workers(self) -> None:
        """End worker processes, for a process that is about to end itself."""
        if self._driver is not None:
            self._driver.end_workers()

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def check_fed(self, fed: Fed, one_chunk: bool) -> None:
        """Raises PromptError for what this engine does not take."""
        boot.check_tokens(fed.ids, self.catalog.dims.d_vocab, self.plan)
        if one_chunk and len(fed.ids) > self.plan.chunk:
            raise PromptError(
                f"a prompt of {len(fed.ids)} tokens needs more than one forward of {self.plan.chunk}",
                hint=f"leave out --one-chunk, or use --chunk {len(fed.ids)}", code="more_than_one_chunk",
            )

    def check_memory(self, n_bytes: int) -> None:
        """Refuse what would not fit into memory, before the forward that fills it."""
        free = memory.available()
        if n_bytes > free * MEMORY_SHARE:
            raise UsageError(f"this query takes {n_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free",
                             hint="ask for fewer hooks, positions or prompts at once", code="too_large")

    def model_body(self) -> dict[str, Any]:
        """The `model` object of every reply."""
        return {
            "name": self.spec.name, "folder": self.spec.model, "revision": self.spec.revision,
            "family": self.catalog.family, "dtype": self.plan.dtype,
        }
