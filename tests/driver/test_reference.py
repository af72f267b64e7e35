"""The reference against computations that share nothing with it: so that it cannot rot.

This process imports no transformers: after an engine has started in it, that could fail.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tiny as settings
from compare import assert_close, logit_error, of_prompt, reference, reference_file, relative_error, worst_row
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import ZERO_EVERY
from tokenizers import Tokenizer

FAMILIES = list(settings.FAMILIES)
PROMPTS = [[1, 77, 300, 5, 5, 411, 9, 28, 130, 64], [3, 500, 42]]
HERE = Path(__file__).parent

BY_TRANSFORMERS = """
import json, re, sys
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
import reference

out, tokens, tokenizer, *folders = sys.argv[1:]
tokens, tensors, facts = json.loads(tokens), {}, {}

for folder in folders:  # hidden states and logits, with the default attention, which knows no softcap
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if getattr(model.config, "attn_logit_softcapping", None) or model.config.model_type == "gpt_oss":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        answer = model(torch.tensor([tokens]), output_hidden_states=True)
    for i, state in enumerate(answer.hidden_states):
        tensors[f"{model.config.model_type}/{i}"] = state[0].clone()
    tensors[f"{model.config.model_type}/logits"] = answer.logits[0].clone()
save_file(tensors, out)

def refuses(probe, values, name):
    try:
        reference.check(probe, {**values, name: values[name].roll(1, 0)})
    except AssertionError:
        return True
    return False
facts["refused"] = {}
for folder in folders:
    probe = reference.Probe(reference.load(folder, torch.float32))
    values = probe.run(tokens)
    reference.check(probe, values)
    some = {}  # the first of each kind: not every layer has all of them
    for name in values:
        some.setdefault(re.sub("^blocks.[0-9]", "", name), name)
    facts["refused"][folder] = {name: refuses(probe, values, name) for name in some.values()}
    probe.close()

t = AutoTokenizer.from_pretrained(tokenizer)
text = facts["text"] = "The Eiffel Tower is in Paris, \\u00e9t\\u00e9!"
facts["ids"] = t(text).input_ids
facts["back"] = t.decode(facts["ids"], skip_special_tokens=True)
facts["special"] = [t.pad_token_id, t.bos_token_id, t.eos_token_id]
facts["size"] = len(t)
facts["chat"] = t.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def by_transformers(tiny, tmp_path_factory) -> dict[str, Any]:
    """What only a process with transformers in it can say; one, since its imports take the longest."""
    out = tmp_path_factory.mktemp("transformers") / "plain.safetensors"
    folders = [str(tiny(family)) for family in FAMILIES]
    command = [sys.executable, "-c", BY_TRANSFORMERS, str(out), json.dumps(PROMPTS[0]), str(tiny("llama", "tokenizer"))]
    done = subprocess.run([*command, *folders], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "tensors": load_file(out)}


