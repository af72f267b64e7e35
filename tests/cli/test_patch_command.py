"""`vlens patch` up to the engine: what is asked, what is refused, what is shown and drawn. The engine is a stand-in."""

from __future__ import annotations

import json
import types
import xml.etree.ElementTree as ET

import pytest
from fake_vlens import CONFIG

from vlens_cli import models
from vlens_cli.cli import asking, main, picture
from vlens_cli.query import Interventions, PatchQuery, Prompt, Reply, Saved

MODEL = {"name": "tiny", "family": "llama", "dtype": "float32"}
SET = "blocks.1.hook_resid_post[pos=0] = @source"


def tokens(*texts: str | None) -> list[dict]:
    return [{"pos": n, "id": 40 + n, "text": text, "piece": text} for n, text in enumerate(texts)]


def run_of(*texts: str, new: int = 1) -> dict:
    top = [{"id": n, "text": text, "logit": 9.0 - n, "prob": 0.5 / (n + 1)} for n, text in enumerate(texts)]
    return {"top": top, "new_tokens": [{"id": 0, "text": texts[0]}] * new, "text": texts[0] * new}


PLACE = {"logit": 9.0, "prob": 0.5, "rank": 0}
COMPARED = {
    "schema_version": 1, "model": MODEL, "vlens": "0.1.0",
    "prompts": [{
        "text": "The <Eiffel>", "chunks": 1, "tokens": tokens("The", " <Eiffel>"),
        "edits": [{"expression": SET, "hook": "blocks.1.hook_resid_post", "fired": 1}],
        "base": run_of(" Paris", " Rome", new=2), "patched": run_of(" Rome", "\x1b[31m", new=2),
        "source": run_of(" Rome", " Paris"),
        "effect": {
            "kl": 1.25, "metric": {"name": "recovery", "base": 0.0, "patched": 0.75, "source": 1.0},
            "logit_diff": {"base": 1.5, "patched": -4.0, "source": -5.0, "change": -5.5, "recovery": None},
            "targets": [{"target": " Paris", "id": 0, "text": " Paris", "pieces": ["x"], "change": -2.125,
                         "recovery": 0.5, "base": PLACE, "patched": PLACE, "source": PLACE}],
        },
    }],
}  # fmt: skip
GRID = [[None] * 3, [0.0, 1.0, -0.5], [None] * 3, [0.25, "NaN", None]]
SWEPT = {
    "schema_version": 1, "model": MODEL, "vlens": "0.1.0",
    "prompts": [{"text": "The <Eiffel>", "chunks": 1, "tokens": tokens("The", " <Eiffel>", "\n"), "edits": [],
                 "base": run_of(" Paris"), "source": run_of(" Rome")}],
    "sweep": {"axes": ["layer", "pos"], "hooks": ["blocks.{1,3}.hook_resid_post"], "metric": "recovery", "cells": 5,
              "targets": [{"id": 1, "text": " Rome"}, {"id": 0, "text": " Paris"}], "base": 0.0, "source": 1.0,
              "grid": GRID, "tokens": tokens("The", " <Eiffel>", "\n"), "source_tokens": tokens("A", "B", None)},
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(args): the query that an engine would be asked, or None; the reply is `run.body`; then run.code, out, err."""
    asked = []

    def ask(spec, query, target, how, check):
        check()
        asked.append(query)
        return Reply(run_one.body, ("a note",), Saved(1, 10) if target else None)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(asking, "ask", ask)
    found = types.SimpleNamespace(name="tiny", folder="/models/tiny", revision=None, config=CONFIG)
    monkeypatch.setattr(models, "resolve", lambda name: found)

    def run_one(*args: str) -> PatchQuery | None:
        asked.clear()
        run_one.code = main.run(["patch", *args])
        run_one.out, run_one.err = capsys.readouterr()
        return asked[0] if asked else None

    run_one.body = COMPARED
    return run_one


SWEEP = ("--sweep", "layer,pos", "--hook", "blocks.*.hook_resid_post", "--source", "Rome")


def test_every_option_reaches_the_engine(run):
    query = run("-i", f"  {SET}", "--source", "The Colosseum", "--target", " Paris", "--target", "#7",
                "--target-prefix", "--metric", "recovery", "--top", "3", "--max-tokens", "8", "--seed", "5", "--no-bos", "--one-chunk",
                "hello")  # fmt: skip
    interventions = Interventions((SET,), (Prompt("The Colosseum"),), 5)
    assert query == PatchQuery((Prompt("hello"),), interventions, (" Paris", "#7"), True, "recovery", 3, 8, bos=False,
                               one_chunk=True)  # fmt: skip
    assert PatchQuery.from_json(json.loads(json.dumps(query.as_json()))) == query
    query = run("--sweep", "head, pos", "--hook", "blocks.*.attn.hook_z[pos=1:]", "--source-tokens", "1,2", "--tokens",
                "3,4")  # fmt: skip
    assert (query.sweep, query.hooks) == (("head", "pos"), ("blocks.*.attn.hook_z[pos=1:]",))
    assert query.interventions.sources == (Prompt(tokens=(1, 2)),)
    assert PatchQuery.from_json(json.loads(json.dumps(query.as_json()))) == query


@pytest.mark.parametrize("change", [{"top": 0}, {"top": "1"}, {"metric": "kl"}, {"sweep": ["depth"]}, {"targets": "x"}])
def test_a_query_of_another_shape_is_refused(change):
    with pytest.raises((TypeError, KeyError)):
        PatchQuery.from_json(PatchQuery((Prompt("a"),)).as_json() | change)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "nothing is patched"),
        (["--source", "x"], "nothing is patched"),
        (["--hook", "hook_embed"], "--hook is for a sweep"),
        (["--svg", "a.svg", "-i", SET, "--source", "x"], "--svg is for a sweep"),
        (["--sweep", "layer,depth", *SWEEP[2:]], "over one or two of layer, pos, head: layer,depth"),
        (["--sweep", "layer,layer", *SWEEP[2:]], "over one or two"),
        (["--sweep", "layer,pos,head", *SWEEP[2:]], "over one or two"),
        (["--sweep", "layer,pos", "--source", "x"], "none is given"),
        (list(SWEEP[:4]), "a sweep patches from a source run"),
        ([*SWEEP, "--hook", "blocks.0.ln1.hook_scale"], "blocks.0.ln1.hook_scale cannot be edited"),
        ([*SWEEP, "--hook", "blocks.9.hook_resid_post"], "there is no layer 9"),
        ([*SWEEP, "--hook", "blocks.0["], "expected"),
        ([*SWEEP, "--svg", "a.png"], "--svg writes svg, and this name does not end in .svg: a.png"),
        ([*SWEEP, "--html", "none/a.html"], "there is no such folder"),
        (["-i", SET], "none is given"),
        (["-i", SET, "--source", "x", "--metric", "kl"], "'kl' is not one of"),
    ],
)
def test_what_is_refused_before_any_engine(run, args, says):
    assert run(*args, "hello") is None
    assert (run.code, run.out) == (2, "") and says in run.err


# What is shown


def test_base_against_patched_as_a_table(run):
    run("--table", "-i", SET, "--source", "x", "hello")
    lines = [line.split() for line in run.out.splitlines()]
    assert ["0.75,", "source", "1"] == lines[-4][-3:] and ["recovery:", "base", "0,", "patched"] == lines[-4][:4]
    assert f"{SET}  (applied in 1 forward)" in run.out
    assert '" Paris"' in run.out and "KL(base || patched) after the last prompt token: 1.25 nats" in run.out
    assert "likeliest after the last prompt token:" in run.out
    assert 'base continues: " Paris Paris"' in run.out and 'patched continues: " Rome Rome"' in run.out
    assert "\x1b" not in run.out and r'"\x1b[31m"' in run.out
    (difference,) = (line for line in lines if line[:1] == ["difference"])
    assert difference == ["difference", "1.5", "-4", "-5", "-5.5"]
    assert run.err == "note: a note\n"


def test_a_continuation_that_has_ended_says_so(run):
    prompt = COMPARED["prompts"][0]
    run.body = COMPARED | {"prompts": [prompt | {"base": prompt["base"] | {"ended": 0}, "patched": prompt["patched"] | {"ended": None}}]}
    run("--table", "-i", SET, "--source", "x", "hello")
    assert run.out.count("it ended with") == 1
    assert '  it ended with " Paris", new token 1 of 2; what follows was generated all the same' in run.out


def test_the_file_of_a_comparison(run):
    assert run("-i", SET, "--source", "x", "-o", "runs.safetensors", "hello") and "1 tensor" in run.err


def test_one_token_is_no_continuation_and_no_targets_no_table(run):
    prompt = COMPARED["prompts"][0]
    bare = {"kl": 0.0, "targets": []}
    runs = {"base": run_of("a"), "patched": run_of("b"), "source": run_of("c")}
    run.body = COMPARED | {"prompts": [prompt | runs | {"effect": bare}]}
    run("--table", "-i", SET, "--source", "x", "hello")
    assert "continues" not in run.out and "target" not in run.out and "last prompt token: 0 nats" in run.out


def test_json_is_the_reply(run):
    run("--json", "-i", SET, "--source", "x", "hello")
    assert json.loads(run.out) == COMPARED


def test_a_heat_map_is_read_without_colour(run):
    run.body = SWEPT
    run(*SWEEP, "--table", "hello")
    assert "\x1b" not in run.out
    assert 'recovery of the logit of " Rome" minus " Paris", patched at blocks.{1,3}.hook_resid_post; base 0' in run.out
    assert 'source: "A" "B" #42' in run.out
    rows = [line for line in run.out.splitlines() if line.startswith("layer ")]
    assert rows[0].split() == ["layer", "1", "0", "1", "█+", "-0.5", "▒-"]
    assert rows[1].split() == ["layer", "3", "0.25", "░+", "NaN"]
    head = next(line for line in run.out.splitlines() if '0 "The"' in line)
    assert head.split() == ["0", '"The"', "1", '"', '<Eiffel>"', "2", r'"\n"']


def test_one_axis_is_a_column(run):
    sweep = SWEPT["sweep"] | {"axes": ["head"], "grid": [0.5, None, -1.0], "metric": "prob"}
    run.body = SWEPT | {"sweep": sweep}
    run(*SWEEP, "--table", "hello")
    rows = [line.split() for line in run.out.splitlines() if line.startswith("head ")]
    assert rows == [["head", "0", "0.5", "▒+"], ["head", "2", "-1", "█-"]]
    assert 'probability of " Rome"' in run.out


def test_kv_heads_are_called_so(run):
    sweep = SWEPT["sweep"] | {"axes": ["layer", "head"], "head_axes": ["kv_head"]}
    run.body = SWEPT | {"sweep": sweep}
    run(*SWEEP, "--table", "hello")
    assert "kv head 0" in run.out and "layer 1" in run.out
    assert picture.grid_of(sweep | {"head_axes": ["head", "kv_head"]}).columns[2] == "head or kv head 2"
    assert picture.grid_of(sweep | {"head_axes": ["head"]}).columns[2] == "head 2"


def test_colour_on_a_terminal_and_blocks_where_it_is_narrow(run, monkeypatch):
    from vlens_cli.cli import effects, output

    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = []
    monkeypatch.setattr(output, "emit", shown.append)

    class Terminal:
        encoding = "utf-8"
        isatty = staticmethod(lambda: True)
        write = flush = staticmethod(lambda *text: None)

    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Terminal())
        text = effects.patch(SWEPT)
    assert f"48;2;{';'.join(map(str, picture.RED))}m" in text  # the background of the largest change
    assert text.count("layer 1") == 3 and text.count("1 █+") == 1


# Pictures


@pytest.mark.parametrize("axes", [["layer", "pos"], ["pos"]])
def test_pictures_hold_every_cell_and_nothing_from_elsewhere(run, tmp_path, axes):
    grid = GRID if len(axes) > 1 else GRID[1]
    run.body = SWEPT | {"sweep": SWEPT["sweep"] | {"axes": axes, "grid": grid}}
    run(*SWEEP, "--svg", "a.svg", "--html", "a.html", "-o", "a.safetensors", "--json", "hello")
    assert run.code == 0 and "a.svg" in run.err and "a.html" in run.err
    root = ET.parse(tmp_path / "a.svg").getroot()
    cells = root.findall(".//{http://www.w3.org/2000/svg}g")
    said = [cell.find("{http://www.w3.org/2000/svg}title").text for cell in cells]
    if len(axes) > 1:
        assert said[:3] == ['layer 1, 0 "The": 0.0', 'layer 1, 1 " <Eiffel>": 1.0', r'layer 1, 2 "\n": -0.5']
        assert len(said) == 5 and said[4] == 'layer 3, 1 " <Eiffel>": NaN'
    else:
        assert said == ['0 "The", recovery: 0.0', '1 " <Eiffel>", recovery: 1.0', r'2 "\n", recovery: -0.5']
    fills = [cell.find("{http://www.w3.org/2000/svg}rect").get("fill") for cell in cells[:3]]
    assert fills[0] == f"rgb{picture.WHITE}" and fills[1] == f"rgb{picture.RED}"
    page = (tmp_path / "a.html").read_text()
    assert (tmp_path / "a.svg").read_text() in page and "&lt;Eiffel&gt;" in page and "<Eiffel>" not in page
    assert page.count("http") == 1  # the name of the SVG language


def test_shades_are_symmetric_and_bounded():
    grid = picture.grid_of(SWEPT["sweep"])
    assert (grid.rows, grid.columns) == (["layer 1", "layer 3"], ['0 "The"', '1 " <Eiffel>"', r'2 "\n"'])
    assert [grid.shade(value, 0.0) for value in (1.0, -1.0, 0.0, None, "NaN")] == [1, -1, 0, 0, 0]
    assert [picture.colour(shade) for shade in (1, -2, 0)] == [picture.RED, picture.BLUE, picture.WHITE]
    assert picture.ink(picture.WHITE) == "black" and picture.ink(picture.BLUE) == "white"
