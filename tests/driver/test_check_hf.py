"""`vlens doctor --check-hf`: the product's own reference against the tests', and the command with a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from compare import REFERENCES, of_prompt, reference
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
TOKENS = [3, 17, 256, 99, 4, 500, 31, 8, 77, 120, *range(40, 60)]


def checked(folder: Path, values: dict, tmp_path: Path) -> dict:
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "capture.safetensors")
    REFERENCES.ask("check_hf", folder=str(folder), file=str(tmp_path / "capture.safetensors"), tokens=TOKENS,
                   out=str(tmp_path / "answer.json"))
    return json.loads((tmp_path / "answer.json").read_text())


# Norms that see heads first; a part of each head that rotates, and q, k, v head by head; experts; norms over all heads; sinks;
# latent rows and shared experts.
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_neox", "qwen3_moe", "olmo2", "gpt2", "gpt_oss", "deepseek_v2"])
def test_what_transformers_gives_has_no_error(tiny, tmp_path, family):
    values = of_prompt(reference(tiny(family), [TOKENS]), 0)
    answer = checked(tiny(family), values, tmp_path)
    assert answer["uncompared"] == []
    assert max(point["error"] for point in answer["points"].values()) < 1e-6
    assert sum(point["layers"] for point in answer["points"].values()) == len(values)


def test_a_wrong_value_is_found_at_its_point_and_layer(tiny, tmp_path):
    values = dict(of_prompt(reference(tiny("llama"), [TOKENS]), 0))
    values["blocks.2.attn.hook_pattern"] = values["blocks.2.attn.hook_pattern"].roll(1, 0)
    values["blocks.1.attn.hook_attn_scores"] = values["blocks.1.attn.hook_attn_scores"] * 0
    points = checked(tiny("llama"), values, tmp_path)["points"]
    assert points["blocks.{i}.attn.hook_pattern"]["error"] > 0.1 and points["blocks.{i}.attn.hook_pattern"]["layer"] == 2
    assert points["blocks.{i}.attn.hook_attn_scores"]["error"] == float("inf")
    others = {name: point["error"] for name, point in points.items() if not name.endswith(("pattern", "scores"))}
    assert max(others.values()) < 1e-6


def test_the_command_and_what_an_engine_has_proved(tiny):
    with tempfile.TemporaryDirectory(prefix="vl-", dir="/tmp") as runtime:
        os.chmod(runtime, 0o700)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("VLENS_")} | {
            "VLENS_RUNTIME": runtime, "VLENS_MODEL": str(tiny("llama", "tokenizer")), "PYTHONPATH": str(ROOT)}  # fmt: skip

        def vlens(*args: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([sys.executable, "-m", "vlens_cli", *args], env=environment, capture_output=True, text=True)

        try:
            done = vlens("doctor", "--check-hf", "--json")
            assert done.returncode == 0, done.stderr
            assert "to write" not in done.stderr
            body = json.loads(done.stdout)
            points = {point["name"]: point for point in body["points"]}
            assert body["ok"] and body["tolerance"] == 1e-4 and body["uncompared"] == []
            assert points["blocks.{i}.attn.hook_pattern"]["layers"] == 4
            assert max(point["error"] for point in body["points"]) < 1e-5
            (engine,) = json.loads(vlens("hooks", "--json").stdout)["engines"]
            assert len(engine["passed"]) == sum(point["layers"] for point in body["points"])
            assert engine["refused"] == {} and engine["dtype"] == "float32"
            assert "hook points passed the proof at load" in vlens("hooks", "--table").stdout
            report = json.loads(vlens("doctor", "--json").stdout)
            assert report["ok"] and report["proofs"][0]["passed"] == engine["passed"]
        finally:
            vlens("engine", "stop")
