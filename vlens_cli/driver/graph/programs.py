"""The edits of one request as words: what the custom op reads to change a row.

A program is the number of its steps, then eight words a step:

    0 keep  1 value  2 along  3 d . d     numbers, fp32
    4 keep  5 value  6 direction  7 mask  where a whole row of fp32 numbers begins, or NONE (of `value` also UNCHANGED:
                                          nothing is added, not even zero)

A step makes `keep * x + value + along * (x . d / d . d) d` of a row x wherever its mask is not zero. Rows are as wide as
the point (all heads), so that heads and dims need no lists of indices. Each position of an edit that has a row for each
has a program of its own; positions with the same edits share one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch

from vlens_cli.driver.base import Edit

NONE, UNCHANGED = -1, -2
STEP = 8


@dataclass
class Step:
    """One step, read back: rows are [segments, width]."""

    keep: torch.Tensor | float
    value: torch.Tensor | float | None
    direction: torch.Tensor | None
    along: float
    square: float
    mask: torch.Tensor | None

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, segments, width] after the step, its mask aside. Zero times what is not finite is zero, if a number
        says so."""
        if isinstance(self.keep, torch.Tensor):
            new = x * self.keep
        else:
            new = torch.zeros_like(x) if self.keep == 0 else x if self.keep == 1 else x * self.keep
        if self.value is not None:
            new = new + self.value
        if self.direction is not None:
            share = (x * self.direction).sum(-1, keepdim=True) / self.square
            new = new + self.along * share * self.direction
        return new


def steps(words: torch.Tensor, floats: torch.Tensor, program: int, shape: tuple[int, int]) -> Iterator[Step]:
    """The steps of a program, as the op reads them."""
    size = math.prod(shape)

    def row(start: int) -> torch.Tensor | None:
        return None if start < 0 else floats[start : start + size].view(shape)

    for n in range(int(words[program])):
        at = program + 1 + n * STEP
        keep, value, along, square = floats[at : at + 4].tolist()
        keeps, values, direction, mask = words[at + 4 : at + STEP].tolist()
        yield Step(keep if keeps < 0 else row(keeps), None if values == UNCHANGED else value if values < 0 else row(values),
                   row(direction), along, square, row(mask))


@dataclass
class Block:
    """The words of a request's edits: `programs` has for each site the program of each position named by an edit, and
    under None that of every other; addresses are relative to the block's start until `at` moves them. `users` counts the
    requests that they serve."""

    words: torch.Tensor
    programs: dict[int, dict[int | None, int]]
    # Places in `words` that hold addresses.
    moved: list[int] = field(default_factory=list)
    start: int = 0
    users: int = 0
    key: tuple = ()

    def at(self, start: int) -> torch.Tensor:
        """The words for a block that begins at `start`."""
        self.start = start
        words = self.words.clone()
        words[self.moved] += start
        return words


def block(edits: dict[int, Sequence[Edit]], shapes: dict[int, tuple[int, ...]]) -> Block:
    """`edits` of each site in order, `shapes` of its value: [(heads,) dims]."""
    writer = _Writer()
    programs = {site: writer.site(of, shapes[site]) for site, of in edits.items()}
    return Block(writer.words(), programs, writer.moved)


class Words:
    """What is free of a memory of `count` words; the first that fits is taken."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = [(0, count)]

    def take(self, count: int) -> int | None:
        """Where a block of `count` words begins; None where there is no room."""
        for n, (start, size) in enumerate(self._free):
            if size >= count:
                self._free[n : n + 1] = [(start + count, size - count)] if size > count else []
                return start
        return None

    def give_back(self, start: int, count: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, (start, count)]):
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self._free = merged


class Programs:
    """The blocks of live requests in the device's memory; requests that are changed alike share one."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.clear()

    def clear(self) -> None:
        self._room = Words(len(self._memory))
        # A block's edits are kept with it: the tensors that its key names by their ids are nobody else's.
        self._blocks: dict[tuple, tuple[Block, list[Sequence[Edit]]]] = {}

    def take(self, edits: dict[int, Sequence[Edit]], shapes: dict[int, tuple[int, ...]]) -> Block:
        """The block of the edits of one more request, as `block` takes them. Raises LookupError where there is no room."""
        key = tuple((site, _identity(edit)) for site, of in edits.items() for edit in of)
        if key not in self._blocks:
            self._blocks[key] = self._put(block(edits, shapes)), list(edits.values())
        found, _ = self._blocks[key]
        found.users, found.key = found.users + 1, key
        return found

    def _put(self, new: Block) -> Block:
        start = self._room.take(len(new.words))
        if start is None:
            raise LookupError(f"edits of {4 * len(new.words)} bytes do not fit into the {4 * self._room.count} that the engine "
                              "keeps for them beside those of other requests")
        self._memory[start : start + len(new.words)].copy_(new.at(start))
        return new

    def give_back(self, block: Block) -> None:
        """One request less."""
        block.users -= 1
        if not block.users:
            self._room.give_back(block.start, len(block.words))
            del self._blocks[block.key]


