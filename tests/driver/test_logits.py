"""`vlens logits` on real engines, against transformers: logits, loss, ranks, the lens, attribution."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from compare import REFERENCES, logit_error, of_prompt, reference
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file
from test_numbers import SHORT, mended, spread
from vlens_cli import lens
from vlens_cli.driver import readout, session
from vlens_cli.families import FAMILIES
from vlens_cli.errors import HookError, PromptError, QueryError, UsageError
from vlens_cli.query import EngineSpec, Interventions, LogitsQuery, Prompt

LOGITS = "unembed.hook_out"
LONG = spread(150, 512)


@pytest.fixture
def ask(engines, tiny):
    """ask(family or folder, *prompts of ids, ...): the body of the reply, and the tensors of the file."""

    def ask_one(family: str | Path, *prompts: list[int], file: bool = True, variant: str | None = None, **fields):
        folder = tiny(family, variant) if isinstance(family, str) else family
        one = session.Session(EngineSpec(model=str(folder), name="tiny"), json.loads((folder / "config.json").read_text()))
        one._driver = engines.open(folder)
        into = io.BytesIO() if file else None
        query = LogitsQuery(prompts=tuple(Prompt(tokens=tuple(p)) for p in prompts), **fields)
        reply = one.answer(LogitsQuery.from_json(json.loads(json.dumps(query.as_json()))), lambda text: None, into)
        return reply.body, load(into.getvalue()) if file else None

    return ask_one


def ended(folder: Path, rows: dict[str, torch.Tensor], work: Path) -> dict[str, torch.Tensor]:
    """Rows of the stream through transformers' end of the model."""
    save_file({key: value.contiguous() for key, value in rows.items()}, work / "rows.safetensors")
    REFERENCES.ask("lens", folder=str(folder), rows=str(work / "rows.safetensors"), out=str(work / "out.safetensors"))
    return load_file(work / "out.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(ask, engines, tiny, tmp_path, family):
    prompts, targets = [SHORT, LONG], ("#7", "#300", "#511")
    with mended(engines, tiny(family), family):
        body, tensors = ask(family, *prompts, targets=targets, loss=True, lens=("resid_post", "attn_out", "mlp_out"),
                            diff=("#7", "#8"), attribution=True, top=4)
    want = reference(tiny(family), prompts)
    rows = {}
    for p, (tokens, prompt) in enumerate(zip(prompts, body["prompts"], strict=True)):
        expected = want[f"{p}/{LOGITS}"]
        assert tensors[f"{p}/logits"].shape == expected.shape == (len(tokens), 512)
        assert logit_error(tensors[f"{p}/logits"], expected) <= 1e-5
        check_positions(prompt["positions"], expected)
        check_loss(prompt["loss"], expected, tokens)
        check_attribution(prompt["attribution"], prompt["positions"], softcap(tiny(family)))
        rows |= {f"{p}/{one['hook']}": want[f"{p}/{one['hook']}"] for one in prompt["lens"]}
    ends = ended(tiny(family), rows, tmp_path)
    for p, prompt in enumerate(body["prompts"]):
        assert [one["hook"] for one in prompt["lens"]] == [
            f"blocks.{i}.hook_{point}" for i in range(4) for point in ("attn_out", "mlp_out", "resid_post")]
        for one in prompt["lens"]:
            check_positions(one["positions"], ends[f"{p}/{one['hook']}"])
        check_same(prompt["lens"][-1]["positions"], prompt["positions"])


def check_positions(rows: list[dict], expected: torch.Tensor) -> None:
    """Logits within 1e-5 of the largest, and what follows from them, in float64 by torch's own functions."""
    expected = expected.double()
    largest = expected.abs().max().item()
    logprobs = expected.log_softmax(-1)
    assert [row["pos"] for row in rows] == list(range(len(expected)))
    for row, logits, logprob in zip(rows, expected, logprobs, strict=True):
        best = logits.topk(4)
        for entry, value in zip(row["top"], best.values.tolist(), strict=True):
            assert abs(entry["logit"] - value) <= 1e-5 * largest
            assert abs(logits[entry["id"]].item() - value) <= 2e-5 * largest
            assert entry["prob"] == pytest.approx(logprob[entry["id"]].exp().item(), rel=1e-3 * largest)
        assert row["entropy"] == pytest.approx(-(logprob.exp() * logprob).sum().item(), rel=1e-4, abs=1e-5)
        for entry, token in zip(row["targets"], (7, 300, 511), strict=True):
            assert entry["id"] == token and abs(entry["logit"] - logits[token].item()) <= 1e-5 * largest
            assert entry["logprob"] == pytest.approx(logprob[token].item(), abs=3e-5 * largest)
            # A rank may differ where two logits are nearer to each other than the tolerance.
            near = ((logits - logits[token]).abs() <= 2e-5 * largest).sum().item() - 1
            assert abs(entry["rank"] - (logits > logits[token]).sum().item()) <= near
        assert row["diff"]["logit"] == row["diff"]["a"]["logit"] - row["diff"]["b"]["logit"]
        assert abs(row["diff"]["logit"] - (logits[7] - logits[8]).item()) <= 2e-5 * largest


def check_same(rows: list[dict], others: list[dict]) -> None:
    """The lens of the last stream is the logits."""
    for row, other in zip(rows, others, strict=True):
        largest = max(abs(entry["logit"]) for entry in other["top"])
        for a, b in zip(row["targets"], other["targets"], strict=True):
            assert abs(a["logit"] - b["logit"]) <= 1e-5 * largest


def check_loss(loss: dict, logits: torch.Tensor, tokens: list[int]) -> None:
    want = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:]), reduction="none")
    assert len(loss["per_token"]) == len(tokens) - 1
    assert loss["mean"] == pytest.approx(want.mean().item(), abs=1e-5)
    assert loss["per_token"] == pytest.approx(want.tolist(), abs=1e-4)
    assert loss["perplexity"] == pytest.approx(math.exp(loss["mean"]))


