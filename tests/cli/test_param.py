"""`vlens param` from checkpoints, as its user meets it: no engine is ever started here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import made
import numpy as np
import pytest
import vlens_cli
from safetensors.numpy import load_file

HEAVY = ("torch", "numpy", "vllm", "safetensors", "transformers")


@pytest.fixture
def folder(tmp_path) -> Path:
    return made.model(tmp_path / "a model")


def param(shell, folder: Path, *args: str, **more):
    return shell.real("param", "-m", str(folder), *args, **more)


def body(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def one(done) -> dict:
    (entry,) = body(done)["params"]
    return entry


def refused(done, *parts: str, code: int = 2) -> str:
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    for part in parts:
        assert part in done.stderr
    return done.stderr


def heads(rows: np.ndarray, count: int) -> np.ndarray:
    """[head, d_model, d_head] of the rows of a projection."""
    return rows.reshape(count, 3, 8).transpose(0, 2, 1)


def test_where_the_package_is_not_on_the_path(shell, folder, tmp_path):
    """An editable install that a hook of `site` finds: the reader is told the folder."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import importlib.util, os, sys\n"
        "folder = os.environ['VLENS_AT']\n"
        "spec = importlib.util.spec_from_file_location('vlens_cli', folder + '/__init__.py',"
        " submodule_search_locations=[folder])\n"
        "sys.modules['vlens_cli'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n")
    package = Path(vlens_cli.__file__).parent
    code = "import sys; sys.path.remove(sys.argv.pop()) if sys.argv[-1] in sys.path else sys.argv.pop(); " \
           "from vlens_cli.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "param", "-m", str(folder), "model.norm.weight", "--json", str(package.parent)],
        env=os.environ | {"PYTHONPATH": str(hook), "VLENS_AT": str(package), "VLENS_RUNTIME": str(tmp_path / "run")},
        cwd=tmp_path, capture_output=True, text=True)
    assert one(done)["shape"] == [8]


# What a weight is


def test_a_query_weight_by_head(shell, folder):
    q = made.tensors()["model.layers.1.self_attn.q_proj.weight"]
    entry = one(param(shell, folder, "blocks.1.attn.W_Q", "--values"))
    assert entry["axes"] == ["head", "d_model", "d_head"] and entry["shape"] == [4, 8, 3]
    assert np.array_equal(np.array(entry["values"], np.float32), q.reshape(4, 3, 8).transpose(0, 2, 1))
    assert (entry["dtype"], entry["source"], entry["kinds"]) == ("float32", "checkpoint", ["transformerlens"])
    assert entry["aliases"] == entry["tensors"] == ["model.layers.1.self_attn.q_proj.weight"]
    assert entry["norm"] == pytest.approx(np.linalg.norm(q.astype(np.float64)), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "tensor", "form"),
    [
        ("embed.W_E", "model.embed_tokens.weight", lambda t: t),
        ("unembed.W_U", "lm_head.weight", lambda t: t.T),
        ("blocks.0.attn.W_K", "model.layers.0.self_attn.k_proj.weight", lambda t: heads(t, 2)),
        ("blocks.0.attn.W_V", "model.layers.0.self_attn.v_proj.weight", lambda t: heads(t, 2)),
        ("blocks.0.attn.W_O", "model.layers.0.self_attn.o_proj.weight", lambda t: t.T.reshape(4, 3, 8)),
        ("blocks.1.mlp.W_gate", "model.layers.1.mlp.gate_proj.weight", lambda t: t.T),
        ("blocks.1.mlp.W_in", "model.layers.1.mlp.up_proj.weight", lambda t: t.T),
        ("blocks.1.mlp.W_out", "model.layers.1.mlp.down_proj.weight", lambda t: t.T),
        ("blocks.1.ln1.w", "model.layers.1.input_layernorm.weight", lambda t: t),
        ("blocks.1.ln2.w", "model.layers.1.post_attention_layernorm.weight", lambda t: t),
        ("ln_final.w", "model.norm.weight", lambda t: t),
        ("W_E", "model.embed_tokens.weight", lambda t: t),
    ],
)
def test_the_file_has_the_bits_under_the_name_that_was_asked(shell, folder, name, tensor, form):
    done = param(shell, folder, name, tensor, "-o", "w.safetensors")
    entries = {entry["name"]: entry for entry in body(done)["params"]}
    found = load_file(shell.folder / "w.safetensors")
    stored = made.tensors()[tensor]
    assert found.keys() == entries.keys() == {name, tensor}
    assert found[tensor].tobytes() == stored.tobytes()
    want = np.ascontiguousarray(form(stored))
    assert found[name].shape == want.shape == tuple(entries[name]["shape"]) and found[name].tobytes() == want.tobytes()
    assert "wrote" in done.stderr and "2 tensors" in done.stderr


