"""TransformerLens' contract of a forward: masks, ragged batches, specs, generated tokens, logits and their rebuild."""

from __future__ import annotations

import types

import pytest
import torch
from compare import assert_close, logit_error, relative_error
from engines import Engines
from test_numbers import SHORT, spread
from vlens_cli.driver import contract, unembed
from vlens_cli.driver.ranks import ALONE
from vlens_cli.errors import HookError, PromptError, QueryError, StartError, UsageError

POST, Z, LAST = "blocks.2.hook_resid_post", "blocks.1.attn.hook_z", "blocks.3.hook_resid_post"
NAMES = [POST, Z, "ln_final.hook_scale", "blocks.0.hook_out"]
LEFT, RIGHT = spread(7, 512), spread(5, 512)


@pytest.fixture
def driver(engines, tiny):
    return engines.open(tiny("llama"))


# Batches and masks


def test_padded_and_alone_are_equal_and_pads_are_empty(driver):
    """Left and right padding in one batch: each prompt's rows are its own, at its own places."""
    rows = [[0, 0, 0, *LEFT], [*RIGHT, 0, 0, 0, 0, 0], SHORT]
    mask = [[0, 0, 0, *[1] * 7], [*[1] * 5, *[0] * 5], [1] * 10]
    out = driver.forward(torch.tensor(rows), capture=NAMES, attention_mask=torch.tensor(mask))
    assert out.rows == (range(3, 10), range(0, 5), range(0, 10))
    assert out.logits.shape == (3, 10, 512) and out.captured[Z].shape == (3, 10, 4, 32)
    for n, (prompt, at) in enumerate(zip((LEFT, RIGHT, SHORT), out.rows, strict=True)):
        alone = driver.forward([prompt], capture=NAMES)
        places, pads = list(at), [p for p in range(10) if p not in at]
        assert_close({k: out.captured[k][n, places] for k in NAMES}, {k: alone.captured[k][0] for k in NAMES})
        assert logit_error(out.logits[n, places], alone.logits[0]) <= 1e-5
        assert all((out.captured[name][n, pads] == 0).all() for name in NAMES)
        assert (out.logits[n, pads] == -torch.inf).all() and out.logits[n, places].isfinite().all()
        assert out.new_tokens[n] == alone.new_tokens[0]


def test_names_that_are_asked_are_the_keys(driver):
    out = driver.forward([SHORT], capture=NAMES, return_logits=False)
    assert list(out.captured) == NAMES and out.logits is None
    assert driver.forward([SHORT]).captured == {}


@pytest.mark.parametrize("mask, said", [
    ([[1] * 9], "rows of"),
    ([[1] * 10, [1] * 10], "rows of"),
    ([[2, *[1] * 9]], "other than 0 and 1: 2"),
    ([[0] * 10], "leaves nothing"),
    ([[1, 1, 0, *[1] * 7]], "a hole between positions 0 and 9"),
    ([[0.5] * 10], "whole numbers"),
])  # fmt: skip
def test_a_mask_that_makes_no_sense_is_refused(driver, mask, said):
    with pytest.raises(UsageError, match=said):
        driver.forward([SHORT], attention_mask=mask)


def test_an_empty_batch_and_unknown_arguments_are_refused(driver):
    for empty in ([], torch.empty(0, 4, dtype=torch.int64)):
        with pytest.raises(PromptError, match="the batch is empty"):
            driver.forward(empty)
    with pytest.raises(PromptError, match="no tokens"):
        driver.forward([SHORT, []])
    with pytest.raises(UsageError, match="whole numbers"):
        driver.forward([[1.5]])
    with pytest.raises(UsageError):
        driver.forward([SHORT], capture=POST)
    with pytest.raises(UsageError):
        driver.forward([SHORT], max_new_tokens=0)
    with pytest.raises(TypeError):
        driver.forward([SHORT], captures=[POST])


