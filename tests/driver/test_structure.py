"""Architectures that no file names: what their structure proves is given and right, and all else is refused."""

from __future__ import annotations

import json
import re
import shutil

import odd_models
import pytest
from compare import assert_close, of_prompt, reference
from engines import capture
from test_numbers import SHORT, spread
from vlens_cli.driver import boot
from vlens_cli.errors import HookError, StartError, UsageError
from vlens_cli.families import catalog_for
from vlens_cli.query import EngineSpec

PROMPTS = [SHORT, spread(150, 512)]
STREAM = {"resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"}
NORM1 = {f"ln1.hook_{point}" for point in ("scale", "normalized", "out")}
MLP = {"mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post"}
# What attention and its z say about each other.
HEADS = {f"attn.hook_{point}" for point in ("v", "rot_q", "rot_k", "z", "attn_scores", "pattern", "result", "out")}

# Model: the points of a block that must be refused, since the model has other values there than their names say.
REFUSED = {
    "Usual": set(),
    "Scaled": {f"hook_{point}" for point in STREAM},
    "Parallel": {"hook_resid_mid"},
    "NormedStream": {"hook_resid_pre", "hook_resid_mid", "hook_attn_out"},
    "NormedOutput": {f"hook_{point}" for point in STREAM} | {"ln2.hook_out"},
    "HalfNormed": NORM1 | {f"hook_{point}" for point in STREAM},
    "Gated": HEADS - {"attn.hook_out"},
    "SwappedGate": MLP,
}


@pytest.fixture
def odd(engines, tiny, tmp_path):
    """odd(name): a driver on Llama's weights in one of `odd_models`, and the folder."""
    odd_models.register()

    def opened(name: str):
        folder = shutil.copytree(tiny("llama"), tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [f"{name}ForCausalLM"]}))
        return engines.open(folder), folder

    return opened


def refused_in_blocks(driver) -> dict[str, set[str]]:
    """Point of a block -> the layers in which it is refused although the tree has its modules."""
    found: dict[str, set[str]] = {}
    for name, reason in driver.non_fireable_hook_points.items():
        if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
            found.setdefault(match[2], set()).add(match[1])
    return found


@pytest.mark.parametrize("name", odd_models.ODD)
def test_layers_that_look_usual_are_given_only_where_they_are(odd, name):
    driver, folder = odd(name)
    want = {n: value for n, value in odd_models.points(folder, name, SHORT).items()}
    (got,) = capture(driver, [SHORT])
    assert_close(got, want)
    refused = refused_in_blocks(driver)
    assert {point for point in REFUSED[name] if refused.get(point) != {"0", "1", "2", "3"}} == set()
    for point in sorted(REFUSED[name])[:1]:
        with pytest.raises(HookError, match="refused"):
            driver.forward([SHORT], capture=[f"blocks.1.{point}"])
    # A norm or head norm that Llama has not is no point of this model; every other point of Llama's is there.
    llama = {n for n in catalog_for({**json.loads((folder / "config.json").read_text()), "architectures": ["LlamaForCausalLM"]}).names}
    if name == "Usual":
        assert llama <= set(got) and not any("_normed" in n or "_post." in n for n in got)
        assert not {n for n in llama if driver.catalog.editable(n)} & driver.non_editable_hook_points.keys()
    else:
        assert refused and len(got) >= 70, "the right points are refused too"


@pytest.mark.parametrize("family", ["ernie4_5", "helium"])
def test_a_usual_family_without_a_file_equals_transformers(engines, tiny, family):
    """One by a class of vLLM's own, one by its Transformers backend; both rotate pairs and not halves."""
    folder = tiny(family)
    driver, want = engines.open(folder), reference(folder, PROMPTS)
    assert driver.catalog.spec.structural
    for p, got in enumerate(capture(driver, PROMPTS)):
        expected = of_prompt(want, p)
        # What a sublayer gives is what it adds, where no norm follows.
        expected |= {f"blocks.{i}.{part}.hook_out": expected[f"blocks.{i}.hook_{part}_out"] for i in range(4) for part in ("attn", "mlp")}
        assert got.keys() == expected.keys()
        assert_close(got, expected)
    edits = {"blocks.1.hook_resid_post": {"op": "scale", "factor": 2.0}}
    changed = driver.forward([SHORT], capture=["blocks.2.hook_resid_pre"], intervene=edits).captured["blocks.2.hook_resid_pre"][0]
    assert_close({"x": changed}, {"x": 2 * want["0/blocks.2.hook_resid_pre"]})


def test_what_is_no_decoder_is_refused_without_an_engine(tiny):
    config = json.loads((tiny("llama") / "config.json").read_text())
    with pytest.raises(StartError, match="no hook points are known"):
        catalog_for({**config, "architectures": ["HeronForMaskedLM"]})
    with pytest.raises(StartError, match="num_hidden_layers"):
        catalog_for({"architectures": ["HeronForCausalLM"], "hidden_size": 128})
    heron = {**config, "architectures": ["HeronForCausalLM"]}
    assert "no file describes" in boot.plan(EngineSpec("heron", "heron"), heron, catalog_for(heron)).notes[-1]
    with pytest.raises(UsageError, match="compiled mode"):
        boot.plan(EngineSpec("heron", "heron", compile_hooks=()), heron, catalog_for(heron))