def test_the_files_metadata_say_what_is_in_it(shell, folder):
    from safetensors import safe_open

    body(param(shell, folder, "blocks.0.attn.W_K[head=1]", "-o", "w.safetensors"))
    with safe_open(shell.folder / "w.safetensors", "np") as file:
        said = {key: json.loads(value) for key, value in file.metadata().items()}
    name = "blocks.0.attn.W_K"
    assert said["axes"] == {name: ["kv_head", "d_model", "d_head"]} and said["selected"] == {name: {"kv_head": [1]}}
    assert said["source"] == {name: "checkpoint"} and said["folder"] == str(folder) and said["family"] == "llama"


def test_selectors_cut_and_keep_their_axis(shell, folder):
    q = made.tensors()["model.layers.0.self_attn.q_proj.weight"]
    entry = one(param(shell, folder, "blocks.0.attn.W_Q[head=0,3][d_model=-1]", "--values"))
    assert entry["shape"] == [2, 1, 3] and entry["selected"] == {"head": [0, 3], "d_model": [7]}
    assert np.array_equal(np.array(entry["values"], "f4"), q.reshape(4, 3, 8)[[0, 3]][:, :, 7][:, None, :])
    entry = one(param(shell, folder, "model.layers.0.self_attn.q_proj.weight[1:3][0]", "--values"))
    assert entry["values"] == q[1:3, :1].astype(float).tolist() and entry["selected"] == {"0": [1, 2], "1": [0]}
    assert one(param(shell, folder, "blocks.0.attn.W_Q[head=0,2:4]"))["selected"] == {"head": [0, 2, 3]}
    assert one(param(shell, folder, "model.norm.weight[0,2:4]"))["selected"] == {"0": [0, 2, 3]}


def test_layers_by_pattern_and_from_the_end(shell, folder):
    names = [e["name"] for e in body(param(shell, folder, "blocks.*.attn.W_Q", "blocks.-1.ln1.w"))["params"]]
    assert names == ["blocks.0.attn.W_Q", "blocks.1.attn.W_Q", "blocks.1.ln1.w"]
    names = [e["name"] for e in body(param(shell, folder, "model.layers.{0,1}.self_attn.q_proj.weight"))["params"]]
    assert names == [f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)]


def test_keys_and_values_say_that_they_have_the_kv_heads(shell, folder):
    assert "2 heads, each of which serves 2 query heads" in param(shell, folder, "blocks.0.attn.W_K").stderr
    assert param(shell, folder, "blocks.0.attn.W_Q").stderr == ""


def test_tied_embeddings_answer_under_both_names_and_say_so(shell, tmp_path):
    arrays = {name: array for name, array in made.tensors().items() if name != "lm_head.weight"}
    tied = made.model(tmp_path / "tied", arrays, tie_word_embeddings=True)
    embed = arrays["model.embed_tokens.weight"].astype(float)
    done = param(shell, tied, "unembed.W_U", "lm_head.weight", "--values")
    unembed, head = body(done)["params"]
    assert np.array_equal(unembed["values"], embed.T) and np.array_equal(head["values"], embed)
    assert unembed["tied"] and head["tied"] and unembed["tensors"] == ["model.embed_tokens.weight"]
    assert "unembed.W_U is embed.W_E, transposed: this model's embeddings are tied" in done.stderr
    assert "lm_head.weight is model.embed_tokens.weight: " in done.stderr and "tied_to" not in head
    listed = body(param(shell, tied, "--list", "unembed.*"))["params"]
    assert listed[0]["tied_to"] == unembed["tied_to"] == "embed.W_E, transposed"
    assert "= embed.W_E, transposed" in param(shell, tied, "--table", "--list", "unembed.*").stdout


def test_a_head_that_a_tied_model_does_not_use_is_only_the_files(shell, tmp_path):
    tied = made.model(tmp_path / "tied", tie_word_embeddings=True)
    done = param(shell, tied, "unembed.W_U", "lm_head.weight", "--values")
    unembed, head = body(done)["params"]
    assert np.array_equal(unembed["values"], made.tensors()["model.embed_tokens.weight"].T.astype(float))
    assert np.array_equal(head["values"], made.tensors()["lm_head.weight"].astype(float))
    assert "lm_head.weight" in done.stderr and "does not use" in done.stderr


# Tables and JSON


