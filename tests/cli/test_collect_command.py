"""`vlens capture -o FOLDER/` up to the engine: prompts as a stream, what is refused, what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vlens_cli import units
from vlens_cli.cli import collect, main

LINES = """{"text": "a", "id": "first"}

{"prompt": "b"}
{"tokens": [1, 2], "id": 7}
"c"
"""


def collected(shell, *args: str, mode: str = "echo", **more):
    return shell.fake("capture", *args, env={"FAKE": mode}, **more)


def body(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_prompts_of_every_kind_reach_the_engine_with_their_lines(shell, hook):
    (shell.folder / "p.jsonl").write_text(LINES)
    (shell.folder / "p.txt").write_text("x\r\n y\n")
    done = collected(shell, "--hook", hook, "typed", "-f", "p.jsonl", "-f", "p.txt", "-f", "-", "--tokens", "5,6", "-o", "out/",
                     "--shard-size", "2MiB", "--max-bytes", "1GB", "--resume", "--skip-bad", "--reduce", "norm",
                     "--dtype-out", "float16", "--pos", "-1", input="from a pipe\n")
    found = body(done)
    assert found["lines"] == [
        {"text": "typed", "where": ""}, {"text": "a", "where": "p.jsonl:1", "id": "first"}, {"text": "b", "where": "p.jsonl:3"},
        {"tokens": [1, 2], "where": "p.jsonl:4", "id": 7}, {"text": "c", "where": "p.jsonl:5"},
        {"text": "x", "where": "p.txt:1"}, {"text": " y", "where": "p.txt:2"},
        {"text": "from a pipe", "where": "standard input:1"}, {"tokens": [5, 6], "where": ""},
    ]
    query = found["query"]
    assert query["folder"] == os.path.realpath(shell.folder / "out") and query["hooks"] == [hook]
    assert (query["shard_bytes"], query["max_bytes"], query["resume"], query["skip_bad"]) == (2 * 2**20, 10**9, True, True)
    assert (query["reduce"], query["save_dtype"], query["pos"]) == ("norm", "float16", "-1")
    assert os.listdir(shell.folder / "out") == ["capture-00001-of-00001.safetensors"]
    assert "note: about 1.0 kB to write" in done.stderr and "1 file, 21 bytes" in done.stderr


def test_a_table_says_what_was_written(shell, hook):
    (shell.folder / "out").mkdir()
    done = collected(shell, "--hook", hook, "--table", "a", "b", "-o", "out", mode="")
    assert "2 prompts of 6 tokens, 1 of them there before" in done.stdout
    assert "capture-00001-of-00001.safetensors   0 to 1     21" in done.stdout


@pytest.mark.parametrize(("lines", "says"), [
    (b'{"text": "a"}\n{"text": \n', "p.jsonl:2 is not JSON"),
    (b'{"text": "a"}\n{"text": "a", "tokens": [1]}\n', "p.jsonl:2 is neither"),
    (b'{"text": "a"}\n{"text": ""}\n', "p.jsonl:2 is empty"),
    (b'{"text": "a"}\n{"text": "\xff"}\n', "p.jsonl:2 is not UTF-8"),
    (b'{"text": "a"}\n{"text": "a", "id": [1]}\n', "p.jsonl:2: id is neither"),
])
def test_a_bad_line_is_named_before_anything_runs_or_left_out(shell, hook, lines, says):
    (shell.folder / "p.jsonl").write_bytes(lines + b'"last"\n')
    done = collected(shell, "--hook", hook, "-f", "p.jsonl", "-o", "out/")
    assert (done.returncode, done.stdout) == (2, "") and f"error: {says}" in done.stderr
    assert "about" not in done.stderr and not (shell.folder / "out").exists()
    done = collected(shell, "--hook", hook, "-f", "p.jsonl", "-o", "out/", "--skip-bad")
    found = body(done)
    assert [line["text"] for line in found["lines"]] == ["a", "last"]
    assert found["skipped"][0]["reason"].startswith(says) and f"note: left out, {says}" in done.stderr


def test_skip_bad_holds_for_one_file_too(shell, hook):
    (shell.folder / "p.jsonl").write_text('"a"\n{\n"b"\n')
    done = shell.fake("capture", "--hook", hook, "-f", "p.jsonl", "--skip-bad", "--json")
    assert [prompt["text"] for prompt in body(done)["prompts"]] == ["a", "b"]
    assert "note: left out, p.jsonl:2 is not JSON" in done.stderr


@pytest.mark.parametrize(("args", "says"), [
    (["-o", "no/such/"], "there is no such folder"),
    (["-o", "out/", "--values"], "--values"),
    (["-o", "p.txt/"], "this is a file, and -o NAME/ means a folder"),
    (["--resume"], "--resume is for the files of a folder"),
    (["-o", "a.safetensors", "--shard-size", "1GB"], "--shard-size is for the files of a folder"),
    (["--max-bytes", "1GB"], "--max-bytes is for the file of -o"),
    (["-o", "out/", "--shard-size", "much"], "much is no size"),
    (["-o", "out/", "--shard-size", "0"], "0 is no size"),
    (["-o", "out/", "--reduce", "median"], "'median' is not one of"),
])
def test_bad_options(shell, hook, args, says):
    (shell.folder / "p.txt").write_text("a\n")
    done = collected(shell, "--hook", hook, *args, "hello")
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr
    assert not (shell.folder / "out").exists()


def test_no_prompt(shell, hook):
    assert "there is no prompt" in collected(shell, "--hook", hook, "-o", "out/").stderr
    (shell.folder / "empty").write_text("")
    assert "there is no prompt in empty" in collected(shell, "--hook", hook, "-o", "out/", "-f", "empty").stderr


def test_a_folder_without_room_for_the_prompts_is_named(shell, hook, monkeypatch, capsys):
    monkeypatch.chdir(shell.folder)
    monkeypatch.setattr(collect.tempfile, "TemporaryFile", lambda dir, **more: open("/dev/full", "w+b", **more))
    monkeypatch.setattr(collect.models, "resolve", lambda name: None)
    assert main.run(["capture", "--hook", hook, "hello", "-o", "out/"]) == 1
    said = capsys.readouterr().err
    assert said == (f"error: the prompts do not go into this folder, No space left on device: {shell.folder}/out\n\n"
                    "hint: make room\n")
    assert not (shell.folder / "out").exists()


def test_what_a_dead_engine_left_is_taken_away(shell, hook):
    (shell.folder / "out").mkdir()
    done = collected(shell, "--hook", hook, "hello", "-o", "out/", mode="died")
    assert done.returncode == 1 and "hint: no shard was finished" in done.stderr
    assert not os.listdir(shell.folder / "out")
    (shell.folder / "out" / "capture-00001-of-00002.safetensors").write_text("whole")
    done = collected(shell, "--hook", hook, "hello", "-o", "out/", mode="died")
    assert done.returncode == 1 and "hint: 1 shard finished: --resume goes on" in done.stderr


def test_a_data_set(shell, hook, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.table({"text": ["a", "", "c"], "id": [5, 6, 7], "ids": [[1, 2], [3], []]})
    parquet.write_table(table, shell.folder / "p.parquet")
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"] + os.pathsep + str(Path(pyarrow.__file__).parents[1]))
    given = ["--hook", hook, "-o", "out/", "--prompts-from-dataset", "p.parquet"]
    assert "p.parquet:2 is empty" in collected(shell, *given).stderr
    assert body(collected(shell, *given, "--skip-bad"))["lines"] == [
        {"text": "a", "where": "p.parquet:1", "id": 5}, {"text": "c", "where": "p.parquet:3", "id": 7}]
    assert body(collected(shell, *given, "--skip-bad", "--column", "ids"))["lines"][0] == {
        "tokens": [1, 2], "where": "p.parquet:1", "id": 5}
    assert "has no column words" in collected(shell, *given, "--column", "words").stderr
    (shell.folder / "p.parquet").write_text("no data set")
    assert "cannot be read as Parquet" in collected(shell, *given).stderr


def test_a_data_set_without_pyarrow(shell, hook):
    (shell.folder / "pyarrow.py").write_text("raise ImportError")
    done = shell.fake("capture", "--hook", hook, "-o", "out/", "--prompts-from-dataset", "p.parquet",
                      env={"PYTHONPATH": f"{shell.folder}{os.pathsep}{os.environ['PYTHONPATH']}"})
    assert done.returncode == 2 and "pip install 'vlens_cli[parquet]'" in done.stderr


def test_sizes():
    assert [units.size_of(text) for text in ("12", "2.5MB", "1 GiB", "3k")] == [12, 2_500_000, 2**30, 3000]
    assert [units.size_of(text) for text in ("", "-1", "1 XB", "0", "GB")] == [None] * 5