# Interventions


def test_specs_do_what_they_say(driver):
    """Each op at its own hook point, against the same hook point without."""
    plain = driver.forward([SHORT], capture=[POST, Z]).captured
    direction = torch.randn(128, generator=torch.Generator().manual_seed(3))
    value = torch.arange(64.0).view(2, 32)
    for spec, want in (
        ({"op": "suppress"}, 0 * plain[POST]),
        ({"op": "scale", "factor": 3}, 3 * plain[POST]),
        ({"op": "add", "value": direction}, plain[POST] + direction),
        ({"op": "subtract", "value": direction.tolist()}, plain[POST] - direction),
        ({"op": "set", "value": 2.5}, 0 * plain[POST] + 2.5),
        ({"op": "project", "value": direction},
         plain[POST] - (plain[POST] @ direction / direction.square().sum())[..., None] * direction),
        ([{"op": "set", "value": 1}, {"op": "scale", "factor": -2}], 0 * plain[POST] - 2),
    ):
        got = driver.forward([SHORT], capture=[POST], intervene={"blocks.2.hook_out": spec}).captured[POST]
        assert relative_error(got, want) <= 1e-6, spec
    for given in (value, value.flatten()):
        spec = {"op": "set", "value": given, "pos": [-1, 2], "head": [1, -1]}
        got = driver.forward([SHORT], capture=[Z], intervene={Z: spec}).captured[Z]
        want = plain[Z].clone()
        for pos in (2, 9):
            want[0, pos, [1, 3]] = value
        assert torch.equal(got, want)
    # What is listed keeps its order: rows of values belong to what was typed.
    spec = {"op": "set", "value": value, "pos": 2, "head": [3, 0]}
    got = driver.forward([SHORT], capture=[Z], intervene={Z: spec}).captured[Z]
    assert torch.equal(got[0, 2, [3, 0]], value)
    first, again, other = (driver.forward([SHORT], capture=[POST], intervene={
        POST: {"op": "noise", "std": 2.0, "seed": seed, "pos": 4}}).captured[POST] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first[0, :4], plain[POST][0, :4]) and 1 < (first - plain[POST])[0, 4].std() < 3


def test_positions_move_with_the_padding(driver):
    spec = {POST: {"op": "set", "value": 7.0, "pos": [4, -1]}}
    out = driver.forward([[0, 0, 0, *LEFT]], capture=[POST], intervene=spec, attention_mask=[[0, 0, 0, *[1] * 7]])
    changed = (out.captured[POST][0] == 7).all(-1).nonzero().flatten().tolist()
    assert changed == [4, 9]
    with pytest.raises(HookError, match=r"selects positions \[2\], and this prompt has 3 to 9"):
        driver.forward([[0, 0, 0, *LEFT]], attention_mask=[[0, 0, 0, *[1] * 7]],
                       intervene={POST: {"op": "suppress", "pos": 2}})


@pytest.mark.parametrize("spec, said", [
    (lambda x: x, "is a function"),
    ({"op": "sett", "value": 1}, "no op that is known"),
    ({"op": "set"}, "lacks value"),
    ({"op": "suppress", "position": 3}, "not known: position"),
    ({"op": "scale", "factor": "2"}, "not a finite number"),
    ({"op": "set", "value": [1.0, 2.0]}, r"shape \[2\] for \[128\]"),
    ({"op": "set", "value": float("nan")}, "not finite"),
    ({"op": "set", "value": "x"}, "no number and no tensor"),
    ({"op": "suppress", "pos": 10}, r"positions \[10\]"),
    ({"op": "suppress", "pos": -11}, r"positions \[-11\]"),
    ({"op": "suppress", "pos": 1.5}, "whole number"),
    ({"op": "suppress", "head": 0}, "heads, which"),
    ({"op": "suppress", "dim": 128}, r"dims \[128\]"),
    ({"op": "project", "value": [0.0] * 128}, "not all 0"),
])  # fmt: skip
def test_a_spec_that_makes_no_sense_is_refused(driver, spec, said):
    with pytest.raises(UsageError, match=said):
        driver.forward([SHORT], intervene={POST: spec})


