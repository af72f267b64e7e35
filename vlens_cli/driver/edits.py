"""Interventions as typed -> the edits of each request: files read, positions found, source runs made, shapes checked.

Everything that can be refused is refused before the first forward. No torch here, for a query without interventions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from vlens_cli import hooks, interventions
from vlens_cli.driver.base import Edit, Request, Result, Want
from vlens_cli.driver.tokens import Fed
from vlens_cli.errors import UsageError
from vlens_cli.families import Catalog
from vlens_cli.hooks import HookRequest, Items, Selected, quoted
from vlens_cli.interventions import Intervention, Noise, Source, Tensor
from vlens_cli.query import Interventions

if TYPE_CHECKING:
    from vlens_cli.driver.session import Progress, Session


@dataclass(frozen=True)
class Edited:
    """The `edits` of each prompt's request, in the order given; `labels` are the (expression, hook point) of each of
    them, the same for every prompt."""

    edits: tuple[tuple[Edit, ...], ...]
    labels: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def body(self, fired: Sequence[int]) -> list[dict[str, Any]]:
        """One prompt's `edits` in a reply: how many forwards each edit was applied in."""
        return [{"expression": expression, "hook": hook, "fired": count}
                for (expression, hook), count in zip(self.labels, fired, strict=True)]


def edits_for(session: Session, asked: Interventions, fed: Sequence[Fed], progress: Progress, *,
              bos: bool | None = None, max_new_tokens: int = 1) -> Edited:
    """The edits of each prompt, after the source run where one is needed. `bos` is the prompts' own rule, for sources.

    Raises UsageError before any forward, StartError, QueryError.
    """
    plan = Plan(session, asked, fed, bos, max_new_tokens)
    requests = plan.source_requests()
    return plan.edited(session.run(requests, progress)[0] if requests else ())


@dataclass(frozen=True)
class Step:
    """One intervention at one hook point. `row` is the shape of what is selected of a position, [(heads,) dims]; `nth`
    counts the steps of this hook point."""

    one: Intervention
    hook: Selected
    row: tuple[int, ...]
    nth: int

    @property
    def where(self) -> str:
        return str(HookRequest("", self.hook.name, self.hook.pos, self.one.hook.head, self.one.hook.dim))


@dataclass(frozen=True)
class Place:
    """One step in one prompt: its `positions` (None: every fed token) and, for @source, what is taken of the source."""

    positions: tuple[int, ...] | None
    source: Want | None = None