def test_a_table_has_a_row_for_each_weight(shell, folder):
    done = param(shell, folder, "blocks.*.attn.W_O", "model.norm.weight", "--table")
    lines = done.stdout.splitlines()
    assert "[head 4, d_head 3, d_model 8] float32, from the checkpoint" in lines
    assert "[8] float32, from the checkpoint" in lines
    rows = [line for line in lines if line.startswith(("blocks.", "model."))]
    assert [row.split()[0] for row in rows] == ["blocks.0.attn.W_O", "blocks.1.attn.W_O", "model.norm.weight"]
    norm = np.linalg.norm(made.tensors()["model.norm.weight"].astype(np.float64))
    assert rows[2].split()[1] == f"{norm:.6g}" and "█" in rows[0]


def test_values_in_a_table_are_labelled_by_their_place(shell, folder):
    done = param(shell, folder, "blocks.0.attn.W_O[head=1][d_head=0,2]", "--values", "--table")
    assert "blocks.0.attn.W_O[0, 0]: " in done.stdout and "blocks.0.attn.W_O[0, 1]: " in done.stdout
    assert "from the checkpoint  [head=1][d_head=0,2]\n" in done.stdout
    assert "  [1:3][0]\n" in param(shell, folder, "model.layers.0.self_attn.q_proj.weight[1:3][0]", "--table").stdout


def test_singular_values(shell, folder):
    q = made.tensors()["model.layers.0.self_attn.q_proj.weight"].astype(np.float64)
    whole, heads = body(param(shell, folder, "--svd", "2", "model.layers.0.self_attn.q_proj.weight",
                              "blocks.0.attn.W_Q"))["params"]  # fmt: skip
    assert whole["singular_values"] == pytest.approx(np.linalg.svd(q, compute_uv=False)[:2].tolist(), rel=1e-9)
    each = np.linalg.svd(q.reshape(4, 3, 8), compute_uv=False)[:, :2]
    assert np.allclose(heads["singular_values"], each, rtol=1e-9)
    refused(param(shell, folder, "--svd", "2", "model.norm.weight"), "one axis")
    table = param(shell, folder, "--svd", "1", "blocks.0.attn.W_Q[head=0]", "--table").stdout
    assert "singular values:" in table


def test_a_comparison(shell, folder, tmp_path):
    other = made.model(tmp_path / "other", made.tensors(1), num_key_value_heads=2)
    x, y = (made.tensors(seed)["model.layers.0.self_attn.q_proj.weight"].astype(np.float64) for seed in (0, 1))
    entry = one(param(shell, folder, "blocks.0.attn.W_Q", "--compare", str(other)))
    assert entry["compare"]["difference_norm"] == pytest.approx(np.linalg.norm(x - y), rel=1e-12)
    assert entry["compare"]["cosine"] == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    table = param(shell, folder, "blocks.0.attn.W_Q", "--compare", str(other), "--table").stdout
    assert f"against {other}: norm of the difference" in table
    same = one(param(shell, folder, "blocks.0.attn.W_Q", "--compare", str(folder)))["compare"]
    assert same["difference_norm"] == 0 and same["cosine"] == pytest.approx(1)


def test_a_comparison_of_other_shapes_is_refused(shell, folder, tmp_path):
    arrays = made.tensors() | {"model.norm.weight": np.ones(9, np.float32)}
    other = made.model(tmp_path / "other", arrays, architectures=["Unknown"])
    refused(param(shell, folder, "model.norm.weight", "--compare", str(other)), "different shapes", "[8]", "[9]")
    refused(param(shell, folder, "blocks.0.ln1.w", "--compare", str(other)), f"in {other}: no weight", "blocks.0.ln1.w")


# Lists and names


def test_the_list_has_all_names_with_shapes_and_places(shell, folder):
    entries = {entry["name"]: entry for entry in body(param(shell, folder, "--list"))["params"]}
    assert entries["blocks.0.attn.W_Q"]["tensors"] == ["model.layers.0.self_attn.q_proj.weight"]
    assert entries["model.layers.0.self_attn.qkv_proj.weight"]["kinds"] == ["engine"]
    assert entries["model.layers.0.self_attn.qkv_proj.weight"]["shape"] == [24, 8]
    assert entries["model.norm.weight"]["kinds"] == ["checkpoint", "engine"]
    assert made.SHAPES.keys() <= entries.keys() and "blocks.0.attn.b_Q" not in entries
    assert all(entry["files"] == ["model.safetensors"] and "norm" not in entry for entry in entries.values())


