"""`--target` against a tiny tokenizer; no engine."""

from __future__ import annotations

import pytest

from vlens_cli.driver import targets
from vlens_cli.driver.tokens import Tokens
from vlens_cli.errors import PromptError, UsageError


@pytest.fixture(scope="module")
def tokens(tiny) -> Tokens:
    return Tokens(str(tiny("llama", "tokenizer")))


def whole(tokens: Tokens) -> str:
    """A text that this tokenizer has as one token."""
    def ids(text: str) -> list[int]:
        return tokens.tokenizer(text, add_special_tokens=False)["input_ids"]

    return next(t for t in map(tokens.text_of, ids("The Eiffel Tower is located in the city")) if len(ids(t)) == 1)


def test_one_token(tokens):
    text = whole(tokens)
    (target,) = targets.resolve([text], tokens, 512)
    assert tokens.tokenizer.decode([target.id]) == text == target.text
    assert target.body() == {"target": text, "id": target.id, "text": text, "pieces": list(target.pieces)}
    assert target.pieces == tuple(tokens.tokenizer.convert_ids_to_tokens([target.id]))


def test_several_pieces_are_refused_with_the_pieces_or_taken_by_the_first(tokens):
    ids = tokens.tokenizer("xylophonist", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    with pytest.raises(UsageError) as caught:
        targets.resolve(["xylophonist"], tokens, 512)
    pieces = tokens.tokenizer.convert_ids_to_tokens(ids)
    assert caught.value.code == "target_pieces" and f"has {len(ids)}: " in caught.value.message
    assert all(f'"{piece}"' in caught.value.message for piece in pieces)
    (target,) = targets.resolve(["xylophonist"], tokens, 512, prefix=True)
    assert (target.id, target.pieces) == (ids[0], tuple(pieces))


def test_an_id(tokens, tiny):
    assert targets.resolve(["#7"], tokens, 512)[0].id == 7
    bare = Tokens(str(tiny("llama")))
    assert targets.resolve(["#511"], bare, 512) == (targets.Target("#511", 511, None, ()),)
    with pytest.raises(UsageError, match="there is no token #512: the ids are 0 to 511"):
        targets.resolve(["#512"], tokens, 512)
    with pytest.raises(PromptError, match="no tokenizer"):
        targets.resolve(["Paris"], bare, 512)


def test_nothing(tokens):
    with pytest.raises(UsageError, match="a target without tokens"):
        targets.resolve([""], tokens, 512)


class Words:
    """A tokenizer of three words; what it does not know is a token a letter."""

    known = {"Paris": 1, " Paris": 2, "Rome": 3, " Berlin": 4, ".": 5, " .": 6}

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [self.known[text]] if text in self.known else list(range(10, 10 + len(text)))}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"<{i}>" for i in ids]


class Worded:
    tokenizer = Words()

    def text_of(self, token: int) -> str:
        return next((text for text, id in Words.known.items() if id == token), "?")


def test_a_word_without_its_space_is_told_of_where_the_other_is_likelier():
    found = targets.resolve(["Paris", "Rome", ".", "#3"], Worded(), 64)
    others = targets.spaced(found, Worded())
    assert {one.typed: other for one, other in others.items()} == {"Paris": 2}
    (said,) = targets.notes(others, [0, 1.0, 2.0, 0, 0])
    assert said.startswith('"Paris" was taken without a space before it; " Paris", typed with the space, is another token')
    assert targets.notes(others, [0, 2.0, 1.0, 0, 0]) == ()


def test_who_asks_for_both_is_not_told():
    assert targets.spaced(targets.resolve(["Paris", " Paris"], Worded(), 64), Worded()) == {}


def test_a_first_piece_is_not_told_of():
    assert targets.spaced(targets.resolve(["Berlin"], Worded(), 64, prefix=True), Worded()) == {}


def test_the_hint_of_several_pieces_names_the_word_that_is_one():
    with pytest.raises(UsageError) as caught:
        targets.resolve(["Berlin"], Worded(), 64)
    assert caught.value.hint.startswith('with a space before it, " Berlin", it is one token; ')
    with pytest.raises(UsageError) as caught:
        targets.resolve(["Madrid"], Worded(), 64)
    assert "it is one token" not in caught.value.hint
