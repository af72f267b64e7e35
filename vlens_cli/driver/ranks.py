"""This worker's place among the ranks of one engine, and what crosses between them.

Tensor-parallel ranks run the same code over the same requests, so that a hook body on one of them may ask all of them
for what each holds: a point whose heads or columns are spread over ranks is joined where it is read, and everything
after that sees what a single rank would. Pipeline stages own their layers; what one of them gives goes to the first.

Order: vLLM (0.26 to 0.32) numbers ranks stage by stage, tensor-parallel ranks next to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from vlens_cli.driver import carry, internals
from vlens_cli.driver.gather import Sharding, gather
from vlens_cli.errors import StartError

# Bytes that are sent at once.
PIECE = 16 * 2**20
# How long a rank waits for another that should be at the same place of the forward; it may be busy, or a long way behind.
PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True)
class Ranks:
    """`tp` tensor-parallel ranks in each of `pp` stages; this is rank `at` of stage `stage`."""

    tp: int = 1
    pp: int = 1
    at: int = 0
    stage: int = 0

    @classmethod
    def of_process(cls) -> Ranks:
        """Where vLLM has put this process."""
        from vllm.distributed import get_pp_group, get_tp_group

        tp, pp = get_tp_group(), get_pp_group()
        return cls(tp.world_size, pp.world_size, tp.rank_in_group, pp.rank_in_group)

    @property
    def rank(self) -> int:
        return self.stage * self.tp + self.at

    @cached_property
    def _impatient(self) -> Any:
        """A group of the tensor-parallel ranks that gives up. Every rank of the engine must ask for it at once."""
        groups = [dist.new_group([stage * self.tp + at for at in range(self.tp)], timeout=PATIENCE, backend="gloo")
                  for stage in range(self.pp)]
        return groups[self.stage]

    def prepare(self) -> None:
        """Called by all ranks together, before any of them asks another."""
        if self.tp > 1:
            self._impatient  # noqa: B018

    def meet(self, what: str) -> None:
        """See that every tensor-parallel rank is at `what`. Raises StartError where one is elsewhere, or does not come."""
        mine = torch.zeros(256, dtype=torch.uint8)
        text = what.encode()[-256:]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.tp)]
        try:
            dist.all_gather(found, mine, group=self._impatient)
        except RuntimeError as fault:
            raise StartError(f"a tensor-parallel rank never came to {what}", code="ranks_differ") from fault
        for at, other in enumerate(found):
            if not torch.equal(other, mine):
                there = bytes(other.tolist()).rstrip(b"\0").decode()
                raise StartError(f"tensor-parallel rank {at} reads {there} where rank {self.at} reads {what}",
                                 code="ranks_differ")

    @cached_property
    def _group(self) -> Any:
        from vllm.distributed import get_tp_group

        return get_tp_group()

    @cached_property
    def _world(self) -> Any:
        """The group of all ranks whose tensors are on the host, whatever the device."""
        from vllm.distributed import get_world_group

        return get_world_group().cpu_group

    # Tensor-parallel ranks

    def each(self, t: torch.Tensor) -> list[torch.Tensor]:
        """What every tensor-parallel rank holds, in their order; all are of one shape."""
        if self.tp == 1:
            return [t]
        t = t.contiguous()
        found = [torch.empty_like(t) for _ in range(self.tp)]
        # As bytes: not every backend knows every dtype.
        on = self._group.cpu_group if t.device.type == "cpu" else self._group.device_group
        dist.all_gather([_bytes(one) for one in found], _bytes(t), group=on)
        return found

    def each_value(self, value: Any) -> list[Any]:
        """`each` of plain values."""
        if self.tp == 1:
            return [value]
        data = torch.frombuffer(bytearray(carry.to_bytes(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self.each(torch.tensor([len(data)]))]
        padded = torch.nn.functional.pad(data, (0, max(sizes) - len(data)))
        return [carry.from_bytes(one[:size].numpy().tobytes()) for one, size in zip(self.each(padded), sizes, strict=True)]

    def any(self, here: bool) -> bool:
        """Whether something is so on any tensor-parallel rank."""
        return here if self.tp == 1 else any(map(bool, self.each(torch.tensor([here]))))

    def sum(self, t: torch.Tensor) -> torch.Tensor:
        return t if self.tp == 1 else self._group.all_reduce(t.contiguous())

    def joined(self, t: torch.Tensor, replicas: int = 1, dim: int = 1) -> torch.Tensor:
        """The ranks' parts side by side; of `replicas` neighbours that hold the same, the first."""
        return t if self.tp == 1 else torch.cat(self.each(t)[::replicas], dim=dim)

    def part(self, t: torch.Tensor, replicas: int = 1, dim: int = 1) -> torch.Tensor:
        """This rank's part of what `joined` gave, as a view."""
        parts = self.tp // replicas
        width = t.shape[dim] // parts
        return t.narrow(dim, self.at // replicas * width, width)

    def linear(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """A whole linear layer's product and bias: x [rows, in] -> [rows, out], whichever side it is cut on."""
        how = internals.cut(layer) if self.tp > 1 else internals.Cut()
        out = internals.linear(layer, self.part(x) if how.rows else x)
        if how.columns:
            widths = internals.sharding(layer, "weight")
            return gather(self.each(out), Sharding(1, widths.parts, widths.replicas))
        return self.sum(out) if how.unreduced else out

    def product(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """A whole output projection's product without its bias: x [rows, in] -> [rows, out]."""
        if self.tp > 1 and internals.cut(layer).rows:
            return self.sum(internals.product(layer, self.part(x).contiguous()))
        return internals.product(layer, x)

    def rows_of(self, weight: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """Rows [ids, ...] in float32 of a weight whose rows lie on the ranks one after the other."""
        if self.tp == 1:
            return weight[ids].float()
        at = torch.tensor(ids, device=weight.device) - self.at * len(weight)
        mine = (at >= 0) & (at < len(weight))
        rows = weight[at.clamp(0, len(weight) - 1)].float()
        return self.sum(torch.where(mine.view(-1, *[1] * (rows.ndim - 1)), rows, 0.0))

    def scoring(self, attention: torch.nn.Module) -> internals.Scoring:
        """How a live attention layer scores, for all of its heads. Raises LookupError."""
        found = internals.attention_scoring(attention)
        by_head = {name: self.joined(t, dim=0) for name in ("slopes", "sinks")
                   if isinstance(t := getattr(found, name), torch.Tensor)}
        return found._replace(**by_head)

    # All ranks

    def from_next_stage(self, value: Any) -> Any:
        """`value` of the next stage, on the host; this stage's own goes to the one before. None in the last stage."""
        found = None
        if self.stage + 1 < self.pp:
            found = carry.from_bytes(b"".join(self._receive(self.rank + self.tp)))
        if self.stage:
            self._send(carry.to_bytes(value), self.rank - self.tp)
        return found

    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 has, on every rank."""
        size = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(size, 0, group=self._world)
        out = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8) if size else torch.empty(0)
        for piece in out.split(PIECE) if size else ():
            dist.broadcast(piece, 0, group=self._world)
        return out.numpy().tobytes()

    def relay(self, value: Any, stages: Iterable[int], paths: Sequence[str]) -> None:
        """What the first rank of each of `stages` gives, through rank 0 into the file of its stage, in pieces."""
        for stage in stages:
            if self.stage == stage and self.at == 0:
                self._send(carry.to_bytes(value), 0)
            if self.rank == 0:
                with open(paths[stage], "wb") as file:
                    file.writelines(self._receive(stage * self.tp))

    def _send(self, data: bytes, to: int) -> None:
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)]), to, group=self._world)
        for piece in whole.split(PIECE):
            dist.send(piece, to, group=self._world)

    def _receive(self, source: int) -> Iterable[bytes]:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self._world)
        for start in range(0, int(size), PIECE):
            piece = torch.empty(min(PIECE, int(size) - start), dtype=torch.uint8)
            dist.recv(piece, source, group=self._world)
            yield piece.numpy().tobytes()


ALONE = Ranks()


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(-1).view(torch.uint8)