def softcap(folder: Path) -> float | None:
    return json.loads((folder / "config.json").read_text()).get("final_logit_softcapping")


def check_attribution(found: list[dict], positions: list[dict], cap: float | None = None) -> None:
    """Three targets and the difference, at the last position: parts sum to the logit (before the softcap), heads to
    their sublayer."""
    last = positions[-1]
    entries = [*last["targets"], last["diff"]["a"], last["diff"]["b"]]
    want = [e["logit"] if cap is None else cap * math.atanh(e["logit"] / cap) for e in entries]
    largest = max(abs(logit) for logit in want)
    for one, logit in zip(found, [*want[:3], want[3] - want[4]], strict=True):
        assert one["pos"] == last["pos"] and one["of"] == ("logit" if cap is None else "logit before the softcap")
        assert abs(one["logit"] - logit) <= 1e-5 * largest * (1 if cap is None else 10)
        parts = one["constant"] + math.fsum(part["value"] for part in one["parts"])
        assert parts == pytest.approx(one["sum"], rel=1e-5, abs=1e-6)
        assert parts == pytest.approx(one["logit"], rel=1e-3, abs=1e-3 * largest * 0.01)
        named = [part["hook"] for part in one["parts"]]
        first = named.index("blocks.0.hook_attn_out")
        assert named[:first] in (["hook_embed"], ["hook_embed", "hook_pos_embed"], ["embed_ln.hook_out"])
        assert named[first : first + 2] == ["blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"]
        for part in one["parts"]:
            if "heads" in part:
                assert math.fsum(part["heads"]) + part["bias"] == pytest.approx(part["value"], rel=1e-4, abs=1e-5)
        assert sum("heads" in part for part in one["parts"]) == 4


@pytest.mark.parametrize("family", ["gemma2"])
def test_a_softcap_is_behind_what_is_explained(ask, engines, tiny, tmp_path, family):
    """Also the end of the model alone: the engine's last stream through transformers' norm, unembedding and softcap."""
    folder = tiny(family)
    assert softcap(folder)
    body, tensors = ask(family, SHORT, targets=("#7", "#300", "#511"), diff=("#7", "#8"), attribution=True, top=4)
    (prompt,) = body["prompts"]
    check_attribution(prompt["attribution"], prompt["positions"], softcap(folder))
    last = f"blocks.{engines.open(folder).catalog.n_layers - 1}.hook_resid_post"
    (captured,) = engines.open(folder).forward([SHORT], capture=[last], return_logits=False).captured[last]
    assert logit_error(tensors["logits"], ended(folder, {"x": captured}, tmp_path)["x"]) <= 1e-5


