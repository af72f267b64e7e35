"""`-i`, `--spec` and `--source` up to the engine."""

from __future__ import annotations

import json
import types

import pytest
from fake_vlens import CONFIG

from vlens_cli import models
from vlens_cli.cli import asking, main
from vlens_cli.query import Reply

Z = "blocks.1.attn.hook_z"


@pytest.fixture
def asked(monkeypatch, capsys, tmp_path):
    """asked(args): the interventions that an engine would be asked for; asked.refused(args): what is said instead."""
    queries = []

    def ask(spec, query, target, how, check):
        check()
        queries.append(query)
        return Reply({})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asking, "ask", ask)
    found = types.SimpleNamespace(name="tiny", folder="/models/tiny", revision=None, config=CONFIG)
    monkeypatch.setattr(models, "resolve", lambda name: found)

    def run(*args: str) -> dict:
        assert main.run(["capture", "--json", "--hook", "hook_embed", *args, "hello"]) == 0, capsys.readouterr().err
        return queries.pop().as_json()["interventions"]

    def refused(*args: str) -> str:
        assert main.run(["capture", "--hook", "hook_embed", *args, "hello"]) == 2 and not queries
        out, err = capsys.readouterr()
        assert out == ""
        return err

    run.refused, run.folder = refused, tmp_path
    return run


def test_expressions_then_spec_files_in_order(asked):
    (asked.folder / "a.json").write_text(json.dumps([{"hook": Z, "op": "scale", "factor": 2, "head": 3}, f"{Z} = 1"]))
    (asked.folder / "b.json").write_text("[]")
    found = asked("--spec", "a.json", "-i", f"{Z}[pos=-1] = 0", "--spec", "b.json", "-i", f"{Z} += noise(1)")
    assert found["expressions"] == [f"{Z}[pos=-1] = 0", f"{Z} += noise(1)", f"{Z}[head=3] *= 2", f"{Z} = 1"]


def test_files_are_found_from_here(asked):
    (asked.folder / "a b.safetensors").touch()
    found = asked("-i", f'{Z} += 4 * "a b.safetensors":k')
    assert found["expressions"] == [f'{Z} += 4 * "{asked.folder}/a b.safetensors":k']


def test_a_tilde_is_the_home(asked, monkeypatch):
    monkeypatch.setenv("HOME", str(asked.folder))
    (asked.folder / "d.safetensors").touch()
    found = asked("-i", f"{Z} -= proj(~/d.safetensors)")
    assert found["expressions"] == [f"{Z} -= proj({asked.folder}/d.safetensors)"]


def test_sources_are_fed_as_prompts_are(asked):
    found = asked("-i", f"{Z} = @source", "--source", "-", "--source-tokens", "1,2", "--chat", "--system", "Be.")
    assert found["sources"] == [
        {"text": "-", "tokens": None, "chat": True, "system": "Be.", "id": None},
        {"text": None, "tokens": [1, 2], "chat": False, "system": None, "id": None},
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-i", f"{Z} = @source"], "none is given"),
        (["--source", "x"], "no intervention has it"),
        (["--source", "x", "-i", f"{Z} = 0"], "no intervention has it"),
        (["--source", "", "-i", f"{Z} = @source"], "the source is empty"),
        (["--source-tokens", "x", "-i", f"{Z} = @source"], "--source-tokens holds something that is not a token id: x"),
        (["-i", f"{Z} ? 0"], "^"),
        (["-i", f"{Z}[head=4] = 0"], "there is no head 4"),
        (["-i", "blocks.4.hook_mlp_out = 0"], "there is no layer 4"),
        (["-i", "blocks.0.ln1.hook_scale = 0"], "cannot be edited"),
        (["-i", f"{Z} = nan"], "--allow-nan"),
        (["-i", f"{Z} = none.safetensors"], "there is no such file: none.safetensors"),
        (["-i", f"{Z} = ."], "names a folder: ."),
        (["--spec", "none.json"], "No such file or directory: none.json"),
        (["--spec", "text.json"], "this file is not JSON: text.json"),
        (["--spec", "object.json"], "holds a list of interventions"),
        (["--spec", "bad.json"], "bad.json, entry 1: an intervention of --spec is wrong: a key that suppress"),
        (["--spec", "grammar.json"], "grammar.json, entry 0: there is no operator /="),
        (["--spec", "unknown.json"], "no hook point of this model is named: hook_nothing"),
    ],
)
def test_what_is_refused_before_any_engine(asked, args, says):
    files = {
        "text.json": "{", "object.json": "{}", "bad.json": f'["{Z} = 0", {{"hook": "{Z}", "op": "suppress", "p": 1}}]',
        "grammar.json": f'["{Z} /= 2"]', "unknown.json": '[{"hook": "hook_nothing", "op": "suppress"}]',
    }  # fmt: skip
    for name, content in files.items():
        (asked.folder / name).write_text(content)
    assert says in asked.refused(*args)
