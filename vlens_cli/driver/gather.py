"""The shards of one parameter, one a rank -> the parameter, by how it was sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlens_cli.errors import QueryError


@dataclass(frozen=True)
class Sharding:
    """How a parameter is spread over the tensor-parallel ranks.

    dim       axis that is cut; None: every rank has all of it
    parts     widths along `dim` of this rank's fused parts (`qkv`: queries, keys, values); empty: it is one part
    replicas  of each part, how many neighbouring ranks hold the same shard (kv heads that are fewer than ranks)
    first     the first rank has all of it, and the others zeros: it is added to what each rank has an addend of
    """

    dim: int | None = None
    parts: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    first: bool = False


def gather(shards: Sequence[torch.Tensor], how: Sharding) -> torch.Tensor:
    """Join the shards, in the order of their ranks.

    Each fused part is joined by itself: the ranks' shards hold a piece of every part, side by side. What several ranks
    hold is taken once. Raises QueryError where replicas differ, or shards have other widths than `how` says.
    """
    if how.first:
        return _first(shards)
    if how.dim is None:
        return _one(shards)
    parts = how.parts or (shards[0].shape[how.dim],)
    replicas = how.replicas or (1,) * len(parts)
    if any(shard.shape[how.dim] != sum(parts) for shard in shards):
        widths = [shard.shape[how.dim] for shard in shards]
        raise QueryError(f"shards have {widths} rows where their layer says {sum(parts)}", code="shards_differ")
    pieces = [shard.split(parts, dim=how.dim) for shard in shards]
    if len(shards) == 1:
        return shards[0]
    joined = []
    for n, count in enumerate(replicas):
        groups = [[piece[n] for piece in pieces[first : first + count]] for first in range(0, len(shards), count)]
        joined += map(_one, groups)
    return torch.cat(joined, dim=how.dim)


def _first(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = shards
    if any(other.shape != first.shape or other.count_nonzero() for other in others):
        raise QueryError("a weight that the first rank should have alone is another's too", code="shards_differ")
    return first


def _one(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """What several ranks hold alike."""
    first, *others = copies
    if any(other.shape != first.shape or not torch.equal(_bits(other), _bits(first)) for other in others):
        raise QueryError("ranks that should hold the same weight differ", code="shards_differ")
    return first


def _bits(t: torch.Tensor) -> torch.Tensor:
    """So that NaN equals itself."""
    return t.contiguous().view(torch.uint8)
