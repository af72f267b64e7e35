"""What a session answers to `vlens param`: live weights, the checkpoint's beside them, and both in one file."""

from __future__ import annotations

import io
import json

import pytest
import torch
from safetensors.torch import load, load_file
from vlens_cli.driver import session
from vlens_cli.errors import UsageError
from vlens_cli.query import EngineSpec, ParamQuery

Q, QKV = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture
def ask(engines, tiny):
    """ask(*names, file=None, dtype=None, ...): the reply about the tiny llama."""

    def ask_one(*names: str, file=None, family: str = "llama", variant=None, dtype=None, **fields):
        folder = tiny(family, variant)
        one = session.Session(EngineSpec(model=str(folder), name="tiny", dtype=dtype), json.loads(
            (folder / "config.json").read_text()))  # fmt: skip
        one.driver = lambda progress: engines.open(folder, dtype=dtype)
        return one.answer(ParamQuery(names=names, **fields), lambda text: None, file)

    return ask_one


@pytest.fixture
def stored(tiny) -> dict[str, torch.Tensor]:
    return load_file(tiny("llama") / "model.safetensors")


def test_a_live_weight_has_the_values_of_the_checkpoint(ask, stored):
    (entry,) = ask("blocks.1.attn.W_Q[head=2]", live=True, values=True).body["params"]
    assert torch.equal(torch.tensor(entry["values"]), stored[Q].view(4, 32, 128)[2:3].transpose(1, 2))
    assert (entry["source"], entry["dtype"], entry["shape"]) == ("engine", "float32", [1, 128, 32])
    assert entry["selected"] == {"head": [2]} and entry["norm"] == pytest.approx(float(stored[Q][64:96].double().norm()))


def test_only_what_the_engine_alone_has_is_asked_of_it_and_one_file_has_both(ask, stored):
    file = io.BytesIO()
    reply = ask("blocks.1.attn.W_Q", QKV, file=file)
    assert [entry["source"] for entry in reply.body["params"]] == ["checkpoint", "engine"]
    found = load(file.getvalue())
    assert reply.saved.tensors == 2 and reply.saved.bytes == len(file.getvalue())
    assert torch.equal(found["blocks.1.attn.W_Q"], stored[Q].view(4, 32, 128).transpose(1, 2))
    assert torch.equal(found[QKV], torch.cat([stored[Q.replace("q_proj", f"{part}_proj")] for part in "qkv"]))


def test_live_weights_have_the_engines_dtype(ask, stored):
    file = io.BytesIO()
    (entry,) = ask(Q, live=True, dtype="bfloat16", file=file).body["params"]
    assert entry["dtype"] == "bfloat16" and torch.equal(load(file.getvalue())[Q], stored[Q].bfloat16())


def test_a_live_weight_is_compared_with_a_checkpoint(ask, stored, tiny):
    (entry,) = ask(Q, live=True, compare=str(tiny("llama", "bf16"))).body["params"]
    off = stored[Q].double() - stored[Q].bfloat16().double()
    assert entry["compare"]["difference_norm"] == pytest.approx(float(off.norm()), rel=1e-9)


def test_experts_are_given_one_by_one_and_all(ask, tiny):
    file = load_file(tiny("mixtral") / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
    names = ("blocks.0.mlp.experts.W_in[expert=3]", name)
    whole, one = ask(*names, family="mixtral", live=True, values=True).body["params"]
    assert torch.equal(torch.tensor(whole["values"])[0], file[name].T) and whole["shape"] == [1, 128, 256]
    assert torch.equal(torch.tensor(one["values"]), file[name])


def test_what_the_engine_cannot_say_is_refused(ask, monkeypatch):
    with pytest.raises(UsageError, match="no blocks.1.attn.b_Q"):
        ask("blocks.1.attn.b_Q", live=True)
    monkeypatch.setattr(session.Session, "check_memory", lambda self, size: pytest.fail(f"{size} bytes"))
    with pytest.raises(pytest.fail.Exception, match=f"{4 * 128 * 128} bytes"):
        ask(Q, live=True)