class Plan:
    """The interventions of one query over its prompts. Making it checks everything; `edited` wants the results of
    `source_requests`, in their order."""

    def __init__(self, session: Session, asked: Interventions, fed: Sequence[Fed], bos: bool | None = None,
                 max_new_tokens: int = 1) -> None:
        """Raises UsageError, HookError, PathError, PromptError."""
        self._session = session
        self._fed = fed
        self._more = max_new_tokens - 1
        self._notes: list[str] = []
        parsed = [interventions.parse(text) for text in asked.expressions]
        interventions.check(parsed, session.catalog, allow_nan=asked.allow_nan, has_source=bool(asked.sources))
        self.sources = self._feed_sources(asked, bos)
        self.steps = _steps(parsed, session.catalog)
        self._places = [self._places_in(n) for n in range(len(fed))]
        self._planned = [self._without_source(asked, places, f) for places, f in zip(self._places, fed, strict=True)]
        self._notes += _contradictions(self.steps, self._places)

    def source_requests(self, also: Callable[[Fed], dict[str, Want]] = lambda source: {}) -> list[Request]:
        """A request for each source, with the rows that any prompt takes of it, and of `also`; none where both are
        nothing. Whole rows come back at every position that is in either."""
        wants = [union(self._wanted(n), also(source)) for n, source in enumerate(self.sources)]
        if not any(wants):
            return []
        check_memory(self._session, self.sources, wants)
        return [Request(source.ids, want) for source, want in zip(self.sources, wants, strict=True)]

    def edited(self, results: Sequence[Result]) -> Edited:
        """The edits, with the values of the source runs in them."""
        edits = [tuple(self._with_source(n, *each, results) for each in zip(planned, self.steps, places, strict=True))
                 for n, (planned, places) in enumerate(zip(self._planned, self._places, strict=True))]
        labels = tuple((str(step.one), step.hook.name) for step in self.steps)
        return Edited(tuple(edits), labels, tuple(dict.fromkeys(self._notes)))

    def source_of(self, prompt: int) -> int:
        """Which source is that of a prompt."""
        return 0 if len(self.sources) == 1 else prompt

    # Sources

    def _feed_sources(self, asked: Interventions, bos: bool | None) -> list[Fed]:
        sources = self._session.feed(asked.sources, bos)
        if len(sources) > 1 and len(sources) != len(self._fed):
            raise UsageError(f"there are {len(sources)} sources for {len(self._fed)} prompts",
                             hint="give one for all, or one for each", code="source_count")
        self._notes += [note for source in sources for note in source.notes]
        return sources

    def _wanted(self, source: int) -> dict[str, Want]:
        """Whole rows, at every position that a prompt takes of this source."""
        found: dict[str, set[int]] = {}
        for prompt, places in enumerate(self._places):
            if self.source_of(prompt) == source:
                for step, place in zip(self.steps, places, strict=True):
                    if place.source:
                        found.setdefault(step.hook.name, set()).update(place.source.positions)
        return {name: Want(tuple(sorted(positions))) for name, positions in found.items()}

    # Edits

    def _without_source(self, asked: Interventions, places: Sequence[Place], fed: Fed) -> list[Edit]:
        if not self.steps:
            return []
        import torch

        from vlens_cli.driver.values import Values

        values = Values(self._session.catalog, asked.seed, asked.allow_nan, getattr(torch, self._session.plan.dtype))
        n_tokens = len(fed.ids) + self._more
        return [values.edit(step, place, n_tokens) for step, place in zip(self.steps, places, strict=True)]

    def _with_source(self, prompt: int, edit: Edit, step: Step, place: Place, results: Sequence[Result]) -> Edit:
        if place.source is None:
            return edit
        from vlens_cli.driver.values import with_source

        return with_source(edit, step, place, results[self.source_of(prompt)].captured[step.hook.name])

    # Places

    def _places_in(self, prompt: int) -> list[Place]:
        try:
            return [self._place(step, prompt) for step in self.steps]
        except UsageError as error:
            if len(self._fed) > 1:
                error.message = f"prompt {prompt}: {error.message}"
            raise

    def _place(self, step: Step, prompt: int) -> Place:
        fed = self._fed[prompt]
        n_tokens = len(fed.ids) + self._more
        positions = step.hook.pos and positions_in(self._session, step.hook.pos, fed, n_tokens, as_typed=True)
        match step.one.value:
            case Source() as asked:
                return self._source_place(step, asked, positions, prompt)
            case Noise():  # each row has its own, so the rows must be known
                return Place(positions or tuple(range(n_tokens)))
        return Place(positions)

    def _source_place(self, step: Step, asked: Source, positions: tuple[int, ...] | None, prompt: int) -> Place:
        fed, source = self._fed[prompt], self.sources[self.source_of(prompt)]
        if positions is None:
            positions = tuple(range(len(fed.ids)))
            if self._more:
                self._notes.append(f"a source run has no generated tokens: this changes the prompt's alone: {step.one}")
        taken = positions
        if asked.pos is not None:
            taken = positions_in(self._session, asked.pos, source, len(source.ids), as_typed=True)
            _same_count(step, "positions", len(positions), len(taken))
        else:
            check_aligned(fed, source)
            if max(positions) >= len(source.ids):
                raise UsageError(f"the source run has positions 0 to {len(source.ids) - 1}, and {step.where} selects "
                                 f"{max(positions)}", hint="@source[pos=...] says which to take", code="no_source_row")
        return Place(positions, Want(taken, *self._source_columns(step, asked)))

    def _source_columns(self, step: Step, asked: Source) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """(heads, dims) that are taken of the source."""
        catalog = self._session.catalog
        (given,) = hooks.resolve([HookRequest("", step.hook.name, None, asked.head, asked.dim)], catalog,
                                 as_typed=True)
        heads = step.hook.head if asked.head is None else given.head
        dims = step.hook.dim if asked.dim is None else given.dim
        row = row_shape(catalog, Selected(step.hook.name, None, heads, dims))
        for what, wanted, found in zip(("heads", "dims")[-len(row) :], step.row, row, strict=True):
            _same_count(step, what, wanted, found)
        return heads, dims