def test_the_file_holds_the_lens_and_the_attribution(ask, tiny):
    fields = {"lens": ("resid_post", "mlp_out"), "targets": ("#300",), "diff": ("#7", "#8"), "attribution": True, "pos": "2,-1"}
    body, tensors = ask("llama", SHORT, LONG, **fields)
    assert len(tensors) == 2 * (1 + 8 + 2)
    for n, prompt in enumerate(body["prompts"]):
        for one in prompt["lens"]:
            kept = tensors[f"{n}/lens/{one['hook']}"]
            assert kept.shape == (2, 512)
            assert [row["targets"][0]["logit"] for row in one["positions"]] == kept[:, 300].tolist()
            assert [row["top"][0]["id"] for row in one["positions"]] == kept.argmax(1).tolist()
        assert torch.allclose(tensors[f"{n}/lens/blocks.3.hook_resid_post"], tensors[f"{n}/logits"], rtol=1e-5, atol=1e-5)
        parts, heads = tensors[f"{n}/attribution"], tensors[f"{n}/attribution/heads"]
        assert parts.shape == (2, 2, 9) and heads.shape == (2, 2, 4, 4)
        for k, one in enumerate(prompt["attribution"]):
            assert parts[k // 2, k % 2].tolist() == [torch.tensor(part["value"]).item() for part in one["parts"]]
            logit = one["logit"]
            assert abs(parts[k // 2, k % 2].sum().item() + one["constant"] - logit) < 1e-4 * max(1, abs(logit))
            shares = [part["heads"] for part in one["parts"] if "heads" in part]
            assert torch.equal(heads[k // 2, k % 2], torch.tensor(shares))


def test_an_attribution_says_what_each_head_does(ask, engines, tiny):
    """Against transformers' weights: a head's columns of the output projection, the final norm's weight, the unembedding."""
    folder = tiny("llama")
    body, _ = ask("llama", SHORT, targets=("#300",), attribution=True, pos="-1", file=False)
    want, weights = of_prompt(reference(folder, [SHORT]), 0), load_file(folder / "model.safetensors")
    direction = weights["lm_head.weight"][300] * weights["model.norm.weight"] / want["ln_final.hook_scale"][-1]
    for i in range(4):
        part = next(p for p in body["prompts"][0]["attribution"][0]["parts"] if p["hook"] == f"blocks.{i}.hook_attn_out")
        projection = weights[f"model.layers.{i}.self_attn.o_proj.weight"].unflatten(1, (4, 32))
        heads = torch.einsum("hk,dhk,d->h", want[f"blocks.{i}.attn.hook_z"][-1], projection, direction)
        assert part["heads"] == pytest.approx(heads.tolist(), rel=1e-4, abs=1e-6)


def test_the_same_prompt_after_another_is_bitwise_equal(ask):
    first, _, third = (ask("llama", prompt)[1]["logits"] for prompt in (SHORT, [*SHORT, *LONG], SHORT))
    assert torch.equal(first, third)
    again = ask("llama", [*SHORT, *LONG])[1]["logits"][: len(SHORT)]
    assert logit_error(again, first) <= 1e-5


def test_one_position_does_not_unembed_the_others(ask, engines, tiny, monkeypatch):
    driver = engines.open(tiny("llama"))
    unembedded = []
    call = driver._call
    monkeypatch.setattr(driver, "_call", lambda method, *args: (
        unembedded.append(len(args[0])) if method == "vlens_unembed" else None, call(method, *args))[1])
    _, alone = ask("llama", LONG, pos="-1")
    assert unembedded == [1]
    _, every = ask("llama", LONG)
    assert unembedded == [1, 150]
    assert alone["logits"].shape == (1, 512) and logit_error(alone["logits"], every["logits"][-1:]) <= 1e-5


def test_logits_come_in_pieces_and_equal_the_hook_point(ask, engines, tiny, monkeypatch):
    from vlens_cli.driver import vllm_driver

    _, whole = ask("llama", LONG)
    monkeypatch.setattr(vllm_driver, "UNEMBED_ROWS", 16)
    body, pieces = ask("llama", LONG, loss=True, pos="100:120")
    assert torch.equal(pieces["logits"], whole["logits"][100:120]) or logit_error(pieces["logits"], whole["logits"][100:120]) < 1e-6
    assert [row["pos"] for row in body["prompts"][0]["positions"]] == list(range(100, 120))
    assert len(body["prompts"][0]["loss"]["per_token"]) == 149
    captured = engines.open(tiny("llama")).forward([LONG], capture=["logits"]).captured["logits"][0]
    assert logit_error(whole["logits"], captured) < 1e-6


def test_the_largest_logits_are_found_by_blocks():
    logits = torch.randn(7, 5003, generator=torch.Generator().manual_seed(0))
    logits[1, 4999] = 50.0
    logits[2, :] = 0.0
    logits[3, 17] = float("nan")
    logits[4, 100:] = float("-inf")
    for count in (1, 5, 38, 100, 5003):
        values, ids = readout.largest(logits, count)
        assert torch.equal(values.nan_to_num(99), logits.topk(count).values.nan_to_num(99))
        assert torch.equal(logits.gather(1, ids).nan_to_num(99), values.nan_to_num(99))
        assert all(len(set(row)) == count for row in ids.tolist())


def test_rows_that_are_not_finite_are_told():
    logits = torch.tensor([[1.0, 2.0, float("nan")], [0.0, float("-inf"), 1.0], [float("inf"), 0.0, 1.0]])
    entries = readout.entries(readout.distribution(logits), (0, 1, 2), 2, [1], lambda i: None)
    assert entries[0]["targets"][0]["rank"] is None and math.isnan(entries[0]["entropy"])
    assert entries[1]["targets"][0]["rank"] == 2 and entries[1]["targets"][0]["prob"] == 0.0
    assert entries[1]["entropy"] == pytest.approx(-sum(p * math.log(p) for p in (0.26894142, 0.73105858)), abs=1e-7)
    assert entries[2]["top"][0]["logit"] == math.inf and math.isnan(entries[2]["top"][0]["prob"])
    from vlens_cli.cli.render import to_json

    assert '"logit": "Infinity"' in to_json(entries) and '"entropy": "NaN"' in to_json(entries)


def test_interventions_reach_the_logits_the_lens_and_the_attribution(ask, engines, tiny):
    """Against the hook point captured under the same edits; edits of the logits themselves too."""
    expressions = ("blocks.1.hook_resid_post[pos=-1] += noise(1)", "blocks.2.attn.hook_z[head=1] = 0",
                   "unembed.hook_out[pos=-1][dim=3] = 99")
    body, tensors = ask("llama", SHORT, interventions=Interventions(expressions), targets=("#3",), lens=("resid_post",))
    (prompt,) = body["prompts"]
    assert [edit["fired"] for edit in prompt["edits"]] == [1, 1, 1]
    assert prompt["positions"][-1]["targets"][0]["logit"] == 99.0 == tensors["logits"][-1, 3]
    assert prompt["positions"][-2]["targets"][0]["logit"] != 99.0
    _, plain = ask("llama", SHORT)
    assert not torch.equal(plain["logits"][-1], tensors["logits"][-1])
    body, _ = ask("llama", SHORT, interventions=Interventions(expressions[:2]), targets=("#3",), attribution=True, file=False)
    (one,) = body["prompts"][0]["attribution"]
    assert one["sum"] == pytest.approx(one["logit"], rel=1e-4)
    extra = next(part for part in one["parts"] if part["hook"] == "interventions")
    assert abs(extra["value"]) > 1e-3
    with pytest.raises(UsageError, match="behind it"):
        ask("llama", SHORT, interventions=Interventions(expressions), targets=("#3",), attribution=True, file=False)


def test_a_stream_with_other_parts_is_refused(ask, engines, tiny, monkeypatch):
    from vlens_cli.driver import attribution

    monkeypatch.setattr(attribution, "_sources", lambda catalog: [])
    with pytest.raises(QueryError, match="do not add up"):
        ask("llama", SHORT, targets=("#7",), attribution=True, file=False)


def test_a_stream_that_is_not_finite_has_no_attribution(ask):
    edits = Interventions(("blocks.1.hook_mlp_out[pos=-1] *= 1e38", "blocks.1.hook_mlp_out[pos=-1] *= 1e38"))
    with pytest.raises(QueryError, match="are not all finite"):
        ask("llama", SHORT, interventions=edits, targets=("#7",), attribution=True, file=False)


def test_the_demo_model_and_its_bf16_copy(ask, demo_model, tiny):
    text = spread(40, 49152)
    body, tensors = ask(demo_model, text, loss=True, lens=("resid_post",), targets=("#7", "#300", "#511"), diff=("#7", "#8"),
                        attribution=True, top=4)
    want = reference(demo_model, [text])[f"0/{LOGITS}"]
    assert logit_error(tensors["logits"], want) <= 1e-5
    (prompt,) = body["prompts"]
    check_positions(prompt["positions"], want)
    check_loss(prompt["loss"], want, text)
    check_same(prompt["lens"][-1]["positions"], prompt["positions"])
    assert all(abs(one["sum"] - one["logit"]) <= 1e-3 * abs(one["logit"]) for one in prompt["attribution"])


def test_bf16_is_the_engines_own(ask, engines, tiny):
    body, tensors = ask("llama", SHORT, variant="bf16", loss=True, targets=("#7",), attribution=True, pos="-1")
    assert tensors["logits"].dtype == torch.bfloat16
    saved = ask("llama", SHORT, variant="bf16", save_dtype="float32")[1]["logits"]
    assert saved.dtype == torch.float32 and torch.equal(saved[-1:].bfloat16(), tensors["logits"])


def test_the_files_metadata_say_what_it_holds(ask, engines, tiny, tmp_path):
    folder = tiny("llama")
    one = session.Session(EngineSpec(model=str(folder), name="tiny"), json.loads((folder / "config.json").read_text()))
    one._driver = engines.open(folder)
    with open(tmp_path / "l.safetensors", "wb") as into:
        one.answer(LogitsQuery((Prompt(tokens=tuple(SHORT)),), pos="1,3"), lambda text: None, into)
    with safe_open(tmp_path / "l.safetensors", "pt") as file:
        metadata = {key: json.loads(text) for key, text in file.metadata().items()}
    assert metadata["positions"] == {"logits": [1, 3]} and metadata["tokens"] == SHORT
    assert metadata["axes"] == {"logits": ["pos", "d_vocab"]} and LOGITS in metadata["aliases"]["logits"]


# What is refused before any engine


@pytest.fixture
def refused(tiny):
    folder = tiny("llama", "tokenizer")
    one = session.Session(EngineSpec(model=str(folder), name="tiny"), json.loads((folder / "config.json").read_text()))
    one.driver = lambda progress: pytest.fail("an engine was started")
    return lambda *prompts, **fields: one.answer(LogitsQuery(prompts or (Prompt(text="The Eiffel Tower"),), **fields),
                                                 lambda text: None)


def test_what_makes_no_sense_is_refused(refused):
    with pytest.raises(UsageError) as caught:
        refused(targets=("xylophonist",))
    assert caught.value.code == "target_pieces"
    with pytest.raises(UsageError, match="a target is one token"):
        refused(diff=("a", "xylophonist"))
    with pytest.raises(PromptError, match="empty"):
        refused(Prompt(text=""))
    with pytest.raises(PromptError, match="no loss"):
        refused(Prompt(tokens=(5,)), loss=True)
    with pytest.raises(HookError):
        refused(pos="99")
    with pytest.raises(HookError, match="lens reads the stream"):
        refused(lens=("blocks.*.attn.hook_q",))
    with pytest.raises(UsageError, match="whole rows"):
        refused(lens=("blocks.1.hook_resid_post[pos=1]",))
    with pytest.raises(HookError, match="no hook point"):
        refused(lens=("resid_poost",))


def test_points_of_the_lens_are_words_or_hooks(tiny):
    from vlens_cli.families import catalog_for

    catalog = catalog_for(json.loads((tiny("llama") / "config.json").read_text()))
    assert lens.points(["blocks.{1,3}.hook_resid_post", "embed"], catalog) == (
        "hook_embed", "blocks.1.hook_resid_post", "blocks.3.hook_resid_post")
