"""Writing files whole, and text that is safe to show."""

from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlens_cli.cli import asking, output, render
from vlens_cli.errors import QueryError
from vlens_cli.query import BOS_NOTE, Reply, Saved


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    target = tmp_path / "a.safetensors"
    target.write_text("old")

    def interrupted(*args):
        assert len(os.listdir(tmp_path)) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "_exchanged", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with output.whole_file(target) as file:
            file.write(b"new")
    assert os.listdir(tmp_path) == ["a.safetensors"] and target.read_text() == "old"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_file_takes_the_place_of_one_that_is_there(tmp_path, monkeypatch, exchanges):
    target = tmp_path / "a.safetensors"
    target.write_text("old")
    if not exchanges:
        monkeypatch.setattr(output, "_exchanged", lambda draft, path: False)
    with output.whole_file(target) as file:
        file.write(b"new")
    assert os.listdir(tmp_path) == ["a.safetensors"] and target.read_text() == "new"


def test_a_write_that_fails_says_why(tmp_path):
    with pytest.raises(QueryError, match="No such file or directory"):
        with output.whole_file(tmp_path / "gone" / "a.safetensors"):
            pass


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (23_040, "23.0 kB"), (5e6, "5.0 MB"), (7.25e12, "7250.0 GB")]
)
def test_sizes(size, text):
    assert output.size_text(size) == text


@given(st.text())
def test_visible_text_cannot_drive_a_terminal(text):
    assert all(char.isprintable() for char in render.visible(text))


def test_what_is_hidden_becomes_visible():
    assert render.visible("a\u200b\u202e\ufeff\x9b\U000e0041é漢👍") == r"a\u200b\u202e\ufeff\x9b\U000e0041é漢👍"
    assert render.quoted(' \\n\n"') == r'" \\n\n\""'
    # Printable for Python, and nothing to see.
    assert render.visible("\ufe0f\u034f\u3164\U000e0100") == r"\ufe0f\u034f\u3164\U000e0100"


def test_an_accent_does_not_go_onto_the_quote():
    assert (render.quoted("\u0301a"), render.quoted("a\u0301")) == (r'"\u0301a"', '"a\u0301"')


def test_what_follows_a_text_from_right_to_left_stays_where_it_is():
    assert render.quoted(" שלום") == '" שלום"\u200e' and render.quoted("é漢") == '"é漢"'
    # Where a text brings such a mark itself, it is seen.
    assert render.quoted("\u200e") == r'"\u200e"'


LEAVES = st.floats() | st.text() | st.none()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_round_trips(value):
    text = render.to_json(value)
    again = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert again == json.loads(json.dumps(render._plain(value)))
    assert not any("\x7f" <= char <= "\x9f" or char in "\u202e\u200b\ufe0f\U000e0041" for char in text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_table_numbers_have_six_digits(value):
    assert math.isclose(float(render.number(value)), value, rel_tol=5.1e-6, abs_tol=0) or abs(value) < 1e-300


def test_what_only_people_care_for_is_said_on_a_terminal(monkeypatch, capsys):
    reply = Reply({}, (BOS_NOTE, "two BOS"))
    asking.show(reply, None, True, str)
    assert capsys.readouterr().err == "note: two BOS\n"
    monkeypatch.setattr(output, "talks_to_a_person", lambda: True)
    asking.show(reply, None, True, str)
    assert capsys.readouterr().err == f"note: {BOS_NOTE}\nnote: two BOS\n"


def test_a_file_is_named_as_it_is_seen_from_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    output.say_saved(tmp_path / "a.safetensors", Saved(1, 10))
    output.say_saved(tmp_path.parent / "b.safetensors", Saved(2, 10))
    assert capsys.readouterr().err == f"wrote a.safetensors: 1 tensor, 10 bytes\nwrote {tmp_path.parent}/b.safetensors: 2 tensors, 10 bytes\n"


def test_notes_on_the_way_are_said_or_left_out(capfd):
    for notes in (True, False):
        with output.progress(notes) as show:
            show(f"note: notes are {notes}")
            show("loading weights")
    assert capfd.readouterr().err == "note: notes are True\n"