def _identity(edit: Edit) -> tuple:
    """Equal for edits that change a row alike, as far as that can be told without looking into tensors."""
    parts = (getattr(edit, one.name) for one in fields(edit))
    # By their texts: minus zero is not zero.
    return tuple(id(part) if isinstance(part, torch.Tensor) else repr(part) for part in parts)


class _Writer:
    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._count = 0
        self.moved: list[int] = []

    def words(self) -> torch.Tensor:
        return torch.cat(self._parts) if self._parts else torch.zeros(0, dtype=torch.int32)

    def site(self, edits: Sequence[Edit], shape: tuple[int, ...]) -> dict[int | None, int]:
        places = [None if e.positions is None else {p: n for n, p in enumerate(e.positions)} for e in edits]
        named = sorted({p for place in places if place is not None for p in place})
        # An edit of every position that has a row for each has as many as tokens are fed.
        longest = max((len(part) for e in edits if e.positions is None for part in (e.keep, e.value)
                       if _by_position(part, shape)), default=0)
        writers = [_EditRows(self, e, shape) for e in edits]
        shared: dict[tuple, int] = {}
        found: dict[int | None, int] = {}
        for p in [*sorted({*named, *range(longest)}), None]:
            chain = tuple((n, writers[n].place(p if place is None else place[p]))
                          for n, place in enumerate(places) if place is None and (p is not None or not writers[n].each)
                          or place is not None and p in place)
            if not chain:
                continue
            if chain not in shared:
                shared[chain] = self._program([writers[n].step(at) for n, at in chain])
            found[p] = shared[chain]
        return found

    def _program(self, parts: list[tuple[list[float], list[int]]]) -> int:
        start = self._count
        words = [torch.tensor([len(parts)], dtype=torch.int32)]
        for n, (numbers, addresses) in enumerate(parts):
            words += [torch.tensor(numbers, dtype=torch.float32).view(torch.int32), torch.tensor(addresses, dtype=torch.int32)]
            at = start + 1 + n * STEP + 4
            self.moved += [at + k for k, address in enumerate(addresses) if address >= 0]
        self.add(torch.cat(words))
        return start

    def row(self, t: torch.Tensor) -> int:
        return self.add(t.to("cpu", torch.float32).contiguous().view(-1).view(torch.int32))

    def add(self, words: torch.Tensor) -> int:
        start, self._count = self._count, self._count + len(words)
        self._parts.append(words)
        return start


class _EditRows:
    """The rows of one edit, written when the first position asks them."""

    def __init__(self, writer: _Writer, edit: Edit, shape: tuple[int, ...]) -> None:
        self._writer, self._edit, self._shape = writer, edit, shape
        self._rows: dict[tuple[str, int | None], int] = {}
        self.each = any(_by_position(part, shape) for part in (edit.keep, edit.value))

    def place(self, at: int | None) -> int | None:
        return at if self.each else None

    def step(self, at: int | None) -> tuple[list[float], list[int]]:
        edit = self._edit
        square = 1.0 if edit.direction is None else float(edit.direction.float() @ edit.direction.float())
        numbers = [_number(edit.keep, 1.0), _number(edit.value, 0.0), edit.along, square]
        value = UNCHANGED if edit.value is None else self._row("value", edit.value, at)
        whole = edit.heads is None and edit.dims is None
        return numbers, [self._row("keep", edit.keep, at), value, self._row("direction", edit.direction, None),
                         NONE if whole else self._row("mask", torch.ones(()), None)]

    def _row(self, what: str, part: float | torch.Tensor | None, at: int | None) -> int:
        if not isinstance(part, torch.Tensor):
            return NONE
        key = what, at if _by_position(part, self._shape) and what in ("keep", "value") else None
        if key not in self._rows:
            self._rows[key] = self._writer.row(self._spread(part if key[1] is None else part[at]))
        return self._rows[key]

    def _spread(self, part: torch.Tensor) -> torch.Tensor:
        """What is given for the selected heads and dims, as a whole row, zero elsewhere."""
        part = part.to("cpu", torch.float32)
        if self._edit.heads is None and self._edit.dims is None:
            return part.expand(self._shape)
        row = torch.zeros(self._shape)
        chosen = [torch.arange(n) for n in self._shape]
        if self._edit.heads is not None:
            chosen[0] = torch.tensor(self._edit.heads)
        if self._edit.dims is not None:
            chosen[-1] = torch.tensor(self._edit.dims)
        row[torch.meshgrid(*chosen, indexing="ij")] = part.expand([len(c) for c in chosen])
        return row


def _by_position(part: float | torch.Tensor | None, shape: Sequence[int]) -> bool:
    return isinstance(part, torch.Tensor) and part.ndim == len(shape) + 1


def _number(part: float | torch.Tensor | None, otherwise: float) -> float:
    return otherwise if part is None or isinstance(part, torch.Tensor) else float(part)


def sites_of(edits: Iterable[Edit], numbers: dict[str, int]) -> dict[int, list[Edit]]:
    """Edits by the number of their site, in order."""
    found: dict[int, list[Edit]] = {}
    for edit in edits:
        found.setdefault(numbers[edit.name], []).append(edit)
    return found