def test_a_list_by_pattern_and_as_a_table(shell, folder):
    names = [e["name"] for e in body(param(shell, folder, "--list", "blocks.0.*"))["params"]]
    assert len(names) == 9 and all(name.startswith("blocks.0.") for name in names)
    table = param(shell, folder, "--list", "--table").stdout
    assert "blocks.{i}.attn.W_Q" in table and "[head 4, d_model 8, d_head 3]" in table
    assert "checkpoint and engine" in table and "lm_head.weight" in table
    refused(param(shell, folder, "--list", "*.nothing"), "matches")
    refused(param(shell, folder, "--list", "a", "b"), "one pattern")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("blocks.0.attn.b_Q", ["this model has no blocks.0.attn.b_Q", "q_proj.bias", "blocks.0.attn.W_Q"]),
        ("w_q", ["did you mean blocks.0.attn.W_Q"]),
        ("blocks.1.attn.WQ", ["no weight of this model is named", "did you mean blocks.1.attn.W_Q"]),
        ("blocks.2.attn.W_Q", ["there is no layer 2", "0 to 1"]),
        ("model.layers.1.self_attn.q.weight", ["did you mean model.layers.1.self_attn.q_proj.weight"]),
        ("blocks.0.attn.W_Q[head=4]", ["there is no head 4", "0 to 3"]),
        ("blocks.0.attn.W_Q[pos=4]", ["no axis of this name: pos", "head, d_model, d_head"]),
        ("model.norm.weight[0][0]", ["1 axes"]),
        ("blocks.0.attn.W_Q[head=1][0:5]", ["all named or all in the order", "blocks.0.attn.W_Q[head=1][d_model=0:5]"]),
        ("blocks.0.attn.W_Q[2][0:5][head=1]", ["blocks.0.attn.W_Q[d_model=2][d_head=0:5][head=1]"]),
        ("blocks.0.attn.W_Q[head=1][0][0][0]", ["all named or all in the order", "its axes are head, d_model, d_head"]),
        ("blocks.0.attn.W_Q[1,0:5,0:3]", ["one axis or several", "blocks.0.attn.W_Q[1][0:5][0:3]", "[head=1,0:5,0:3]"]),
        ("model.layers.0.mlp.down_proj.weight[0:2,1]", ["one axis or several", "down_proj.weight[0:2][1]"]),
        ("model.layers.0.mlp.down_proj.weight[600]", ["there is no row 600 in axis 0 of model.layers.0.mlp.down_proj"]),
        ("model.layers.0.mlp.down_proj.weight[0][600]", ["there is no column 600 in axis 1 of model.layers.0.mlp"]),
        ("model.norm.weight[600]", ["there is no place 600 in axis 0 of model.norm.weight: the places are 0 to 7"]),
        ("blocks.0.attn.W_Q[head=1", ["expected `,` or `]`"]),
        ("blocks.0.attn.W_Q[head=1]x", ["cannot stand after"]),
        ("blocks.1-0.attn.W_Q", ["run backwards"]),
        ("*.lora_A", ["matches"]),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", ["did you mean model.layers.0.self_attn.q_proj.weight"]),
        ("model.layers.0.self_attn.qkv_proj.weight", ["the engine's own", "--from engine"]),
    ],
)
def test_a_name_that_is_not_there(shell, folder, name, parts):
    refused(param(shell, folder, name, "--from", "checkpoint", "--json"), *parts)


def test_options_that_contradict_each_other(shell, folder):
    refused(param(shell, folder), "no weight is named", "--list")
    refused(param(shell, folder, "model.norm.weight", "--from", "checkpoint", "--dtype", "float16"), "--dtype")
    refused(param(shell, folder, "model.norm.weight", "--from", "engine", "--raw"), "--raw")
    refused(param(shell, folder, "W_E", "W_E[0]"), "asked for twice")


def test_an_unknown_family_has_its_checkpoints_names(shell, tmp_path):
    odd = made.model(tmp_path / "odd", {"x.weight": np.arange(6, dtype=np.float32).reshape(2, 3)},
                     architectures=["Unheard"], num_hidden_layers=...)
    done = param(shell, odd, "x.weight", "--values")
    assert one(done)["values"] == [[0, 1, 2], [3, 4, 5]] and body(done)["model"]["family"] is None
    assert [e["name"] for e in body(param(shell, odd, "--list"))["params"]] == ["x.weight"]
    refused(param(shell, odd, "blocks.0.attn.W_Q"), "blocks.0.attn.W_Q")
    refused(param(shell, odd, "x.weight", "--from", "engine"), "Unheard", code=3)


def test_a_config_that_is_not_the_familys_leaves_the_checkpoints_names(shell, tmp_path):
    for change in ({"sliding_window": 8}, {"hidden_size": "8"}):
        folder = made.model(tmp_path / "m", **change)
        assert one(param(shell, folder, "model.norm.weight"))["shape"] == [8]
        refused(param(shell, folder, "ln_final.w"), "no weight of this model is named", "its checkpoint's name only",
                *change)
        refused(param(shell, folder, "model.norm.weight", "--from", "engine"), *change, code=3)


