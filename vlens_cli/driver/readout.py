"""Logits as numbers that a person reads: the likeliest tokens, ranks, entropy, loss.

Everything is computed from pieces of a few hundred rows, by torch, where the rows are: nobody ever holds
[pos, d_vocab], and no Python list does unless every value was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# The vocabulary is searched in blocks of this many entries: the k largest lie in the k blocks with the largest maxima.
BLOCK = 128

TextOf = Callable[[int], str | None]


@dataclass(frozen=True)
class Distribution:
    """Rows of logits as distributions over the next token.

    logits   [rows, d_vocab], as the engine gave them
    log_sum  [rows] float64, log(sum(exp(logits)))
    entropy  [rows] float64, in nats
    """

    logits: torch.Tensor
    log_sum: torch.Tensor
    entropy: torch.Tensor

    def only(self, rows: list[int]) -> Distribution:
        """Some of the rows."""
        return Distribution(self.logits[rows], self.log_sum[rows], self.entropy[rows])

    def logprobs(self, picked: torch.Tensor) -> torch.Tensor:
        """The log-probabilities, in float64, of logits that were picked out: [rows, ...]."""
        return picked.double() - self.log_sum.view(-1, *[1] * (picked.ndim - 1))


def distribution(logits: torch.Tensor) -> Distribution:
    """Sums in float32 of exponentials relative to the row's largest logit; the logarithm and what is added to it in
    float64. With e = exp(x - max), S = sum(e): logsumexp = max + log S, and the entropy -sum(p log p) is
    log S - sum(e (x - max)) / S."""
    top = logits.amax(1, keepdim=True).float()
    shifted = logits.float() - top
    weights = shifted.exp()
    total = weights.sum(1).double()
    # A token that cannot come (-inf) adds 0, and 0 * inf would be NaN.
    mean = shifted.clamp_min_(torch.finfo(torch.float32).min).mul_(weights).sum(1).double() / total
    return Distribution(logits, top[:, 0].double() + total.log(), total.log() - mean)


def largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of the `count` largest logits of each row, descending; NaN counts as the largest.

    torch.topk over a whole vocabulary takes longer than the unembedding; over the blocks that hold them it does not.
    """
    n_blocks = logits.shape[1] // BLOCK
    if count >= n_blocks:
        found = logits.topk(min(count, logits.shape[1]), dim=1)
        return found.values, found.indices
    whole = n_blocks * BLOCK
    maxima = logits[:, :whole].unflatten(1, (n_blocks, BLOCK)).amax(2)
    blocks = maxima.topk(count, dim=1).indices
    inside = torch.arange(BLOCK, device=logits.device)
    tail = torch.arange(whole, logits.shape[1], device=logits.device).expand(len(logits), -1)
    ids = torch.cat([(blocks[:, :, None] * BLOCK + inside).flatten(1), tail], dim=1)
    found = logits.gather(1, ids).topk(count, dim=1)
    return found.values, ids.gather(1, found.indices)


def ranks(logits: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """[rows, n]: how many tokens have a larger logit than each picked one [rows, n]; -1 where the row holds NaN, which
    has no order."""
    counts = torch.stack([(logits > one[:, None]).sum(1) for one in picked.unbind(1)], dim=1)
    return counts.masked_fill(logits.isnan().any(1, keepdim=True), -1)


def entries(rows: Distribution, positions: Sequence[int], top: int, targets: Sequence[int], text_of: TextOf
            ) -> list[dict[str, Any]]:
    """One object a row: pos, entropy (nats), top (id, text, logit, prob), and for each target the same with rank and
    logprob."""
    values, ids = largest(rows.logits, top)
    probs = rows.logprobs(values).exp()
    picked = rows.logits[:, list(targets)]
    found = [
        {"pos": pos, "entropy": entropy, "top": [
            {"id": i, "text": text_of(i), "logit": logit, "prob": prob} for i, logit, prob in zip(*row, strict=True)]}
        for pos, entropy, *row in zip(positions, rows.entropy.tolist(), ids.tolist(), values.tolist(), probs.tolist(),
                                      strict=True)
    ]
    if targets:
        logprobs = rows.logprobs(picked)
        columns = (picked.tolist(), logprobs.exp().tolist(), logprobs.tolist(), ranks(rows.logits, picked).tolist())
        for entry, *row in zip(found, *columns, strict=True):
            entry["targets"] = [
                {"id": i, "text": text_of(i), "logit": logit, "prob": prob, "logprob": logprob,
                 "rank": rank if rank >= 0 else None}
                for i, logit, prob, logprob, rank in zip(targets, *row, strict=True)
            ]
    return found
