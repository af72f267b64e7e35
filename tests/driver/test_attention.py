"""Points that are rebuilt from others: attention scores, patterns, and what each head adds."""

from __future__ import annotations

import json

import pytest
import torch
from compare import assert_close, of_prompt, reference
from engines import capture
from test_numbers import SHORT, spread
from vlens_cli import hooks
from vlens_cli.driver import attention, internals, session
from vlens_cli.driver.base import Edit, Request, Want
from vlens_cli.driver.internals import Scoring
from vlens_cli.errors import HookError
from vlens_cli.query import CaptureQuery, EngineSpec, Prompt

SCORES, PATTERN, RESULT = (f"blocks.1.attn.hook_{name}" for name in ("attn_scores", "pattern", "result"))
NAMES = [SCORES, PATTERN, RESULT]
LONG = spread(150, 512)
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_chunks_of_a_long_prompt_in_a_batch_equal_transformers(engines, tiny, family, monkeypatch):
    monkeypatch.setattr(attention, "PIECE", 1000)  # some six query rows, or seven of results
    driver = engines.open(tiny(family), chunk=16)
    prompts = [LONG, SHORT, LONG[::-1]]
    names = [n for n in driver.supported_hook_points if n.endswith(("attn_scores", "pattern", "result"))]
    assert len(names) == 3 * 4
    want = reference(tiny(family), prompts)
    for p, got in enumerate(capture(driver, prompts, names)):
        assert_close(got, of_prompt(want, p))


@pytest.mark.parametrize("family, seen", [("llama", 150), ("mistral", 16)])
def test_rows_of_a_pattern_sum_to_one_and_are_zero_outside_what_a_query_sees(engines, tiny, family, seen):
    (got,) = capture(engines.open(tiny(family), chunk=16), [LONG], [PATTERN, SCORES])
    pattern, scores = got[PATTERN], got[SCORES]
    assert pattern.shape == scores.shape == (4, 150, 150)
    assert (pattern.sum(-1) - 1).abs().max() < 1e-5
    distance = torch.arange(150)[:, None] - torch.arange(150)
    hidden = ((distance < 0) | (distance >= seen)).expand_as(pattern)
    assert (pattern[hidden] == 0).all() and (pattern[~hidden] > 0).all()
    assert (scores[hidden] == LOWEST).all() and (scores[~hidden] > -1000).all()


def test_chosen_heads_queries_and_keys_are_slices_of_the_whole(engines, tiny):
    driver = engines.open(tiny("mistral"), chunk=16)
    (whole,) = capture(driver, [LONG], NAMES)
    rows, keys = (0, 15, 16, 33, 149), (3, 17, 120)
    (got,) = capture(driver, [LONG], NAMES, positions=rows, heads=(1, 3), dims=keys)
    assert_close(got, {
        PATTERN: whole[PATTERN][[1, 3]][:, list(rows)][..., list(keys)],
        SCORES: whole[SCORES][[1, 3]][:, list(rows)][..., list(keys)],
        RESULT: whole[RESULT][list(rows)][:, [1, 3]][..., list(keys)],
    })
    (one,) = capture(driver, [LONG], [PATTERN], positions=(149,), heads=(2,))
    assert one[PATTERN].shape == (1, 1, 150)


def test_only_what_is_asked_is_kept_and_computed(engines, tiny, monkeypatch):
    driver = engines.open(tiny("llama"))
    computed = []
    scores = attention.scores
    monkeypatch.setattr(attention, "scores", lambda q, *more: computed.append(q.shape) or scores(q, *more))
    capture(driver, [LONG], [PATTERN], positions=(7, 149), heads=(3,))
    assert computed == [(2, 1, 32)]
    reads = attention.reads(_point(driver), Want((7, 149), heads=(2, 3)))
    assert reads == (Want((7, 149), (2, 3)), Want(heads=(1,))), "the second kv head serves the heads 2 and 3"


def _point(driver):
    worker = driver._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker._taps.points[PATTERN]


def test_a_point_and_what_is_rebuilt_from_it_are_asked_together_with_other_selectors(engines, tiny):
    driver = engines.open(tiny("llama"))
    asked = {"blocks.1.attn.hook_rot_k": Want((2,)), PATTERN: Want((5,)), RESULT: Want((1,)), "blocks.1.attn.hook_z": Want((3,)),
             SCORES: Want((6,), heads=(0,))}
    (result,) = driver.run([Request(tuple(SHORT), asked)])
    (whole,) = capture(driver, [SHORT], list(asked))
    for name, want in asked.items():
        got = result.captured[name]
        axis = driver.catalog.token_axis(name)
        assert got.positions == want.positions
        heads = whole[name] if want.heads is None else whole[name][list(want.heads)]
        assert_close({name: got.value}, {name: heads.index_select(axis, torch.tensor(want.positions))})
    assert driver._call("vlens_state") == {"requests": 0, "hooks": 0}


