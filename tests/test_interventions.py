"""Interventions: grammar, faults under a caret, spec files, printing that parses back. No engine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlens_cli import interventions
from vlens_cli.errors import HookError, UsageError, VlensError
from vlens_cli.families import catalog_for
from vlens_cli.hooks import HookRequest, Index, Part, Slice, Text
from vlens_cli.interventions import (
    Constant,
    File,
    Intervention,
    Noise,
    Numbers,
    Source,
    Tensor,
    check,
    from_spec,
    parse,
    targets,
    with_paths,
)

CATALOG = catalog_for(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 12,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 256,
    }
)
MLP = "blocks.5.hook_mlp_out"


def value(text: str) -> interventions.Value:
    return parse(f"{MLP} = {text}").value


# Grammar


@pytest.mark.parametrize(
    ("text", "op", "wanted"),
    [
        (f"{MLP} = 0", "=", Constant(0.0)),
        (f"{MLP} *= 0.5", "*=", Constant(0.5)),
        (f"{MLP} += -1e-3", "+=", Constant(-0.001)),
        (f"{MLP} += 4 * steer.safetensors:happy", "+=", Tensor(File("steer.safetensors", "happy"), factor=4.0)),
        (f"{MLP} -= proj(dir.safetensors)", "-=", Tensor(File("dir.safetensors"), "proj")),
        (f"{MLP} = mean(a/b.safetensors:0/blocks.3.hook_resid_post)", "=",
         Tensor(File("a/b.safetensors", "0/blocks.3.hook_resid_post"), "mean")),
        (f'{MLP} = "a b:c.safetensors":"k (1)"', "=", Tensor(File("a b:c.safetensors", "k (1)"))),
        (f"{MLP} = 'x.safetensors'", "=", Tensor(File("x.safetensors"))),
        (f"{MLP} = [1, -2.5,3e2]", "=", Tensor(Numbers((1.0, -2.5, 300.0)))),
        (f"{MLP} = @source", "=", Source()),
        (f'{MLP} += 0.5 * @source[pos="Rome"][head=3]', "+=", Source((Text("Rome"),), (Index(3),), None, 0.5)),
        (f"{MLP} += noise(3)", "+=", Noise(3.0)),
        (f"  {MLP}   =   0  ", "=", Constant(0.0)),
    ],
)  # fmt: skip
def test_expressions(text, op, wanted):
    found = parse(text)
    assert (found.hook.pattern, found.op, found.value) == (MLP, op, wanted)
    assert parse(str(found)) == found


def test_selectors_and_patterns_are_those_of_hooks():
    found = parse('blocks.{0,3-5}.attn.hook_z[pos=prompt,-1,2:4,"Eiffel"#2][head=3] *= 0.5')
    assert found.hook.pattern == "blocks.{0,3-5}.attn.hook_z"
    assert found.hook.pos == (Part("prompt"), Index(-1), Slice(2, 4), Text("Eiffel", 2))
    assert found.hook.head == (Index(3),) and found.op == "*="


def test_a_star_may_end_the_pattern_before_the_operator():
    found = parse("blocks.3.hook_resid_* *= 2")
    assert (found.hook.pattern, found.op) == ("blocks.3.hook_resid_*", "*=")


def test_a_path_may_begin_like_a_number():
    assert value("4dirs.safetensors") == Tensor(File("4dirs.safetensors"))
    assert value("4 * 4.safetensors:4") == Tensor(File("4.safetensors", "4"), factor=4.0)
    assert value('"4"') == Tensor(File("4"))
    assert str(value('"nan"')) == '"nan"'


@pytest.mark.parametrize(
    ("text", "says", "under"),
    [
        ("blocks.5.hook_mlp_out", "expected a space and one of", ""),
        ("blocks.5.hook_mlp_out= 0", "white space is needed before the operator", "= 0"),
        ("blocks.5.hook_mlp_out =0", "white space is needed after the operator", "0"),
        ("blocks.5.hook_mlp_out /= 2", "there is no operator /=", "/= 2"),
        ("blocks.5.hook_mlp_out == 2", "there is no operator ==", "== 2"),
        ("blocks.5.hook_mlp_out 2", "expected one of = += -= *=", "2"),
        ("blocks.5.hook_mlp_out =", "expected a number, a file", ""),
        ("blocks.5.hook_mlp_out = men(x.safetensors)", "there is no function men", "men(x.safetensors)"),
        ("blocks.5.hook_mlp_out = @sauce", "only @source begins with @", "@sauce"),
        ("blocks.5.hook_mlp_out = 1 2", "the expression ends before this", "2"),
        ("blocks.5.hook_mlp_out = a b.safetensors", "the expression ends before this", "b.safetensors"),
        ("blocks.5.hook_mlp_out = a:b:c d", "the expression ends before this", "d"),
        ("blocks.5.hook_mlp_out = mean(x.safetensors", "expected `)`", ""),
        ("blocks.5.hook_mlp_out = x.safetensors:", "expected the key", ""),
        ("blocks.5.hook_mlp_out += noise(-1)", "a standard deviation is", "-1)"),
        ("blocks.5.hook_mlp_out += noise(x)", "expected a number, the standard deviation", "x)"),
        ("blocks.5.hook_mlp_out += 2 * noise(1)", "noise takes its size itself", "noise(1)"),
        ("blocks.5.hook_mlp_out *= noise(1)", "it is no factor", "noise(1)"),
        ("blocks.5.hook_mlp_out *= proj(d.safetensors)", "it is no factor", "proj(d.safetensors)"),
        ("blocks.5.hook_mlp_out += 4 * -1 * f.safetensors:k", "a value has one factor", "* f.safetensors:k"),
        ("blocks.5.hook_mlp_out += f.safetensors:k * 4", "a value has one factor", "* 4"),
        ("blocks.5.hook_mlp_out = @source * 4", "a value has one factor", "* 4"),
        ("blocks.5.hook_mlp_out = [1, x]", "expected a number", "x]"),
        ("blocks.5.hook_mlp_out = [1", "expected `,` or `]`", ""),
        ('blocks.5.hook_mlp_out = "x', "this quote is not closed", '"x'),
        ('blocks.5.hook_mlp_out = ""', "expected a number, a file", '""'),
        ("blocks.5.hook_mlp_out[pos=x] = 0", "expected a number, a range", "x] = 0"),
        ("blocks.5.hook_mlp_out = @source[pos=3", "expected `,` or `]`", ""),
        (" = 0", "expected a hook name", "= 0"),
    ],
)
def test_faults_show_the_expression_with_a_caret_under_the_fault(text, says, under):
    with pytest.raises(HookError) as caught:
        parse(text)
    message, shown, caret = caught.value.message.split("\n")
    assert says in message
    assert shown == f"  {text}"
    assert caret == "  " + " " * (len(text) - len(under)) + "^"
    assert caught.value.code == "edit_grammar" and caught.value.exit_code == 2


# Printing

numbers = st.floats(allow_nan=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=8)
ends = st.none() | st.integers(-99, 99)
items = st.one_of(st.integers(-99, 99).map(Index), st.builds(Slice, ends, ends))
parts = st.sampled_from(["prompt", "generated"]).map(Part)
pos_items = items | st.builds(Text, texts, st.none() | st.integers(1, 9)) | parts
positions = st.none() | st.lists(pos_items, min_size=1, max_size=3).map(tuple)
indices = st.none() | st.lists(items, min_size=1, max_size=3).map(tuple)
tensors = st.builds(File, texts, st.none() | texts) | st.lists(numbers, min_size=1, max_size=3).map(tuple).map(Numbers)
values = st.one_of(
    numbers.map(Constant),
    st.builds(Tensor, tensors, st.sampled_from(["", "mean", "proj"]), numbers),
    st.builds(Source, positions, indices, indices, numbers),
    st.floats(0, 1e300).map(Noise),
)
patterns = st.sampled_from(["hook_embed", "blocks.*.hook_resid_post", "blocks.{0,3-5}.attn.hook_*", "blocks.-1.hook_z"])


@given(patterns, positions, indices, indices, st.sampled_from(interventions.OPS), values)
def test_what_is_printed_parses_to_the_same(pattern, pos, head, dim, op, value):
    if op == "*=" and (isinstance(value, Noise) or getattr(value, "how", "") == "proj"):
        op = "+="
    one = Intervention(HookRequest("", pattern, pos, head, dim), op, value)
    again = parse(str(one))
    assert again == one
    assert str(again) == str(one)


@given(st.text(max_size=60) | st.text("blocks.5hk_mlpout[]=+-*@\"'():, 0ceinrs", max_size=40).map(f"{MLP} = ".__add__))
def test_whatever_is_typed_parses_or_is_refused(text):
    try:
        one = parse(text)
    except VlensError:
        return
    assert math.isnan(getattr(one.value, "value", 0.0)) or "nan" in str(one) or parse(str(one)) == one


# Spec files


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ({"hook": MLP, "op": "suppress"}, f"{MLP} = 0"),
        ({"hook": MLP, "op": "scale", "factor": 0.5, "pos": -1}, f"{MLP}[pos=-1] *= 0.5"),
        ({"hook": MLP, "op": "add", "value": [1, 2.5], "pos": [0, 3]}, f"{MLP}[pos=0,3] += [1, 2.5]"),
        ({"hook": MLP, "op": "subtract", "value": 2}, f"{MLP} -= 2"),
        ({"hook": MLP, "op": "set", "value": "@source", "pos": '"Eiffel"'}, f'{MLP}[pos="Eiffel"] = @source'),
        ({"hook": "blocks.*.attn.hook_z", "op": "set", "value": "4 * s.safetensors:k", "head": 3, "dim": "0:8"},
         "blocks.*.attn.hook_z[head=3][dim=0:8] = 4 * s.safetensors:k"),
        ({"hook": MLP, "op": "project", "value": "d.safetensors"}, f"{MLP} -= proj(d.safetensors)"),
        ({"hook": MLP, "op": "project", "value": [1, 0]}, f"{MLP} -= proj([1, 0])"),
        ({"hook": MLP, "op": "noise", "value": 3, "pos": None}, f"{MLP} += noise(3)"),
        ({"hook": MLP, "op": "mean", "value": "d.safetensors:k"}, f"{MLP} = mean(d.safetensors:k)"),
        (f"{MLP}[pos=0] = 1", f"{MLP}[pos=0] = 1"),
        ({"hook": MLP, "op": "add", "value": "f.safetensors:k", "factor": 4}, f"{MLP} += 4 * f.safetensors:k"),
        ({"hook": MLP, "op": "subtract", "value": "@source", "factor": -0.5}, f"{MLP} -= -0.5 * @source"),
        ({"hook": MLP, "op": "set", "value": [1, 2], "factor": 2}, f"{MLP} = 2 * [1, 2]"),
        ({"hook": MLP, "op": "set", "value": 3, "factor": 2}, f"{MLP} = 6"),
        ({"hook": MLP, "op": "add", "value": "2 * f.safetensors", "factor": None}, f"{MLP} += 2 * f.safetensors"),
    ],
)  # fmt: skip
def test_a_spec_is_the_same_as_an_expression(spec, same):
    assert from_spec(spec) == parse(same)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (3, "neither an object nor an expression: 3"),
        ({"hook": MLP}, "no op that vlens has: None"),
        ({"hook": MLP, "op": "ablate"}, "no op that vlens has: 'ablate'"),
        ({"hook": MLP, "op": "suppress", "position": 3}, "a key that suppress does not take: position"),
        ({"hook": MLP, "op": "suppress", "value": 3}, "a key that suppress does not take: value"),
        ({"hook": MLP, "op": "scale", "value": 3}, "a key that scale does not take: value"),
        ({"hook": MLP, "op": "scale"}, "scale without: factor"),
        ({"op": "add", "value": 1}, "add without: hook"),
        ({"hook": 3, "op": "suppress"}, "hook is no text: 3"),
        ({"hook": MLP + "[pos=1]", "op": "suppress", "pos": 2}, "pos is given twice"),
        ({"hook": MLP, "op": "suppress", "pos": 1.5}, "pos is neither"),
        ({"hook": MLP, "op": "suppress", "pos": True}, "pos is neither"),
        ({"hook": MLP, "op": "suppress", "pos": []}, "pos is neither"),
        ({"hook": MLP, "op": "add", "value": None}, "add takes no such value"),
        ({"hook": MLP, "op": "add", "value": [[1]]}, "add takes no such value"),
        ({"hook": MLP, "op": "add", "value": True}, "add takes no such value"),
        ({"hook": MLP, "op": "add", "value": 10**400}, "add takes no such value"),
        ({"hook": MLP, "op": "noise", "value": -1}, "noise takes its standard deviation"),
        ({"hook": MLP, "op": "noise", "value": "x.safetensors"}, "noise takes its standard deviation"),
        ({"hook": MLP, "op": "project", "value": 3}, "project takes a list of numbers or names a tensor"),
        ({"hook": MLP, "op": "mean", "value": "@source"}, "mean takes a list of numbers or names a tensor"),
        ({"hook": MLP, "op": "scale", "factor": [1]}, "scale takes a number"),
        ({"hook": MLP, "op": "project", "value": [1], "factor": 2}, "a key that project does not take: factor"),
        ({"hook": MLP, "op": "add", "value": [1], "factor": "2"}, "factor is no number: '2'"),
        ({"hook": MLP, "op": "add", "value": "2 * f.safetensors", "factor": 2}, "a factor is given twice"),
        ({"hook": MLP, "op": "add", "value": "noise(3)", "factor": 2}, "noise takes its size itself"),
    ],
)
def test_bad_specs(spec, says):
    with pytest.raises(UsageError) as caught:
        from_spec(spec)
    assert says in caught.value.message


# Against a model


def test_targets_of_a_pattern():
    found = targets(parse("blocks.{0,-1}.attn.hook_z[head=3] *= 0.5"), CATALOG)
    assert [(one.name, one.head) for one in found] == [("blocks.0.attn.hook_z", (3,)), ("blocks.11.attn.hook_z", (3,))]
    assert [one.name for one in targets(parse("blocks.0.hook_out = 0"), CATALOG)] == ["blocks.0.hook_resid_post"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("blocks.0.hook_resid_pots = 0", "no hook point of this model is named"),
        ("blocks.12.hook_resid_post = 0", "there is no layer 12"),
        ("blocks.0.attn.hook_z[head=8] = 0", "there is no head 8"),
        ("blocks.0.hook_resid_post[dim=64] = 0", "there is no dim 64"),
        ("blocks.0.hook_resid_post[head=0] = 0", "has no heads"),
        ("blocks.0.ln1.hook_scale = 1", "blocks.0.ln1.hook_scale cannot be edited: it is formed beside the forward"),
        ("ln_final.hook_scale *= 2", "cannot be edited"),
        ("blocks.0.ln1.hook_out = 0", "blocks.0.ln1.hook_out cannot be edited"),
        ("blocks.0.attn.hook_pattern = 0", "blocks.0.attn.hook_pattern cannot be edited"),
        ("blocks.0.mlp.hook_router_logits = 0", "is not given"),
        (f"{MLP} = @source", "no"),
        (f"{MLP} = nan", "not finite"),
        (f"{MLP} += inf * x.safetensors", "not finite"),
        (f"{MLP} += [1, -inf]", "not finite"),
    ],
)
def test_what_this_model_does_not_take(text, says):
    with pytest.raises(UsageError) as caught:
        check([parse(text)], CATALOG, allow_nan=False, has_source=False)
    assert says in caught.value.message


def test_what_is_allowed():
    check([parse(f"{MLP} = nan"), parse(f"{MLP} = @source"), parse(f"{MLP} = 0"), parse("logits += 1")], CATALOG,
          allow_nan=True, has_source=True)


def test_paths_are_replaced_and_nothing_else():
    one = parse(f"{MLP}[pos=1] += 2 * mean(x.safetensors:k)")
    assert str(with_paths(one, "/a b/".__add__)) == f'{MLP}[pos=1] += 2 * mean("/a b/x.safetensors":k)'
    assert interventions.files([one, one, parse(f"{MLP} = 0")]) == ["x.safetensors"]
    assert with_paths(parse(f"{MLP} = [1]"), str.upper) == parse(f"{MLP} = [1]")


@pytest.mark.parametrize("text", ["blocks.5.hook_mlp_out=0", "blocks.5.hook_mlp_out= 0", "blocks.5.hook_mlp_out =0"])
def test_a_missing_space_is_put_in_by_the_hint(text):
    with pytest.raises(HookError) as caught:
        parse(text)
    assert caught.value.hint == "blocks.5.hook_mlp_out = 0"
