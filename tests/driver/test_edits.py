"""Interventions to edits: files, shapes, positions, source runs, refusals. No engine: the session is a stand-in that
answers a source run with values that tell where they come from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from vlens_cli.driver import patch
from vlens_cli.driver.base import Captured, Edit, Result
from vlens_cli.driver.edits import Edited, edits_for
from vlens_cli.driver.tokens import Tokens
from vlens_cli.errors import UsageError
from vlens_cli.families import catalog_for
from vlens_cli.query import Interventions, Prompt

CATALOG = catalog_for(
    {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 512,
    }
)  # fmt: skip
MLP, Z = "blocks.1.hook_mlp_out", "blocks.1.attn.hook_z"  # [16] and [4, 4]


class Fake:
    """Obeys what edits.py asks of a session; `asked` are the source requests that it ran."""

    dtype = "float32"

    def __init__(self, folder: str) -> None:
        self.catalog = CATALOG
        self.tokens = Tokens(folder)
        self.plan = SimpleNamespace(dtype=self.dtype)
        self.asked: list = []

    def feed(self, prompts, bos, one_chunk=False):
        return [self.tokens.feed(prompt, bos) for prompt in prompts]

    def check_memory(self, n_bytes):
        assert n_bytes > 0

    def run(self, requests, progress):
        self.asked += requests
        return [Result({name: Captured(self.value(n, name, want), want.positions) for name, want in r.capture.items()},
                       (0,), 1) for n, r in enumerate(requests)], 0.1

    @staticmethod
    def value(source: int, name: str, want) -> torch.Tensor:
        """1000 * source + 100 * position + the index in the row."""
        shape = [CATALOG.size(axis) for axis in CATALOG.axes(name)[1:]]
        row = torch.arange(float(torch.Size(shape).numel())).view(shape)
        return torch.stack([1000 * source + 100 * p + row for p in want.positions]).bfloat16().float()


@pytest.fixture(scope="module")
def folder(tiny) -> str:
    return str(tiny("llama", "tokenizer"))


def ids(*tokens: int) -> Prompt:
    return Prompt(tokens=tokens)


@pytest.fixture
def plan(folder):
    """plan(expressions..., prompts=, sources=, more...): the Edited of a query of 5 fed tokens."""

    def make(*expressions: str, prompts=(ids(5, 6, 7, 8, 9),), sources=(), seed=0, allow_nan=False, new=1) -> Edited:
        make.session = Fake(folder)
        fed = make.session.feed(prompts, None)
        asked = Interventions(expressions, tuple(sources), seed, allow_nan)
        return edits_for(make.session, asked, fed, lambda text: None, max_new_tokens=new)

    return make


def only(edited: Edited) -> Edit:
    ((edit,),) = edited.edits
    return edit


@pytest.fixture
def store(tmp_path):
    """store(tensors) -> the path of a file that holds them."""

    def write(**tensors) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        save_file({key.replace("__", "."): t.contiguous() for key, t in tensors.items()}, path)
        return str(path)

    return write


# Operators


@pytest.mark.parametrize(
    ("text", "keep", "value", "along"),
    [
        (f"{MLP} = 2", 0.0, 2.0, 0.0),
        (f"{MLP} += 2", 1.0, 2.0, 0.0),
        (f"{MLP} -= 2", 1.0, -2.0, 0.0),
        (f"{MLP} *= 2", 2.0, None, 0.0),
        (f"{MLP} = proj([{'3, ' * 15}3])", 0.0, None, 1.0),
        (f"{MLP} += 2 * proj([{'3, ' * 15}3])", 1.0, None, 2.0),
        (f"{MLP} -= proj([{'3, ' * 15}3])", 1.0, None, -1.0),
    ],
)
def test_operators(plan, text, keep, value, along):
    edit = only(plan(text))
    assert (edit.name, edit.positions, edit.heads, edit.dims) == (MLP, None, None, None)
    assert (edit.keep, edit.value, edit.along) == (keep, value, along)
    if along:
        assert torch.equal(edit.direction, torch.full((16,), 0.25))


def test_nothing_asked_needs_nothing(plan):
    edited = plan(prompts=(ids(1), ids(2)), sources=())
    assert edited.edits == ((), ()) and edited.body(()) == [] and plan.session.asked == []


def test_a_pattern_is_an_edit_a_hook_point_and_labels_follow(plan):
    edited = plan("blocks.{0,2}.hook_mlp_out = 0", f"{Z}[head=2,3][dim=0] *= 0.5", prompts=(ids(1, 2), ids(3)))
    names = ["blocks.0.hook_mlp_out", "blocks.2.hook_mlp_out", Z]
    assert [[e.name for e in edits] for edits in edited.edits] == [names, names]
    assert (edited.edits[0][2].heads, edited.edits[0][2].dims) == ((2, 3), (0,))
    assert edited.body((1, 2, 3)) == [
        {"expression": "blocks.{0,2}.hook_mlp_out = 0", "hook": names[0], "fired": 1},
        {"expression": "blocks.{0,2}.hook_mlp_out = 0", "hook": names[1], "fired": 2},
        {"expression": f"{Z}[head=2,3][dim=0] *= 0.5", "hook": Z, "fired": 3},
    ]


# Positions


@pytest.mark.parametrize(
    ("selector", "new", "wanted"),
    [
        ("", 20, None), ("[pos=-1]", 1, (4,)), ("[pos=-1]", 20, (4,)), ("[pos=3:]", 4, (3, 4, 5, 6, 7)),
        ("[pos=prompt]", 4, (0, 1, 2, 3, 4)), ("[pos=generated]", 4, (5, 6, 7)), ("[pos=0,7]", 4, (0, 7)),
    ],
)  # fmt: skip
def test_positions_count_fed_tokens_and_negative_ones_from_the_prompts_end(plan, selector, new, wanted):
    assert only(plan(f"{MLP}{selector} = 0", new=new)).positions == wanted


def test_a_text_selects_the_tokens_that_cover_it(plan):
    edit = only(plan(f'{MLP}[pos="Eiffel"] = 0', prompts=(Prompt(text="The Eiffel Tower is in"),)))
    fed = plan.session.tokens.feed(Prompt(text="The Eiffel Tower is in"), None)
    assert edit.positions and "Eiffel" in "".join(fed.texts[p] for p in edit.positions)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{MLP}[pos=5] = 0", "there is no position 5"),
        (f"{MLP}[pos=-6] = 0", "there is no position -6"),
        (f"{MLP}[pos=generated] = 0", "there are no generated positions"),
        (f'{MLP}[pos="Rome"] = 0', "does not contain"),
        ("blocks.1.ln1.hook_scale = 1", "cannot be edited"),
        (f"{MLP} = @source", "none is given"),
        (f"{MLP} = nan", "not finite"),
        (f"{MLP} = [1, 2]", "is 16, and that of [1, 2] is 2"),
        (f"{MLP} = proj([1, 2])", "is 16, and that of proj([1, 2]) is 2"),
        (f"{MLP} = proj([{'0, ' * 15}0])", "has no direction"),
    ],
)
def test_refused_before_any_forward(plan, text, says):
    with pytest.raises(UsageError) as caught:
        plan(text)
    assert says in caught.value.message
    assert plan.session.asked == []


# Files


def test_a_row_for_all_positions_or_a_row_for_each(plan, store):
    path = store(one=torch.arange(16.0), again=torch.arange(16.0).view(1, 1, 16), rows=torch.arange(80.0).view(5, 16))
    for key in ("one", "again"):
        edit = only(plan(f"{MLP} += 4 * {path}:{key}"))
        assert edit.positions is None and torch.equal(edit.value, 4 * torch.arange(16.0)) and edit.keep == 1
    edit = only(plan(f"{MLP} = {path}:rows"))
    assert edit.positions == (0, 1, 2, 3, 4) and torch.equal(edit.value, torch.arange(80.0).view(5, 16))
    edit = only(plan(f"{MLP}[pos=prompt] *= {path}:rows", new=3))
    assert edit.positions == (0, 1, 2, 3, 4) and torch.equal(edit.keep, torch.arange(80.0).view(5, 16))


def test_heads(plan, store):
    path = store(dim=torch.arange(4.0), heads=torch.arange(16.0).view(4, 4), rows=torch.arange(80.0).view(5, 4, 4),
                 one_head=torch.arange(20.0).view(5, 4))  # fmt: skip
    assert torch.equal(only(plan(f"{Z} = {path}:dim")).value, torch.arange(4.0).expand(4, 4))
    assert torch.equal(only(plan(f"{Z} = {path}:heads")).value, torch.arange(16.0).view(4, 4))
    assert torch.equal(only(plan(f"{Z} = {path}:rows")).value, torch.arange(80.0).view(5, 4, 4))
    assert torch.equal(only(plan(f"{Z}[head=2] = {path}:one_head")).value, torch.arange(20.0).view(5, 1, 4))
    assert only(plan(f"{Z}[head=1,2][dim=0] = 7")).value == 7.0
    with pytest.raises(UsageError, match=r"takes \[4, 4\] numbers a position, and the shape of .* is \[5, 4\]"):
        plan(f"{Z} = {path}:one_head")


def test_mean_averages_rows(plan, store):
    path = store(rows=torch.arange(48.0).view(3, 16), heads=torch.arange(48.0).view(3, 4, 4), square=torch.zeros(4, 4))
    assert torch.equal(only(plan(f"{MLP} = mean({path}:rows)")).value, torch.arange(48.0).view(3, 16).mean(0))
    assert torch.equal(only(plan(f"{Z} = -1 * mean({path}:heads)")).value, -torch.arange(48.0).view(3, 4, 4).mean(0))
    with pytest.raises(UsageError, match="may be positions or heads"):
        plan(f"{Z} = mean({path}:square)")


def test_keys(plan, store):
    assert only(plan(f"{MLP} = {store(any=torch.ones(16))}")).value.sum() == 16
    several = store(a=torch.zeros(16), blocks__1__hook_mlp_out=torch.ones(16))
    assert only(plan(f"{MLP} = {several}")).value.sum() == 16
    alias = store(a=torch.zeros(16), blocks__1__hook_out=torch.ones(16))
    assert only(plan(f"blocks.1.hook_resid_post = {alias}")).value.sum() == 16
    for text, says in ((f"{MLP} = {several}:b", f"{several} has no tensor b; its tensors are a, {MLP}"),
                       (f"{MLP} = {alias}", f"{alias} has 2 tensors, and none is named {MLP}; its tensors are a")):
        with pytest.raises(UsageError) as caught:
            plan(text)
        assert says in caught.value.message and caught.value.code == "no_key"


def test_the_hint_of_a_file_of_several_names_those_that_fit(plan, store):
    def hint(text: str) -> str:
        with pytest.raises(UsageError) as caught:
            plan(text)
        return caught.value.hint

    path = store(a=torch.zeros(17), b=torch.ones(2, 16), c=torch.ones(16), d=torch.tensor(1.0))
    assert hint(f"{MLP} = {path}") == f"say which: {path}:b or {path}:c"
    assert hint(f"{Z} = {path}") == f"none of them is 4 wide, as {Z} is"
    many = store(**{f"k{n}": torch.ones(16) for n in range(5)})
    assert hint(f"{MLP} = {many}").endswith(f"{many}:k2; 5 of them are 16 wide")


def test_edits_of_generated_positions_alone_are_said_to_change_nothing_measured(plan):
    def notes(*expressions: str, new: int = 3) -> list[str]:
        edited = plan(*expressions, prompts=(ids(5, 6, 7), ids(5, 6, 7, 8)), new=new)
        return patch.beyond(edited, plan.session.feed((ids(5, 6, 7), ids(5, 6, 7, 8)), None))

    (note,) = notes(f"{MLP}[pos=generated] = 0", f"{Z}[pos=4:] = 1")
    assert note.startswith("every edit is on generated positions: ")
    (note,) = notes(f"{MLP}[pos=3] = 0")
    assert note.startswith("every edit of prompt 0 is on generated positions")
    assert notes(f"{MLP}[pos=generated] = 0", f"{MLP}[pos=-1] = 0") == []
    assert notes(f"{MLP} = 0") == [] and notes(new=1) == []


def test_files_that_do_not_fit(plan, store, tmp_path):
    path = store(wide=torch.ones(17), rows=torch.ones(4, 16), nan=torch.tensor([0.0] * 15 + [float("nan")]),
                 flags=torch.ones(16, dtype=torch.bool), none=torch.ones(0, 16))  # fmt: skip
    (tmp_path / "text.safetensors").write_text("hello, this is text")
    for text, says in (
        (f"{MLP} = {path}:wide", f"the width of {MLP} is 16, and that of {path}:wide is 17"),
        (f"{MLP} = {path}:rows", f"{MLP} selects 5 positions, and {path}:rows has 4 rows"),
        (f"{MLP}[pos=0,1] = {path}:rows", f"{MLP}[pos=0,1] selects 2 positions, and {path}:rows has 4 rows"),
        (f"{MLP} = {path}:none", "numbers a position"),
        (f"{MLP} = {path}:nan", f"{path}:nan holds 1 values that are not finite, the first at [15]"),
        (f"{MLP} = {path}:flags", "holds bool values"),
        (f"{MLP} = {tmp_path}/text.safetensors", f"this is not a safetensors file: {tmp_path}/text.safetensors"),
        (f"{MLP} = {tmp_path}/gone.safetensors", "gone.safetensors"),
    ):
        with pytest.raises(UsageError) as caught:
            plan(text)
        assert says in caught.value.message, text
    assert only(plan(f"{MLP} = {path}:nan", allow_nan=True)).value.isnan().sum() == 1


def test_rows_of_the_prompt_alone_are_refused_where_more_is_fed(plan, store):
    with pytest.raises(UsageError, match="selects 7 positions, and .* has 5 rows"):
        plan(f"{MLP} = {store(rows=torch.ones(5, 16))}", new=3)


# Noise


def test_noise_is_seeded_covers_generated_rows_and_does_not_depend_on_the_selection(plan):
    edit = only(plan(f"{MLP} += noise(3)", new=4))
    assert edit.positions == tuple(range(8)) and edit.value.shape == (8, 16)
    assert torch.equal(only(plan(f"{MLP} += noise(3)")).value, edit.value[:5])
    assert torch.equal(only(plan(f"{MLP}[pos=1,3][dim=2:5] += noise(3)")).value, edit.value[[1, 3]][:, 2:5])
    assert torch.equal(only(plan(f"{MLP} -= noise(1.5)")).value, -edit.value[:5] / 2)
    assert not torch.equal(only(plan(f"{MLP} += noise(3)", seed=1)).value, edit.value[:5])
    twice = plan(f"{MLP} += noise(3)", f"{MLP} += noise(3)", f"{Z}[head=1] = noise(3)").edits[0]
    assert torch.equal(twice[0].value, edit.value[:5]) and not torch.equal(twice[0].value, twice[1].value)
    assert twice[2].value.shape == (5, 1, 4) and twice[2].keep == 0


def test_noise_has_the_standard_deviation_that_it_says(plan):
    value = only(plan("hook_embed += noise(3)", prompts=(ids(*range(500)),))).value
    assert value.mean().abs() < 0.15 and abs(value.std() - 3) < 0.1


# Sources


def rows(*positions: int, source: int = 0) -> torch.Tensor:
    return Fake.value(source, MLP, SimpleNamespace(positions=positions))


def test_the_source_gives_the_same_positions(plan):
    source = ids(1, 2, 3, 4, 5)
    edit = only(plan(f"{MLP}[pos=3,-1] = @source", sources=[source]))
    assert (edit.keep, edit.positions) == (0.0, (3, 4)) and torch.equal(edit.value, rows(3, 4))
    (request,) = plan.session.asked
    assert request.tokens == (1, 2, 3, 4, 5) and request.capture[MLP].positions == (3, 4)
    edit = only(plan(f"{MLP} -= 0.5 * @source", sources=[source], new=3))
    assert edit.positions == (0, 1, 2, 3, 4) and torch.equal(edit.value, -0.5 * rows(0, 1, 2, 3, 4))


def test_mapped_positions_heads_and_dims(plan):
    edit = only(plan(f"{MLP}[pos=3] = @source[pos=-1]", sources=[ids(1, 2)]))
    assert edit.positions == (3,) and torch.equal(edit.value, rows(1))
    edit = only(plan(f"{MLP}[dim=0,1] = @source[dim=4:6]", sources=[ids(1, 2, 3, 4, 5)]))
    assert torch.equal(edit.value, rows(0, 1, 2, 3, 4)[:, 4:6])
    edit = only(plan(f"{Z}[pos=0][head=1,3] = @source[head=0,2]", sources=[ids(1, 2, 3, 4, 5)]))
    assert torch.equal(edit.value, torch.arange(16.0).view(1, 4, 4)[:, [0, 2]])
    edit = only(plan(f"{Z}[pos=0][head=1][dim=2] = @source", sources=[ids(1, 2, 3, 4, 5)]))
    assert edit.value.tolist() == [[[6.0]]]


def test_what_is_listed_keeps_its_order_on_both_sides(plan, store):
    five = [ids(1, 2, 3, 4, 5)]
    edit = only(plan(f"{MLP}[pos=3,1] = @source[pos=1,3]", sources=five))
    assert edit.positions == (3, 1) and torch.equal(edit.value, rows(1, 3))
    edit = only(plan(f"{MLP}[pos=3,1] = @source[pos=-1,0:1]", sources=five))
    assert torch.equal(edit.value, rows(4, 0))
    edit = only(plan(f"{MLP}[pos=3,1] = @source", sources=five))
    assert torch.equal(edit.value, rows(3, 1))
    edit = only(plan(f"{Z}[pos=0][head=3,1] = @source[head=1,2]", sources=five))
    assert edit.heads == (3, 1) and torch.equal(edit.value, torch.arange(16.0).view(1, 4, 4)[:, [1, 2]])
    edit = only(plan(f"{MLP}[dim=10,3] = [1, 2]"))
    assert edit.dims == (10, 3) and edit.value.tolist() == [1, 2]
    path = store(x=torch.stack([torch.full((16,), 1.0), torch.full((16,), 2.0)]))
    edit = only(plan(f"{MLP}[pos=4,2] = {path}"))
    assert edit.positions == (4, 2) and edit.value[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("text", [f"{MLP} = 1e39", f"{MLP} *= -1e39", f"{MLP} += noise(1e39)",
                                  f"{MLP} = [1e39{', 0' * 15}]", f"{MLP} = 10 * [1e38{', 0' * 15}]"])
def test_numbers_beyond_float32_are_refused(plan, text):
    with pytest.raises(UsageError, match="float32"):
        plan(text)
    plan(text, allow_nan=True)


def test_numbers_beyond_the_engines_dtype_are_refused(plan, store, monkeypatch):
    monkeypatch.setattr(Fake, "dtype", "float16")
    with pytest.raises(UsageError, match="too large for float16, whose largest is 6.55e"):
        plan(f"{MLP} = 1e5")
    only(plan(f"{MLP} *= 1e5"))
    with pytest.raises(UsageError, match="too large for float32, the first at \\[3\\]"):
        plan(f"{MLP} = {store(x=torch.tensor([0.0] * 3 + [1e300] + [0.0] * 12, dtype=torch.float64))}")


def test_with_several_prompts_the_one_that_lacks_a_position_is_named(plan):
    with pytest.raises(UsageError, match="prompt 1: there is no position 3"):
        plan(f"{MLP}[pos=3] = 0", prompts=(ids(1, 2, 3, 4), ids(1, 2, 3)))


def test_one_source_for_all_or_one_for_each(plan):
    both = (ids(1, 2), ids(3, 4))
    edited = plan(f"{MLP}[pos=1] = @source", prompts=both, sources=[ids(8, 9)])
    assert len(plan.session.asked) == 1 and all(torch.equal(e.value, rows(1)) for (e,) in edited.edits)
    edited = plan(f"{MLP}[pos=1] = @source", prompts=both, sources=[ids(8, 9), ids(7, 9)])
    assert [r.tokens for r in plan.session.asked] == [(8, 9), (7, 9)]
    assert [torch.equal(e.value, rows(1, source=n)) for n, (e,) in enumerate(edited.edits)] == [True, True]


@pytest.mark.parametrize(
    ("text", "sources", "says"),
    [
        (f"{MLP} = @source", [(1, 2)], "the prompt has 5 tokens and the source 2"),
        (f"{MLP}[pos=0] = @source", [(1, 2)], "the prompt has 5 tokens and the source 2"),
        (f"{MLP}[pos=0,1] = @source[pos=1]", [(1, 2)], "selects 2 positions, and 1 are taken"),
        (f"{MLP}[pos=0] = @source[pos=2]", [(1, 2)], "there is no position 2"),
        (f"{Z}[head=0] = @source[head=1,2]", [(1, 2, 3, 4, 5)], "selects 1 heads, and 2 are taken"),
        (f"{MLP}[dim=0] = @source[dim=1,2]", [(1, 2, 3, 4, 5)], "selects 1 dims, and 2 are taken"),
        (f"{MLP} = @source[head=1]", [(1, 2, 3, 4, 5)], "has no heads"),
        (f"{MLP} = @source", [(1,), (2,)], "there are 2 sources for 1 prompts"),
    ],
)
def test_sources_that_do_not_fit(plan, text, sources, says):
    with pytest.raises(UsageError) as caught:
        plan(text, sources=[ids(*one) for one in sources])
    assert says in caught.value.message and plan.session.asked == []


def test_token_counts_that_differ_show_both_rows(plan, folder):
    with pytest.raises(UsageError) as caught:
        plan(f"{MLP} = @source", prompts=(Prompt(text="The Eiffel"),), sources=[Prompt(text="The Eiffel Tower")])
    first, prompt, source = caught.value.message.split("\n")
    assert prompt.startswith('  prompt: "') and source.startswith('  source: "')
    assert "@source[pos=4]" in caught.value.hint


def test_generated_rows_have_no_source(plan):
    with pytest.raises(UsageError, match="the source run has positions 0 to 4, and .* selects 6"):
        plan(f"{MLP}[pos=5,6] = @source", sources=[ids(1, 2, 3, 4, 5)], new=3)
    notes = plan(f"{MLP} = @source", sources=[ids(1, 2, 3, 4, 5)], new=3).notes
    assert any("no generated tokens" in note for note in notes)


# Contradictions


def test_two_sets_of_the_same_entries_are_said(plan):
    (note,) = plan(f"{MLP} = 0", f"{MLP}[pos=1] = 1", f"{Z}[head=0] = 1", f"{Z}[head=1] = 1", f"{MLP} += 1").notes
    assert note == f"{MLP} is set twice, and the last wins: {MLP} = 0; {MLP}[pos=1] = 1"
    assert plan(f"{MLP}[pos=0] = 0", f"{MLP}[pos=1] = 1").notes == ()