def test_generated_tokens_are_queries_and_keys_too(engines, tiny):
    driver = engines.open(tiny("llama"))
    (result,) = driver.run([Request(tuple(SHORT), dict.fromkeys(NAMES, Want()), max_new_tokens=5)])
    (fed,) = capture(driver, [[*SHORT, *result.new_tokens[:-1]]], NAMES)
    assert result.captured[PATTERN].value.shape == (4, 14, 14)
    assert result.captured[PATTERN].positions == tuple(range(14))
    assert_close({n: c.value for n, c in result.captured.items()}, fed)


def test_they_follow_edits_of_what_they_are_made_of_and_cannot_be_edited(engines, tiny):
    driver = engines.open(tiny("llama"))
    edits = (Edit("blocks.1.attn.hook_rot_q", heads=(2,), keep=0.0), Edit("blocks.1.attn.hook_z", heads=(1,), keep=0.0))
    (result,) = driver.run([Request(tuple(SHORT), dict.fromkeys(NAMES, Want()), edits=edits)])
    pattern, plain = result.captured[PATTERN].value, capture(driver, [SHORT], [PATTERN])[0][PATTERN]
    uniform = torch.ones(10, 10).tril() / torch.arange(1, 11)[:, None]
    assert torch.allclose(pattern[2], uniform, atol=1e-6) and torch.equal(pattern[[0, 1, 3]], plain[[0, 1, 3]])
    assert (result.captured[RESULT].value[:, 1] == 0).all() and (result.captured[RESULT].value[:, 2] != 0).any()
    with pytest.raises(HookError, match="cannot be edited"):
        driver.run([Request(tuple(SHORT), edits=(Edit(PATTERN, keep=0.0),))])


def test_what_is_made_of_latent_rows_is_cut_and_follows_generated_tokens(engines, tiny, monkeypatch):
    monkeypatch.setattr(attention, "PIECE", 5000)  # two latent rows, some thirty query rows
    names = ["blocks.1.attn.kv_b_proj.hook_out", "blocks.1.attn.hook_k", "blocks.1.attn.hook_v", PATTERN, SCORES]
    rows, keys = (0, 15, 33, 149), (3, 17, 50)
    driver = engines.open(tiny("deepseek_v2"))
    (whole,) = capture(driver, [LONG], names)
    (got,) = capture(driver, [LONG], names, positions=rows, heads=(1, 3), dims=keys)
    (result,) = driver.run([Request(tuple(SHORT), dict.fromkeys(names, Want()), max_new_tokens=5)])
    (fed,) = capture(driver, [[*SHORT, *result.new_tokens[:-1]]], names)
    assert_close(whole, {name: of_prompt(reference(tiny("deepseek_v2"), [LONG]), 0)[name] for name in names})
    assert_close(got, {name: value[[1, 3]][:, list(rows)][..., list(keys)] if name in (PATTERN, SCORES)
                       else value[list(rows)][:, [1, 3]][..., list(keys)] for name, value in whole.items()})
    assert_close({name: captured.value for name, captured in result.captured.items()}, fed)


def test_forward_pads_queries_and_keys(engines, tiny):
    driver = engines.open(tiny("llama"))
    out = driver.forward([SHORT, SHORT[:4]], capture=[PATTERN], return_logits=False)
    assert out.captured[PATTERN].shape == (2, 4, 10, 10)
    (short,) = capture(driver, [SHORT[:4]], [PATTERN])
    assert_close({PATTERN: out.captured[PATTERN][1, :, :4, :4]}, short)
    assert out.captured[PATTERN][1, :, 4:].abs().max() == 0 and out.captured[PATTERN][1, :, :, 4:].abs().max() == 0


def test_in_bfloat16_they_are_given_in_bfloat16(engines, tiny):
    driver = engines.open(tiny("llama"), dtype="bfloat16")
    assert driver.non_fireable_hook_points == {}
    (got,) = capture(driver, [SHORT], NAMES)
    want = of_prompt(reference(tiny("llama"), [SHORT]), 0)
    assert all(value.dtype == torch.bfloat16 for value in got.values())
    assert (got[PATTERN].float() - want[PATTERN]).abs().max() < 0.05
    assert (got[SCORES][:, 0, 1:] == torch.finfo(torch.bfloat16).min).all()
    assert ((got[RESULT].float() - want[RESULT]).norm() / want[RESULT].norm()) < 0.05


# The formulas, against ones that are written another way