def test_a_prefix_that_the_checkpoint_leaves_out_may_be_typed(shell, tmp_path):
    random = np.random.default_rng(0)
    shapes = {"wte.weight": (16, 8), "wpe.weight": (5, 8), "ln_f.weight": (8,), "ln_f.bias": (8,), **{
        f"h.0.{name}": shape for name, shape in {
            "ln_1.weight": (8,), "ln_1.bias": (8,), "ln_2.weight": (8,), "ln_2.bias": (8,), "attn.c_attn.weight": (8, 24),
            "attn.c_attn.bias": (24,), "attn.c_proj.weight": (8, 8), "attn.c_proj.bias": (8,), "mlp.c_fc.weight": (8, 32),
            "mlp.c_fc.bias": (32,), "mlp.c_proj.weight": (32, 8), "mlp.c_proj.bias": (8,)}.items()}}  # fmt: skip
    arrays = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    folder = made.model(tmp_path / "gpt2", arrays, architectures=["GPT2LMHeadModel"], model_type="gpt2", n_layer=1,
                        n_embd=8, n_head=2, head_dim=..., tie_word_embeddings=...)  # fmt: skip
    names = ("h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight", "blocks.0.attn.W_K", "blocks.0.attn.b_V",
             "pos_embed.W_pos", "blocks.0.mlp.W_in", "unembed.W_U")  # fmt: skip
    body(param(shell, folder, *names, "-o", "w.safetensors"))
    found, fused = load_file(shell.folder / "w.safetensors"), arrays["h.0.attn.c_attn.weight"]
    assert np.array_equal(found[names[0]], fused) and np.array_equal(found[names[1]], fused)
    assert np.array_equal(found["blocks.0.attn.W_K"], fused[:, 8:16].reshape(8, 2, 4).transpose(1, 0, 2))
    assert np.array_equal(found["blocks.0.attn.b_V"], arrays["h.0.attn.c_attn.bias"][16:].reshape(2, 4))
    assert np.array_equal(found["pos_embed.W_pos"], arrays["wpe.weight"])
    assert np.array_equal(found["blocks.0.mlp.W_in"], arrays["h.0.mlp.c_fc.weight"])
    assert np.array_equal(found["unembed.W_U"], arrays["wte.weight"].T)
    refused(param(shell, folder, "blocks.0.mlp.W_gate"), "did you mean blocks.0.mlp.W_")


def test_names_are_completed(shell, folder):
    words = f"vlens param -m '{folder}' blocks.1.attn.W_"
    env = {"_VLENS_COMPLETE": "bash_complete", "COMP_CWORD": "4", "COMP_WORDS": words}
    done = shell.real(env=env)
    assert done.stdout.split() == [f"plain,blocks.1.attn.W_{letter}" for letter in "QKVO"]


# Files of many kinds


def test_shards_are_found_by_the_index(shell, tmp_path):
    folder = made.model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    names = sorted(made.tensors())
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in halves.items():
        made.write(folder / file, {name: made.tensors()[name] for name in own})
    index = {"weight_map": {name: file for file, own in halves.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made.write(folder / "other.safetensors", {"model.norm.weight": np.zeros(8, np.float32)})
    entries = body(param(shell, folder, *names, "--values"))["params"]
    assert all(np.array_equal(np.array(e["values"], "f4"), made.tensors()[e["name"]]) for e in entries)
    assert [entry["files"] for entry in entries] == [[index["weight_map"][entry["name"]]] for entry in entries]


def test_pickled_weights_are_refused_unless_allowed(shell, tmp_path):
    import torch

    folder = made.model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    state = {name: torch.from_numpy(array) for name, array in made.tensors().items()}
    state["model.norm.weight"] = state["model.norm.weight"].bfloat16()
    torch.save(state, folder / "pytorch_model.bin")
    refused(param(shell, folder, "model.norm.weight"), "pickled", "save_pretrained", "--allow-pickle")
    refused(param(shell, folder, "--list"), "pickled")
    done = param(shell, folder, "--allow-pickle", "blocks.0.attn.W_Q", "model.norm.weight", "-o", "w.safetensors")
    assert [entry["dtype"] for entry in body(done)["params"]] == ["float32", "bfloat16"]
    from safetensors.torch import load_file as load_torch

    found = load_torch(shell.folder / "w.safetensors")
    assert torch.equal(found["model.norm.weight"], state["model.norm.weight"])
    q = state["model.layers.0.self_attn.q_proj.weight"].view(4, 3, 8).transpose(1, 2)
    assert torch.equal(found["blocks.0.attn.W_Q"], q)


def test_a_pickle_that_would_run_something_is_not_read(shell, tmp_path):
    import pickle

    folder = made.model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Runs()}))
    refused(param(shell, folder, "--allow-pickle", "x"), "holds more than tensors", code=3)
    assert not marker.exists()


