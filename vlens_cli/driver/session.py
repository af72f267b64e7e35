"""One model, ready for queries: checks them without an engine, starts it when the first one passes, answers.

torch and vLLM are imported when the engine is started: a query that is refused has not waited for them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli import __version__, checkpoint, hooks
from vlens_cli.driver import boot
from vlens_cli.driver.base import Request, Result, Want
from vlens_cli.driver.tokens import Fed, Tokens
from vlens_cli.errors import PromptError, UsageError
from vlens_cli.families import catalog_for, check_checkpoint
from vlens_cli.query import RUNNING, SCHEMA_VERSION, CaptureQuery, EngineSpec, Reply, StartQuery

if TYPE_CHECKING:
    from vlens_cli.driver.vllm_driver import VLLMDriver

Progress = Callable[[str], None]
# Characters or token ids.
SMALL = 2000
# Who writes a large file wants the file; statistics of more rows than these take longer than the file does.
ROWS_BESIDE_FILE = 20_000
# A capture is joined from its pieces, and cast: it may be there twice for a moment.
MEMORY_SHARE = 0.4


def available_bytes() -> int:
    """Memory that could be used without swapping (man proc, MemAvailable)."""
    text = Path("/proc/meminfo").read_text()
    return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", text)[1])


class Session:
    """Answers queries about one model in this process. `config` is its parsed config.json."""

    def __init__(self, spec: EngineSpec, config: dict[str, Any]) -> None:
        self.spec = spec
        self._config = config
        self.catalog = catalog_for(config)
        found = checkpoint.shapes(Path(spec.model))
        if found is not None:
            check_checkpoint(self.catalog, config, found)
        self.plan = boot.plan(spec, config, self.catalog)
        self.tokens = Tokens(spec.model)
        self._driver: VLLMDriver | None = None
        self._cancelled: Callable[[], bool] = lambda: False
        self._between: Callable[[], None] = lambda: None

    @property
    def started(self) -> bool:
        """Whether the engine runs."""
        return self._driver is not None

    def watch(self, cancelled: Callable[[], bool], between: Callable[[], None]) -> None:
        """Until the next call: break a query off between two steps when `cancelled` says so, and call `between`
        between two pieces of a large one, with no request in flight."""
        self._cancelled, self._between = cancelled, between

    @staticmethod
    def is_small(query: Any) -> bool:
        """Whether a query may run between two pieces of a large one: about a second's work."""
        prompts = getattr(query, "prompts", ())
        return sum(len(p.text or p.tokens or ()) for p in prompts) <= SMALL

    def answer(self, query: CaptureQuery | StartQuery, progress: Progress, into: BinaryIO | None = None) -> Reply:
        """Answer any query. Raises UsageError before any engine starts, StartError, QueryError."""
        if isinstance(query, StartQuery):
            self.driver(progress)
            return Reply({"model": self.model_body()}, self.plan.notes)
        return self.capture(query, progress, into)

    def capture(self, query: CaptureQuery, progress: Progress, into: BinaryIO | None = None) -> Reply:
        """Answer `vlens capture`, its tensors into the open file `into`. Raises UsageError before any engine starts, StartError, QueryError."""
        fed = [self.tokens.feed(prompt, query.bos) for prompt in query.prompts]
        wants = self._wants(query, fed)
        for one in fed:
            self._check(one, query.one_chunk)
        self._check_size(fed, wants)
        driver = self.driver(progress)
        progress(RUNNING)
        from vlens_cli.driver import blob
        requests = [Request(f.ids, want) for f, want in zip(fed, wants, strict=True)]
        began = time.monotonic()
        results = driver.run(requests, self._cancelled, self._between)
        forward = time.monotonic() - began
        n_rows = sum(len(c.positions) for r in results for c in r.captured.values())
        return Reply(
            body=self._body(query, fed, wants, results, n_rows <= ROWS_BESIDE_FILE or into is None)
            | {"seconds": {"forward": round(forward, 6)}},
            notes=tuple(dict.fromkeys([*self.plan.notes, *(note for f in fed for note in f.notes), *(
                [] if n_rows <= ROWS_BESIDE_FILE or into is None else
                [f"the statistics of {n_rows} rows are left out beside the file; without -o they are printed"])])),
            saved=None if into is None else blob.write_capture(
                into, self.spec, self.plan.dtype, self.catalog, fed, wants, results, query.save_dtype),
        )

    def driver(self, progress: Progress) -> VLLMDriver:
        """The engine, started by the first call."""
        if self._driver is None:
            progress(f"starting the engine for {self.spec.name}")
            with boot.translated():
                from vlens_cli.driver.vllm_driver import VLLMDriver
                self._check_pickled()
            self._driver = VLLMDriver(self.spec, self.plan, self.catalog)
        return self._driver

    def _check_pickled(self) -> None:
        """What __init__ does for safetensors, for *.bin: their names can only be read by torch."""
        if checkpoint.shapes(Path(self.spec.model)) is None:
            import torch

            files = [f for f in sorted(Path(self.spec.model).glob("*.bin")) if f.name != "training_args.bin"]
            names = [n for f in files for n in torch.load(f, map_location="meta", mmap=True, weights_only=True)]
            check_checkpoint(self.catalog, self._config, names)

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _wants(self, query: CaptureQuery, fed: list[Fed]) -> list[dict[str, Want]]:
        requests = [hooks.parse(text) for text in query.hooks]
        selected = hooks.resolve(requests, self.catalog, pos=query.pos, head=query.head, dim=query.dim)
        return [{s.name: Want(self._positions(s, f), s.head, s.dim) for s in selected} for f in fed]

    def _positions(self, selected: hooks.Selected, fed: Fed) -> tuple[int, ...] | None:
        if selected.pos is None:
            return None
        tokens = tuple(text or "" for text in fed.texts)
        return hooks.positions(selected.pos, len(fed.ids), lambda text: self.tokens.spans(fed, text), tokens=tokens)

    def _check(self, fed: Fed, one_chunk: bool) -> None:
        boot.check_tokens(fed.ids, self.catalog.dims.d_vocab, self.plan)
        if one_chunk and len(fed.ids) > self.plan.chunk:
            raise PromptError(
                f"a prompt of {len(fed.ids)} tokens needs more than one forward of {self.plan.chunk}",
                hint=f"leave out --one-chunk, or use --chunk {len(fed.ids)}", code="more_than_one_chunk",
            )

    def _check_size(self, fed: list[Fed], wants: list[dict[str, Want]]) -> None:
        """Refuse what would not fit into memory, before the forward that fills it."""
        n_bytes = boot.BYTES[self.plan.dtype] * sum(
            self._numbers(name, want, len(f.ids)) for f, wanted in zip(fed, wants, strict=True)
            for name, want in wanted.items()
        )
        free = available_bytes()
        if n_bytes > free * MEMORY_SHARE:
            raise UsageError(f"this capture takes {n_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are free",
                             hint="ask for fewer hooks, positions or prompts at once", code="too_large")

    def _numbers(self, name: str, want: Want, n_tokens: int) -> int:
        rows = n_tokens if want.positions is None else len(want.positions)
        axes = self.catalog.axes(name)[1:]
        sizes = [self.catalog.size(axis) for axis in axes]
        if want.dims is not None:
            sizes[-1] = len(want.dims)
        if want.heads is not None:
            sizes[-2] = len(want.heads)
        return rows * math.prod(sizes)

    def _body(self, query: CaptureQuery, fed: list[Fed], wants: list[dict[str, Want]], results: list[Result],
              rows: bool) -> dict[str, Any]:
        from vlens_cli.driver import summary

        return {
            "schema_version": SCHEMA_VERSION,
            "command": "capture",
            "vlens": __version__,
            "model": self.model_body(),
            "prompts": [
                {
                    "text": f.text,
                    "chunks": result.chunks,
                    "tokens": [{"pos": n, "id": i, "text": t, "piece": p}
                               for n, (i, t, p) in enumerate(zip(f.ids, f.texts, f.pieces, strict=True))],
                    "hooks": {
                        name: summary.hook_body(captured, want[name], self.catalog.axes(name),
                                                self.catalog.derived(name), query.values, rows, self.tokens.text_of)
                        for name, captured in result.captured.items()
                    },
                }
                for f, want, result in zip(fed, wants, results, strict=True)
            ],
        }

    def model_body(self) -> dict[str, Any]:
        """The `model` object of every reply."""
        return {
            "name": self.spec.name, "folder": self.spec.model, "revision": self.spec.revision,
            "family": self.catalog.family, "dtype": self.plan.dtype,
        }
