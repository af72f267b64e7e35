#!/usr/bin/env python3
"""Tiny models with random weights, which both transformers and vLLM's CPU engine load.

    tiny.py OUT FAMILY[:VARIANT]...        write OUT/FAMILY[-VARIANT] each

Four layers, d_model 128, four query heads and two kv heads of 32, d_mlp 256, vocabulary 512, float32, seed 0.
Norm weights and biases are moved off their defaults, so that a forgotten weight or bias shows.

A new family is a row of `FAMILIES`. Tests call `tiny_model`, which keeps what it made in the test cache
(`$VLENS_TEST_CACHE`, else `~/.cache/vlens-tests`); only the script's own process imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

# Family: what differs from BASE; `...` takes a setting away (gpt2 would keep a number of kv heads without meaning it).
# Windows are shorter than the tests' prompts, and softcaps and multipliers far from 1, so that a forgotten one shows.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {},
    "gemma": {"head_dim": 32},
    "gemma2": {
        "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "decoder_sparse_step": 1, "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4},
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512, "num_key_value_heads": ...},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128, "num_key_value_heads": ...},
    "gpt_neox": {"num_key_value_heads": ...},
    "olmo2": {},
    "starcoder2": {"sliding_window": 16},
    "stablelm": {"use_qkv_bias": True},
    "cohere": {},
    "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    },
    "glm4": {"head_dim": 32, "attention_bias": True},
    "bloom": {"n_layer": 4, "n_head": 4, "num_key_value_heads": ...},
    "falcon": {"num_kv_heads": 1, "num_key_value_heads": ...},
    "gpt_oss": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "deepseek_v2": {
        "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32,
        "v_head_dim": 64, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
}

# Those that no file of vlens names; in vLLM 0.32 the first has a class of its own, the second runs through transformers'.
UNNAMED: dict[str, dict[str, Any]] = {"ernie4_5": {}, "helium": {"head_dim": 32}}

# Variant: what it is.
VARIANTS = {
    "long": "rotation of Llama 3, whose prompts are longer than the length that it stretches",
    "odd_vocab": "a vocabulary that is no multiple of 64",
    "one_kv": "one key and value head for all query heads",
    "zero_norm": "every seventh entry of every norm weight is zero",
    "bf16": "the same weights rounded to bfloat16",
    "direct_queries": "queries that are not latent",
    "tokenizer": "with a byte-level BPE tokenizer (pad 0, BOS 1, EOS 2; it prepends BOS) and a chat template",
}
ZERO_EVERY = 7
SETTINGS: dict[str, dict[str, Any]] = {
    "long": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "odd_vocab": {"vocab_size": 500},
    "direct_queries": {"q_lora_rank": None},
    "one_kv": {"num_key_value_heads": 1},
}
# Variants that tests ask of another family than llama.
OF_FAMILY = {"direct_queries": "deepseek_v2"}

KEEP_SECONDS = 7 * 24 * 3600

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

TEXT = """
The Eiffel Tower is located in the city of Paris. The Colosseum is located in the city of Rome.
The Eiffel Tower is in France, and the Colosseum is in Italy. Where is the Eiffel Tower? It is in Paris.
Where is the Colosseum? It is in Rome. The capital of France is Paris; the capital of Italy is Rome.
The capital of Japan is Tokyo, the capital of Spain is Madrid, and the capital of Germany is Berlin.
When Mary and John went to the store, John gave a drink to Mary. When John and Mary went to the park,
Mary gave a book to John. The cat sat on the mat, and the dog lay on the rug. The keys to the cabinet are here.
A language model reads a text from left to right and says how likely each next token is. Each layer reads the
residual stream and adds what it found. One token, two tokens, three tokens; one, two, three, four, five, six.
What is in the stream after this layer? The answer is a row of numbers, one for each position of the text.
She said that she would come, but he said that he would not. They were there before the others were there.
"""


def cache_folder() -> Path:
    """The folder outside the tree that keeps what tests make once: models and references."""
    given = os.environ.get("VLENS_TEST_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "vlens-tests"


def delete_old(folder: Path, pattern: str) -> None:
    """Delete what no test has used for `KEEP_SECONDS`; a use sets the modification time."""
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another test process was first
            if time.time() - path.stat().st_mtime > KEEP_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def fingerprint() -> str:
    """A hash of what decides the bytes of a model: this text, which holds the settings, and the libraries."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "torch", "tokenizers")]
    return hashlib.sha256("\n".join([Path(__file__).read_text(), *versions]).encode()).hexdigest()[:12]


def tiny_model(family: str, variant: str | None = None) -> Path:
    """The folder of a tiny model. Where the cache lacks it, a process of its own makes it and the usual others: most of
    the time goes into imports."""
    if family not in FAMILIES | UNNAMED:
        raise ValueError(f"no tiny model of family {family!r}; there are {', '.join(FAMILIES | UNNAMED)}")
    if variant is not None and variant not in VARIANTS:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    out = cache_folder() / f"tiny-{fingerprint()}"
    folder = out / folder_name(family, variant)
    if folder.is_dir():
        os.utime(out)
    else:
        delete_old(cache_folder(), "tiny-*")
        asked = family if variant is None else f"{family}:{variant}"
        usual = [*FAMILIES, *UNNAMED, *(f"{OF_FAMILY.get(name, 'llama')}:{name}" for name in VARIANTS)]
        command = [sys.executable, __file__, str(out), *dict.fromkeys([asked, *usual])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"tiny.py {asked} failed:\n{done.stderr}")
    return folder


def folder_name(family: str, variant: str | None) -> str:
    return family if variant is None else f"{family}-{variant}"


def write(out: Path, family: str, variant: str | None) -> Path:
    """Write one model whole or not at all: into a temporary folder beside it, then renamed."""
    out.mkdir(parents=True, exist_ok=True)
    folder = out / folder_name(family, variant)
    if folder.is_dir():
        return folder
    temporary = Path(tempfile.mkdtemp(dir=out, prefix=f".{folder.name}-"))
    try:
        build(temporary, family, variant)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def build(folder: Path, family: str, variant: str | None) -> None:
    """Make the model and save it. Seed, and order of the random draws, are those of the project's first tiny models."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = {key: value for key, value in {**BASE, **(FAMILIES | UNNAMED)[family], **SETTINGS.get(variant, {})}.items()
                if value is not ...}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.9 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        if variant == "zero_norm":
            norms = [p for name, p in model.named_parameters() if name.split(".")[-2].endswith("norm")]
            assert len(norms) > 2 * BASE["num_hidden_layers"], f"not every norm of {family} was found"
            for parameter in norms:
                parameter[::ZERO_EVERY] = 0
    if variant == "bf16":
        model.to(torch.bfloat16)
    model.save_pretrained(folder)
    if variant == "tokenizer":
        save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Train the small byte-level BPE on `TEXT` and save it beside the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE["vocab_size"],
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT.splitlines(), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BASE["bos_token_id"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=BASE["max_position_embeddings"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # The class's older name, which every transformers that a supported vLLM comes with can load.
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2))


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        sys.exit(__doc__)
    for name in ("torchvision", "torchaudio", "torchcodec"):  # not needed; broken beside some builds of torch
        sys.modules[name] = None  # type: ignore[assignment]
    for asked in arguments[1:]:
        family, _, variant = asked.partition(":")
        print(write(Path(arguments[0]), family, variant or None))


if __name__ == "__main__":
    main(sys.argv[1:])
