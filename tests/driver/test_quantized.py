"""A quantized checkpoint: activations are the engine's, and those of a forward of the dequantized model up to what the
int8 inputs of its products explain."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from compare import of_prompt, reference, relative_error
from engines import capture
from safetensors.torch import load_file, save_file
from test_numbers import SHORT

# Each product rounds its inputs to 127 steps of a row's largest entry, some three times its root mean square: an error of
# 3 / 127 / sqrt(12), 0.7% of a row's size. Four layers of four such products, one after the other, add as a walk does.
LIMIT = 4 * 4 * 0.007 / 2

# Of the 127 that int8 has: on processors without VNNI the kernel adds two products in 16 bits, and larger weights saturate.
STEPS = 63

SCHEME = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    }},
}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """(a checkpoint of int8 weights with a scale a row, the same model with these weights in float32)."""
    work = tmp_path_factory.mktemp("quantized")
    packed, plain = (shutil.copytree(tiny("llama"), work / name) for name in ("int8", "float32"))
    tensors = load_file(plain / "model.safetensors")
    quantized = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / STEPS
        rows = (tensors[name] / scale).round().clamp(-STEPS, STEPS)
        tensors[name] = rows * scale
        quantized |= {name: rows.to(torch.int8), name.replace("weight", "weight_scale"): scale}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(quantized, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEME}))
    return packed, plain


def test_activations_of_int8_weights_are_those_of_the_dequantized_model(engines, folders, capsys):
    packed, plain = folders
    driver = engines.open(packed)
    # What one head adds is no part of a sum: the projection rounds the rows of all heads together.
    assert {name.rsplit(".", 1)[1] for name in driver.non_fireable_hook_points} == {"hook_result"}
    (got,), (again,) = capture(driver, [SHORT]), capture(driver, [SHORT])
    want = of_prompt(reference(plain, [SHORT]), 0)
    errors = {name: relative_error(value, want[name]) for name, value in got.items() if not name.endswith("attn_scores")}
    worst = max(errors, key=errors.get)
    with capsys.disabled():
        print(f"\nint8: {len(errors)} points, the worst {worst} is {errors[worst]:.1e} off the dequantized model (limit {LIMIT:.1e})")
    assert errors[worst] <= LIMIT
    assert 1e-4 < errors["blocks.3.hook_resid_post"], "nothing was quantized"
    assert errors["hook_embed"] == errors["blocks.0.hook_resid_pre"] == 0.0
    assert all(torch.equal(value, again[name]) for name, value in got.items())
