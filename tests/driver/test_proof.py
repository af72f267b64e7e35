"""The proof at load finds a wrong row, whatever it is that is wrong, and refuses that point by name."""

from __future__ import annotations


import pytest
from engines import Engines, capture
from test_numbers import SHORT
from vlens_cli import families
from vlens_cli.errors import HookError
from vlens_cli.families import Catalog


WRONG = {
    "the first of a pair taken for the stream": ("blocks.{i}.hook_resid_post", {"outputs": (0,)}),
    "the second of a pair taken for the stream": ("blocks.{i}.hook_resid_post", {"outputs": (1,)}),
    "the input stream without its residual": ("blocks.{i}.hook_resid_pre", {"inputs": ("hidden_states",)}),
    "norms swapped": ("blocks.{i}.ln1.hook_out", {"module": "ln2"}),
    "keys and queries swapped": ("blocks.{i}.attn.hook_k", {"split": ("kv_head", "head", "kv_head"), "part": 0}),
    "values read where keys are": ("blocks.{i}.attn.hook_v", {"part": 1}),
    "rotated keys read before rotation": (
        "blocks.{i}.attn.hook_rot_k", {"module": "qkv", "inputs": (), "outputs": (0,), "part": 1,
                                       "split": ("head", "kv_head", "kv_head")}),
    "gate and up swapped": ("blocks.{i}.mlp.hook_pre", {"part": 1}),
    "post read after the down projection's input": ("blocks.{i}.hook_mlp_out", {"module": "attn"}),
    "the scale of another norm": ("blocks.{i}.ln2.hook_scale", {"module": "ln1"}),
    "a pattern of keys that are not rotated": (
        "blocks.{i}.attn.hook_pattern", {"of": ("blocks.{i}.attn.hook_rot_q", "blocks.{i}.attn.hook_k")}),
    "scores taken for the pattern": ("blocks.{i}.attn.hook_pattern", {"derive": "scores"}),
    "results of the queries": ("blocks.{i}.attn.hook_result", {"of": ("blocks.{i}.attn.hook_q",)}),
    "a module that does not exist": ("blocks.{i}.attn.hook_z", {"module": "logits", "inputs": (0,)}),
}


# In families of other shapes: what their own shape invites.
WRONG_ELSEWHERE = {
    "the sum rule where the first of two tensors is the stream": (
        "cohere", "blocks.{i}.hook_resid_post", {"outputs": (0, 1)}),
    "what the second of two tensors is": ("stablelm", "blocks.{i}.hook_resid_post", {"outputs": (1,)}),
    "attention's own output for what is added": ("gemma2", "blocks.{i}.hook_attn_out", {"module": "attn"}),
    "the norm after the MLP for the one before": ("gemma2", "blocks.{i}.ln2.hook_out", {"module": "ln2_post"}),
    "an embedding that is not scaled": (
        "gemma2", "hook_embed", {"module": "embed", "inputs": (), "outputs": (0,), "factor": ""}),
    "what is added without its multiplier": ("granite", "blocks.{i}.hook_mlp_out", {"derive": "", "factor": ""}),
    "an embedding without its multiplier": (
        "granite", "hook_embed", {"module": "embed", "inputs": (), "outputs": (0,), "factor": ""}),
    "queries and keys of other heads": ("gpt_neox", "blocks.{i}.attn.hook_q", {"part": 1}),
    "the stream after the MLP's norm, of another layer": ("gpt_neox", "blocks.{i}.hook_mlp_out", {"module": "attn"}),
    "positions for tokens": ("gpt2", "hook_embed", {"module": "pos_embed"}),
    "queries for the part of them that turns": ("deepseek_v2", "blocks.{i}.attn.hook_rot_q", {"part": 0, "split": ("d_rope", "d_nope")}),
    "the latent row before its norm": ("deepseek_v2", "blocks.{i}.attn.hook_kv_latent", {"inputs": (0,), "outputs": ()}),
    "the key that turns before it has": (
        "deepseek_v2", "blocks.{i}.attn.hook_rot_k", {"module": "qkv_a", "inputs": (), "outputs": (0,), "part": 1,
                                                      "split": ("d_kv_row", "d_rope")}),
    "keys with their values behind": (
        "deepseek_v2", "blocks.{i}.attn.hook_k", {"of": ("blocks.{i}.attn.hook_kv_latent",), "derive": "keys_and_values"}),
    "scores of latent rows taken for the pattern": ("deepseek_v2", "blocks.{i}.attn.hook_pattern", {"derive": "latent_scores"}),
    "gate and up of shared experts swapped": ("deepseek_v2", "blocks.{i}.mlp.shared_experts.hook_pre", {"part": 1}),
    "what all experts give for what the shared ones do": (
        "deepseek_v2", "blocks.{i}.mlp.shared_experts.hook_out", {"module": "mlp"}),
    "weights of experts for their logits": ("mixtral", "blocks.{i}.mlp.hook_router_logits", {
        "derive": "expert_indices", "helper": "experts", "axes": ("pos", "k")}),
}


@pytest.fixture(scope="module")
def reread(engines, tiny):
    """reread(family, rows): a driver whose worker has located and proved these rows; one engine a family."""
    mine = Engines()

    def with_rows(family: str, rows: tuple[families.Row, ...]):
        # Beside an engine of another shape vLLM has no ranks for experts.
        engines.close()
        driver = mine.open(tiny(family))
        spec = families.load(family)._replace(rows=rows)
        worker = driver._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        driver.catalog = Catalog(spec, driver.catalog.dims, driver.catalog._config)
        worker._locate(driver.catalog)
        driver._find_points()
        return driver

    yield with_rows
    mine.close()


def changed(family: str, hook: str, fields: dict) -> tuple[families.Row, ...]:
    """A family's rows with one changed, as a wrong TOML file would have it."""
    right = families.load(family).rows
    wrong = tuple(row._replace(**fields) if row.hook == hook else row for row in right)
    assert wrong != right
    return wrong


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_row_is_refused_by_name(reread, what):
    hook, fields = WRONG[what]
    driver = reread("llama", changed("llama", hook, fields))
    name = hook.replace("{i}", "1")
    assert name in driver.non_fireable_hook_points
    assert name not in driver.supported_hook_points
    with pytest.raises(HookError, match="refused"):
        capture(driver, [SHORT], [name])
    others = {n for n in driver.non_fireable_hook_points if families._fold(n)[0] != hook}
    # Only the stream that a norm divides says what its divisor is, and only z and v what a pattern is.
    alone = ("hook_scale", "hook_attn_scores", "hook_pattern", "hook_result")
    assert {n for n in others if not n.endswith(alone)} == set(), "a point that is right was refused too"


def test_a_row_of_the_next_layer_is_refused_by_name(reread, monkeypatch):
    from vlens_cli.driver.locate import Locator

    real = Locator.module

    def off_by_one(self, role, layer=None):
        return real(self, role, layer + 1 if role == "ln1" and layer == 1 else layer)

    monkeypatch.setattr(Locator, "module", off_by_one)
    driver = reread("llama", families.load("llama").rows)
    assert {n for n in driver.non_fireable_hook_points if n.startswith("blocks.1.")} >= {
        f"blocks.1.ln1.hook_{point}" for point in ("out", "scale", "normalized")}


@pytest.mark.parametrize("what", WRONG_ELSEWHERE)
def test_a_wrong_row_of_another_shape_is_refused_by_name(reread, what):
    family, hook, fields = WRONG_ELSEWHERE[what]
    driver = reread(family, changed(family, hook, fields))
    assert hook.replace("{i}", "1") in driver.non_fireable_hook_points
