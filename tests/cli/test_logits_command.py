"""`vlens logits` up to the engine: what is asked, what is refused, what is shown."""

from __future__ import annotations

import json
import re
import types

import pytest
from vlens_cli import models
from vlens_cli.cli import asking, logits, main
from vlens_cli.query import LogitsQuery, Reply

from fake_vlens import CONFIG

TOKEN = {"id": 7, "text": " Paris", "logit": 12.5, "prob": 0.75}
TARGET = TOKEN | {"rank": 0, "logprob": -0.3}
ROW = {"pos": 1, "entropy": 0.5, "top": [TOKEN], "targets": [TARGET], "diff": {"a": TARGET, "b": TARGET, "logit": -3.25}}
BODY = {
    "model": {"name": "tiny", "family": "llama", "dtype": "float32"},
    "prompts": [{
        "text": "two", "chunks": 1, "tokens": [{"pos": n, "id": n, "text": text, "piece": text} for n, text in enumerate("ab")],
        "positions": [ROW], "loss": {"mean": 1.5, "perplexity": 4.48, "per_token": [1.5]},
        "lens": [{"hook": f"blocks.{i}.hook_resid_post", "layer": i, "positions": [ROW]} for i in (0, 1)],
        "attribution": [{"target": {"id": 7, "text": " Paris"}, "pos": 1, "of": "logit", "logit": 12.5, "sum": 12.5,
                         "constant": 0.0, "parts": [{"hook": "hook_embed", "value": 2.0},
                                                    {"hook": "blocks.0.hook_attn_out", "value": -10.5, "heads": [-9.25, -1.25],
                                                     "bias": 0.0}]}],
    }],
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys):
    """run(args): the query that an engine would be asked, or None; what was printed is in `run.out` and `run.err`."""
    asked = []

    def ask(spec, query, target, how, check):
        check()
        asked.append(query)
        return Reply(BODY)

    monkeypatch.setattr(asking, "ask", ask)
    found = types.SimpleNamespace(name="tiny", folder="/models/tiny", revision=None, config=CONFIG)
    monkeypatch.setattr(models, "resolve", lambda name: found)

    def run_one(*args: str) -> LogitsQuery | None:
        asked.clear()
        run_one.code = main.run(["logits", *args])
        run_one.out, run_one.err = capsys.readouterr()
        return asked[0] if asked else None

    return run_one


def test_every_option_reaches_the_engine(run):
    query = run("--pos", "-1", "--top", "3", "--target", " Paris", "--target", "#7", "--target-prefix", "--diff", "a", "b",
                "--loss", "--lens", "resid_mid,mlp_out", "--attribution", "--values", "-i", "hook_embed  = 0", "-o", "x.safetensors",
                "--save-dtype", "float16", "--one-chunk", "--no-bos", "hello")  # fmt: skip
    assert LogitsQuery.from_json(json.loads(json.dumps(query.as_json()))) == query
    assert (query.pos, query.top, query.targets, query.target_prefix, query.diff) == ("-1", 3, (" Paris", "#7"), True, ("a", "b"))
    assert query.loss and query.attribution and query.values and query.one_chunk and query.bos is False
    assert query.lens == ("resid_mid", "mlp_out") and query.save_dtype == "float16"
    assert query.interventions.expressions == ("hook_embed = 0.0",) or query.interventions.expressions == ("hook_embed = 0",)


@pytest.mark.parametrize("args, points", [
    (["--lens", "The Eiffel Tower"], ("resid_post",)),
    (["The Eiffel Tower", "--lens"], ("resid_post",)),
    (["--lens", "--loss", "The Eiffel Tower"], ("resid_post",)),
    (["--lens", "attn_out", "The Eiffel Tower"], ("attn_out",)),
    (["--lens=attn_out,mlp_out", "The Eiffel Tower"], ("attn_out", "mlp_out")),
    (["--lens", "blocks.{0,2}.hook_resid_post", "The Eiffel Tower"], ("blocks.{0,2}.hook_resid_post",)),
    (["--lens", "--", "--lens"], ("resid_post",)),
    (["Hello", "--lens"], ("resid_post",)),
    (["--lens", "--", "Hello"], ("resid_post",)),
    (["--lens", "resid_mid, mlp_out", "The Eiffel Tower"], ("resid_mid", "mlp_out")),
])  # fmt: skip
def test_the_lens_may_stand_alone_before_a_prompt(run, args, points):
    query = run(*args)
    assert query.lens == points and len(query.prompts) == 1


