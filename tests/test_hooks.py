"""Hook names: grammar, expansion over a catalog, selectors. A real catalog of the llama family, no engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlens_cli.errors import HookError, UsageError, VlensError
from vlens_cli.families import catalog_for
from vlens_cli.hooks import (
    HookRequest,
    Index,
    Part,
    Selected,
    Slice,
    Text,
    expand,
    indices,
    looks_like_hook,
    parse,
    parse_items,
    positions,
    resolve,
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


def names(pattern: str) -> tuple[str, ...]:
    return expand(parse(pattern), CATALOG)


def fault(pattern: str) -> HookError:
    with pytest.raises(HookError) as caught:
        expand(parse(pattern), CATALOG)
    return caught.value


# Grammar


def test_selectors_of_every_kind():
    request = parse("""blocks.{0,5}.attn.hook_z[pos=-1, 2:4,:3,5:,"Eif\\"fel"#2,'a b',prompt][head=3][dim=0:2]""")
    assert request.pattern == "blocks.{0,5}.attn.hook_z"
    assert request.pos == (
        Index(-1), Slice(2, 4), Slice(None, 3), Slice(5, None), Text('Eif"fel', 2), Text("a b"), Part("prompt")
    )  # fmt: skip
    assert (request.head, request.dim) == ((Index(3),), (Slice(0, 2),))


def test_no_selector_is_none():
    request = parse("hook_embed")
    assert (request.pos, request.head, request.dim) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("", 0),
        ("blocks.3", 8),
        ("blocks.x.hook_z", 7),
        ("blocks.{0,}.hook_z", 10),
        ("blocks.{0,5.hook_z", 11),
        ("blocks.3-.hook_z", 9),
        ("*.hook_scale", 0),
        ("blocks.3.{hook_q,hook_k}", 9),
        ("hook_embed[", 11),
        ("hook_embed[row=1]", 11),
        ("hook_embed[pos]", 14),
        ("hook_embed[pos=]", 15),
        ("hook_embed[pos=1", 16),
        ("hook_embed[pos=1][pos=2]", 18),
        ('hook_embed[head="a"]', 16),
        ("hook_embed[dim=prompt]", 15),
        ('hook_embed[pos="abc]', 15),
        ('hook_embed[pos=""]', 15),
        (r'hook_embed[pos="a\qb"]', 17),
        ('hook_embed[pos="a"#0]', 19),
        ("hook_embed[pos=99999999999999999999]", 30),
        ("hook_embed x", 10),
        ("hook_embed[pos=1]x", 17),
    ],
)
def test_a_fault_has_a_caret_under_it(text, column):
    with pytest.raises(HookError) as caught:
        parse(text)
    _, shown, caret = caught.value.message.split("\n")
    assert shown == f"  {text}"
    assert caret == " " * (column + 2) + "^"
    assert caught.value.code == "hook_grammar"


@pytest.mark.parametrize(("read", "hint"), [
    (lambda: parse_items("Eiffel", "pos"), """quotes must survive the shell: --pos '"Eiffel"'"""),
    (lambda: parse_items("0,The Eiffel#2", "pos"), """quotes must survive the shell: --pos '"The Eiffel"'"""),
    (lambda: parse("hook_embed[pos=Eiffel]"), """quotes must survive the shell: '...[pos="Eiffel"]'"""),
    (lambda: parse("hook_embed[pos=1,head=3]"), "one pair of brackets each: [head=3][pos=-1]"),
    (lambda: parse_items("1,,2", "pos"), ""),
    (lambda: parse_items("Eiffel", "head"), ""),
])  # fmt: skip
def test_a_text_without_its_quotes_is_told_how_to_keep_them(read, hint):
    with pytest.raises(HookError) as caught:
        read()
    assert caught.value.hint == hint


def test_control_characters_do_not_move_the_caret():
    with pytest.raises(HookError) as caught:
        parse("hook_embed\x1b[31m")
    assert "\x1b" not in caught.value.message
    assert caught.value.message.endswith("\n" + " " * 12 + "^")


@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text):
    try:
        parse(text)
    except VlensError:
        pass


@given(st.text(alphabet="blocks.019-*{,}[]=poshead:\"'#\\ n", max_size=40))
def test_texts_near_the_grammar_parse_or_are_refused(text):
    for head in ("", "blocks.", "hook_embed[pos="):
        try:
            request = parse(head + text)
            assert parse(str(request)) == request
        except VlensError:
            pass


INTS = st.integers(-(10**12), 10**12)
NUMBERS = INTS.map(Index) | st.builds(Slice, st.none() | INTS, st.none() | INTS)
TEXTS = st.builds(Text, st.text(min_size=1), st.none() | st.integers(1, 99))
PARTS = st.sampled_from(["prompt", "generated"]).map(Part)
SLOTS = st.sampled_from(["", "blocks.0.", "blocks.*.", "blocks.-1.", "blocks.{0,3-5}.", "blocks.3-7.", "blocks.-3--1."])
TAILS = st.from_regex(r"([a-z0-9_]{1,8}\.){0,2}[a-z0-9_*]{1,8}", fullmatch=True)