def test_points_that_cannot_be_edited_are_refused(driver):
    with pytest.raises(HookError, match="no layer 9"):
        driver.forward([SHORT], intervene={"blocks.9.hook_resid_post": {"op": "suppress"}})
    with pytest.raises(HookError, match="cannot be edited"):
        driver.forward([SHORT], intervene={"ln_final.hook_scale": {"op": "suppress"}})


# Generated tokens


def test_generated_tokens_have_rows_labels_and_edits(driver):
    mask = [[0, 0, *[1] * 7, 0], [1] * 10]
    out = driver.forward([[0, 0, *LEFT, 0], SHORT], attention_mask=mask, capture=[POST], max_new_tokens=4)
    assert out.new_tokens.shape == (2, 4) and out.rows == (range(2, 12), range(0, 13))
    assert out.logits.shape == (2, 13, 512) and (out.logits[0, :2] == -torch.inf).all() and (out.logits[0, 12:] == -torch.inf).all()
    whole = driver.forward([[*SHORT, *out.new_tokens[1, :3].tolist()]], capture=[POST])
    assert relative_error(out.captured[POST][1], whole.captured[POST][0]) <= 1e-5
    assert logit_error(out.logits[1], whole.logits[0]) <= 1e-5
    assert out.logits[1, 9:].argmax(-1).tolist() == out.new_tokens[1].tolist()
    last = driver.forward([SHORT], capture=[POST], max_new_tokens=4, feed_last=True)
    assert torch.equal(last.new_tokens[0], out.new_tokens[1]) and last.rows == (range(0, 14),)
    again = driver.forward([[*SHORT, *last.new_tokens[0].tolist()]], capture=[POST])
    assert relative_error(last.captured[POST], again.captured[POST]) <= 1e-5
    edited = driver.forward([SHORT], capture=[POST], max_new_tokens=4, intervene={POST: {"op": "set", "value": 1.0, "pos": 11}})
    assert (edited.captured[POST][0] == 1).all(-1).nonzero().flatten().tolist() == [11]


# Logits and their rebuild


@pytest.mark.parametrize("family", ["gemma2", "qwen2", "llama"])
def test_rebuilt_logits_equal_the_engines(engines, tiny, family):
    driver = engines.open(tiny(family))
    assert driver.probe_logit_reconstruction() and driver.provides_sequence_logits
    out = driver.forward([SHORT], capture=["ln_final.hook_out"])
    assert logit_error(driver._call("vlens_rebuild", out.captured["ln_final.hook_out"][0]), out.logits[0]) <= 1e-5
    assert torch.allclose(out.logits[0].double().softmax(-1).sum(-1), torch.ones(10, dtype=torch.float64))


def hidden(monkeypatch, *methods: str) -> None:
    """An engine whose unembedding gives something else than what it samples from."""
    for method in methods:
        monkeypatch.setattr(unembed.Unembedding, method, lambda self, rows: torch.ones(len(rows), 512))


def test_with_the_unembedding_hidden_logits_are_rebuilt(engines, tiny, driver, monkeypatch):
    want = driver.forward([SHORT]).logits
    hidden(monkeypatch, "logits")
    fresh = Engines()
    try:
        one = fresh.open(tiny("llama"))
        assert one.non_fireable_hook_points.keys() == {"unembed.hook_out"} and one.provides_sequence_logits
        assert logit_error(one.forward([SHORT]).logits, want) <= 1e-5
    finally:
        fresh.close()


