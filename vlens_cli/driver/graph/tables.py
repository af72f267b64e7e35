"""Device memory that the custom op reads: which rows of a step to copy where, and what to change in them.

Everything stays where it is for the life of the engine, since captured graphs hold the addresses; contents change
between steps, on the engine's own stream.

    table   int32 [site, 2, token]: where a token's row is copied to (in granules of `rows`), and where its program begins
            (in words of `words`); -1 is none
    words   the programs of live requests (programs.py), int32 and float32 in one memory
    rows    captured rows of one step, each at a granule of its own
    counts  int32 [site, 2]: how many rows the op has copied and changed, counted by the op itself
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlens_cli.driver.graph.limits import GRANULE, PROGRAM_SHARE
from vlens_cli.driver.graph.programs import Programs

WORD = 4


@dataclass(frozen=True)
class Site:
    """One place in the graph.

    name      the hook point      columns  where its value begins in a row of the tensor
    segments  x width: how its value is parted for projections: heads x d_head, or 1 x the whole width
    pair      the value is the sum of two tensors      factor  the value is this times the tensor
    raw       both tensors are copied as they are, side by side: the value is formed of them later
    batch     tensors are [1, tokens, width]
    """

    name: str
    columns: int
    segments: int
    width: int
    pair: bool = False
    raw: bool = False
    factor: float = 1.0
    batch: bool = False

    @property
    def kept(self) -> int:
        """Numbers that are copied of one row."""
        return self.segments * self.width * (2 if self.raw and self.pair else 1)


class Tables:
    """The memory of one worker, and the op's two bodies over it."""

    def __init__(self, sites: list[Site], n_tokens: int, n_bytes: int, device: torch.device) -> None:
        self.sites = sites
        # Rows of the table begin at multiples of 128 bytes: a kernel is compiled once for all sites.
        self.n_tokens = -(-n_tokens // 32) * 32
        on_gpu = device.type == "cuda"
        self.table = torch.full((len(sites), 2, self.n_tokens), -1, dtype=torch.int32, device=device)
        self._staging = [_Staging(self.table, on_gpu) for _ in range(2)]
        self._turn = 0
        self.host = torch.full_like(self.table, -1, device="cpu").numpy()
        self.words = torch.zeros(n_bytes // PROGRAM_SHARE // WORD, dtype=torch.int32, device=device)
        self.floats = self.words.view(torch.float32)
        self.programs = Programs(self.words)
        granules = (n_bytes - n_bytes // PROGRAM_SHARE) // GRANULE
        self.rows = torch.zeros(granules * GRANULE, dtype=torch.uint8, device=device)
        self.granules = granules
        # At multiples of 16 bytes, for the same reason.
        self.counts = torch.zeros(len(sites), 4, dtype=torch.int32, device=device)[:, :2]
        # Learned when the engine warms up: what each site is called with.
        self.dtypes: list[torch.dtype | None] = [None] * len(sites)
        self._of: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}
        # The sites that the tables say something about, within a step that they were filled for. Elsewhere, as when graphs
        # are captured, None: all.
        self.busy: set[int] | None = None
        self.pairs = [False] * len(sites)
        if on_gpu:
            from vlens_cli.driver.graph import kernel

            self._run, self._capturing = kernel.run, torch.cuda.is_current_stream_capturing
        else:
            from vlens_cli.driver.graph import host

            self._run, self._capturing = host.run, bool

    @property
    def n_bytes(self) -> int:
        """What this takes of the device."""
        held = (self.table, self.words, self.rows, self.counts)
        return sum(t.numel() * t.element_size() for t in held)

    def visit(self, x: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        at = self.sites[site]
        x, residual = _flat(x, at), None if residual is None else _flat(residual, at)
        if len(x) > self.n_tokens:
            raise RuntimeError(f"a step of {len(x)} tokens is longer than the tables: {self.n_tokens}")
        self.dtypes[site], self.pairs[site] = x.dtype, residual is not None
        # Of a long prompt's forward, which is no graph's, a launch for nothing would be the most of what this costs.
        if self.busy is None or site in self.busy or self._capturing():
            self._run(self, site, x, residual)

    def of(self, site: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """(where, what, rows, counts) of a site, whose rows are of a dtype. Views made once: capturing graphs calls the op
        thousands of times."""
        if (site, dtype) not in self._of:
            self._of[site, dtype] = *self.table[site], self.rows.view(dtype), self.counts[site]
        return self._of[site, dtype]

    def upload(self, sites: range) -> None:
        """Bring the host's rows of some sites to the device, in the order of the stream."""
        staging = self._staging[self._turn]
        self._turn = (self._turn + 1) % len(self._staging)
        staging.send(torch.from_numpy(self.host[sites.start : sites.stop]), self.table, sites)

    def row_granules(self, site: int) -> int:
        """How many granules a copied row of a site takes. LookupError for a site that no graph has called."""
        if self.dtypes[site] is None:
            raise LookupError(f"the engine's graph never calls the point {self.sites[site].name}")
        return -(-self.sites[site].kept * self.dtypes[site].itemsize // GRANULE)

    def copied(self, site: int, start: int, count: int) -> torch.Tensor:
        """The `count` rows of a site that begin at granule `start`, as a view: [count, width], or [count, 2, width] where
        two tensors are kept as they are."""
        at, step = self.sites[site], self.row_granules(site)
        flat = self.rows[start * GRANULE : (start + count * step) * GRANULE].view(self.dtypes[site]).view(count, -1)
        if at.raw:
            return flat[:, : at.kept].unflatten(1, (2 if at.pair else 1, -1))[:, : 1 + self.pairs[site]]
        return flat[:, : at.kept]

    def clear(self) -> None:
        """Forget every request."""
        self.host[:] = -1
        self.table.fill_(-1)
        self.counts.zero_()
        self.programs.clear()
        self.busy = None


class _Staging:
    """Host memory that a copy to the device may still be reading when the next step is planned."""

    def __init__(self, table: torch.Tensor, on_gpu: bool) -> None:
        self._buffer = torch.empty(table.shape, dtype=table.dtype, pin_memory=True) if on_gpu else None
        self._done = torch.cuda.Event() if on_gpu else None

    def send(self, rows: torch.Tensor, table: torch.Tensor, sites: range) -> None:
        if self._buffer is None:
            table[sites.start : sites.stop].copy_(rows)
            return
        self._done.synchronize()
        buffer = self._buffer[: len(sites)]
        buffer.copy_(rows)
        table[sites.start : sites.stop].copy_(buffer, non_blocking=True)
        self._done.record()


def _flat(t: torch.Tensor, site: Site) -> torch.Tensor:
    """[tokens, width], as a view: what is written must reach the engine."""
    t = t[0] if site.batch and t.ndim > 2 else t
    return t if t.ndim == 2 else t.view(len(t), -1)
