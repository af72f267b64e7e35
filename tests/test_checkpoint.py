"""A checkpoint that is not whole, or not the config's, is refused before any engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlens_cli import checkpoint
from vlens_cli.errors import StartError
from vlens_cli.families import FAMILIES, catalog_for, check_checkpoint, load

# By every family's keys: a family reads its own.
CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "intermediate_size": 12, "vocab_size": 32, "n_layer": 2, "n_embd": 8, "n_head": 4, "ffn_dim": 12,
    "num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    "kv_lora_rank": 6, "q_lora_rank": 6, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2,
    "moe_intermediate_size": 6, "n_shared_experts": 1,
}  # fmt: skip


def config_of(family: str, **more: object) -> dict:
    return CONFIG | {"architectures": [load(family).classes[0]]} | more


def whole(config: dict) -> set[str]:
    """The tensors that the family's own rows name."""
    catalog = catalog_for(config)
    config = catalog.spec.defaults | config
    holds = {"always": True, "never": False, "maybe": False}
    names = set()
    for pattern, when in catalog.spec.checkpoint.items():
        wanted = holds[when] if when in holds else not config.get(when[1:]) if when[0] == "!" else bool(config.get(when))
        each = {pattern.replace("{i}", str(i)).replace("{e}", str(e)) for i in range(2) for e in range(3)}
        names |= each if wanted else set()
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_passes_and_any_missing_weight_is_named(family):
    config = config_of(family)
    names = whole(config)
    assert len(names) > 12
    check_checkpoint(catalog_for(config), config, names)
    for name in names - {"lm_head.weight"}:
        with pytest.raises(StartError, match=f"lacks weights that the model has: {name}"):
            check_checkpoint(catalog_for(config), config, names - {name})


@pytest.mark.parametrize(
    ("family", "more", "extra"),
    [
        ("qwen3", {"attention_bias": True}, "model.layers.0.self_attn.o_proj.bias"),
        ("llama", {}, "model.layers.1.self_attn.q_proj.bias"),
        ("mistral", {"attention_bias": True}, "model.layers.1.self_attn.q_proj.bias"),
        ("llama", {}, "model.layers.2.mlp.up_proj.weight"),
    ],
)
def test_a_weight_that_the_engine_does_not_read_is_named(family, more, extra):
    config = config_of(family, **more)
    with pytest.raises(StartError, match=f"does not read: {extra}"):
        check_checkpoint(catalog_for(config), config, whole(config) | {extra})


def test_a_tied_head_may_be_there_or_not_and_an_untied_one_must():
    tied, untied = config_of("llama", tie_word_embeddings=True), config_of("llama")
    names = whole(tied)
    assert "lm_head.weight" not in names
    check_checkpoint(catalog_for(tied), tied, names)
    check_checkpoint(catalog_for(tied), tied, names | {"lm_head.weight"})
    with pytest.raises(StartError, match="lm_head"):
        check_checkpoint(catalog_for(untied), untied, names)


def test_names_without_the_models_prefix_and_masks_are_taken():
    config = config_of("gpt2", tie_word_embeddings=True)
    bare = {name.removeprefix("transformer.") for name in whole(config)}
    check_checkpoint(catalog_for(config), config, bare | {"h.0.attn.bias"})
    with pytest.raises(StartError, match=r"lacks weights that the model has: transformer\.wpe\.weight"):
        check_checkpoint(catalog_for(config), config, bare - {"wpe.weight"})


@pytest.mark.parametrize(("family", "key"), [
    ("gpt_neox", "use_parallel_residual"), ("stablelm", "use_parallel_residual"), ("cohere", "use_qk_norm"),
    ("opt", "do_layer_norm_before"), ("falcon", "parallel_attn"),
])
def test_a_layout_that_this_version_does_not_read_is_refused(family, key):
    catalog_for(config_of(family))
    other = not load(family).when[key]
    with pytest.raises(StartError, match=f"{key} = {not other}, and config.json has {other}"):
        catalog_for(config_of(family, **{key: other}))


@pytest.mark.parametrize(("family", "key"), [("llama", "sliding_window"), ("qwen3", "logit_scale"), ("phi3", "bias")])
def test_a_key_that_only_the_engine_obeys_is_refused(family, key):
    with pytest.raises(StartError, match=key):
        catalog_for(config_of(family, **{key: 8}))
    catalog_for(config_of(family, **{key: None}))


@pytest.mark.parametrize(
    "more",
    [
        {"hidden_size": "128"}, {"num_attention_heads": "4"}, {"num_hidden_layers": 10**8}, {"vocab_size": -1},
        {"num_hidden_layers": True}, {"architectures": [1]}, {"architectures": 3}, {"hidden_size": None},
    ],
)  # fmt: skip
def test_a_config_that_makes_no_sense_is_a_start_error(more):
    with pytest.raises(StartError, match=r"config\.json"):
        catalog_for(config_of("llama") | more)


def write(path: Path, entries: dict, data: bytes) -> None:
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(begin: int, end: int) -> dict:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


def test_names_are_read_over_the_files_that_the_index_names(tmp_path):
    write(tmp_path / "a.safetensors", {"__metadata__": {"x": "y"}, "a": entry(0, 8)}, b"\0" * 8)
    write(tmp_path / "b.safetensors", {"b": entry(0, 4)}, b"\0" * 4)
    assert checkpoint.shapes(tmp_path) == {"a": (2,), "b": (1,)}
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    assert checkpoint.shapes(tmp_path) == {"a": (2,)}


def test_weights_that_are_not_safetensors_have_no_names_here(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert checkpoint.shapes(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, (10).to_bytes(8, "little") + b"{", (2).to_bytes(8, "little") + b"[]"])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(StartError, match=r"broken weight file: .*m\.safetensors"):
        checkpoint.shapes(tmp_path)


def test_a_file_that_was_cut_is_named(tmp_path):
    write(tmp_path / "m.safetensors", {"a": entry(0, 8)}, b"\0" * 7)
    with pytest.raises(StartError, match="shorter than its header says"):
        checkpoint.shapes(tmp_path)