def scores_of(scoring: Scoring, n: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k = torch.randn(2, n, 3, 8, generator=torch.Generator().manual_seed(0)).unbind()
    found = attention.scores(q, k, torch.arange(3), torch.arange(n), scoring)
    return found, q.transpose(0, 1), k.transpose(0, 1)


def test_softcap_comes_before_the_mask():
    found, q, k = scores_of(Scoring(0.5, softcap=2.0))
    for i in range(7):
        for j in range(7):
            want = 2 * torch.tanh((q[:, i] * k[:, j]).sum(-1) * 0.5 / 2) if j <= i else torch.tensor(float("-inf"))
            assert torch.allclose(found[:, i, j], want.expand(3), atol=1e-6)


def test_linear_biases_fall_with_the_distance():
    slopes = torch.tensor([0.5, 0.25, 0.0])
    found, q, k = scores_of(Scoring(1.0, slopes=slopes))
    pattern = attention.pattern(found, torch.arange(3), Scoring(1.0))
    distance = torch.arange(7)[:, None] - torch.arange(7)
    want = q @ k.transpose(1, 2) - slopes[:, None, None] * distance.clamp_min(0)
    want = want.masked_fill(distance < 0, float("-inf")).softmax(-1)
    assert torch.allclose(pattern, want, atol=1e-6)


def test_a_sink_takes_its_share_of_each_row():
    sinks = torch.tensor([0.0, 1.0, -2.0])
    found, _, _ = scores_of(Scoring(1.0, window=3, sinks=sinks))
    pattern = attention.pattern(found, torch.arange(3), Scoring(1.0, sinks=sinks))
    want = found.exp() / (found.exp().sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    assert torch.allclose(pattern, want, atol=1e-6) and (pattern.sum(-1) < 1).all()
    assert (pattern[:, 5, :3] == 0).all() and (pattern[:, 5, 3:6] > 0).all()


def test_an_attention_that_scores_in_another_way_is_refused(engines, tiny, monkeypatch):
    attention_of = _point(engines.open(tiny("llama"))).module
    assert internals.attention_scoring(attention_of) == Scoring(32**-0.5)
    for where, name, value, what in ((attention_of, "attn_type", "encoder_only", "of type encoder_only"),
                                     (attention_of, "use_alibi_sqrt", True, "square root"),
                                     (attention_of.impl, "chunk_lookback", 2, "chunks")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, value, raising=False)
            with pytest.raises(LookupError, match=what):
                internals.attention_scoring(attention_of)


# As a query


@pytest.fixture
def asked(engines, tiny):
    """asked(*hooks, **fields): the reply's body for two prompts, by the open engine."""

    def ask(*names, **fields):
        folder = tiny("llama", "tokenizer")
        one = session.Session(EngineSpec(model=str(folder), name="tiny"), json.loads((folder / "config.json").read_text()))
        one.driver = lambda progress: engines.open(folder)
        query = CaptureQuery(prompts=(Prompt(text="The Eiffel Tower"), Prompt(text="The keys to the cabinet")),
                             hooks=names, **fields)
        return one, one.answer(query, lambda text: None).body["prompts"]

    return ask


def test_a_reply_has_a_row_for_each_head_and_query(asked):
    _, prompts = asked("blocks.1.attn.hook_pattern[head=1,2][pos=-1,1]", "blocks.1.attn.hook_attn_scores[dim=:2]", values=True)
    for prompt in prompts:
        n = len(prompt["tokens"])
        pattern, scores = prompt["hooks"][PATTERN], prompt["hooks"][SCORES]
        assert pattern["axes"] == ["head", "query", "key"] and pattern["shape"] == [2, 2, n] and pattern["derived"]
        assert pattern["positions"] == [1, n - 1] and pattern["heads"] == [1, 2]
        assert [(row["head"], row["pos"]) for row in pattern["rows"]] == [(1, 1), (1, n - 1), (2, 1), (2, n - 1)]
        for row in pattern["rows"]:
            values = torch.tensor(row["values"], dtype=torch.float64)
            assert len(values) == n and abs(values.sum() - 1) < 1e-5
            seen = values[values > 0]
            assert row["entropy"] == pytest.approx(float(-(seen * seen.log()).sum()), abs=1e-6)
            assert row["percent"] == (100 * values).round().int().tolist()
            assert row["top"][0] == {"key": int(values.argmax()), "value": float(values.max())}
            assert all(entry["key"] <= row["pos"] for entry in row["top"])
        assert scores["shape"] == [4, n, 2] and scores["dims"] == [0, 1] and len(scores["rows"]) == 4 * n
        first = scores["rows"][0]
        assert first["min"] == first["max"] == first["values"][0] and first["values"][1] == LOWEST
        assert [entry["key"] for entry in first["top"]] == [0]


def test_memory_is_counted_with_both_axes_and_with_what_is_kept_for_them(asked, monkeypatch):
    one, prompts = asked(PATTERN)
    fed = one.feed((Prompt(tokens=tuple(range(3, 103))),), None)
    from vlens_cli.driver import capture as answerer

    (selected,) = hooks.resolve([hooks.parse(f"{PATTERN}[head=1][pos=0:10]")], one.catalog)
    want = answerer.want_of(one, selected, fed[0])
    kept = 100 * 4 * 32 + 100 * 2 * 32
    assert answerer.size(one, fed, [{PATTERN: want}]) == 4 * (1 * 10 * 100 + kept)
    assert answerer.size(one, fed, [{RESULT: Want(dims=(1, 2))}]) == 4 * (100 * 4 * 2 + 100 * 4 * 32)


def test_keys_out_of_range_are_refused(asked):
    with pytest.raises(HookError, match="no position 99"):
        asked(f"{PATTERN}[dim=99]")