def plain_llama(folder: Path, tokens: list[int]) -> dict[str, torch.Tensor]:
    """The tiny llama by the formulas of its paper, in float64, from the file of weights: no modules, no hooks."""
    w = {name.removeprefix("model."): value.double() for name, value in load_file(folder / "model.safetensors").items()}
    eps, theta, heads, kv_heads, d_head = 1e-6, 10000.0, 4, 2, 32
    out: dict[str, torch.Tensor] = {}

    def norm(name: str, weight: str, x: torch.Tensor) -> torch.Tensor:
        out[f"{name}.hook_scale"] = ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5
        out[f"{name}.hook_normalized"] = x / out[f"{name}.hook_scale"]
        out[f"{name}.hook_out"] = out[f"{name}.hook_normalized"] * w[weight]
        return out[f"{name}.hook_out"]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = x.clone()
        for position in range(len(x)):
            for j in range(d_head // 2):
                angle = position * theta ** (-2 * j / d_head)
                a, b = x[position, :, j], x[position, :, j + d_head // 2]
                turned[position, :, j] = a * math.cos(angle) - b * math.sin(angle)
                turned[position, :, j + d_head // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    x = out["hook_embed"] = w["embed_tokens.weight"][tokens]
    for i in range(4):
        at, lw = f"blocks.{i}", f"layers.{i}"
        out[f"{at}.hook_resid_pre"] = x
        h = norm(f"{at}.ln1", f"{lw}.input_layernorm.weight", x)
        q = (h @ w[f"{lw}.self_attn.q_proj.weight"].T).reshape(-1, heads, d_head)
        k = (h @ w[f"{lw}.self_attn.k_proj.weight"].T).reshape(-1, kv_heads, d_head)
        v = (h @ w[f"{lw}.self_attn.v_proj.weight"].T).reshape(-1, kv_heads, d_head)
        rot_q, rot_k = rotate(q), rotate(k)
        z = torch.zeros_like(q)
        lowest = torch.finfo(torch.float32).min
        table = torch.full((heads, len(tokens), len(tokens)), lowest, dtype=torch.float64)
        pattern, result = torch.zeros_like(table), torch.zeros(len(tokens), heads, 128, dtype=torch.float64)
        W_O = w[f"{lw}.self_attn.o_proj.weight"]
        for position in range(len(tokens)):
            for head in range(heads):
                kv = head * kv_heads // heads
                scores = rot_k[: position + 1, kv] @ rot_q[position, head] / d_head**0.5
                z[position, head] = scores.softmax(0) @ v[: position + 1, kv]
                table[head, position, : position + 1] = scores
                pattern[head, position, : position + 1] = scores.exp() / scores.exp().sum()
                result[position, head] = W_O[:, head * d_head : (head + 1) * d_head] @ z[position, head]
        out |= {f"{at}.attn.hook_{name}": value for name, value in
                {"q": q, "k": k, "v": v, "rot_q": rot_q, "rot_k": rot_k, "z": z, "attn_scores": table,
                 "pattern": pattern, "result": result}.items()}
        out[f"{at}.hook_attn_out"] = z.reshape(len(tokens), -1) @ w[f"{lw}.self_attn.o_proj.weight"].T
        x = out[f"{at}.hook_resid_mid"] = x + out[f"{at}.hook_attn_out"]
        h = norm(f"{at}.ln2", f"{lw}.post_attention_layernorm.weight", x)
        pre = out[f"{at}.mlp.hook_pre"] = h @ w[f"{lw}.mlp.gate_proj.weight"].T
        up = out[f"{at}.mlp.hook_pre_linear"] = h @ w[f"{lw}.mlp.up_proj.weight"].T
        post = out[f"{at}.mlp.hook_post"] = pre / (1 + (-pre).exp()) * up
        out[f"{at}.hook_mlp_out"] = post @ w[f"{lw}.mlp.down_proj.weight"].T
        x = out[f"{at}.hook_resid_post"] = x + out[f"{at}.hook_mlp_out"]
    out["unembed.hook_out"] = norm("ln_final", "norm.weight", x) @ w["lm_head.weight"].T
    return out


@pytest.mark.parametrize("variant", [None, "zero_norm"])
def test_every_hook_of_llama_equals_a_plain_computation(tiny, variant):
    folder = tiny("llama", variant)
    tensors = reference(folder, PROMPTS)
    for p, tokens in enumerate(PROMPTS):
        want, got = plain_llama(folder, tokens), of_prompt(tensors, p)
        assert set(got) == set(want)
        assert_close(got, want, whole=3e-6, row=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_logits_equal_transformers_own(tiny, by_transformers, family):
    got, plain = of_prompt(reference(tiny(family), PROMPTS), 0), by_transformers["tensors"]
    names = {f"blocks.{i}.hook_resid_pre": str(i) for i in range(4)}  # its last state is after the final norm
    names |= {"ln_final.hook_out": "4", "unembed.hook_out": "logits"}
    want = {name: plain[f"{family}/{key}"] for name, key in names.items()}
    assert_close({name: got[name] for name in names}, want, whole=2e-6, row=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_identities_hold_and_are_recorded(tiny, family):
    with safe_open(reference_file(tiny(family), PROMPTS), "pt") as file:
        errors = json.loads(file.metadata()["identities"])
    assert len(errors) >= 17 and max(errors.values()) <= 1e-6


def test_a_float64_run_agrees_with_float32(tiny):
    got, want = reference(tiny("qwen3"), PROMPTS), reference(tiny("qwen3"), PROMPTS, fp64=True)
    assert set(got) == set(want)
    assert_close(got, want, whole=3e-6, row=1e-5)


def test_bfloat16_is_kept_as_it_is(tiny):
    tensors = reference(tiny("llama", "bf16"), PROMPTS[1:], dtype="bfloat16")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}


def test_normalized_is_finite_where_the_norms_weight_is_zero(tiny):
    values = of_prompt(reference(tiny("llama", "zero_norm"), PROMPTS), 0)
    for name in ("blocks.0.ln1", "blocks.3.ln2", "ln_final"):
        assert (values[f"{name}.hook_out"][:, ::ZERO_EVERY] == 0).all()
        assert (values[f"{name}.hook_normalized"][:, ::ZERO_EVERY] != 0).all()


def test_every_hook_is_under_some_identity(by_transformers):
    """With its rows shifted by one position, any single value of a kind, in a layer or outside them, is refused."""
    for folder, refused in by_transformers["refused"].items():
        assert len(refused) >= 5 + 15
        assert [name for name in refused if not refused[name]] == [], folder


def test_a_family_without_a_row_is_refused(tiny, tmp_path):
    other = shutil.copytree(tiny("llama"), tmp_path / "olmo")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "olmo", "architectures": ["OlmoForCausalLM"]}))
    with pytest.raises(RuntimeError, match="no row for the family 'olmo'"):
        reference_file(other, PROMPTS)


def test_a_reference_is_run_once(tiny):
    first = reference_file(tiny("llama"), PROMPTS)
    inode = first.stat().st_ino
    again = reference_file(tiny("llama"), PROMPTS)
    assert (again, again.stat().st_ino) == (first, inode)
    assert reference_file(tiny("llama"), PROMPTS[:1]) != first


def test_tokenizer_of_the_tiny_model(tiny, by_transformers):
    facts, ids = by_transformers, by_transformers["ids"]
    assert facts["special"] == [0, 1, 2]
    assert ids[0] == 1 and 1 not in ids[1:] and max(ids) < facts["size"] <= 512
    assert facts["back"] == facts["text"]
    assert len(ids) < len(facts["text"]) / 2, "no merges"
    assert facts["chat"] == "<s>[user] Hi\n[assistant] "
    # The template's BOS and the tokenizer's own: what a caller must not feed unseen.
    assert Tokenizer.from_file(str(tiny("llama", "tokenizer") / "tokenizer.json")).encode(facts["chat"]).ids[:2] == [1, 1]


class TestCompare:
    want = {"a": torch.tensor([[3.0, 4.0], [0.0, 1.0]])}

    def test_errors_are_relative_to_the_reference(self):
        got = torch.tensor([[3.0, 4.0], [0.0, 1.1]])
        assert relative_error(got, self.want["a"]) == pytest.approx(0.1 / 26**0.5, rel=1e-5)
        row, error = worst_row(got, self.want["a"])
        assert (row, error) == (1, pytest.approx(0.1, rel=1e-5))
        assert logit_error(got, self.want["a"]) == pytest.approx(0.1 / 4, rel=1e-5)

    def test_numpy_bfloat16_and_zero_references(self):
        assert relative_error(self.want["a"].numpy(), self.want["a"].bfloat16()) == 0
        assert relative_error(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
        assert relative_error(torch.ones(2, 2), torch.zeros(2, 2)) == math.inf

    @pytest.mark.parametrize(
        ("got", "message"),
        [
            ({"a": torch.tensor([[3.0, 4.0], [0.0, 1.1]])}, "a: row 1"),
            ({"a": torch.full((2, 2), math.nan)}, "a: relative error nan"),
            ({"a": torch.ones(1, 2)}, r"a: shape \(1, 2\)"),
            ({"b": torch.ones(2, 2)}, "b: the reference has no such hook"),
            ({}, "nothing to compare"),
        ],
    )
    def test_a_fault_names_the_hook(self, got, message):
        assert_close(self.want, self.want)
        with pytest.raises(AssertionError, match=message):
            assert_close(got, self.want)

    def test_logits_are_also_measured_by_the_largest(self):
        want = {"0/unembed.hook_out": torch.ones(1, 10_000)}
        got = {"0/unembed.hook_out": want["0/unembed.hook_out"].clone()}
        got["0/unembed.hook_out"][0, 0] += 1e-4
        with pytest.raises(AssertionError, match="of the largest logit"):
            assert_close(got, want)
