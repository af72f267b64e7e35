"""`vlens capture` up to the engine: prompts, checks before it starts, what is shown, what is written."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest


def queried(shell, *args: str, **more) -> dict:
    """What the engine was asked, for a command line that is right."""
    done = shell.fake("capture", *args, env={"FAKE": "echo"}, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def texts(shell, *args: str, **more) -> list:
    body = queried(shell, "--hook", "hook_embed", *args, **more)
    return [prompt["text"] or tuple(prompt["tokens"]) for prompt in body["query"]["prompts"]]


def refused(shell, *args: str, code: int = 2, **more) -> str:
    done = shell.fake("capture", *args, **more)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


# The query


def test_every_option_reaches_the_engine(shell):
    body = queried(
        shell, "--hook", "blocks.*.attn.hook_z", "--hook", "blocks.0.attn.hook_q[pos=0]", "--pos", "-1",
        "--head", "3", "--dim", "0:1", "--values", "-o", "a.safetensors", "--save-dtype", "float16", "-m", "some",
        "--dtype", "bfloat16", "--max-len", "99", "--chunk", "16", "--one-chunk", "--keep-alive", "2h", "--chat",
        "--timeout", "3", "-i", "blocks.0.hook_mlp_out   =  0.50", "--seed", "7", "--allow-nan",
        "--system", "Be.", "--no-bos", "--reduce", "mean", "--max-bytes", "2.5MB", "hello",
    )  # fmt: skip
    assert body["query"] == {
        "prompts": [{"text": "hello", "tokens": None, "chat": True, "system": "Be.", "id": None}],
        "hooks": ["blocks.*.attn.hook_z", "blocks.0.attn.hook_q[pos=0]"],
        "pos": "-1", "head": "3", "dim": "0:1", "bos": False, "values": True, "save_dtype": "float16",
        "one_chunk": True,
        "interventions": {"expressions": ["blocks.0.hook_mlp_out = 0.5"], "sources": [], "seed": 7, "allow_nan": True},
        "reduce": "mean", "max_bytes": 2_500_000,
    }  # fmt: skip
    assert body["spec"] == {
        "model": "/models/tiny", "name": "some", "revision": None, "dtype": "bfloat16", "max_len": 99, "chunk": 16,
        "compile_hooks": None, "compile_buffer": None, "tp": 1, "pp": 1, "executor": None,
    }  # fmt: skip
    assert body["how"] == {"daemon": True, "keep_alive": 7200.0, "timeout": 3.0}


def test_defaults(shell, hook):
    body = queried(shell, "--hook", hook, "--dtype", "auto", "hello")
    assert body["spec"]["dtype"] is None
    assert body["query"]["bos"] is None
    assert body["how"] == {"daemon": True, "keep_alive": 900.0, "timeout": None}


# Prompts


def test_arguments_files_and_ids_in_this_order(shell):
    (shell.folder / "lines").write_text("three\r\n fo\u2028ur \n")
    found = texts(shell, "one", "-f", "lines", "--tokens", "5, 6", "two", "--tokens", "7")
    assert found == ["one", "two", "three", " fo\u2028ur ", (5, 6), (7,)]


def test_json_lines_by_suffix_or_by_first_line(shell):
    lines = '{"prompt": "a", "id": 1}\n\n{"text": "b"}\n{"tokens": [1, 2]}\n"c\\n"\n'
    (shell.folder / "a.jsonl").write_text(lines)
    (shell.folder / "b.txt").write_text(lines)
    wanted = ["a", "b", (1, 2), "c\n"]
    assert texts(shell, "-f", "a.jsonl", "-f", "b.txt") == wanted * 2


def test_a_number_on_the_first_line_is_no_json(shell):
    (shell.folder / "a.txt").write_text("17\n[1, 2]")
    assert texts(shell, "-f", "a.txt") == ["17", "[1, 2]"]


def test_standard_input(shell):
    assert texts(shell, "-", input="one\ntwo\n\n") == ["one\ntwo\n"]
    assert texts(shell, "-f", "-", input="one\ntwo\n") == ["one", "two"]


def test_a_prompt_beside_a_silent_pipe_does_not_wait(shell, hook):
    reader, writer = os.pipe()
    try:
        assert shell.fake("capture", "--hook", hook, "hello", stdin=reader).returncode == 0
        assert "there is no prompt" in refused(shell, "--hook", hook, stdin=reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_after_the_dashes_everything_is_text(shell):
    assert texts(shell, "a", "--", "-", "blocks.0.hook_resid_post", "--json") == [
        "a", "-", "blocks.0.hook_resid_post", "--json",
    ]  # fmt: skip


def test_braces_that_bash_expanded(shell):
    """bash makes `--hook blocks.0.hook_resid_post` and a prompt of blocks.{0,5}.hook_resid_post."""
    command = '"$0" -m vlens_cli capture --hook blocks.{0,1}.hook_z hi'
    done = subprocess.run(["bash", "-c", command, sys.executable], cwd=shell.folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: this prompt is a hook name: blocks.1.hook_z\n")
    assert "quote the pattern" in done.stderr and "after `--`" in done.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "there is no prompt"),
        ([""], "the prompt is empty"),
        (["a", "--system", "x"], "--chat is not given"),
        (["-", "-f", "-"], "asked for twice"),
        (["--tokens", "1,x"], "not a token id: x"),
        (["--tokens", "1,-2"], "not a token id: -2"),
        (["--tokens", ","], "--tokens is empty"),
        (["--tokens", "1", "--chat"], "--chat changes text"),
        (["--tokens", "1", "--bos"], "--bos changes text"),
        (["-f", "none.txt"], "No such file or directory: none.txt"),
        (["-f", "."], "Is a directory"),
        (["-f", "empty.txt"], "there is no prompt in empty.txt"),
        (["-f", "gap.txt"], "gap.txt:2 is empty"),
        (["-f", "latin.txt"], "latin.txt:1 is not UTF-8 text"),
        (["-f", "bad.jsonl"], "bad.jsonl:2 is not JSON"),
        (["-f", "both.jsonl"], "both.jsonl:1 is neither"),
        (["-f", "list.json"], "list.json:1 is neither"),
        (["-f", "kind.jsonl"], "kind.jsonl:1: tokens is not a list"),
        (["-f", "ids.jsonl"], "ids.jsonl:1 holds something that is not a token id: True"),
        (["-f", "deep.jsonl"], "deep.jsonl:1 is not JSON"),
        (["-f", "half.jsonl"], "half.jsonl:1 is not UTF-8 text"),
    ],
)
def test_bad_prompts(shell, hook, args, says):
    files = {
        "empty.txt": b"", "gap.txt": b"a\n\nb\n", "latin.txt": b"Z\xfcrich", "bad.jsonl": b'"a"\n{"prompt": \n',
        "both.jsonl": b'{"prompt": "a", "tokens": [1]}', "list.json": b'["a"]', "kind.jsonl": b'{"tokens": "1,2"}',
        "ids.jsonl": b'{"tokens": [1, true]}', "deep.jsonl": b"[" * 100_000, "half.jsonl": b'"\\ud800"',
    }  # fmt: skip
    for name, content in files.items():
        (shell.folder / name).write_bytes(content)
    assert says in refused(shell, "--hook", hook, *args).splitlines()[0]


def test_an_argument_that_is_not_utf8(shell, hook):
    assert "not UTF-8" in refused(shell, "--hook", hook, os.fsdecode(b"Z\xfcrich"))


# What is checked before an engine starts


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("blocks.3.hook_resid_pst", "did you mean blocks.3.hook_resid_post"),
        ("blocks.9.hook_resid_post", "this model has layers 0 to 3"),
        ("blocks.3.attn.hook_k[head=2]", "the kv heads are 0 to 1"),
        ("blocks.3.hook_resid_post[head=0]", "has no heads"),
        ("blocks.3.mlp.hook_router_logits", "no mixture of experts"),
        ("blocks.3.hook_resid_post[pos=x]", "\n                               ^"),
    ],
)
def test_bad_hooks(shell, hook, says):
    assert says in refused(shell, "--hook", hook, "hello", env={"FAKE": "bug"})


def test_a_flag_with_a_fault_has_a_caret(shell, hook):
    assert refused(shell, "--hook", hook, "--pos", "1,", "hello").splitlines()[1:3] == ["  1,", "    ^"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("a.npz", "does not end in .safetensors"),
        ("none/a.safetensors", "there is no such folder"),
        ("folder.safetensors", "-o names a folder"),
        ("pipe.safetensors", "not a file"),
        ("/proc/a.safetensors", "this folder cannot be written"),
    ],
)
def test_bad_targets(shell, hook, target, says):
    (shell.folder / "folder.safetensors").mkdir()
    os.mkfifo(shell.folder / "pipe.safetensors")
    assert says in refused(shell, "--hook", hook, "-o", target, "hello", env={"FAKE": "bug"})


def test_save_dtype_needs_a_file(shell, hook):
    assert "add -o" in refused(shell, "--hook", hook, "--save-dtype", "float16", "hello")


def test_grammar_before_prompts_before_target_before_model(shell):
    args = ["--hook", "blocks.", "-f", "none.txt", "-o", "a.npz", "-m", "missing"]
    said = [refused(shell, *args)]
    args[1] = "blocks.99.hook_resid_post"
    said.append(refused(shell, *args))
    args[2:4] = ["hello"]
    said.append(refused(shell, *args))
    args[4] = "a.safetensors"
    said.append(refused(shell, *args, code=3))
    said.append(refused(shell, *args[:-1], "there"))
    wanted = ["expected a layer", "none.txt", ".safetensors", "no model", "layers 0 to 3"]
    for text, says in zip(said, wanted, strict=True):
        assert says in text


# What is shown


def test_json_is_exact_and_strict(shell, hook):
    done = shell.fake("capture", "--hook", hook, "hello")
    body = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    row = body["prompts"][0]["hooks"][hook]["rows"][0]
    assert (row["norm"], row["mean"], row["std"]) == ("NaN", "-Infinity", "Infinity")
    assert (row["min"], row["top"][0]["value"]) == (0.1 + 0.2, 1 / 3)
    assert "\u202e" not in done.stdout
    assert done.stderr == "note: two BOS\\x1b[0m\n"


def test_a_table_on_a_pipe(shell, hook):
    done = shell.fake("capture", "--hook", hook, "--table", "hello", "[red]there[/red]")
    lines = done.stdout.splitlines()
    assert lines[0] == "tiny (llama, float32)"
    assert lines[2] == 'prompt 0: "hello", 3 tokens'
    assert lines[4] == f"{hook}  [pos 3, d_model 8] float32  (derived)"
    titles = lines[5].split("│") if "│" in lines[5] else lines[5].split()
    assert [title.strip() for title in titles][:7] == ["pos", "token", "norm", "mean", "std", "min", "max"]
    for pos, text in enumerate(lines[7:10]):
        cells = text.split()
        assert cells[0] == str(pos)
        assert r'" \x1b[31m[bold]\u202e\n"' in text
        assert cells[-7:] == ["NaN", "-Infinity", "Infinity", "0.3", "1e-30", "1:", "0.333333"]
    assert 'prompt 1: "[red]there[/red]", 3 tokens' in lines
    assert not any(text.endswith(" ") for text in lines)


def test_heads_are_named_with_their_dims(shell):
    out = shell.fake("capture", "--hook", "blocks.0.attn.hook_q", "--table", "hello").stdout
    assert "largest |value| (head.dim: value)" in out and "2.1: 0.333333" in out


def test_values_in_tables_are_all_there(shell, hook):
    args = ("--hook", hook, "--hook", "blocks.0.attn.hook_q", "--values", "--pos", "2", "hello")
    table = shell.fake("capture", "--table", *args).stdout
    assert "pos 2: 2 2.001 2.002 2.003 2.004 2.005 2.006 2.007\n" in table
    assert [f"pos 2, head {head}: 2 2.001" in table for head in range(5)] == [True] * 4 + [False]
    values = json.loads(shell.fake("capture", *args).stdout)["prompts"][0]["hooks"][hook]["rows"][0]["values"]
    assert values == [2 + i / 1000 for i in range(8)]


def test_a_pattern_is_a_heat_map_a_head(shell):
    out = shell.fake("capture", "--hook", "blocks.0.attn.hook_pattern[head=1,3]", "--table", "hello").stdout
    assert "blocks.0.attn.hook_pattern[head=1,3]  [head 2, query 3, key 3] float32  (derived)" in out
    assert "keys 0 to 2, left to right: · below 1%, ░ below 10%, ▒ below 33%, ▓ below 66%, █ more" in out
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("head ")] == ["head 1", "head 3"]
    maps = [line.split('"  ')[1][:4] for line in lines if line.strip().startswith(("0  ", "1  ", "2  "))]
    assert maps == ["█   ", "▒█  ", "▒·█ "] * 2
    assert '2 " \\x1b[31m[bold]\\u202e\\n": 0.9' in out and "0.325083" in out
    assert "\x1b" not in out


def test_a_heat_map_in_a_locale_without_blocks(shell):
    done = shell.fake("capture", "--hook", "blocks.0.attn.hook_pattern[head=1]", "--table", "hello",
                      env={"PYTHONIOENCODING": "ascii"})
    assert "|+.@  |" in done.stdout and "@ more" in done.stdout


def test_keys_are_chosen_by_dim_and_too_many_have_no_heat_map(shell):
    out = shell.fake("capture", "--hook", "blocks.0.attn.hook_pattern[head=1][dim=0,2][pos=-1]", "--table", "--values",
                     "hello").stdout
    assert "hook_pattern[head=1][dim=0,2]  [head 1, query 1, key 2] float32" in out and "keys 0, 2, left to right" in out
    assert "▒█" in out and "head 1, pos 2: 0.1 0.9" in out
    many = shell.fake("capture", "--hook", "blocks.0.attn.hook_pattern[head=1][pos=-1]", "--table", "hello",
                      env={"FAKE_TOKENS": "201"}).stdout
    assert "too many keys for a heat map; [dim=...] chooses some" in many and "200" in many and "█" not in many


def test_selected_heads_keep_their_numbers(shell):
    out = shell.fake("capture", "--hook", "blocks.0.attn.hook_q[head=1,3]", "--values", "--table", "hello").stdout
    assert "blocks.0.attn.hook_q[head=1,3]  [pos 3, head 2, d_head 2] float32" in out
    assert [f"pos 2, head {head}:" in out for head in range(4)] == [False, True, False, True]


def test_a_long_hook_name_is_not_cut(shell):
    out = shell.fake("capture", "--hook", "blocks.*.attn.hook_rot_q", "--table", "x" * 500).stdout
    assert "x" * 500 in out and "blocks.3.attn.hook_rot_q" in out and "…" not in out


# What is written


def test_the_file_and_the_line_about_it(shell, hook):
    done = shell.fake("capture", "--hook", hook, "-o", "a.safetensors", "hello")
    written = (shell.folder / "a.safetensors").read_bytes()
    assert json.loads(done.stdout)["command"] == "capture"
    path = shell.folder.resolve() / "a.safetensors"
    assert done.stderr.splitlines()[-1] == f"wrote {path.name}: 1 tensor, {len(written)} bytes"
    assert written == b"what the engine wrote"
    assert os.listdir(shell.folder) == ["a.safetensors"]


def test_a_file_is_replaced_through_its_link_under_the_umask(shell, hook):
    (shell.folder / "real.safetensors").write_text("old")
    (shell.folder / "link.safetensors").symlink_to("real.safetensors")
    before = os.umask(0o027)
    try:
        assert shell.fake("capture", "--hook", hook, "-o", "link.safetensors", "hello").returncode == 0
    finally:
        os.umask(before)
    assert (shell.folder / "link.safetensors").is_symlink()
    real = shell.folder / "real.safetensors"
    assert real.read_bytes() != b"old" and stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_failure_leaves_the_old_file_and_nothing_else(shell, hook):
    (shell.folder / "a.safetensors").write_text("old")
    assert shell.fake("capture", "--hook", hook, "-o", "a.safetensors", "hello", env={"FAKE": "bug"}).returncode == 4
    assert os.listdir(shell.folder) == ["a.safetensors"]
    assert (shell.folder / "a.safetensors").read_text() == "old"


def test_the_file_is_written_when_the_reader_left(shell, hook):
    reader, writer = os.pipe()
    os.close(reader)
    done = shell.fake("capture", "--hook", hook, "-o", "a.safetensors", "hello", stdout=writer)
    os.close(writer)
    assert done.returncode == 0
    assert (shell.folder / "a.safetensors").is_file()
