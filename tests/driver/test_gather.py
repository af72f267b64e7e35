"""Shards of made-up parameters, cut as vLLM cuts them, joined again."""

from __future__ import annotations

import pytest
import torch

from vlens_cli.driver.gather import Sharding, gather
from vlens_cli.errors import QueryError

D_MODEL, D_HEAD = 6, 4


def weight(rows: int, columns: int = D_MODEL) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def qkv_shards(ranks: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, list[torch.Tensor], Sharding]:
    """(the whole fused weight, each rank's shard, how): with fewer kv heads than ranks, neighbours share one."""
    q, k, v = (weight(n * D_HEAD) + 1000 * i for i, n in enumerate((heads, kv_heads, kv_heads)))
    replicas = max(1, ranks // kv_heads)
    own, own_kv = heads // ranks * D_HEAD, max(1, kv_heads // ranks) * D_HEAD
    shards = [
        torch.cat([q[rank * own :][:own], *(t[rank // replicas * own_kv :][:own_kv] for t in (k, v))])
        for rank in range(ranks)
    ]
    return torch.cat([q, k, v]), shards, Sharding(0, (own, own_kv, own_kv), (1, replicas, replicas))


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 2), (2, 4, 4), (2, 4, 1), (4, 8, 2), (8, 8, 2)]
)
def test_fused_queries_keys_and_values(ranks, heads, kv_heads):
    whole, shards, how = qkv_shards(ranks, heads, kv_heads)
    assert torch.equal(gather(shards, how), whole)
    if ranks > 1:
        assert not torch.equal(torch.cat(shards)[: len(whole)], whole)  # what joining on axis 0 would give


def test_a_bias_of_fused_parts():
    whole, shards, how = qkv_shards(2, 4, 1)
    assert torch.equal(gather([shard[:, 0] for shard in shards], how), whole[:, 0])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gate_and_up(ranks):
    gate, up = weight(8), weight(8) + 1000
    own = 8 // ranks
    shards = [torch.cat([gate[r * own :][:own], up[r * own :][:own]]) for r in range(ranks)]
    assert torch.equal(gather(shards, Sharding(0, (own, own))), torch.cat([gate, up]))


def test_experts_are_fused_along_their_second_axis():
    gate, up = torch.randn(3, 8, D_MODEL), torch.randn(3, 8, D_MODEL)
    shards = [torch.cat([gate[:, r * 4 :][:, :4], up[:, r * 4 :][:, :4]], dim=1) for r in range(2)]
    assert torch.equal(gather(shards, Sharding(1, (4, 4))), torch.cat([gate, up], dim=1))


def test_row_parallel_is_joined_along_the_inputs():
    whole = weight(D_MODEL, 8)
    assert torch.equal(gather(list(whole.split(4, dim=1)), Sharding(1)), whole)


def test_a_vocabulary_is_joined_in_the_order_of_ranks_with_its_padding_last():
    whole = torch.cat([weight(10), torch.zeros(6, D_MODEL)])
    assert torch.equal(gather(list(whole.split(8)), Sharding(0)), whole)


def test_a_replicated_weight_is_taken_once_and_must_agree():
    norm = weight(1)[0]
    norm[0] = float("nan")
    assert torch.equal(gather([norm, norm.clone()], Sharding())[1:], norm[1:])
    other = norm.clone()
    other[3] += 1
    with pytest.raises(QueryError, match="differ"):
        gather([norm, other], Sharding())


def test_a_bias_that_the_first_rank_adds_is_the_first_ranks():
    bias = weight(8)
    assert gather([bias, torch.zeros_like(bias)], Sharding(first=True)) is bias
    with pytest.raises(QueryError, match="another's too"):
        gather([bias, bias], Sharding(first=True))


def test_replicated_heads_must_agree():
    _, shards, how = qkv_shards(2, 4, 1)
    shards[1][-1] += 1
    with pytest.raises(QueryError, match="differ"):
        gather(shards, how)


def test_widths_that_are_not_the_layers_are_refused():
    with pytest.raises(QueryError, match="rows where their layer says"):
        gather([weight(8), weight(8)], Sharding(0, (4, 3)))
