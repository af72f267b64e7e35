"""Text and tokens: which tokens cover a text, and what is fed with and without BOS."""

from __future__ import annotations

import pytest
from vlens_cli.driver.tokens import Tokens
from vlens_cli.errors import PromptError
from vlens_cli.query import Prompt


@pytest.fixture(scope="module")
def tokens(tiny):
    return Tokens(str(tiny("llama", "tokenizer")))


def fed(tokens, text: str):
    return tokens.feed(Prompt(text=text), None)


@pytest.mark.parametrize(
    ("text", "sought"),
    [
        ("The Eiffel Tower is in Paris", "Eiffel"), ("The Eiffel Tower", "wer"), ("A café by", "é"), ("café", "caf"),
        ("I love 🗼 towers", "🗼"), ("I love 🗼 towers", " 🗼"), ("I love 🗼 towers", "🗼 t"), ("a 日本語 b", "本"),
        ("🗼🗼", "🗼"), ("e\u0301 é", "e\u0301"), ("👨‍👩‍👧 a", "👨‍👩‍👧"), ("x\ufffd", "\ufffd"), ("日" * 40, "日日"),
    ],
)  # fmt: skip
def test_the_tokens_that_cover_a_text_are_those_of_the_tokenizers_offsets(tokens, text, sought):
    one = fed(tokens, text)
    offsets = tokens.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    begin, found = text.find(sought), []
    while begin >= 0:
        end = begin + len(sought)
        covered = [n for n, (a, b) in enumerate(offsets) if a < end and b > begin]
        found.append((covered[0], covered[-1] + 1))
        begin = text.find(sought, begin + 1)
    assert tokens.spans(one, sought) == found


def test_a_text_that_is_not_there_has_no_span(tokens):
    assert tokens.spans(fed(tokens, "The Eiffel Tower"), "Paris") == []


def test_a_long_prompt_is_searched_in_a_time_that_grows_with_it(tokens, monkeypatch):
    calls = []
    decode = tokens._decode
    monkeypatch.setattr(tokens, "_decode", lambda ids: calls.append(len(ids)) or decode(ids))
    one = fed(tokens, "The Eiffel Tower is big. " * 100)
    assert len(tokens.spans(one, "Eiffel")) == 100
    assert sum(calls) < 20 * len(one.ids)
    calls.clear()
    tokens.spans(one, "Tower")
    assert calls == [], "a second selector decodes it all again"


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(tiny, monkeypatch):
    tokens = Tokens(str(tiny("llama", "tokenizer")), 100)
    read = []
    whole = tokens.tokenizer
    monkeypatch.setattr(tokens, "_loaded", lambda text, **more: read.append(len(text)) or whole(text, **more))
    with pytest.raises(PromptError, match="a prompt of 1,200,000 characters, .* is longer than this engine takes: 100") as caught:
        fed(tokens, "a wide " * 171_428 + "abcd")
    assert caught.value.code == "prompt_too_long" and sum(read) < 10_000
    monkeypatch.undo()
    for text in ("a wide " * 20, "a wide " * 200):
        assert fed(tokens, text).ids == tuple(whole(text)["input_ids"]), "who takes it is asked, where it is not clear"


def test_bos_follows_the_tokenizer_unless_it_is_said(tokens):
    plain = tokens.tokenizer("Paris", add_special_tokens=False)["input_ids"]
    assert fed(tokens, "Paris").ids == (1, *plain)
    assert tokens.feed(Prompt(text="Paris"), True).ids == (1, *plain)
    assert tokens.feed(Prompt(text="Paris"), False).ids == tuple(plain)
    assert tokens.feed(Prompt(text="<s>Paris"), False).ids == (1, *plain)
    chat = Prompt(text="Paris", chat=True)
    assert tokens.feed(chat, None).ids[0] == 1 and tokens.feed(chat, False).ids == tokens.feed(chat, None).ids[1:]


def test_a_folder_without_a_tokenizer_names_ids_and_takes_no_text(tiny):
    bare = Tokens(str(tiny("llama")))
    assert bare.feed(Prompt(tokens=(5, 6)), None).texts == (None, None)
    with pytest.raises(PromptError, match="takes no text"):
        fed(bare, "Paris")


def test_an_empty_prompt_is_refused(tokens):
    with pytest.raises(PromptError, match="empty"):
        fed(tokens, "")
