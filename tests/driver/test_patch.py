"""`vlens patch` on real engines, in fp32, against transformers with hooks that do the same (patch_reference.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compare import REFERENCES
from safetensors.torch import load, load_file

from vlens_cli.driver.session import Session
from vlens_cli.driver.tokens import Tokens
from vlens_cli.query import EngineSpec, Interventions, PatchQuery, Prompt

EIFFEL, COLOSSEUM = "The Eiffel Tower is located in the city of", "The Colosseum is located in the city of"
PROMPT, SOURCE = [3, 17, 256, 99, 4, 31, 8], [3, 18, 250, 99, 5, 31, 8]


@pytest.fixture(scope="module")
def session(engines):
    """session(folder): a session on the engine that the tests share."""

    def open_one(folder: Path) -> Session:
        config = json.loads((Path(folder) / "config.json").read_text())
        one = Session(EngineSpec(model=str(folder), name="test"), config)
        one.driver = lambda progress: engines.open(folder)
        return one

    return open_one


def ask(session: Session, prompt: Prompt, expressions=(), source: Prompt | None = None, into=None, **fields) -> dict:
    asked = Interventions(tuple(expressions), () if source is None else (source,))
    return session.answer(PatchQuery((prompt,), asked, **fields), lambda text: None, into).body


def reference(tmp_path: Path, folder: Path, prompt: list[int], source: list[int], point: str, cells: list) -> dict:
    out = tmp_path / "out.safetensors"
    REFERENCES.ask("patches", folder=str(folder), prompt=prompt, source=source, point=point, cells=cells, out=str(out))
    return load_file(out)


def recovery(rows: dict, a: int, b: int) -> torch.Tensor:
    """[cells] from the reference's logits, in fp64."""
    difference = {name: (row.double()[..., a] - row.double()[..., b]) for name, row in rows.items()}
    return (difference["cells"] - difference["base"]) / (difference["source"] - difference["base"])


def tokens_of(body: dict, key: str = "tokens") -> list[int]:
    return [token["id"] for token in body["sweep"][key]]


# The demo model


def test_causal_tracing_equals_transformers(session, demo_model, tmp_path, capsys):
    """The 30 x 10 grid of the Eiffel Tower and Colosseum prompts, by one query."""
    into = open(tmp_path / "grid.safetensors", "w+b")
    body = ask(session(demo_model), Prompt(EIFFEL), (), Prompt(COLOSSEUM), into, sweep=("layer", "pos"),
               hooks=("blocks.*.hook_resid_post",), metric="recovery", targets=(" Rome", " Paris"))  # fmt: skip
    sweep = body["sweep"]
    assert sweep["axes"] == ["layer", "pos"] and (sweep["base"], sweep["source"]) == (0, 1)
    grid = torch.tensor(sweep["grid"], dtype=torch.float64)
    assert grid.shape == (30, 10) and sweep["cells"] == 300
    cells = [[layer, [p], None] for layer in range(30) for p in range(10)]
    rows = reference(tmp_path, demo_model, tokens_of(body), tokens_of(body, "source_tokens"), "resid_post", cells)
    rome, paris = (target["id"] for target in sweep["targets"])
    worst = (grid.flatten() - recovery(rows, rome, paris)).abs().max().item()
    with capsys.disabled():
        print(f"\ncausal tracing, 30 x 10, against transformers: largest difference of recovery {worst:.1e}")
    assert worst < 1e-3
    assert grid.max() - grid.min() > 0.9 and grid[29, :9].abs().max() < 1e-4 and abs(grid[29, 9] - 1) < 1e-4
    into.seek(0)
    assert torch.equal(load(into.read())["grid"], grid)
    assert body["prompts"][0]["base"]["top"][0]["text"] == " Paris"
    assert body["prompts"][0]["source"]["top"][0]["text"] == " Rome"


def test_heads_of_the_demo_model_equal_transformers(session, demo_model, tmp_path):
    body = ask(session(demo_model), Prompt(EIFFEL), (), Prompt(COLOSSEUM), sweep=("layer", "head"),
               hooks=("blocks.{4,17,23}.attn.hook_z",))  # fmt: skip
    sweep = body["sweep"]
    assert sweep["metric"] == "logit_diff" and [t["text"] for t in sweep["targets"]] == [" Rome", " Paris"]
    cells = [[layer, list(range(10)), [head]] for layer in (4, 17, 23) for head in range(9)]
    rows = reference(tmp_path, demo_model, tokens_of(body), tokens_of(body, "source_tokens"), "z", cells)
    rome, paris = (target["id"] for target in sweep["targets"])
    want = (rows["cells"][:, rome] - rows["cells"][:, paris]).view(3, 9)
    got = torch.tensor([row for row in sweep["grid"] if row[0] is not None])
    assert len(sweep["grid"]) == 30 and sum(row == [None] * 9 for row in sweep["grid"]) == 27
    assert (got - want).abs().max() < 1e-3
    assert sweep["base"] == pytest.approx((rows["base"][rome] - rows["base"][paris]).item(), abs=1e-3)