def test_of_pickled_files_none_counts_for_another(shell, tmp_path):
    import torch

    folder = made.model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    state = {name: torch.from_numpy(array) for name, array in made.tensors().items()}
    torch.save(state, folder / "pytorch_model.bin")
    torch.save({"other": torch.zeros(2)}, folder / "optimizer.bin")
    stale = folder / "zz_stale.bin"
    torch.save({"model.norm.weight": torch.zeros(8)}, stale)
    refused(param(shell, folder, "--allow-pickle", "model.norm.weight"), "two weight files", "zz_stale.bin", code=3)
    stale.unlink()
    assert one(param(shell, folder, "--allow-pickle", "model.norm.weight"))["norm"] > 0
    torch.save({"state_dict": state}, folder / "pytorch_model.bin")
    refused(param(shell, folder, "--allow-pickle", "model.norm.weight"), "but state_dict", "state_dict()", code=3)


def test_a_range_without_an_end_ends(shell, folder):
    for text in ("blocks.0-99999999.attn.W_Q", "blocks.{0-9999999999}.attn.W_Q", "blocks.5-99999999.attn.W_Q"):
        refused(param(shell, folder, text), "2" if "5-" not in text else "5")


@pytest.mark.parametrize("kind", ["F64", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I8", "U8", "BOOL"])
def test_every_type_of_number(shell, tmp_path, kind):
    from vlens_cli.checkpoint import NAMES, SIZES

    numpys = {"F64": "f8", "F16": "f2", "I64": "i8", "I32": "i4", "I8": "i1"}
    stored = np.array([[0, 1, 1], [1, 0, 1]], numpys.get(kind, f"u{SIZES[kind]}"))
    folder = made.model(tmp_path / "m", {"x": stored}, {"x": kind}, architectures=["Unheard"])
    done = param(shell, folder, "x", "--values", "-o", "x.safetensors")
    entry = one(done)
    assert entry["dtype"] == NAMES[kind] and np.count_nonzero(entry["values"]) == 4
    assert (shell.folder / "x.safetensors").read_bytes().endswith(stored.tobytes())


def test_numbers_of_no_known_type_are_refused(shell, tmp_path):
    folder = made.model(tmp_path / "m", {"x": np.zeros(4, np.uint8)}, {"x": "F4"}, architectures=["Unheard"])
    refused(param(shell, folder, "x"), "does not read numbers of this type: F4")
    assert [e["dtype"] for e in body(param(shell, folder, "--list"))["params"]] == ["F4"]


def test_names_that_hold_what_a_pattern_or_a_selector_is_made_of(shell, tmp_path):
    names = ["x[0]", "s*r", "a b.c", "{0,1}.w", "\x1b[31mred"]
    arrays = {name: np.full(3, n, np.float32) for n, name in enumerate(names)}
    folder = made.model(tmp_path / "m", arrays, architectures=["Unheard"])
    done = param(shell, folder, *names, "-o", "x.safetensors")
    assert [entry["mean"] for entry in body(done)["params"]] == [0, 1, 2, 3, 4]
    assert load_file(shell.folder / "x.safetensors").keys() == arrays.keys()
    assert "\x1b" not in param(shell, folder, *names, "--table").stdout


def test_tensors_without_numbers_and_without_axes(shell, tmp_path):
    arrays = {"none": np.empty((0, 4), np.float32), "scalar": np.array(2.5, np.float32)}
    folder = made.model(tmp_path / "m", arrays, architectures=["Unheard"])
    none, scalar = body(param(shell, folder, "none", "scalar", "--values", "-o", "x.safetensors"))["params"]
    assert (none["shape"], none["count"], none["values"]) == ([0, 4], 0, [])
    assert (scalar["shape"], scalar["mean"], scalar["values"]) == ([], 2.5, 2.5)
    found = load_file(shell.folder / "x.safetensors")
    assert found["none"].shape == (0, 4) and found["scalar"] == 2.5
    assert "none" in param(shell, folder, "none", "scalar", "--values", "--table").stdout


def broken(folder: Path, content: bytes) -> Path:
    (folder / "model.safetensors").write_bytes(content)
    return folder


def headed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it has no header"),
        (b"\0" * 7, "it has no header"),
        (b"\xff" * 8, "header is too long"),
        (headed(b"{"), ""),
        (headed(b"[" * 100_000), ""),
        (headed(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', b"\0" * 7), "shorter than its header"),
        (headed(b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', b"\0" * 8), "8 bytes"),
        (headed(b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}', b"\0" * 8), "makes no sense"),
        (headed(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', b"\0" * 8), ""),
        (headed(b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}', b"\0" * 8), "gap"),
        (headed(b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
                b' "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', b"\0" * 2), "twice"),
        (headed(b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},'
                b' "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}', b"\0" * 3), "overlap"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(shell, folder, content, why):
    done = param(shell, broken(folder, content), "model.norm.weight")
    refused(done, "broken weight file", "model.safetensors", why, code=3)


def test_a_tensor_in_two_files_is_refused(shell, folder):
    made.write(folder / "more.safetensors", {"model.norm.weight": np.zeros(8, np.float32)})
    refused(param(shell, folder, "W_E"), "two weight files", "model.norm.weight", code=3)


def test_a_shape_that_is_not_the_configs_is_refused(shell, tmp_path):
    folder = made.model(tmp_path / "m", num_attention_heads=6)
    refused(param(shell, folder, "blocks.0.attn.W_Q"), "not what the config says", "[12, 8]", code=3)
    assert one(param(shell, folder, "model.layers.0.self_attn.q_proj.weight"))["shape"] == [12, 8]


def test_links_and_other_spellings_of_the_folder(shell, folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "abc")
    (folder / "model.safetensors").symlink_to(blobs / "abc")
    assert one(param(shell, tmp_path / "link", "W_E"))["files"] == ["model.safetensors"]


# Quantized


def scaled(tmp_path: Path, scales: np.ndarray, **more: object) -> tuple[Path, np.ndarray]:
    """An 8-bit query projection, every bit pattern but NaN, with these scales."""
    name = "model.layers.0.self_attn.q_proj.weight"
    bits = np.random.default_rng(0).integers(0, 0x7F, (12, 8)).astype(np.uint8)
    arrays = made.tensors() | {name: bits, f"{name}_scale_inv": scales}
    quantization = {"quant_method": "fp8", **more}
    folder = made.model(tmp_path / "q", arrays, {name: "F8_E4M3"}, quantization_config=quantization)
    import torch

    return folder, torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()


@pytest.mark.parametrize(
    ("scales", "more", "words"),
    [
        (np.array([0.25], "f4"), {}, "one scale for all"),
        (np.linspace(0.1, 3, 12, dtype="f4").reshape(12, 1), {}, "a scale for each row"),
        (np.linspace(0.1, 3, 6, dtype="f4").reshape(3, 2), {"weight_block_size": [5, 4]}, "each block of 5 x 4"),
    ],
)
def test_eight_bits_with_scales_are_dequantized_and_the_scheme_named(shell, tmp_path, scales, more, words):
    folder, stored = scaled(tmp_path, scales, **more)
    rows, columns = (5, 4) if more else (12 if scales.size == 1 else 1, 8)
    spread = np.repeat(np.repeat(scales.reshape(-(-12 // rows), -1), rows, 0), columns, 1)[:12, :8]
    want = stored * spread
    entry = one(param(shell, folder, "blocks.0.attn.W_Q", "--values"))
    assert entry["dtype"] == "float32" and words in entry["dequantized"]
    assert entry["dequantized"].startswith("fp8: float8_e4m3fn")
    assert np.array_equal(np.array(entry["values"], "f4"), want.reshape(4, 3, 8).transpose(0, 2, 1))
    raw = one(param(shell, folder, "model.layers.0.self_attn.q_proj.weight", "--raw", "--values"))
    assert raw["dtype"] == "float8_e4m3fn" and np.array_equal(np.array(raw["values"], "f4"), stored)
    assert "dequantized" in param(shell, folder, "blocks.0.attn.W_Q", "--table").stdout
    assert one(param(shell, folder, "blocks.0.ln1.w"))["dtype"] == "float32"


def test_weights_of_four_bits_in_their_own_tensor_are_refused(shell, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    arrays = made.tensors() | {name: np.zeros((48, 1), np.uint8), f"{name}.absmax": np.ones(2, np.float32)}
    folder = made.model(tmp_path / "q", arrays, quantization_config={"quant_method": "bitsandbytes"})
    refused(param(shell, folder, "blocks.0.attn.W_Q"), "packed", "bitsandbytes", f"--raw {name}")
    refused(param(shell, folder, name), "quantized (bitsandbytes)", "--raw")
    assert one(param(shell, folder, name, "--raw"))["dtype"] == "uint8"
    assert "blocks.0.attn.W_K" in {entry["name"] for entry in body(param(shell, folder, "--list"))["params"]}


def test_scales_that_fit_nothing_are_refused(shell, tmp_path):
    folder, _ = scaled(tmp_path, np.ones((4, 3), "f4"))
    refused(param(shell, folder, "blocks.0.attn.W_Q"), "quantized (fp8", "[4, 3]", "--raw")


def test_a_second_scale_is_not_left_out(shell, tmp_path):
    folder, _ = scaled(tmp_path, np.ones((), "f4"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert one(param(shell, folder, name))["dequantized"]
    made.write(folder / "more.safetensors", {f"{name}_scale_2": np.full(1, 3, "f4")})
    refused(param(shell, folder, name), f"scaled by {name}_scale_2 too", "--raw")


def test_packed_weights_are_refused_and_their_integers_given_raw(shell, tmp_path):
    arrays = made.tensors()
    packed = arrays.pop("model.layers.0.self_attn.q_proj.weight").view(np.int32)
    stem = "model.layers.0.self_attn.q_proj."
    arrays |= {f"{stem}qweight": packed, f"{stem}scales": np.ones((1, 12), np.float16)}
    folder = made.model(tmp_path / "q", arrays, quantization_config={"quant_method": "gptq", "bits": 4})
    for name in ("blocks.0.attn.W_Q", f"{stem}weight"):
        refused(param(shell, folder, name), "packed", "gptq 4 bits", f"--raw {stem}qweight")
    refused(param(shell, folder, f"{stem}qweight"), "quantized", "--raw")
    raw = one(param(shell, folder, "--raw", f"{stem}qweight", "--values"))
    assert raw["dtype"] == "int32" and raw["values"] == packed.tolist()


# The process


def test_the_shells_side_imports_neither_numpy_nor_torch(shell, folder):
    code = (
        "import sys\nfrom vlens_cli.cli.main import run\n"
        f"code = run(['param', '-m', {str(folder)!r}, 'blocks.0.attn.W_Q', '--table', '--svd', '1'])\n"
        f"print(code, sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "0 []\n") and "singular values" in done.stdout


def test_many_values_are_refused_and_fit_a_file(shell, tmp_path):
    folder = made.model(tmp_path / "m", {"x": np.zeros((2001, 2000), np.float32)}, architectures=["Unheard"])
    refused(param(shell, folder, "x", "--values"), "4002000 numbers", "-o")
    assert one(param(shell, folder, "x", "-o", "x.safetensors"))["sparsity"] == 1


def test_a_file_that_cannot_be_written_is_one_line(shell, folder):
    refused(param(shell, folder, "W_E", "-o", "/nonexistent/x.safetensors"), "no such folder")
    refused(param(shell, folder, "W_E", "-o", "w.txt"), ".safetensors")
    assert list(shell.folder.iterdir()) == []


def test_many_small_weights_are_counted_together(shell, tmp_path):
    arrays = {f"x{n}": np.zeros((500, 2001), np.float32) for n in range(4)}
    folder = made.model(tmp_path / "m", arrays, architectures=["Unheard"])
    refused(param(shell, folder, "*", "--values"), "4002000 numbers")


@pytest.mark.parametrize("index", ['{"weight_map": {}}', "{", "[]", '{"weight_map": []}', "{}"])
def test_a_broken_index_is_named(shell, folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    refused(param(shell, folder, "W_E"), "model.safetensors.index.json", code=3)


def test_ctrl_c_ends_the_reader_too(shell, tmp_path):
    """The singular values of a large matrix take long."""
    folder = made.model(tmp_path / "m", {"x": np.ones((4000, 4000), np.float32)}, architectures=["Unheard"])
    command = [sys.executable, "-m", "vlens_cli", "param", "-m", str(folder), "x", "--svd", "1", "-o", "x.safetensors"]
    running = subprocess.Popen(command, cwd=shell.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    end = time.monotonic() + 60
    while not list(shell.folder.glob(".vlens-*.tmp")) and time.monotonic() < end:
        time.sleep(0.01)
    reader = int(children.read_text().split()[0])
    running.send_signal(signal.SIGINT)
    assert (running.wait(30), running.stdout.read(), running.stderr.read()) == (130, "", "")
    assert not Path(f"/proc/{reader}").exists() and list(shell.folder.iterdir()) == []


def test_head_ends_quietly(shell, folder):
    command = f"{sys.executable} -m vlens_cli param -m '{folder}' 'blocks.*' --values --table | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.startswith("note: ") and done.stderr.count("\n") == 1
