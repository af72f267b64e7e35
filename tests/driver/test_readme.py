"""README.md: its examples run, and their output is what stands there; what it says of the catalog and the commands is so."""

from __future__ import annotations

import shutil

import pytest
import readme
from vlens_cli.cli.main import COMMANDS

TEXT = (readme.ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bench(tmp_path_factory, demo_model):
    made = readme.Bench(tmp_path_factory.mktemp("readme"), demo_model)
    yield made
    made.close()


def test_every_example_prints_what_stands_there(bench):
    if shutil.which("jq") is None:
        pytest.skip("the examples need jq, which is not installed: apt-get install jq")
    wrong = readme.stale(TEXT, bench)
    assert not wrong, "\n\n".join(wrong) + "\n\nrun: make readme"


def test_every_command_has_an_example():
    sources = "\n".join(one.source for block in readme.examples(TEXT) for one in block) + "vlens completions"
    assert [command for command in COMMANDS if f"vlens {command}" not in sources] == []


@pytest.mark.parametrize(("shown", "printed", "equal"), [
    ("norm 92.9718", "norm 92.9719", True),
    ("norm 92.9718", "norm 92.9720", False),
    ("1.5e-05", "1.6e-05", True),
    ("1.5e-05", "1.7e-05", False),
    ("pos 3", "pos 4", False),
    ("pid 31, 0.85 GB", "pid 4711, 1.02 GB", True),
    ('" Paris" 0.702', '" Rome" 0.702', False),
    ("a  1.5\n─────", "a   1.5\n───────", True),
    ("a\nb", "a", False),
])
def test_what_counts_as_the_same(shown, printed, equal):
    assert readme.same(shown, printed) is equal


def test_a_stale_example_is_written_anew(tmp_path, demo_model):
    text = "one\n\n    $ echo hello; echo 2.5\n    old\n    older\n\n    >>> 1 + 1\n    2\n\ntwo\n\n    $ printf 'a\\n\\nb\\n'\n\nthree\n"
    made = readme.Bench(tmp_path, demo_model)
    assert [wrong.splitlines()[0] for wrong in readme.stale(text, made)] == [
        "line 3: echo hello; echo 2.5", "line 12: printf 'a\\n\\nb\\n'"]
    now = readme.current(text, made)
    assert "    $ echo hello; echo 2.5\n    hello\n    2.5\n\n" in now and now.endswith("b\\n'\n    a\n\n    b\n\nthree\n")
    assert readme.stale(now, made) == []


def test_an_example_that_fails_is_no_example(tmp_path, demo_model):
    with pytest.raises(RuntimeError, match="line 1: vlens hoks"):
        readme.stale("    vlens hoks\n", readme.Bench(tmp_path, demo_model))
