"""Target tokens as people type them, for the commands that report single logits. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlens_cli import hooks
from vlens_cli.driver.tokens import Tokens
from vlens_cli.errors import UsageError


@dataclass(frozen=True)
class Target:
    """One target: as `typed`, the token `id` that stands for it, that token's `text`, and all `pieces` of what was
    typed (raw, as the tokenizer has them; one, unless a prefix was asked for; none of a model without tokenizer)."""

    typed: str
    id: int
    text: str | None
    pieces: tuple[str, ...]

    def body(self) -> dict[str, Any]:
        """What a reply says of it."""
        return {"target": self.typed, "id": self.id, "text": self.text, "pieces": list(self.pieces)}


def resolve(typed: Sequence[str], tokens: Tokens, d_vocab: int, prefix: bool = False) -> tuple[Target, ...]:
    """The tokens of `--target`, in order; `#123` is the token id 123, in a model without tokenizer too.

    A text is tokenized by itself, without special tokens. One of several pieces is refused, unless `prefix` takes its
    first piece for the whole. Raises UsageError (codes `target_pieces`, `bad_target`), PromptError without tokenizer.
    """
    return tuple(_target(one, tokens, d_vocab, prefix) for one in typed)


def of_id(token: int, tokens: Tokens) -> Target:
    """A token that nobody typed, such as the likeliest one."""
    return Target(f"#{token}", token, tokens.text_of(token), _pieces([token], tokens))


def spaced(found: Sequence[Target], tokens: Tokens) -> dict[Target, int]:
    """Words that were typed without a space before them, and are one token with it as well: that token's id, unless
    it is asked too. Inside a sentence it is most often the one that was meant."""
    others = {one: _spaced(one.typed, tokens) for one in found if len(one.pieces) == 1}
    asked = {None, *(one.id for one in found)}
    return {one: other for one, other in others.items() if other not in asked}


def notes(others: dict[Target, int], logits: Sequence[float]) -> tuple[str, ...]:
    """A line for each of `spaced`'s whose other token has the larger of the `logits` [d_vocab]."""
    return tuple(f"{hooks.quoted(one.typed)} was taken without a space before it; {hooks.quoted(f' {one.typed}')}, typed with the space, is "
                 "another token, and likelier after the prompt"
                 for one, other in others.items() if other < len(logits) and logits[other] > logits[one.id])


def _spaced(typed: str, tokens: Tokens) -> int | None:
    """The one token of a word with a space before it, where that is another."""
    if not typed[:1].isalnum():
        return None
    alone, ids = (list(tokens.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (typed, f" {typed}"))
    return ids[0] if len(ids) == 1 and ids != alone else None


def _target(typed: str, tokens: Tokens, d_vocab: int, prefix: bool) -> Target:
    if re.fullmatch(r"#[0-9]{1,15}", typed):
        if int(typed[1:]) >= d_vocab:
            raise UsageError(f"there is no token {typed}: the ids are 0 to {d_vocab - 1}", code="bad_target")
        return of_id(int(typed[1:]), tokens)
    ids = list(tokens.tokenizer(typed, add_special_tokens=False)["input_ids"])
    if not ids:
        raise UsageError(f"a target without tokens: {typed!r}", code="bad_target")
    pieces = _pieces(ids, tokens)
    if len(ids) > 1 and not prefix:
        shown = " ".join(f'"{piece}"' for piece in pieces)
        spaced = _spaced(typed, tokens)
        meant = f"with a space before it, {hooks.quoted(f' {typed}')}, it is one token; " if spaced is not None else ""
        raise UsageError(f"a target is one token, and {typed!r} has {len(ids)}: {shown}", code="target_pieces",
                         hint=f"{meant}--target-prefix takes the first for the whole; the space before a word is part of it")
    return Target(typed, ids[0], tokens.text_of(ids[0]), pieces)


def _pieces(ids: Sequence[int], tokens: Tokens) -> tuple[str, ...]:
    return tuple(tokens.tokenizer.convert_ids_to_tokens(list(ids))) if tokens.text_of(ids[0]) is not None else ()