def some(items):
    return st.none() | st.lists(items, min_size=1, max_size=4).map(tuple)


REQUESTS = st.builds(
    HookRequest,
    st.just(""),
    st.builds(str.__add__, SLOTS, TAILS).filter(lambda name: not name.startswith("blocks.") or name.count(".") > 1),
    some(NUMBERS | TEXTS | PARTS),
    some(NUMBERS),
    some(NUMBERS),
)


@given(REQUESTS)
def test_what_is_printed_parses_to_the_same(request):
    try:
        again = parse(str(request))
    except HookError:
        # Only a bare tail `blocks.x.y` may fail: its second part is no layer.
        assert request.pattern.startswith("blocks.") and not request.pattern[7:8].isdigit()
        return
    assert again == request


@pytest.mark.parametrize(
    ("text", "hook"),
    [
        ("blocks.5.x", True),
        ("blocks.0.hook_resid_post", True),
        ("hook_embed", True),
        ("ln_final.hook_scale[pos=-1]", True),
        ("Hello", False),
        ("logits", False),
        ("The Eiffel Tower is in", False),
        ("blocks.", False),
        ("", False),
    ],
)
def test_what_looks_like_a_hook(text, hook):
    assert looks_like_hook(text) is hook


# Expansion


@pytest.mark.parametrize(
    ("slot", "layers"),
    [("3", [3]), ("-1", [11]), ("*", range(12)), ("{0,5,10}", [0, 5, 10]), ("3-7", range(3, 8)),
     ("{9,0-2}", [0, 1, 2, 9]), ("-3--1", [9, 10, 11]), ("{1,1}", [1])],
)  # fmt: skip
def test_layers(slot, layers):
    assert names(f"blocks.{slot}.hook_resid_post") == tuple(f"blocks.{i}.hook_resid_post" for i in layers)


def test_aliases_become_canonical():
    assert names("blocks.3.hook_out") == ("blocks.3.hook_resid_post",)
    assert names("logits") == ("unembed.hook_out",)
    assert names("ln_final.hook_in") == ("blocks.11.hook_resid_post",)


def test_a_star_in_the_last_segment_stays_in_it():
    found = names("blocks.3.hook_resid_*")
    assert found == ("blocks.3.hook_resid_pre", "blocks.3.hook_resid_mid", "blocks.3.hook_resid_post")
    assert all(name.startswith("blocks.3.attn.") for name in names("blocks.3.attn.*"))
    assert names("*") == ("hook_embed",)


def test_a_star_matches_aliases_where_no_name_matches():
    assert names("blocks.3.attn.q.hook_o*") == ("blocks.3.attn.hook_q",)


def test_order_is_that_of_the_forward():
    found = names("blocks.*.hook_*")
    assert list(found) == [name for name in CATALOG.names if name in found]
    assert len(found) == 12 * 5


@pytest.mark.parametrize("slot", ["12", "-13", "{0,12}", "9-12"])
def test_a_layer_out_of_range_says_the_range(slot):
    error = fault(f"blocks.{slot}.hook_resid_post")
    assert "this model has layers 0 to 11" in error.message
    assert error.code == "layer_out_of_range"


def test_a_range_may_not_run_backwards():
    error = fault("blocks.7-3.hook_resid_post")
    assert (error.message, error.hint) == ("layers 7-3 run backwards", "write 3-7")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("blocks.{0,5}.hook_resid_pst", "blocks.{0,5}.hook_resid_post"),
        ("blocks.*.hook_z", "blocks.*.attn.hook_z"),
        ("hook_z", "blocks.0.attn.hook_z"),
        ("blocks.3.resid_mid", "blocks.3.hook_resid_mid"),
        ("ln_finl.hook_scale", "ln_final.hook_scale"),
        ("blocks.3.attn.q.hook_ouT", "blocks.3.attn.q.hook_out"),
    ],
)
def test_an_unknown_name_gets_near_matches_in_its_own_spelling(typed, meant):
    error = fault(typed)
    assert error.code == "unknown_hook"
    assert typed in error.message
    assert meant in error.hint.split("?")[0]


def test_a_name_like_no_other_gets_the_list():
    assert fault("zzzzzz").hint == "`vlens hooks` lists the hook points of this model"


def test_a_pattern_that_matches_nothing():
    assert fault("blocks.3.attn.bias_*").message == "no hook point of this model matches: blocks.3.attn.bias_*"


@pytest.mark.parametrize(
    "typed", ["blocks.3.mlp.hook_router_logits", "blocks.*.mlp.hook_router_logits", "blocks.0.mlp.hook_rout*"]
)
def test_a_refused_name_gives_the_reason(typed):
    error = fault(typed)
    assert error.code == "hook_refused"
    assert "this family has no mixture of experts" in error.message


