"""TransformerLens' RemoteBridge over a driver of ours, against its own bridge over transformers: `make test-peers`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import readme
import torch
from compare import BRIDGE, relative_error
from safetensors.torch import load_file
from test_numbers import SHORT

pytest.importorskip("transformer_lens")

# Where TransformerLens' bridge is not what the name says (a mixture's inputs and outputs, heads before positions), or
# where the value is no activation of the model.
OTHER = re.compile(r"hook_cos|hook_sin|embed\.hook_in$|pos_embed\.hook_in|rotary_emb|[qk]_norm\.|hook_[qk]_normed")
# Its unembed.hook_out is before the softcap, ours are the logits; `logits` itself is compared.
BEFORE_SOFTCAP = {"gemma2": {"unembed.hook_out", "hook_unembed"}}


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """reference(folder): what TransformerLens over transformers caches of SHORT."""

    def made(folder: Path) -> dict[str, torch.Tensor]:
        out = tmp_path_factory.mktemp("bridge") / "out.safetensors"
        BRIDGE.ask("cache", folder=str(folder), tokens=SHORT, out=str(out))
        return load_file(out)

    return made


@pytest.fixture(autouse=True)
def forget(engines):
    """A bridge closes its driver when it is collected, which may be in a later test."""
    yield
    engines.close()


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2"])
def test_a_cache_equals_that_of_boot_transformers(tiny, engines, reference, family, capsys):
    from vlens_cli.driver.lens_bridge import over

    folder = tiny(family, "tokenizer")
    bridge = over(engines.open(folder))
    logits, cache = bridge.run_with_cache(torch.tensor([SHORT]))
    want = reference(folder)
    loss = bridge.forward(torch.tensor([SHORT]), return_type="loss")
    assert relative_error(logits, want["logits"]) <= 1e-4 and abs(loss - want["loss"]) <= 1e-4
    same = [name for name in want if name in cache and not OTHER.search(name) and name not in BEFORE_SOFTCAP.get(family, ())]
    errors = {name: relative_error(cache[name].reshape(want[name].shape), want[name]) for name in same}
    off = {name: error for name, error in errors.items() if not error <= 1e-4}
    missing = sorted({re.sub(r"\.\d+\.", ".i.", name) for name in want if name not in cache} - {"logits", "loss"})
    with capsys.disabled():
        print(f"\n{family}: {len(same)} names of {len(want)} equal boot_transformers; not given: {', '.join(missing)}")
    assert not off
    assert len(same) >= 100


def test_interventions_hooks_and_names(tiny, engines):
    from transformer_lens.model_bridge.driver_protocol import validate_driver
    from vlens_cli.driver.lens_bridge import over

    driver = engines.open(tiny("llama", "tokenizer"))
    bridge = over(driver)
    validate_driver(bridge._driver, after_bridge_construction=True)
    tokens, name = torch.tensor([SHORT]), "blocks.1.hook_out"
    plain = bridge.forward(tokens)
    logits, cache = bridge.run_with_cache(tokens, names_filter=[name, "blocks.1.hook_resid_post"],
                                          intervene={name: {"op": "scale", "factor": 2.0}})
    assert set(cache) >= {name} and not torch.equal(logits, plain)
    want = driver.forward([SHORT], capture=[name]).captured[name]
    assert relative_error(cache[name], 2 * want) <= 1e-6
    seen = []
    with pytest.warns(UserWarning, match="read-only"):
        again = bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda value, hook: seen.append(value.shape))])
    assert seen == [torch.Size([1, 10, 128])] and torch.equal(again, plain)
    assert bridge.to_tokens("The Eiffel Tower").shape[0] == 1
    with pytest.raises(NotImplementedError):
        bridge.run_with_cache(tokens, names_filter="blocks.0.attn.hook_cos")


def test_a_bridge_over_the_resident_engine_equals_one_in_process(tiny, engines, tmp_path, monkeypatch):
    from vlens_cli.driver import bridge

    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("VLENS_RUNTIME", str(tmp_path / "run"))
    folder, name, z = tiny("llama", "tokenizer"), "blocks.1.hook_out", "blocks.2.attn.hook_z"
    driver = engines.open(folder)
    direction = torch.randn(128, generator=torch.Generator().manual_seed(1))
    batch, mask = [[0, 0, *SHORT[:8]], SHORT], [[0, 0, *[1] * 8], [1] * 10]
    specs = {name: [{"op": "scale", "factor": 2.0, "pos": 5}, {"op": "project", "value": direction}],
             z: {"op": "add", "value": torch.ones(2, 32), "head": [0, 3]}, "blocks.3.hook_mlp_out": {"op": "set", "value": 0.25},
             "hook_embed": {"op": "noise", "std": 0.5, "seed": 3}}
    try:
        with bridge(str(folder), resident=True) as model:
            for more in ({}, {"intervene": specs}, {"intervene": {"blocks.0.hook_attn_out": {"op": "suppress"}}}):
                got = model._driver.forward(batch, capture=[name, z], attention_mask=mask, **more)
                want = driver.forward(batch, capture=[name, z], attention_mask=mask, **more)
                for key in (name, z):
                    assert relative_error(got.captured[key], want.captured[key]) <= 1e-5
                assert relative_error(got.logits[0, 2:], want.logits[0, 2:]) <= 1e-5
                assert torch.equal(got.new_tokens, want.new_tokens) and got.rows == want.rows
            assert model.forward(torch.tensor([SHORT]), return_type="loss").isfinite()
            assert torch.equal(model._driver.get_param("blocks.1.attn.W_Q"), driver.get_param("blocks.1.attn.W_Q"))
    finally:
        subprocess.run([sys.executable, "-m", "vlens_cli", "engine", "stop"], capture_output=True)


def test_the_example_of_the_readme(tmp_path, demo_model):
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [block for block in readme.examples(text) if any("import bridge" in one.source for one in block)]
    printed = readme.Bench(tmp_path, demo_model).run(block)
    assert printed == [one.shown for one in block]