@pytest.mark.parametrize("args, said", [
    (["--diff", "a"], "requires 2 arguments"),
    (["--diff", "a", "hello"], "there is no prompt: --diff takes two tokens"),
    (["--attribution", "hello"], "none is named"),
    (["--target", "", "hello"], "a target is empty"),
    (["--target", "\udcff", "hello"], "a target is not UTF-8 text"),
    (["--diff", "a", "\udcff", "hello"], "a target is not UTF-8 text"),
    (["--target-prefix", "hello"], "neither is given"),
    (["--all", "hello"], "--all is for the table of --attribution"),
    (["--pos", "x", "hello"], "expected a number"),
    (["--top", "-1", "hello"], "-1"),
    (["--lens=resid_poost", "hello"], "resid_poost"),
    (["--lens", "resid_mdi", "--pos", "-1", "P"], "no point of it: resid_mdi\n\nhint: did you mean --lens=resid_mid?"),
    (["--lens", "attn_out,resid_mdi", "P"], "did you mean --lens=attn_out,resid_mid?"),
    (["--lens", "Hello"], "a prompt of one word stands before it"),
    (["--lens=ln_final.hook_out", "hello"], "the lens reads the stream"),
    (["--save-dtype", "float16", "hello"], "-o is not given"),
    ([""], "the prompt is empty"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(run, args, said):
    assert run(*args) is None
    assert run.code == 2 and said in run.err and run.out == ""


def test_the_tables_show_every_part(run):
    run("--table", "hello")
    lines = run.out.splitlines()
    assert any(line.split()[:5] == ["1", '"b"', "0.5", "12.5", "0.75"] and "-3.25" in line for line in lines)
    assert "loss 1.5 nats a token, perplexity 4.48" in run.out
    assert lines.count("lens: likeliest token, probability") == 1 and '" Paris" 0.75' in run.out
    parts = [line.split() for line in lines[lines.index(next(line for line in lines if "what makes" in line)) :]]
    values = [row[-5] if row[-1:] == ["attn_out"] else row[-1] for row in parts if row][4:]
    assert values == ["0", "-10.5", "-9.25", "2", "-1.25"]
    assert any(line.split() == ["sum", "12.5", *"without the heads, which their attn_out holds".split()] for line in lines)
    assert any(line.split() == ["blocks.0.attn.hook_z[head=0]", "-9.25", "share", "of", "its", "attn_out"] for line in lines)


def many_parts(n_layers: int, n_heads: int) -> dict:
    """The reply of a larger model: attention adds the layer's number, in equal shares of its heads, and an MLP a little."""
    parts = [part for i in range(n_layers) for part in (
        {"hook": f"blocks.{i}.hook_attn_out", "value": float(i), "heads": [i / n_heads] * n_heads, "bias": 0.0},
        {"hook": f"blocks.{i}.hook_mlp_out", "value": -0.125})]
    one = BODY["prompts"][0]["attribution"][0] | {"parts": parts, "sum": sum(part["value"] for part in parts)}
    return BODY | {"prompts": [BODY["prompts"][0] | {"attribution": [one]}]}


def rows_of(text: str) -> list[str]:
    """The lines of the attribution, from the sum on."""
    lines = text[text.index("what makes") :].splitlines()
    return lines[next(n for n, line in enumerate(lines) if line.startswith("sum ")) :]


def added(rows: list[str]) -> float:
    """What the rows add up to that are part of the sum: the constant, the parts, the others."""
    return sum(float(re.search(r"\s(-?[0-9.]+)(\s|$)", row)[1]) for row in rows[1:] if "share of" not in row)


def test_the_largest_of_many_parts_are_shown_and_the_others_add_up(run):
    body = many_parts(n_layers=30, n_heads=4)
    shown, whole = rows_of(logits.table(body)), rows_of(logits.table(body, every=True))
    assert shown[2].startswith("blocks.29.hook_attn_out ") and shown[3].startswith("blocks.28.hook_attn_out ")
    assert shown[-1].startswith("the others ") and len(shown) == 2 + logits.SHOWN_PARTS + 1
    assert shown[-1].endswith("  40 parts and 120 heads more, added without the heads; --all shows each")
    assert len(whole) == 2 + 180 and [row.split() for row in whole[:22]] == [row.split() for row in shown[:22]]
    assert added(shown) == added(whole) == float(shown[0].split()[1])


def test_all_reaches_the_table(run):
    run("--table", "--attribution", "--target", " Paris", "--all", "hello")
    assert run.code == 0 and "hook_z[head=1]" in run.out


def test_a_part_that_is_not_finite_is_among_the_shown():
    body = many_parts(n_layers=30, n_heads=4)
    body["prompts"][0]["attribution"][0]["parts"][1]["value"] = "NaN"
    lines = logits.table(body).splitlines()
    assert any(line.split()[:2] == ["blocks.0.hook_mlp_out", "NaN"] for line in lines)


def test_a_number_that_is_not_finite_is_shown(monkeypatch, run):
    row = ROW | {"top": [TOKEN | {"logit": "NaN", "prob": "NaN"}], "targets": [TARGET | {"rank": None, "prob": "NaN"}]}
    broken = BODY | {"prompts": [BODY["prompts"][0] | {"positions": [row], "lens": [{"hook": "h", "positions": [row]}]}]}
    assert "NaN" in logits.table(broken)