def test_with_both_hidden_the_final_positions_logprobs_are_given_and_said(engines, tiny, driver, monkeypatch):
    want = driver.forward([SHORT, LEFT])
    hidden(monkeypatch, "logits", "rebuilt")
    fresh = Engines()
    try:
        one = fresh.open(tiny("llama"))
        assert not one.provides_sequence_logits and not one.supports("sequence_logits") and not one.probe_logit_reconstruction()
        out = one.forward([SHORT, LEFT])
        for n, length in enumerate((10, 7)):
            assert (out.logits[n, : length - 1] == -torch.inf).all() and (out.logits[n, length:] == -torch.inf).all()
            assert logit_error(out.logits[n, length - 1], want.logits[n, length - 1].log_softmax(-1)) <= 1e-5
        with pytest.raises(HookError, match="refused"):
            one.forward([SHORT], capture=["logits"])
    finally:
        fresh.close()


class Logits(torch.nn.Module):
    """A model that unembeds into 5 of 8 tokens."""

    soft_cap, scale = 3.0, 2.0

    def compute_logits(self, rows):
        return self.scale * self.soft_cap * torch.tanh(rows @ torch.ones(4, 5) / self.soft_cap)


def end(model: Logits) -> unembed.Unembedding:
    locator = types.SimpleNamespace(ranks=ALONE, catalog=types.SimpleNamespace(dims=types.SimpleNamespace(d_vocab=8)))
    return unembed.Unembedding(model, locator)


def test_narrower_logits_are_padded_and_the_rebuild_agrees():
    model, rows = Logits(), torch.randn(3, 4)
    one = end(model)
    head = types.SimpleNamespace(weight=torch.ones(5, 4))
    one._learn(model, (head, rows), {}, model.compute_logits(rows))
    logits = one.logits(rows)
    assert logits.shape == (3, 8) and (logits[:, 5:] == -torch.inf).all() and logits[:, :5].isfinite().all()
    assert torch.allclose(one.rebuilt(rows)[:, :5], logits[:, :5]) and (one.rebuilt(rows)[:, 5:] == -torch.inf).all()


@pytest.mark.parametrize("field, value", [("scale", float("nan")), ("soft_cap", float("inf"))])
def test_a_scale_or_softcap_that_is_not_finite_is_refused(field, value):
    model = Logits()
    setattr(model, field, value)
    with pytest.raises(ValueError, match="not finite"):
        end(model)._learn(model, (types.SimpleNamespace(weight=torch.ones(5, 4)), torch.ones(1, 4)), {}, torch.ones(1, 5))


def test_ranks_that_disagree_about_the_scale_are_refused():
    one, other = ({"softcap": None, "scale": scale, "rebuild_error": error} for scale, error in ((1.0, 0.0), (2.0, 0.0)))
    with pytest.raises(StartError, match="disagree"):
        contract.agreed([one, other])
    assert contract.agreed([one, None, one | {"rebuild_error": 0.5}])["rebuild_error"] == 0.5


def test_a_request_without_its_record_fails(driver, monkeypatch):
    from vlens_cli.driver import taps

    monkeypatch.setattr(taps.Taps, "open", lambda self, *args: None)
    with pytest.raises(QueryError, match="no tap has seen"):
        driver.forward([SHORT], capture=[POST])
    monkeypatch.undo()
    assert driver.forward([SHORT]).logits.isfinite().all()


# The end


def test_two_drivers_in_one_process(driver, tiny):
    """One is closed, twice; the other answers as before."""
    before = driver.forward([SHORT]).logits
    fresh = Engines()
    other = fresh.open(tiny("qwen3"))
    assert other.architecture == "Qwen3ForCausalLM" and driver.architecture == "LlamaForCausalLM"
    assert other.forward([SHORT]).logits.isfinite().all()
    assert torch.equal(driver.forward([SHORT]).logits, before)
    other.close()
    other.close()
    with pytest.raises(UsageError, match="closed"):
        other.forward([SHORT])
    assert torch.equal(driver.forward([SHORT]).logits, before)
