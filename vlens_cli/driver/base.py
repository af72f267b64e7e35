"""What a driver takes and gives, whatever runs behind it.

`Driver` keeps the contract of TransformerLens' own `Driver` protocol (4.3), so that one object can serve a
`RemoteBridge` and vlens' commands; `run` is the narrower call that the commands use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from vlens_cli.driver.outlet import Slot

LOGITS = "unembed.hook_out"


@dataclass(frozen=True)
class Want:
    """What to keep of one hook point: absolute positions (None: all fed tokens) and indices along the head axis
    and the last axis (None: all). Of attention patterns and scores the positions are the queries', `dims` the keys'.

    `reduce` makes one row of the rows of all positions, entry by entry: their mean, their max, or their norm, which is
    the root of the sum of squares; None keeps the rows."""

    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    dims: tuple[int, ...] | None = None
    reduce: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"positions": self.positions, "heads": self.heads, "dims": self.dims, "reduce": self.reduce}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Want:
        return cls(**{key: tuple(value) if isinstance(value, list | tuple) else value for key, value in fields.items()})


@dataclass(frozen=True, eq=False)
class Edit:
    """One change of one hook point in one request: rows x become `keep * x + value + along * proj(x)`, where proj(x) is
    the part of x along `direction`, (x . d / d . d) d.

    positions    absolute positions (None: every fed token, generated ones included)
    heads, dims  indices along the head axis and the last axis (None: all); nothing else is touched
    keep         factor of what is there, a number or a tensor that broadcasts as `value` does; 0 replaces it unread
    value        what is added, a number or a tensor: one selected row [(heads,) dims], or one for each of `positions`
                 [positions, (heads,) dims]
    direction    [dims] over the last axis; `along` is the factor of the projection on it
    """

    name: str
    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    dims: tuple[int, ...] | None = None
    keep: float | torch.Tensor = 1.0
    value: float | torch.Tensor | None = None
    direction: torch.Tensor | None = None
    along: float = 0.0


@dataclass(frozen=True)
class Request:
    """One prompt's token ids, what to keep of its forward, by canonical hook name, and what to change in it, in order.

    `final_logprobs` asks for the log-probabilities of the token after the prompt, from the engine's sampler. With a `slot`
    what is kept leaves for a file while the forward runs, and the result holds none of it.
    """

    tokens: tuple[int, ...]
    capture: dict[str, Want] = field(default_factory=dict)
    max_new_tokens: int = 1
    edits: tuple[Edit, ...] = ()
    final_logprobs: bool = False
    slot: Slot | None = None


@dataclass(frozen=True)
class Captured:
    """One hook point of one request: `value` is [pos, ...] on the host, or [head, query, key]; `positions` are the
    absolute ones along `pos` or `query`."""

    value: torch.Tensor
    positions: tuple[int, ...]

    def at(self, positions: tuple[int, ...]) -> Captured:
        """The rows of some of the positions, in the order given."""
        if positions == self.positions:
            return self
        place = {pos: n for n, pos in enumerate(self.positions)}
        return Captured(self.value[[place[pos] for pos in positions]], positions)


@dataclass(frozen=True)
class Result:
    """One request's answer. `chunks` counts the forwards that its prompt and decode steps took, `fired` how many
    forwards each of its edits was applied in, in their order; `final_logprobs` is [d_vocab] where it was asked."""

    captured: dict[str, Captured]
    new_tokens: tuple[int, ...]
    chunks: int
    fired: tuple[int, ...] = ()
    final_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class ForwardResult:
    """TransformerLens' reply: `logits` [batch, pos, d_vocab] or None, `captured` hook name -> [batch, pos, ...], each
    prompt's rows at their own places and padded around them (logits -inf, captures 0); `new_tokens` [batch, new];
    `raw_output` the per-request results. `rows` are the places of each prompt's fed tokens, of which the last
    new - 1 (or new) were generated."""

    logits: torch.Tensor | None
    captured: dict[str, torch.Tensor]
    new_tokens: torch.Tensor | None = None
    raw_output: Any = None
    rows: tuple[range, ...] = ()


class Driver(Protocol):
    """Runs forwards of one model."""

    supported_hook_points: tuple[str, ...]
    non_fireable_hook_points: dict[str, str]
    provides_sequence_logits: bool

    def run(self, requests: Sequence[Request]) -> list[Result]: ...

    def forward(
        self,
        input_ids: Any,
        *,
        capture: Sequence[str] = (),
        intervene: dict[str, Any] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        attention_mask: Any = None,
    ) -> ForwardResult: ...

    def supports(self, feature: str) -> bool: ...

    def close(self) -> None: ...
