"""What a sweep plans, and its metrics: no engine."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from vlens_cli import hooks
from vlens_cli.driver import effect, sweep
from vlens_cli.driver.sweep import Part
from vlens_cli.driver.targets import Target
from vlens_cli.driver.tokens import Fed
from vlens_cli.errors import HookError, UsageError
from vlens_cli.families import catalog_for
from vlens_cli.query import PatchQuery, Prompt

CATALOG = catalog_for(
    {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 512,
    }
)  # fmt: skip


def cells(*patterns: str, axes: tuple[str, ...], n_tokens: int = 3) -> sweep.Cells:
    swept = hooks.resolve(map(hooks.parse, patterns), CATALOG)
    places = [hook.pos and hooks.positions(hook.pos, n_tokens, lambda text: []) for hook in swept]
    return sweep.plan_cells(swept, places, axes, CATALOG, n_tokens)


def post(layer: int, *positions: int) -> Part:
    return Part(f"blocks.{layer}.hook_resid_post", positions, None, None)


# Cells


def test_layers_by_positions():
    found = cells("blocks.*.hook_resid_post", axes=("layer", "pos"))
    assert found == {(i, p): (post(i, p),) for i in range(3) for p in range(3)}
    turned = cells("blocks.*.hook_resid_post", axes=("pos", "layer"))
    assert turned == {(p, i): (post(i, p),) for i in range(3) for p in range(3)} and list(turned)[1] == (0, 1)


def test_brackets_restrict_what_is_swept_and_what_is_patched():
    found = cells("blocks.{0,2}.hook_resid_post[pos=1:]", axes=("layer", "pos"))
    assert list(found) == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert cells("blocks.1.hook_resid_post[pos=1:]", axes=("layer",)) == {(1,): (post(1, 1, 2),)}
    found = cells("blocks.1.attn.hook_z[head=1,3][dim=0]", axes=("head",))
    assert found == {(h,): (Part("blocks.1.attn.hook_z", (0, 1, 2), (h,), (0,)),) for h in (1, 3)}
    assert cells("blocks.1.attn.hook_z[head=1,3]", axes=("layer",))[(1,)][0].heads == (1, 3)


def test_an_axis_that_is_not_swept_is_patched_at_once():
    found = cells("blocks.*.hook_resid_post", axes=("pos",))
    assert found[(2,)] == (post(0, 2), post(1, 2), post(2, 2)) and len(found) == 3
    both = cells("blocks.*.hook_attn_out", "blocks.*.hook_mlp_out", axes=("layer",))
    assert [part.name for part in both[(1,)]] == ["blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"]


def test_kv_heads_have_cells_of_their_own():
    found = cells("blocks.*.attn.hook_k", "blocks.*.attn.hook_q", axes=("layer", "head"))
    assert len(found) == 12 and len(found[0, 1]) == 2 and len(found[0, 3]) == 1
    assert sweep.head_axes(found, CATALOG) == ["head", "kv_head"]
    assert sweep.head_axes(cells("blocks.*.attn.hook_v", axes=("head",)), CATALOG) == ["kv_head"]


def test_a_source_of_another_length_has_a_hint_that_a_sweep_can_follow():
    fed, source = (Fed(ids, (None,) * len(ids), (None,) * len(ids), None) for ids in ((1, 2, 3), (1, 2)))
    session, plan = SimpleNamespace(catalog=CATALOG), SimpleNamespace(sources=[source])
    query = PatchQuery((Prompt("a"),), sweep=("layer",), hooks=("blocks.*.hook_resid_post",))
    with pytest.raises(UsageError, match="the prompt has 3 tokens and the source 2") as caught:
        sweep._plan(session, query, [fed], plan)
    assert caught.value.hint.startswith("choose a --source of the prompt's number of tokens")


@pytest.mark.parametrize(
    ("axes", "hook", "says"),
    [
        (("layer",), "hook_embed", "is in no layer"),
        (("head",), "blocks.0.hook_resid_post", "has no heads"),
        (("layer",), "blocks.0.ln1.hook_scale", "cannot be edited"),
        (("layer",), "blocks.7.hook_resid_post", "there is no layer 7"),
    ],
)
def test_hooks_that_have_not_the_axes(axes, hook, says):
    with pytest.raises(HookError, match=says):
        sweep._hooks(PatchQuery((Prompt("a"),), sweep=axes, hooks=(hook,)), CATALOG)


def test_the_grid_has_every_layer_and_null_where_nothing_ran():
    assert sweep._nested({(0, 1): 1.0, (2, 0): None}, (3, 2)) == [[None, 1.0], [None, None], [None, None]]
    assert sweep._nested({(1,): 0.5}, (2,)) == [None, 0.5]
    assert sweep._with_nan([[1.0, None]])[0][0] == 1 and math.isnan(sweep._with_nan([[1.0, None]])[0][1])


# Metrics


def target(n: int) -> Target:
    return Target(f"#{n}", n, None, ())


ROW = torch.tensor([1.0, 3.0, -2.0, 0.5])


def test_metrics_of_a_row():
    assert effect.Metric("logit_diff", (1, 2)).of_whole(ROW) == 5
    assert effect.Metric("logit_diff", (1, 2)).raw(ROW[[1, 2]]) == 5
    assert effect.Metric("prob", (1, 2)).of_whole(ROW) == pytest.approx(math.exp(3) / sum(map(math.exp, ROW.tolist())))
    assert effect.Metric("recovery", (3,)).of_whole(ROW) == 0.5
    assert [effect.Metric(name, (1, 2)).dims for name in ("logit_diff", "recovery", "prob")] == [(1, 2), (1, 2), None]


def test_recovery_is_0_at_the_base_1_at_the_source_and_null_where_they_are_equal():
    metric = effect.Metric("recovery", (0,))
    assert [metric.value(x, 2.0, 6.0) for x in (2.0, 6.0, 5.0, 0.0)] == [0, 1, 0.75, -0.5]
    assert str(metric.value(6.0, 6.0, 2.0)) == "0.0"
    assert metric.value(3.0, 2.0, 2.0) is None and metric.value(3.0, 2.0, None) is None
    assert effect.Metric("prob", (0,)).value(0.25, 2.0, 2.0) == 0.25


def test_the_metric_follows_from_the_targets():
    assert effect.metric(None, [target(1), target(2)], False).name == "logit_diff"
    assert effect.metric(None, [target(1)], False).name == "prob"
    for name, ids, source, says in (("logit_diff", [1], True, "takes two targets, and 1"), ("prob", [], True, "and 0 are"),
                                    ("recovery", [1], False, "none is given"), (None, [1, 1], True, "are the same token"),
                                    ("prob", [1, 2, 3], True, "and 3 are given")):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            effect.metric(name, [target(n) for n in ids], source)


def test_kl_in_nats():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    assert effect.kl(p.log() + 7, q.log()) == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert effect.kl(p.log(), p.log()) == 0
    never = torch.tensor([0.0, -math.inf, 0.0])
    assert effect.kl(never, torch.tensor([0.0, -math.inf, 1.0])) > 0 and effect.kl(torch.zeros(3), never) == math.inf
