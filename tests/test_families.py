"""How a model's family is found among many files."""

from __future__ import annotations

import tomllib

import pytest

from vlens_cli import families


@pytest.fixture(autouse=True)
def forget():
    families.load.cache_clear()
    yield
    families.load.cache_clear()


def test_every_class_finds_its_family():
    named = {c: name for name in families.FAMILIES for c in families.load(name).classes}
    families.load.cache_clear()
    assert {c: families.family_of([c]).name for c in named} == named


def test_only_the_family_that_is_asked_for_is_parsed(monkeypatch):
    parsed = []
    real = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or real(text))
    assert families.family_of(["Unheard", "Qwen3ForCausalLM"]).name == "qwen3"
    # With the one that it starts from.
    assert len(parsed) == 2 and "Qwen3ForCausalLM" in parsed[0] and "LlamaForCausalLM" in parsed[1]


@pytest.mark.parametrize("name", [name for name in families.FAMILIES if families.load(name).layouts])
def test_another_module_tree_has_the_same_points(name):
    family = families.load(name)
    for layout in map(families.load, family.layouts):
        assert [row.hook for row in layout.rows] == [row.hook for row in family.rows]
        assert (layout.aliases, layout.refused, layout.dims, layout.checkpoint) == (
            family.aliases, family.refused, family.dims, family.checkpoint)
        assert layout.modules.keys() == family.modules.keys() and layout.modules != family.modules


def test_only_decoders_without_a_file_are_read_by_their_structure():
    assert families.family_of(["HeronForCausalLM"]).name == families.family_of(["HeronLMHeadModel"]).name == "structural"
    with pytest.raises(families.StartError, match="no hook points are known"):
        families.family_of(["HeronModel"])