# Selectors


def select(*hooks: str, **flags: str) -> tuple[Selected, ...]:
    return resolve([parse(hook) for hook in hooks], CATALOG, **flags)


def test_flags_apply_to_hooks_that_carry_none():
    own, default = select("blocks.0.attn.hook_z[head=1]", "blocks.1.attn.hook_z", head="2,0", pos="-1")
    assert (own.head, default.head) == ((1,), (0, 2))
    assert own.pos == default.pos == (Index(-1),)


def test_heads_of_keys_are_kv_heads():
    with pytest.raises(HookError) as caught:
        select("blocks.0.attn.hook_k[head=2]")
    assert caught.value.message == "there is no kv head 2 in blocks.0.attn.hook_k: the kv heads are 0 to 1"
    assert select("blocks.0.attn.hook_q[head=-1]")[0].head == (7,)


@pytest.mark.parametrize(("hook", "flags"), [("blocks.0.hook_resid_post[head=0]", {}), ("blocks.0.*", {"head": "0"})])
def test_a_head_selector_is_never_ignored(hook, flags):
    with pytest.raises(HookError) as caught:
        select("blocks.0.attn.hook_z", hook, **flags)
    assert caught.value.code == "no_heads"
    assert "has no heads" in caught.value.message


def test_dims_are_of_the_last_axis():
    assert select("blocks.0.attn.hook_z", dim="-1")[0].dim == (7,)
    assert select("blocks.0.hook_resid_pre[dim=-2:]")[0].dim == (62, 63)
    with pytest.raises(HookError, match="there is no dim 1 in blocks.0.ln1.hook_scale"):
        select("blocks.0.ln1.hook_scale[dim=1]")


def test_where_the_last_axis_is_the_keys_dims_wait_for_the_tokens():
    (one,) = select("blocks.0.attn.hook_pattern[head=-1][pos=3]", dim="0,-2:")
    assert (one.head, one.dim, one.pos) == ((7,), None, (Index(3),))
    assert one.key == (Index(0), Slice(-2, None))


def test_the_same_hook_twice_is_one():
    assert [one.name for one in select("blocks.1.hook_out", "hook_embed", "blocks.1.hook_resid_post")] == [
        "blocks.1.hook_resid_post",
        "hook_embed",
    ]


def test_the_same_hook_with_other_selectors_is_refused():
    with pytest.raises(UsageError) as caught:
        select("blocks.*.hook_resid_post", "blocks.1.hook_resid_post[pos=3]")
    assert caught.value.code == "hook_twice"


def test_a_flag_that_does_not_parse_is_refused():
    with pytest.raises(HookError, match="expected"):
        select("hook_embed", pos="")


# Indices and positions


def test_indices_are_ascending_and_unique():
    assert indices(parse_items("5,1:3,-1,2", "head"), 8, "head") == (1, 2, 5, 7)
    assert indices(parse_items(":", "head"), 3, "head") == (0, 1, 2)


@pytest.mark.parametrize("items", ["8", "-9", "0:9", "-9:2", "3:3", "5:2", "8:"])
def test_what_does_not_exist_is_not_clamped(items):
    with pytest.raises(HookError):
        indices(parse_items(items, "head"), 8, "head")


TOKENS = ["The", " E", "iff", "el", " is", " the", " The"]


def spans(text: str) -> list[tuple[int, int]]:
    return {"Eiffel": [(1, 4)], "The": [(0, 1), (6, 7)]}.get(text, [])


def at(items: str, **more) -> tuple[int, ...]:
    return positions(parse_items(items, "pos"), len(TOKENS), spans, tokens=TOKENS, **more)


def test_positions():
    assert at('"Eiffel",-1,0') == (0, 1, 2, 3, 6)
    assert at("'The'#2") == (6,)
    assert at("prompt") == tuple(range(7))


def test_negative_positions_count_from_the_end_of_the_prompt():
    assert at("-1", n_prompt=5) == (4,)
    assert at("generated", n_prompt=5) == (5, 6)
    assert at("6", n_prompt=5) == (6,)


@pytest.mark.parametrize(
    ("items", "code", "says"),
    [
        ("7", "pos_out_of_range", "the positions are 0 to 6"),
        ("-8", "pos_out_of_range", "there is no position -8"),
        ("generated", "pos_out_of_range", "no generated positions"),
        ('"Paris"', "text_not_found", '" E" "iff"'),
        ('"The"', "text_ambiguous", "2 times"),
        ('"The"#3', "text_not_found", "only 2 times"),
    ],
)
def test_positions_that_are_not_there(items, code, says):
    with pytest.raises(HookError) as caught:
        at(items)
    assert caught.value.code == code
    assert says in caught.value.message
