"""`vlens hooks`: a model's catalog, without an engine."""

from __future__ import annotations

import json

import pytest


def listed(shell, *args: str) -> dict:
    done = shell.fake("hooks", "--json", *args, env={"FAKE": "bug"})
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_the_whole_catalog(shell):
    body = listed(shell)
    assert (body["schema_version"], body["command"]) == (1, "hooks")
    assert body["model"] == {
        "name": "tiny", "folder": "/models/tiny", "revision": None, "family": "llama", "differs": None, "n_layers": 4,
    }  # fmt: skip
    entries = {entry["name"]: entry for entry in body["hooks"]}
    keys = entries["blocks.3.attn.hook_k"]
    assert (keys["axes"], keys["shape"]) == (["pos", "kv_head", "d_head"], [None, 2, 2])
    assert keys["aliases"] == ["blocks.3.attn.k.hook_out"]
    assert entries["ln_final.hook_scale"]["shape"] == [None, 1] and entries["ln_final.hook_scale"]["derived"]
    assert not entries["blocks.0.attn.hook_z"]["derived"] and entries["hook_embed"]["definition"]
    assert entries["blocks.0.attn.hook_z"]["editable"] and not entries["blocks.0.ln1.hook_scale"]["editable"]
    refused = {entry["name"]: entry["reason"] for entry in body["refused"]}
    assert "no mixture of experts" in refused["blocks.{i}.mlp.hook_router_logits"]
    pattern = entries["blocks.2.attn.hook_pattern"]
    assert (pattern["axes"], pattern["shape"]) == (["head", "query", "key"], [4, None, None]) and pattern["derived"]


def test_patterns_choose_in_the_order_of_the_forward(shell):
    body = listed(shell, "ln_final.hook_scale", "blocks.{1,0}.hook_resid_*", "hook_embed")
    names = [entry["name"] for entry in body["hooks"]]
    kinds = ("pre", "mid", "post")
    blocks = [f"blocks.{i}.hook_resid_{kind}" for i in (0, 1) for kind in kinds]
    assert names == ["hook_embed", *blocks, "ln_final.hook_scale"]
    assert body["refused"] == []


def test_a_star_after_the_layer_is_the_whole_block_and_another_stops_at_a_dot(shell):
    every = [entry["name"] for entry in listed(shell)["hooks"]]
    block = [entry["name"] for entry in listed(shell, "blocks.{-1,1}.*")["hooks"]]
    assert block == [name for name in every if name.startswith(("blocks.1.", "blocks.3."))]
    assert "blocks.3.attn.hook_z" in block
    plain = [entry["name"] for entry in listed(shell, "blocks.3.hook_*")["hooks"]]
    assert plain == [name for name in every if name.startswith("blocks.3.hook_")]


def test_the_table_folds_layers(shell):
    out = shell.fake("hooks", "--table").stdout
    row = next(line for line in out.splitlines() if line.startswith("blocks.{i}.attn.hook_k "))
    assert all(cell in row for cell in ("0-3", "[pos, kv_head 2, d_head 2]", "the engine"))
    assert "blocks.0." not in out and "blocks.{i}.hook_out" not in out
    assert "not given" in out and "no mixture of experts" in out
    pattern = next(line for line in out.splitlines() if line.startswith("blocks.{i}.attn.hook_pattern "))
    assert "[head 4, query, key]" in pattern and "vlens" in pattern


def test_the_table_by_layer(shell):
    for args in (["--all"], ["blocks.*.hook_resid_post"]):
        out = shell.fake("hooks", "--table", *args).stdout
        assert all(f"blocks.{i}.hook_resid_post" in out for i in range(4))


def test_what_a_running_engine_has_proved(shell):
    out = shell.fake("hooks", "--table", env={"FAKE_PROOF": "1"}).stdout
    assert "the engine of pid 77 (bfloat16): 1 hook points passed the proof at load" in out
    lines = out.splitlines()
    assert lines[-2].split() == ["blocks.1.attn.hook_z", "failed", "the", "proof", "at", "load"]
    assert lines[-1].split()[:3] == ["hook_embed", "not", "editable:"]
    body = json.loads(shell.fake("hooks", "--json", env={"FAKE_PROOF": "1"}).stdout)
    assert body["engines"][0]["refused"] == {"blocks.1.attn.hook_z": "failed the proof at load"}
    assert listed(shell)["engines"] == []


def test_aliases_in_the_table(shell):
    out = shell.fake("hooks", "--table", "--aliases").stdout
    lines = out.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("blocks.{i}.hook_resid_post "))
    assert lines[place].endswith(" blocks.{i}.hook_out") and lines[place + 1].strip() == "ln_final.hook_in"
    assert "blocks.2.hook_out" in shell.fake("hooks", "--table", "--aliases", "blocks.2.hook_resid_post").stdout


def test_a_real_folder(shell):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 12, "vocab_size": 32,
    }  # fmt: skip
    (shell.folder / "a model").mkdir()
    (shell.folder / "a model" / "config.json").write_text(json.dumps(config))
    (shell.folder / "a model" / "model.safetensors").touch()
    done = shell.real("hooks", "-m", "a model/", "--json", "blocks.1.attn.hook_q_normed")
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["model"]["folder"] == str((shell.folder / "a model").resolve())
    assert body["hooks"][0]["shape"] == [None, 4, 4]


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("blocks.0.hook_resid_pst", "did you mean blocks.0.hook_resid_post"),
        ("blocks.4.hook_resid_post", "layers 0 to 3"),
        ("blocks.0.mlp.hook_router_logits", "no mixture of experts"),
        ("hook_embed[pos=1]", "takes no selectors"),
    ],
)
def test_bad_patterns(shell, pattern, says):
    done = shell.fake("hooks", pattern)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