def test_base_patched_and_continuations(session, demo_model):
    body = ask(session(demo_model), Prompt(EIFFEL), ["blocks.8.hook_resid_post[pos=1:4] = @source"], Prompt(COLOSSEUM),
               targets=(" Paris", " Rome"), max_new_tokens=4, metric="recovery", top=3)  # fmt: skip
    (prompt,) = body["prompts"]
    assert prompt["edits"] == [{"expression": "blocks.8.hook_resid_post[pos=1:4] = @source",
                                "hook": "blocks.8.hook_resid_post", "fired": 1}]  # fmt: skip
    assert [prompt[run]["top"][0]["text"] for run in ("base", "patched", "source")] == [" Paris", " Rome", " Rome"]
    assert prompt["base"]["text"].startswith(" Paris") and prompt["patched"]["text"].startswith(" Rome")
    assert len(prompt["base"]["new_tokens"]) == len(prompt["patched"]["new_tokens"]) == 4
    assert prompt["effect"]["kl"] > 1
    assert prompt["effect"]["metric"]["base"] == 0 and prompt["effect"]["metric"]["source"] == 1
    assert prompt["effect"]["logit_diff"]["recovery"] == prompt["effect"]["metric"]["patched"] > 0.5


def test_patching_a_run_with_itself_changes_nothing(session, demo_model):
    expressions = ["blocks.*.hook_resid_post = @source", "blocks.*.attn.hook_z = @source", "hook_embed = @source"]
    body = ask(session(demo_model), Prompt(EIFFEL), expressions, Prompt(EIFFEL), targets=(" Paris",))
    effect = body["prompts"][0]["effect"]
    assert abs(effect["targets"][0]["change"]) <= 1e-5 * effect["targets"][0]["base"]["logit"]
    assert abs(effect["kl"]) < 1e-8


def test_a_file_holds_the_logits_of_each_run(session, tiny, tmp_path):
    with open(tmp_path / "runs.safetensors", "w+b") as into:
        body = ask(session(tiny("llama")), Prompt(tokens=tuple(PROMPT)), ["blocks.1.hook_mlp_out = @source"],
                   Prompt(tokens=tuple(SOURCE)), into, top=512, max_new_tokens=3)
        into.seek(0)
        kept = load(into.read())
    assert set(kept) == {*(f"{run}/logits" for run in ("base", "patched", "source")), "base/new_tokens", "patched/new_tokens"}
    for run in ("base", "patched", "source"):
        top = sorted(body["prompts"][0][run]["top"], key=lambda token: token["id"])
        assert kept[f"{run}/logits"].tolist() == [token["logit"] for token in top]
    for run in ("base", "patched"):
        assert kept[f"{run}/new_tokens"].tolist() == [token["id"] for token in body["prompts"][0][run]["new_tokens"]]


@pytest.mark.parametrize(("files", "ended"), [
    ({"generation_config.json": {"eos_token_id": [7, 9]}, "config.json": {"eos_token_id": 3}}, 2),
    ({"generation_config.json": {}, "config.json": {"eos_token_id": 3}}, 1),
    ({"config.json": {"eos_token_id": 4}}, None),
    ({"config.json": {}}, None),
])
def test_where_a_continuation_has_ended(tmp_path, files, ended):
    for name, fields in files.items():
        (tmp_path / name).write_text(json.dumps(fields))
    assert Tokens(str(tmp_path)).ended([1, 3, 9, 7]) == ended


# Every swept point, on a tiny model


