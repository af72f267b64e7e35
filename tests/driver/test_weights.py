"""Every weight by every name: the checkpoint's bits, from the checkpoint and from the engine; and names that mean what
they say, by what a forward captured."""

from __future__ import annotations

import pytest
import torch
from compare import relative_error
from engines import capture
from safetensors.torch import load_file
from test_numbers import SHORT

from vlens_cli import params
from vlens_cli.driver.weights import as_tensor
from vlens_cli.errors import UsageError
from vlens_cli.families import FAMILIES, Catalog, Family
from vlens_cli.reader import answer

LIMIT = 1e-5


def stored(folder) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def from_file(param: params.Param, weights: params.Weights) -> torch.Tensor:
    return as_tensor(answer.mapped(params.reading(param, weights)))


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


Tensors = dict[str, torch.Tensor]


def norms(w: Tensors, acts: Tensors, family: Family, block: str, names: tuple[str, ...]):
    for name in (f"{block}{name}" for name in names):
        out = f"{name}.hook_out" if f"{name}.hook_out" in acts else block + POST_NORMS.get(name.removeprefix(block), "")
        if f"{name}.w" in w:
            weight = w[f"{name}.w"] + (family.norm == "rms_plus_one")
            yield out, acts[f"{name}.hook_normalized"] * weight + w.get(f"{name}.b", 0)


# What a norm after a sublayer gives is what the sublayer adds.
POST_NORMS = {"ln1_post": "hook_attn_out", "ln2_post": "hook_mlp_out", "embed_ln": "blocks.0.hook_resid_pre"}


def attention(w: Tensors, acts: Tensors, block: str):
    x, attn = acts.get(f"{block}ln1.hook_out", acts[f"{block}hook_resid_pre"]), f"{block}attn"
    for part in (part for part in "qkv" if f"{attn}.hook_{part}" in acts and f"{attn}.W_{part.upper()}" in w):
        out = torch.einsum("pm,hmd->phd", x, w[f"{attn}.W_{part.upper()}"])
        yield f"{attn}.hook_{part}", out + w.get(f"{attn}.b_{part.upper()}", 0)
    out = torch.einsum("phd,hdm->pm", acts[f"{attn}.hook_z"], w[f"{attn}.W_O"]) + w.get(f"{attn}.b_O", 0)
    yield f"{attn}.hook_out" if f"{attn}.hook_out" in acts else f"{block}hook_attn_out", out


def mlp(w: Tensors, acts: Tensors, block: str):
    """With parallel attention both sublayers may read one norm; without norms before them they read the stream."""
    inputs = [f"{block}ln2.hook_out", f"{block}ln1.hook_out", f"{block}hook_resid_mid"]
    x, m = acts[next(name for name in inputs if name in acts)], f"{block}mlp"
    out = f"{m}.hook_out" if f"{m}.hook_out" in acts else f"{block}hook_mlp_out"
    if f"{m}.W_router" in w:
        yield f"{m}.hook_router_logits", x @ w[f"{m}.W_router"] + w.get(f"{m}.b_router", 0)
        yield out, experts(x, w, acts, m)
        return
    gated = {"hook_pre": "gate", "hook_pre_linear": "in"}
    for hook, weight in (gated if f"{m}.W_gate" in w else {"hook_pre": "in"}).items():
        yield f"{m}.{hook}", x @ w[f"{m}.W_{weight}"] + w.get(f"{m}.b_{weight}", 0)
    yield out, acts[f"{m}.hook_post"] @ w[f"{m}.W_out"] + w.get(f"{m}.b_out", 0)


def experts(x: torch.Tensor, w: Tensors, acts: Tensors, m: str) -> torch.Tensor:
    """What the chosen experts make of each row, by their weights, and what the shared ones make of all."""
    gate, up = (torch.einsum("pm,emf->pef", x, w[f"{m}.experts.W_{p}"]) + w.get(f"{m}.experts.b_{p}", 0)
                for p in ("gate", "in"))  # fmt: skip
    inner = clamped(gate, up) if f"{m}.experts.b_in" in w else torch.nn.functional.silu(gate) * up
    every = torch.einsum("pef,efm->pem", inner, w[f"{m}.experts.W_out"]) + w.get(f"{m}.experts.b_out", 0)
    chosen, share = acts[f"{m}.hook_expert_indices"].long(), acts[f"{m}.hook_expert_weights"]
    out = (every[torch.arange(len(x))[:, None], chosen] * share[:, :, None]).sum(1)
    if f"{m}.shared.W_in" not in w:
        return out
    inner = torch.nn.functional.silu(x @ w[f"{m}.shared.W_gate"]) * (x @ w[f"{m}.shared.W_in"])
    return out + inner @ w[f"{m}.shared.W_out"]


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gpt_oss' activation."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


# Weights that no captured point shows.
UNSEEN = ("q_norm.w", "k_norm.w", "kv_norm.w", "attn.sinks", "W_DQ", "W_UQ", "W_DKV", "W_KR", "W_UK", "W_UV")

# What stands between the unembedding and the logits, and the embedding and the stream, in the tiny models.
LOGITS = {"gemma2": lambda x: 3 * torch.tanh(x / 3), "granite": lambda x: x / 2, "cohere": lambda x: x / 16}
EMBEDDED = {**dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 128**0.5), "granite": 3.0}


def ends(w: Tensors, acts: Tensors, family: str, tokens: list[int]):
    yield "hook_embed", w["embed.W_E"][tokens] * EMBEDDED.get(family, 1)
    if "pos_embed.W_pos" in w:
        yield "hook_pos_embed", w["pos_embed.W_pos"][: len(tokens)]
    logits = acts["ln_final.hook_out"] @ w["unembed.W_U"] + w.get("unembed.b_U", 0)
    yield "unembed.hook_out", LOGITS.get(family, lambda x: x)(logits)


def meanings(w: Tensors, acts: Tensors, catalog: Catalog, tokens: list[int]):
    """(hook point, what the weights make of the points before it)."""
    for block in (f"blocks.{i}." for i in range(catalog.n_layers)):
        yield from norms(w, acts, catalog.spec, block, ("ln1", "ln1_post", "ln2", "ln2_post"))
        yield from attention(w, acts, block)
        yield from mlp(w, acts, block)
    yield from norms(w, acts, catalog.spec, "", ("embed_ln", "ln_final"))
    yield from ends(w, acts, catalog.family, tokens)


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
    for name, expected in meanings(w, acts, driver.catalog, tokens):
        assert relative_error(acts[name], expected) < LIMIT, name
    return used


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_a_tiny_family_by_every_name(engines, tiny, family):
    folder = tiny(family)
    driver = engines.open(folder)
    counts = check_bits(driver, folder)
    assert counts["transformerlens"] >= 4 * 8 + 3
    weights = params.of_model(str(folder))
    assert weights.holders.keys() == weights.stored.keys(), "a tensor of the checkpoint that no name reads"
    unused = weights.rows.keys() - check_meaning(driver, folder, SHORT)
    assert not {name for name in unused if not name.endswith(UNSEEN)}


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
