"""Points that the engine never forms, rebuilt from those that it does: attention scores and patterns, what each head adds,
and the keys and values of latent attention.

The engine's kernels keep no [query, key] table, sum the heads inside the output projection, and draw the projection of
latent keys and values into themselves. All are computed when a request is taken, from the rows that its taps kept: only
the asked heads and query positions, a bounded piece at a time, each piece put into its place on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vlens_cli.driver import internals
from vlens_cli.driver.base import Want
from vlens_cli.driver.locate import Point

# Numbers of one piece: 16 MB in fp32, whatever the prompt's length.
PIECE = 4_000_000

# Rows of a source, and the absolute positions that they are of.
Rows = tuple[torch.Tensor, tuple[int, ...]]


def reads(point: Point, want: Want) -> tuple[Want, ...]:
    """What must be kept of each of the point's sources (`row.of`, in order) to rebuild what is wanted of it."""
    return REBUILD[point.row.derive].reads(point, want)


@torch.inference_mode()
def rebuild(point: Point, want: Want, sources: Sequence[Rows]) -> Rows:
    """The wanted part of a rebuilt point, on the host in the engine's dtype, and the positions that it is of.

    Raises LookupError where a source has other rows than `reads` asked for.
    """
    return REBUILD[point.row.derive].rebuild(point, want, sources)


def scores(q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor, positions: torch.Tensor,
           scoring: internals.Scoring) -> torch.Tensor:
    """Attention scores before the softmax, [head, query, key] in fp32; -inf where masked.

    q [query, head, d_head] and k [key, head, d_head] after rotation, of the query heads `heads` [head]; `positions`
    [query] are the queries' absolute ones, and the keys are those of positions 0, 1, ...

    scale * q.k, then the softcap, cap * tanh(s / cap) (Gemma 2), then the linear bias, slope * key position (Press et al.
    2022, up to a constant a row, which the softmax does not see; Bloom's and Falcon's form in transformers).
    """
    found = scoring.scale * torch.einsum("qhd,khd->hqk", q.float(), k.float())
    if scoring.softcap is not None:
        found = scoring.softcap * torch.tanh(found / scoring.softcap)
    keys = torch.arange(len(k), device=q.device)
    if scoring.slopes is not None:
        found = found + scoring.slopes.to(found)[heads, None, None] * keys
    distance = positions[:, None] - keys
    hidden = distance < 0 if scoring.window is None else (distance < 0) | (distance >= scoring.window)
    return found.masked_fill(hidden, float("-inf"))


def pattern(found: torch.Tensor, heads: torch.Tensor, scoring: internals.Scoring) -> torch.Tensor:
    """The softmax of scores [head, query, key] over the keys, in fp32.

    With sinks (gpt-oss) each head has one more score that no key stands for: rows then sum to less than one.
    """
    if scoring.sinks is None:
        return found.softmax(-1)
    sinks = scoring.sinks.to(found)[heads, None, None].expand(-1, found.shape[1], 1)
    return torch.cat([found, sinks], dim=-1).softmax(-1)[..., :-1]


