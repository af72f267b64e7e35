"""What a change does to the logits of one position, in fp64: divergence, metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlens_cli.driver.targets import Target
from vlens_cli.errors import UsageError


def kl(base: torch.Tensor, patched: torch.Tensor) -> float:
    """KL(base || patched) in nats, of two rows of logits [d_vocab]."""
    p, q = (row.double().log_softmax(0) for row in (base, patched))
    # What has no probability adds nothing, also where both logits are -inf.
    return torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum().item()


@dataclass(frozen=True)
class Metric:
    """One number of a row of logits.

    logit_diff   logit of the first target minus that of the second
    prob         probability of the first target
    recovery     (x - base) / (source - base), x being logit_diff, or the logit of a single target
    """

    name: str
    ids: tuple[int, ...]

    @property
    def dims(self) -> tuple[int, ...] | None:
        """The entries of the row that it needs; None for all."""
        return None if self.name == "prob" else self.ids

    def raw(self, row: torch.Tensor) -> float:
        """Before it is normalized, from the entries `dims` of a row, in that order."""
        if self.name == "prob":
            return row.double().softmax(0)[self.ids[0]].item()
        return (row[0].double() - row[1].double() if len(self.ids) > 1 else row[0].double()).item()

    def of_whole(self, row: torch.Tensor) -> float:
        """`raw` of a whole row [d_vocab]."""
        return self.raw(row if self.dims is None else row[list(self.dims)])

    def value(self, raw: float, base: float, source: float | None) -> float | None:
        """The metric, given its raw value here and in the two runs; None where it is not defined."""
        if self.name != "recovery":
            return raw
        return None if source is None or source == base else (raw - base) / (source - base) + 0.0  # no -0.0


def metric(name: str | None, targets: Sequence[Target], has_source: bool) -> Metric:
    """The metric of this name; without one, the logit difference of two targets, the probability of one.

    Raises UsageError where the targets, or the source, do not suffice.
    """
    ids = tuple(target.id for target in targets)
    if len(set(ids)) < len(ids):
        raise UsageError(f"two targets are the same token: {', '.join(target.typed for target in targets)}",
                         code="same_target")
    name = name or ("logit_diff" if len(ids) > 1 else "prob")
    if not 1 <= len(ids) <= 2 or (name == "logit_diff" and len(ids) != 2):
        wanted = "two targets" if name == "logit_diff" else "one target or two"
        raise UsageError(f"the metric {name} takes {wanted}, and {len(ids)} are given", code="metric_targets",
                         hint='--target " Paris" --target " Rome"')
    if name == "recovery" and not has_source:
        raise UsageError("recovery compares with a source run, and none is given", code="no_source",
                         hint='add --source "The Colosseum is in"')
    return Metric(name, ids)
