"""What a request gets does not depend on what else is asked, beside it or before it; and rows are labelled right."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, relative_error
from engines import capture
from test_numbers import SHORT, spread
from vlens_cli.driver.base import Request, Want
from vlens_cli.errors import HookError, PromptError, QueryError, UsageError

POST = "blocks.2.hook_resid_post"


def test_one_by_one_and_all_together_are_bitwise_equal(engines, tiny):
    driver = engines.open(tiny("llama"))
    (together,) = capture(driver, [SHORT])
    for name, value in together.items():
        (alone,) = capture(driver, [SHORT], [name])
        assert torch.equal(alone[name], value), name


def test_the_same_prompt_after_another_is_bitwise_equal(engines, tiny):
    driver = engines.open(tiny("llama"))
    first, _, third = (capture(driver, [p])[0] for p in (SHORT, spread(40, 512), SHORT))
    assert all(torch.equal(first[name], third[name]) for name in first)


def test_sixteen_prompts_in_one_batch_equal_each_alone(engines, tiny):
    driver = engines.open(tiny("qwen3"))
    prompts = [spread(3 + (37 * n) // 15, 512) for n in range(16)]
    assert {len(p) for p in prompts} >= {3, 40}
    for prompt, batched in zip(prompts, capture(driver, prompts), strict=True):
        (alone,) = capture(driver, [prompt])
        assert all(value.shape[driver.catalog.token_axis(name)] == len(prompt) for name, value in batched.items())
        assert_close(batched, alone)


def test_chunks_give_the_same_rows_and_are_counted(engines, tiny):
    prompt = spread(50, 512)
    (whole,) = capture(engines.open(tiny("llama")), [prompt])
    driver = engines.open(tiny("llama"), chunk=16)
    (result,) = driver.run([Request(tuple(prompt), {n: Want() for n in driver.supported_hook_points})])
    assert result.chunks == 4
    assert_close({n: c.value for n, c in result.captured.items()}, whole)
    assert all(c.positions == tuple(range(50)) for c in result.captured.values())


def test_chosen_positions_heads_and_dims_are_slices_of_the_whole(engines, tiny):
    driver = engines.open(tiny("llama"), chunk=16)
    prompt = spread(50, 512)
    # Attention patterns and scores: test_attention.py.
    names = [n for n in driver.supported_hook_points if driver.catalog.token_axis(n) == 0]
    (whole,) = capture(driver, [prompt], names)
    positions = (0, 15, 16, 33, 49)
    (rows,) = capture(driver, [prompt], names, positions=positions)
    assert all(torch.equal(rows[n], whole[n][list(positions)]) for n in whole)
    (head,) = capture(driver, [prompt], ["blocks.1.attn.hook_z", "blocks.1.attn.hook_k"], heads=(1,))
    assert all(torch.equal(head[n], whole[n][:, [1]]) for n in head)
    dims = [n for n in whole if not n.endswith("hook_scale")]
    (columns,) = capture(driver, [prompt], dims, dims=(3, 17))
    assert all(torch.equal(columns[n], whole[n][..., [3, 17]]) for n in dims)


def test_generated_tokens_have_rows_too(engines, tiny):
    driver = engines.open(tiny("llama"))
    (result,) = driver.run([Request(tuple(SHORT), {POST: Want()}, max_new_tokens=5)])
    assert len(result.new_tokens) == 5
    assert result.captured[POST].positions == tuple(range(len(SHORT) + 4))
    (fed,) = capture(driver, [[*SHORT, *result.new_tokens[:-1]]], [POST])
    assert relative_error(result.captured[POST].value, fed[POST]) < 1e-5


def test_forward_keeps_transformer_lens_contract(engines, tiny):
    driver = engines.open(tiny("llama"))
    out = driver.forward([SHORT, SHORT[:4]], capture=[POST, "blocks.0.attn.hook_q"])
    assert out.captured.keys() == {POST, "blocks.0.attn.hook_q"}
    assert out.captured[POST].shape == (2, 10, 128) and out.captured["blocks.0.attn.hook_q"].shape == (2, 10, 4, 32)
    assert out.captured[POST][1, 4:].abs().max() == 0
    assert out.logits.shape == (2, 10, 512) and torch.isinf(out.logits[1, 4:]).all()
    assert out.new_tokens.tolist() == [[out.logits[0, -1].argmax()], [out.logits[1, 3].argmax()]]
    assert driver.forward(torch.tensor(SHORT), return_logits=False).logits is None


def test_what_the_model_cannot_do_is_refused_before_the_forward(engines, tiny):
    driver = engines.open(tiny("llama"))
    with pytest.raises(HookError):
        driver.forward(SHORT, capture=["blocks.4.hook_resid_post"])
    with pytest.raises(PromptError, match=r"513 tokens.* 512"):
        driver.forward(spread(513, 512))
    with pytest.raises(PromptError, match="512"):
        driver.forward([3, 512])
    with pytest.raises(PromptError):
        driver.forward([[]])
    with pytest.raises(UsageError):
        driver.forward(SHORT, intervene={POST: {"op": "surpress"}})


def test_a_fault_in_a_tap_fails_its_query_and_the_engine_lives(engines, tiny, monkeypatch):
    driver = engines.open(tiny("llama"))
    (before,) = capture(driver, [SHORT], [POST])
    from vlens_cli.driver import taps

    def broken(*args):
        raise RuntimeError("a tap broke")

    monkeypatch.setattr(taps, "_value", broken)
    with pytest.raises(QueryError, match="a tap broke"):
        capture(driver, [SHORT], [POST])
    monkeypatch.undo()
    (after,) = capture(driver, [SHORT], [POST])
    assert torch.equal(before[POST], after[POST])


def test_a_tap_that_does_not_fire_is_an_error(engines, tiny, monkeypatch):
    driver = engines.open(tiny("llama"))
    from vlens_cli.driver import taps

    monkeypatch.setattr(taps.Record, "keep", lambda *args: None)
    with pytest.raises(QueryError, match=r"no position where 10 positions"):
        capture(driver, [SHORT], [POST])


def test_nothing_stays_in_the_worker_after_a_query(engines, tiny):
    driver = engines.open(tiny("llama"))
    capture(driver, [SHORT])
    assert driver._call("vlens_state") == {"requests": 0, "hooks": 0}