def attended(found: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A pattern [head, query, key] times values [key, kv_head, d_head]: z, [query, head, d_head]."""
    return torch.einsum("hqk,khd->qhd", found.float(), v.float().repeat_interleave(len(found) // v.shape[1], dim=1))


# Scores and patterns


def _table_reads(point: Point, want: Want) -> tuple[Want, ...]:
    """The asked queries of the asked heads, and the keys of all positions of the kv heads that serve them."""
    if want.heads is None:
        return Want(want.positions), Want()
    return Want(want.positions, want.heads), Want(heads=tuple(sorted({h // point.kv_group for h in want.heads})))


Finish = Callable[[torch.Tensor, torch.Tensor, internals.Scoring], torch.Tensor]


def _unfinished(found: torch.Tensor, heads: torch.Tensor, scoring: internals.Scoring) -> torch.Tensor:
    return found


def _attended(finish: Finish) -> Callable[[Point, Want, Sequence[Rows]], Rows]:
    """The table of queries and keys as the attention kernel gets them."""

    def made(point: Point, want: Want, sources: Sequence[Rows]) -> Rows:
        q, (k, keys) = sources
        serving = dict(zip(_table_reads(point, want)[1].heads or range(k.shape[1]), range(k.shape[1]), strict=True))
        return _table(point, want, q, keys, lambda h: k[:, [serving[h // point.kv_group]]],
                      point.ranks.scoring(point.module), finish)

    return made


def _table(point: Point, want: Want, queries: Rows, keys: Sequence[int], keys_of: Callable[[int], torch.Tensor],
           scoring: internals.Scoring, finish: Finish) -> Rows:
    """[head, query, key] of what `finish` makes of the scores, with the dtype's lowest number for -inf; `keys_of` gives a
    head's keys [key, 1, width] of the positions `keys`."""
    q, positions = queries
    if tuple(keys) != tuple(range(len(keys))):
        raise LookupError(f"{point.name} needs the keys of every position, and has {len(keys)} others")
    heads = want.heads or tuple(range(q.shape[1]))
    columns = slice(None) if want.dims is None else list(want.dims)
    out = torch.empty(len(heads), len(q), len(keys) if want.dims is None else len(want.dims), dtype=q.dtype)
    lowest = torch.finfo(q.dtype).min
    for n, h in enumerate(heads):
        head, k = torch.tensor([h], device=q.device), keys_of(h)
        for rows in _pieces(len(q), len(k)):
            at = torch.tensor(positions[rows], device=q.device)
            found = finish(scores(q[rows, [n]], k, head, at, scoring), head, scoring)
            out[n, rows] = found[0, :, columns].clamp_min(lowest).to(out.dtype)
    return out, positions


def _pieces(rows: int, width: int) -> Iterator[slice]:
    step = max(1, PIECE // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


# Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): one row a position, of which each head's key and value are
# projections, and one key that turns and serves all heads


def _projected(point: Point, kv_b: torch.nn.Module, latent: torch.Tensor, heads: Sequence[int] | None) -> torch.Tensor:
    """The asked heads' keys without rotation, each with its value behind, [rows, head, d_nope + d_head], of latent rows after
    their norm."""
    n_heads, chosen = point.shape[0], slice(None) if heads is None else list(heads)
    return torch.cat([point.ranks.linear(kv_b, latent[rows]).unflatten(-1, (n_heads, -1))[:, chosen]
                      for rows in _pieces(len(latent), n_heads * latent.shape[1])])


def _latent_reads(point: Point, want: Want) -> tuple[Want, ...]:
    return (Want(want.positions),) * len(point.of)


def _keys_and_values(point: Point, want: Want, sources: Sequence[Rows]) -> Rows:
    """All of the projection, [pos, head, d_nope + d_head]."""
    ((latent, positions),) = sources
    return _cut(_projected(point, point.module, latent, want.heads), want), positions


def _value_of_latent(point: Point, want: Want, sources: Sequence[Rows]) -> Rows:
    ((latent, positions),) = sources
    return _cut(_projected(point, point.module, latent, want.heads)[..., -point.shape[1] :], want), positions


def _key_of_latent(point: Point, want: Want, sources: Sequence[Rows]) -> Rows:
    (latent, positions), (turned, _) = sources
    return _cut(_keys(_projected(point, point.module, latent, want.heads), turned, point.shape[1]), want), positions


def _keys(projected: torch.Tensor, turned: torch.Tensor, width: int) -> torch.Tensor:
    """Keys [rows, head, width] of what `_projected` gives: the part that does not turn, then that which all heads share."""
    turned = turned[:, None].expand(-1, projected.shape[1], -1)
    return torch.cat([projected[..., : width - turned.shape[-1]], turned], dim=-1)


def _latent_table_reads(point: Point, want: Want) -> tuple[Want, ...]:
    return Want(want.positions, want.heads), Want(), Want()


def _of_latent(finish: Finish) -> Callable[[Point, Want, Sequence[Rows]], Rows]:
    """The table of queries and keys that are made of latent rows."""

    def made(point: Point, want: Want, sources: Sequence[Rows]) -> Rows:
        q, (latent, keys), (turned, _) = sources
        projected = _projected(point, point.helper, latent, want.heads)
        place = {h: n for n, h in enumerate(want.heads or range(point.shape[0]))}
        return _table(point, want, q, keys, lambda h: _keys(projected[:, [place[h]]], turned, q[0].shape[-1]),
                      internals.Scoring(internals.latent_scale(point.module)), finish)

    return made


def _cut(t: torch.Tensor, want: Want) -> torch.Tensor:
    return (t if want.dims is None else t[..., list(want.dims)]).cpu()


# What each head adds


def _result_reads(point: Point, want: Want) -> tuple[Want, ...]:
    return (Want(want.positions, want.heads),)


def _result(point: Point, want: Want, sources: Sequence[Rows]) -> Rows:
    """[pos, head, d_model]: the layer's own product of each head's z, with the other heads zeroed."""
    ((z, positions),) = sources
    n_heads, d_model = point.shape
    heads = want.heads or tuple(range(n_heads))
    columns = slice(None) if want.dims is None else list(want.dims)
    out = torch.empty(len(z), len(heads), d_model if want.dims is None else len(want.dims), dtype=z.dtype)
    for n, h in enumerate(heads):
        for rows in _pieces(len(z), max(d_model, n_heads * z.shape[2])):
            alone = z.new_zeros(rows.stop - rows.start, n_heads, z.shape[2])
            alone[:, h] = z[rows, n]
            out[rows, n] = point.ranks.product(point.module, alone.flatten(1))[:, columns].to(out.dtype)
    return out, positions


@dataclass(frozen=True)
class Rebuilding:
    """What a rebuilt point needs of its sources, and how it is made of them."""

    reads: Callable[[Point, Want], tuple[Want, ...]]
    rebuild: Callable[[Point, Want, Sequence[Rows]], Rows]


REBUILD = {
    "scores": Rebuilding(_table_reads, _attended(_unfinished)),
    "pattern": Rebuilding(_table_reads, _attended(pattern)),
    "keys_and_values": Rebuilding(_latent_reads, _keys_and_values),
    "latent_key": Rebuilding(_latent_reads, _key_of_latent),
    "latent_value": Rebuilding(_latent_reads, _value_of_latent),
    "latent_scores": Rebuilding(_latent_table_reads, _of_latent(_unfinished)),
    "latent_pattern": Rebuilding(_latent_table_reads, _of_latent(pattern)),
    "result": Rebuilding(_result_reads, _result),
}
