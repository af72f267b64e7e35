"""Variants of one prompt, computed together, equal the same variants as requests of their own."""

from __future__ import annotations

import pytest
import torch
from compare import logit_error
from engines import capture
from vlens_cli.driver import replay, vllm_driver
from vlens_cli.driver.base import LOGITS, Edit, Request, Want
from vlens_cli.errors import QueryError

PROMPT = (3, 17, 256, 99, 4, 500, 31, 8, 77, 120, 9, 250)
LAST = Want((len(PROMPT) - 1,))
POINTS = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "attn.hook_q", "attn.hook_k",
          "attn.hook_v", "attn.hook_rot_k", "attn.hook_z", "ln1.hook_normalized", "mlp.hook_pre", "mlp.hook_post")


def variants(driver, points=POINTS) -> list[Request]:
    """Each point of each layer set at one position, or at all, and pairs of edits in two layers."""
    (own,) = capture(driver, [list(PROMPT)])
    names = [f"blocks.{i}.{point}" for i in range(driver.catalog.n_layers) for point in points]
    names = [n for n in names if n in own and n not in driver.non_editable_hook_points]
    generator = torch.Generator().manual_seed(5)

    def edit(n, positions):
        value = own[n] if positions is None else own[n][list(positions)]
        return Edit(n, positions, keep=0.5, value=value.std() * torch.randn(value.shape, generator=generator))

    sets = [(edit(n, (k % len(PROMPT),)),) for k, n in enumerate(names)] + [(edit(n, None),) for n in names[::3]]
    sets += [(edit(a, (7, 9)), edit(b, (2,))) for a, b in zip(names[::5], names[::-5], strict=True)]
    return [Request(PROMPT, {LOGITS: LAST}, edits=edits) for edits in sets]


def assert_same(got, want, limit=1e-5):
    errors = [logit_error(a.captured[LOGITS].value, b.captured[LOGITS].value) for a, b in zip(got, want, strict=True)]
    assert max(errors) <= limit, errors


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "llama"])
def test_variants_equal_requests_of_their_own(engines, tiny, family, monkeypatch):
    driver = engines.open(tiny(family))
    requests = variants(driver)
    got = driver.run_variants(requests)
    assert driver._replays
    assert_same(got, driver.run(requests))
    monkeypatch.setattr(vllm_driver, "REPLAY_ROWS", 3 * len(PROMPT))
    assert_same(driver.run_variants(requests), got, 2e-6)
    assert driver._call("vlens_state") == {"requests": 0, "hooks": 0}


def test_only_the_asked_logits_come_back(engines, tiny):
    driver = engines.open(tiny("llama"))
    requests = variants(driver, ("hook_resid_post",))
    few = [Request(r.tokens, {LOGITS: Want(LAST.positions, dims=(400, 7))}, edits=r.edits) for r in requests]
    for one, whole in zip(driver.run_variants(few), driver.run_variants(requests), strict=True):
        assert torch.equal(one.captured[LOGITS].value, whole.captured[LOGITS].value[:, [400, 7]])


def test_what_is_no_variant_runs_as_requests_do(engines, tiny, monkeypatch):
    driver = engines.open(tiny("llama"))
    monkeypatch.setattr(driver, "_replayed", lambda *_: pytest.fail("replayed"))
    own = Request(PROMPT, {LOGITS: LAST}, edits=(Edit("blocks.1.hook_resid_post", value=1.0),))
    others = [
        Request(PROMPT[:4], {LOGITS: Want((3,))}, edits=own.edits),
        Request(PROMPT, {LOGITS: Want((2,))}, edits=own.edits),
        Request(PROMPT, {LOGITS: LAST}, edits=(Edit("hook_embed", value=1.0),)),
        Request(PROMPT, {LOGITS: LAST}),
        Request(PROMPT, {LOGITS: LAST}, 3, edits=own.edits),
    ]
    for other in others:
        assert len(driver.run_variants([own, other])) == 2


def test_where_the_blocks_cannot_be_replayed_the_answer_is_the_same(engines, tiny, monkeypatch):
    driver = engines.open(tiny("llama"))
    requests = variants(driver, ("hook_resid_post", "attn.hook_z"))
    want = driver.run(requests)

    def broken(*_):
        raise LookupError("no such argument")

    monkeypatch.setattr(replay._Block, "__call__", broken)
    with pytest.warns(UserWarning, match="no such argument"):
        assert_same(driver.run_variants(requests), want, 0)
    monkeypatch.undo()
    driver._replays = True
    # A stand-in for attention that is not the engine's: the plain prompt shows it.
    monkeypatch.setattr(replay, "attend", lambda q, *_: q)
    with pytest.warns(UserWarning, match="replayed logits are off"):
        assert_same(driver.run_variants(requests), want, 0)
    assert not driver._replays
    driver._replays = True


def test_an_edit_that_a_replay_misses_is_no_answer(engines, tiny, monkeypatch):
    driver = engines.open(tiny("llama"))
    requests = variants(driver, ("attn.hook_z",))
    want = driver.run(requests)
    through = replay.Replay._through

    def without_hooks(self, *args):
        """As if a block formed its output without the modules whose input is edited."""
        monkeypatch.setattr(replay.Taps, "_visit", lambda *_: None)
        try:
            return through(self, *args)
        finally:
            monkeypatch.undo()

    monkeypatch.setattr(replay.Replay, "_through", without_hooks)
    with pytest.warns(UserWarning, match="never applied"):
        assert_same(driver.run_variants(requests), want, 0)
    assert not driver._replays
    driver._replays = True


def test_variants_are_broken_off_between_groups(engines, tiny, monkeypatch):
    driver = engines.open(tiny("llama"))
    monkeypatch.setattr(vllm_driver, "REPLAY_ROWS", len(PROMPT))
    requests, between = variants(driver, ("hook_resid_post",)), []
    driver.run_variants(requests, between=lambda: between.append(1))
    assert len(between) == len(requests) - 1
    with pytest.raises(QueryError, match="asker has left"):
        driver.run_variants(requests, cancelled=lambda: len(between) > len(requests), between=lambda: between.append(1))
    assert driver._call("vlens_state") == {"requests": 0, "hooks": 0}