@pytest.mark.parametrize("point", ["resid_post", "attn_out", "mlp_out", "z"])
def test_every_swept_point_equals_transformers(session, tiny, tmp_path, point):
    folder = tiny("llama")
    hook = f"blocks.*.{'attn.hook_z' if point == 'z' else f'hook_{point}'}"
    body = ask(session(folder), Prompt(tokens=tuple(PROMPT)), (), Prompt(tokens=tuple(SOURCE)), sweep=("layer", "pos"),
               hooks=(hook,), targets=("#7", "#300"))  # fmt: skip
    cells = [[layer, [p], None] for layer in range(4) for p in range(7)]
    rows = reference(tmp_path, folder, PROMPT, SOURCE, point, cells)
    want = (rows["cells"][:, 7] - rows["cells"][:, 300]).view(4, 7)
    got = torch.tensor(body["sweep"]["grid"])
    assert (got - want).abs().max() <= 1e-5 * rows["base"].abs().max() * 2
    # What is compared is not the base everywhere.
    assert (want - (rows["base"][7] - rows["base"][300])).abs().max() > 1e-3


def test_one_axis_positions_and_heads_of_one_layer(session, tiny, tmp_path):
    folder = tiny("llama")
    base, source = Prompt(tokens=tuple(PROMPT)), Prompt(tokens=tuple(SOURCE))
    body = ask(session(folder), base, (), source, sweep=("head",), hooks=("blocks.2.attn.hook_z[pos=1,2]",),
               metric="prob", targets=("#7",))  # fmt: skip
    rows = reference(tmp_path, folder, PROMPT, SOURCE, "z", [[2, [1, 2], [head]] for head in range(4)])
    assert body["sweep"]["grid"] == pytest.approx(rows["cells"].double().softmax(1)[:, 7].tolist(), rel=1e-5)


def test_interventions_are_part_of_the_base_and_of_every_cell(session, tiny, tmp_path):
    """Noise on the embeddings, undone by the clean run's values: at the first layer's whole stream all of it."""
    folder = tiny("llama")
    same = Prompt(tokens=tuple(PROMPT))
    body = ask(session(folder), same, ["hook_embed[pos=1,2] += noise(1)"], same, sweep=("layer",), metric="recovery",
               hooks=("blocks.*.hook_resid_post",), targets=("#7", "#300"))  # fmt: skip
    assert body["prompts"][0]["edits"][0]["fired"] == 1
    assert body["sweep"]["grid"] == pytest.approx([1.0] * 4, abs=1e-4)
    body = ask(session(folder), same, (), same, sweep=("layer",), metric="recovery",
               hooks=("blocks.*.hook_resid_post",), targets=("#7", "#300"))  # fmt: skip
    assert body["sweep"]["grid"] == [None] * 4


def test_every_forward_that_an_edit_was_applied_in_is_counted(session, tiny):
    expressions = ["hook_embed += noise(0.1)", "hook_embed[pos=0] += 1", "blocks.*.hook_mlp_out[pos=generated] *= 0.5",
                   "blocks.2.hook_resid_post[pos=5:9] = @source[pos=0:4]"]  # fmt: skip
    base, source = Prompt(tokens=tuple(PROMPT)), Prompt(tokens=tuple(SOURCE[:5]))
    (prompt,) = ask(session(tiny("llama")), base, expressions, source, max_new_tokens=20)["prompts"]
    assert [edit["fired"] for edit in prompt["edits"]] == [20, 1, 19, 19, 19, 19, 3]
    assert len(prompt["patched"]["new_tokens"]) == 20 and prompt["patched"]["text"] is None
    assert prompt["chunks"] == 1


def test_kl_and_probabilities_are_those_of_the_logits(session, tiny):
    body = ask(session(tiny("llama")), Prompt(tokens=tuple(PROMPT)), ["blocks.1.hook_mlp_out = 0"], top=512,
               targets=("#7",))  # fmt: skip
    (prompt,) = body["prompts"]
    logits = {}
    for run in ("base", "patched"):
        top = prompt[run]["top"]
        assert len(top) == 512 and [t["logit"] for t in top] == sorted((t["logit"] for t in top), reverse=True)
        logits[run] = torch.tensor([t["logit"] for t in sorted(top, key=lambda t: t["id"])], dtype=torch.float64)
        assert sum(t["prob"] for t in top) == pytest.approx(1, rel=1e-6)
    p, q = (logits[run].log_softmax(0) for run in ("base", "patched"))
    divergence = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
    assert prompt["effect"]["kl"] == pytest.approx(divergence.item())
    target = prompt["effect"]["targets"][0]
    assert target["change"] == target["patched"]["logit"] - target["base"]["logit"] and target["recovery"] is None
    assert target["base"]["rank"] == sum(t["logit"] > target["base"]["logit"] for t in prompt["base"]["top"])
