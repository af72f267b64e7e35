"""Every weight by every name: the checkpoint's bits, from the checkpoint and from the engine; and names that mean what
they say, by what a forward captured."""

from __future__ import annotations

import pytest
import torch
from compare import relative_error
from engines import capture
from safetensors.torch import load_file
from test_numbers import FAMILIES, SHORT

from vlens_cli import params
from vlens_cli.errors import UsageError
from vlens_cli.reader import answer

LIMIT = 1e-5


def stored(folder) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def from_file(param: params.Param, weights: params.Weights) -> torch.Tensor:
    numbers = answer.mapped(params.reading(param, weights))
    raw = numbers.raw.copy()
    return torch.from_numpy(raw) if raw.dtype.kind == "f" else torch.from_numpy(raw.view("i2")).view(torch.bfloat16)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_bits(driver, folder) -> dict[str, int]:
    """Compare all; how many weights there were of each kind."""
    file, weights = stored(folder), params.of_model(str(folder))
    live = driver.weights(weights)
    assert file.keys() <= weights.names.keys()
    counts: dict[str, int] = {}
    for name, kinds in {**weights.names, **dict.fromkeys(weights.aliases, ("alias",))}.items():
        param = params.resolve([params.ParamRequest(name, name)], weights)[0]
        got = live.tensor(param)
        if name in file:
            assert same_bits(got, file[name]), name
        if param.view is not None:
            assert same_bits(got, from_file(param, weights)), name
        assert tuple(got.shape) == param.shape
        for kind in kinds:
            counts[kind] = counts.get(kind, 0) + 1
    assert counts["checkpoint"] == len(file)
    return counts


def norms(weights: dict[str, torch.Tensor], acts: dict[str, torch.Tensor], name: str):
    out = acts[f"{name}.hook_normalized"] * weights[f"{name}.w"]
    yield f"{name}.hook_out", out + weights.get(f"{name}.b", 0)


def attention(w: dict[str, torch.Tensor], acts: dict[str, torch.Tensor], block: str):
    x, attn = acts[f"{block}.ln1.hook_out"], f"{block}.attn"
    for part in "qkv":
        out = torch.einsum("pm,hmd->phd", x, w[f"{attn}.W_{part.upper()}"])
        yield f"{attn}.hook_{part}", out + w.get(f"{attn}.b_{part.upper()}", 0)
    out = torch.einsum("phd,hdm->pm", acts[f"{attn}.hook_z"], w[f"{attn}.W_O"]) + w.get(f"{attn}.b_O", 0)
    yield f"{attn}.hook_out" if f"{attn}.hook_out" in acts else f"{block}.hook_attn_out", out


def mlp(w: dict[str, torch.Tensor], acts: dict[str, torch.Tensor], block: str):
    x, m = acts[f"{block}.ln2.hook_out"], f"{block}.mlp"
    if f"{m}.W_gate" in w:
        yield f"{m}.hook_pre", x @ w[f"{m}.W_gate"] + w.get(f"{m}.b_gate", 0)
        yield f"{m}.hook_pre_linear", x @ w[f"{m}.W_in"] + w.get(f"{m}.b_in", 0)
    else:
        yield f"{m}.hook_pre", x @ w[f"{m}.W_in"] + w.get(f"{m}.b_in", 0)
    out = acts[f"{m}.hook_post"] @ w[f"{m}.W_out"] + w.get(f"{m}.b_out", 0)
    yield f"{m}.hook_out" if f"{m}.hook_out" in acts else f"{block}.hook_mlp_out", out


def meanings(w: dict[str, torch.Tensor], acts: dict[str, torch.Tensor], n_layers: int):
    """(hook point, what the weights make of the points before it)."""
    for block in (f"blocks.{i}" for i in range(n_layers)):
        yield from norms(w, acts, f"{block}.ln1")
        yield from attention(w, acts, block)
        yield from norms(w, acts, f"{block}.ln2")
        yield from mlp(w, acts, block)
    yield from norms(w, acts, "ln_final")
    yield "unembed.hook_out", acts["ln_final.hook_out"] @ w["unembed.W_U"] + w.get("unembed.b_U", 0)


def check_meaning(driver, folder, tokens: list[int]) -> set[str]:
    """The weights that some captured value confirmed."""
    weights = params.of_model(str(folder))
    used: set[str] = set()

    class Named(dict):
        def __getitem__(self, name):
            used.add(name)
            return super().__getitem__(name)

        def get(self, name, default=None):
            return self[name] if name in self else default

    (acts,) = capture(driver, [tokens])
    w = Named({name: from_file(weights.param(name), weights).double() for name in weights.rows})
    acts = {name: value.double() for name, value in acts.items()}
    for name, expected in meanings(w, acts, driver.catalog.n_layers):
        assert relative_error(acts[name], expected) < LIMIT, name
    assert torch.equal(acts["hook_embed"], w["embed.W_E"][tokens])
    return used


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_a_tiny_family_by_every_name(engines, tiny, family):
    folder = tiny(family)
    driver = engines.open(folder)
    counts = check_bits(driver, folder)
    assert counts["transformerlens"] >= 4 * 9 + 3 and counts["engine"] >= 4 * 6 + 3
    weights = params.of_model(str(folder))
    unused = weights.rows.keys() - check_meaning(driver, folder, SHORT)
    assert not {name for name in unused if not name.endswith(("q_norm.w", "k_norm.w"))}


def test_every_weight_of_the_demo_model_by_every_name(engines, demo_model):
    driver = engines.open(demo_model)
    counts = check_bits(driver, demo_model)
    assert counts == {"transformerlens": 30 * 9 + 3, "checkpoint": 272, "engine": 30 * 6 + 2, "alias": 3}
    check_meaning(driver, demo_model, SHORT)


def test_a_bf16_checkpoint_keeps_its_bits(engines, tiny):
    folder = tiny("llama", "bf16")
    check_bits(engines.open(folder), folder)


def test_a_driver_gives_a_weight_by_any_name(engines, tiny):
    folder = tiny("llama")
    driver, file = engines.open(folder), stored(folder)
    query = file["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(driver.get_param("model.layers.1.self_attn.q_proj.weight"), query)
    assert torch.equal(driver.get_param("blocks.1.attn.W_Q"), query.view(4, 32, 128).transpose(1, 2))
    fused = driver.get_param("model.layers.1.self_attn.qkv_proj.weight")
    assert torch.equal(fused, torch.cat([file[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]))
    with pytest.raises(UsageError, match="has no blocks.1.attn.b_Q") as refused:
        driver.get_param("blocks.1.attn.b_Q")
    assert "blocks.1.attn.W_Q" in refused.value.hint


def test_tied_embeddings_answer_under_both_names(engines, demo_model):
    driver = engines.open(demo_model)
    embed = stored(demo_model)["model.embed_tokens.weight"]
    assert torch.equal(driver.get_param("lm_head.weight"), embed)
    assert torch.equal(driver.get_param("unembed.W_U"), embed.T)
    assert torch.equal(driver.get_param("W_U"), embed.T)