def union(one: dict[str, Want], other: dict[str, Want]) -> dict[str, Want]:
    """Whole rows at every position that either wants; both name them."""
    shared = {name: Want(tuple(sorted({*one[name].positions, *other[name].positions}))) for name in one.keys() & other}
    return one | other | shared


def positions_in(session: Session, items: Items, fed: Fed, n_tokens: int, *, as_typed: bool = False) -> tuple[int, ...]:
    """Items as positions of one prompt, of which `n_tokens` are fed, generated ones included; see `hooks.positions`."""
    return hooks.positions(items, n_tokens, lambda text: session.tokens.spans(fed, text), n_prompt=len(fed.ids),
                           tokens=tuple(text or "" for text in fed.texts), as_typed=as_typed)


def row_shape(catalog: Catalog, hook: Selected) -> tuple[int, ...]:
    """The shape of what is selected of one position: [(heads,) dims]."""
    row = [catalog.size(axis) for axis in catalog.axes(hook.name)[1:]]
    if hook.dim is not None:
        row[-1] = len(hook.dim)
    if hook.head is not None:
        row[-2] = len(hook.head)
    return tuple(row)


MAPPED_HINT = "say which position takes which: 'blocks.8.hook_resid_post[pos=3] = @source[pos=4]'"


def check_aligned(fed: Fed, source: Fed, hint: str = MAPPED_HINT) -> None:
    """Raises UsageError where the same position is not the same place in a prompt and its source, with both rows."""
    if len(fed.ids) != len(source.ids):
        raise UsageError(
            f"the prompt has {len(fed.ids)} tokens and the source {len(source.ids)}, so positions do not correspond\n"
            f"  prompt: {_row(fed)}\n  source: {_row(source)}",
            hint=hint,
            code="not_aligned")


def _row(fed: Fed) -> str:
    tokens = zip(fed.ids, fed.texts, strict=True)
    return " ".join(f"#{token}" if text is None else quoted(text) for token, text in tokens)


def _steps(parsed: Sequence[Intervention], catalog: Catalog) -> list[Step]:
    steps: list[Step] = []
    seen: Counter[str] = Counter()
    for one in parsed:
        for hook in interventions.targets(one, catalog):
            steps.append(Step(one, hook, row_shape(catalog, hook), seen[hook.name]))
            seen[hook.name] += 1
    return steps


def _same_count(step: Step, what: str, wanted: int, found: int) -> None:
    if wanted != found:
        raise UsageError(f"{step.where} selects {wanted} {what}, and {found} are taken of the source: {step.one.value}",
                         code="count_mismatch")


def check_memory(session: Session, fed: Sequence[Fed], wants: Sequence[dict[str, Want]]) -> None:
    """Refuse what would not fit into memory, before the forward that fills it."""
    from vlens_cli.driver.capture import size  # which imports this module

    session.check_memory(size(session, fed, wants))


def _contradictions(steps: Sequence[Step], places: Sequence[Sequence[Place]]) -> list[str]:
    """A note for every set of entries that a later one sets again."""
    sets: dict[str, list[int]] = {}
    for n, step in enumerate(steps):
        if step.one.op == "=" and not (isinstance(step.one.value, Tensor) and step.one.value.how == "proj"):
            sets.setdefault(step.hook.name, []).append(n)
    return [f"{steps[a].hook.name} is set twice, and the last wins: {steps[a].one}; {steps[b].one}"
            for numbers in sets.values() for a, b in combinations(numbers, 2)
            if any(_overlap(steps[a], of[a], steps[b], of[b]) for of in places)]


def _overlap(a: Step, at: Place, b: Step, bt: Place) -> bool:
    pairs = ((at.positions, bt.positions), (a.hook.head, b.hook.head), (a.hook.dim, b.hook.dim))
    return all(one is None or other is None or set(one) & set(other) for one, other in pairs)
