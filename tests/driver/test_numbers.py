"""Every hook point of every family against transformers, in fp32: whole tensors, every layer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compare import assert_close, of_prompt, reference, relative_error, worst_row
from engines import capture
from vlens_cli import families
from vlens_cli.driver.vllm_driver import VLLMDriver

# Families whose plain logits in vLLM differ from transformers' (`differs` in the family's file says why), and by how much
# of their size.
DIFFER = {"bloom": (1e-5, 5e-4)}


def mend_bloom(model: torch.nn.Module) -> None:
    """Its own GELU, by the approximation with tanh."""
    for block in model.transformer.h:
        block.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")


MEND = {"bloom": mend_bloom}


@contextlib.contextmanager
def mended(engines, folder: Path, family: str, **fields: str) -> Iterator[VLLMDriver]:
    """The family's engine; where vLLM's own values are not transformers', with what makes them differ mended in it."""
    driver = engines.open(folder, **fields)
    if family in DIFFER:
        MEND[family](driver._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model())
    yield driver
    if family in DIFFER:
        engines.close()


SHORT = [3, 17, 256, 99, 4, 500, 31, 8, 77, 120]


def spread(count: int, vocabulary: int) -> list[int]:
    """Token ids that look like no pattern: a linear congruence over the vocabulary."""
    return [(7919 * n + 104729) % (vocabulary - 10) + 5 for n in range(count)]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_point_of_a_tiny_family_equals_transformers(engines, tiny, family, record_property):
    folder = tiny(family)
    prompts = [SHORT, spread(150, 512)]
    driver = engines.open(folder)
    for name, reason in driver.non_fireable_hook_points.items():
        assert reason == driver.catalog.row(name).absent != "", f"{name} is refused: {reason}"
    want = reference(folder, prompts)
    assert bool(families.load(family).differs) == (family in DIFFER)
    if family in DIFFER:
        least, most = DIFFER[family]
        (got,) = capture(driver, prompts[:1], ["unembed.hook_out"])
        assert least < relative_error(got["unembed.hook_out"], want["0/unembed.hook_out"]) < most
    with mended(engines, folder, family) as driver:
        for p, got in enumerate(capture(driver, prompts)):
            assert got.keys() == of_prompt(want, p).keys(), "not the points that the model has"
            assert_close(got, of_prompt(want, p))


def test_queries_that_are_not_latent_and_no_rows_of_theirs(engines, tiny):
    folder = tiny("deepseek_v2", "direct_queries")
    driver = engines.open(folder)
    lacking = {n.partition(".attn.")[2] for n in driver.non_fireable_hook_points if ".attn." in n}
    assert lacking == {"q_a_proj.hook_out", "q_a_layernorm.hook_scale", "q_a_layernorm.hook_normalized", "hook_q_latent",
                       "q_b_proj.hook_out"}
    (got,) = capture(driver, [SHORT])
    want = of_prompt(reference(folder, [SHORT]), 0)
    assert got.keys() == want.keys() and "blocks.3.attn.q_proj.hook_out" in got
    assert_close(got, want)


@pytest.mark.parametrize("variant, vocabulary", [("long", 512), ("odd_vocab", 500)])
def test_prompts_beyond_a_stretched_length_and_a_vocabulary_that_is_padded(engines, tiny, variant, vocabulary):
    folder = tiny("llama", variant)
    prompts = [[t % vocabulary for t in SHORT], spread(150, vocabulary), spread(300, vocabulary)]
    driver, want = engines.open(folder), reference(folder, prompts)
    assert driver.non_fireable_hook_points == {} and want["0/unembed.hook_out"].shape == (10, vocabulary)
    for p, got in enumerate(capture(driver, prompts)):
        assert_close(got, of_prompt(want, p))


def test_a_norm_whose_weight_holds_zeros_gives_finite_right_values(engines, tiny):
    folder = tiny("llama", "zero_norm")
    names = [n for n in engines.open(folder).supported_hook_points if "ln" in n]
    (got,) = capture(engines.open(folder), [SHORT], names)
    assert all(torch.isfinite(value).all() for value in got.values())
    assert_close(got, of_prompt(reference(folder, [SHORT]), 0))


def test_every_point_of_the_demo_model_equals_transformers(engines, demo_model, capsys):
    prompts = [SHORT, spread(250, 49152)]
    want = reference(demo_model, prompts)
    driver = engines.open(demo_model)
    assert driver.catalog.n_layers == 30
    worst: dict[str, tuple[float, float]] = {}
    for p, got in enumerate(capture(driver, prompts)):
        expected = of_prompt(want, p)
        for name, value in got.items():
            point = re.sub(r"blocks\.\d+", "blocks.*", name)
            errors = relative_error(value, expected[name]), worst_row(value, expected[name])[1]
            worst[point] = tuple(map(max, worst.get(point, (0.0, 0.0)), errors))
        assert_close(got, expected)
    with capsys.disabled():
        print("\ndemo model, 10 and 250 tokens, worst relative error of any layer: whole tensor, one row")
        for point, (whole, row) in worst.items():
            print(f"  {point:32} {whole:.1e} {row:.1e}")


def test_the_stream_joins_bitwise_from_block_to_block(engines, demo_model):
    (got,) = capture(engines.open(demo_model), [SHORT])
    for i in range(29):
        assert torch.equal(got[f"blocks.{i}.hook_resid_post"], got[f"blocks.{i + 1}.hook_resid_pre"])
    assert torch.equal(got["hook_embed"], got["blocks.0.hook_resid_pre"])


@pytest.mark.parametrize("dtype, limit", [("bfloat16", 0.05)])
def test_another_dtype_is_the_engines_own_and_close(engines, tiny, dtype, limit):
    folder = tiny("llama")
    driver = engines.open(folder, dtype=dtype)
    (got,) = capture(driver, [SHORT])
    want = of_prompt(reference(folder, [SHORT]), 0)
    assert driver.non_fireable_hook_points == {}
    for name, value in got.items():
        assert value.dtype == getattr(torch, dtype)
        assert relative_error(value, want[name]) < limit, name
