"""What a session says of a query: before any engine starts, and in its reply."""

from __future__ import annotations

import io
import json
import shutil
import sys
import types

import pytest
import torch
from safetensors.torch import load
from vlens_cli import memory
from vlens_cli.driver import blob, session
from vlens_cli.errors import PromptError, StartError, UsageError
from vlens_cli.query import CaptureQuery, EngineSpec, Prompt

TEXT = "The Eiffel Tower is in the city of Paris."


@pytest.fixture
def opened(tiny):
    """A session that must not start an engine."""

    def open_one(family: str = "llama", variant: str | None = "tokenizer", change: dict | None = None, **fields):
        folder = tiny(family, variant)
        config = json.loads((folder / "config.json").read_text()) | (change or {})
        one = session.Session(EngineSpec(model=str(folder), name="tiny", **fields), config)
        one.driver = lambda progress: pytest.fail("an engine was started")
        return one

    return open_one


def ask(one: session.Session, *hooks: str, prompts=(Prompt(text=TEXT),), **fields):
    return one.answer(CaptureQuery(prompts=prompts, hooks=hooks or ("logits",), **fields), lambda text: None)


def test_a_capture_that_memory_cannot_hold_is_refused_with_both_numbers(opened, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(UsageError, match=r"takes .* GB, and 0\.0 GB"):
        ask(opened(), "logits[pos=0]")
    monkeypatch.setattr(memory, "available", lambda: 4 * 512 * 3)
    with pytest.raises(pytest.fail.Exception, match="engine was started"):
        ask(opened(), "logits[pos=0]")


@pytest.mark.parametrize("written", ["model.safetensors", "model-2.safetensors", None])
def test_files_that_change_while_the_engine_reads_them_are_refused(tiny, tmp_path, monkeypatch, written):
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    closed = []

    class Reads:
        asleep = False

        def __init__(self, *_):
            if written:
                (folder / written).touch()

        def close(self):
            closed.append(self)

    monkeypatch.setitem(sys.modules, "vlens_cli.driver.graph.driver", types.SimpleNamespace(driver_for=Reads))
    one = session.Session(EngineSpec(str(folder), "tiny"), json.loads((folder / "config.json").read_text()))
    if written is None:
        assert isinstance(one.driver(lambda text: None), Reads)
        return
    with pytest.raises(StartError, match="changed while the engine read them") as caught:
        one.driver(lambda text: None)
    assert caught.value.code == "model_changed" and len(closed) == 1 and not one.started


def test_a_prompt_longer_than_one_chunk_is_refused_only_when_asked(opened):
    long = (Prompt(tokens=tuple(range(3, 33))),)
    with pytest.raises(PromptError, match="30 tokens needs more than one forward of 16"):
        ask(opened(chunk=16), prompts=long, one_chunk=True)
    with pytest.raises(pytest.fail.Exception, match="engine was started"):
        ask(opened(chunk=16), prompts=long)


def test_a_length_beyond_the_model_is_refused(opened):
    with pytest.raises(UsageError, match="--max-len 513 is more than this model takes: 512"):
        opened(max_len=513)


def test_a_rotation_that_the_engine_computes_otherwise_is_refused(opened):
    with pytest.raises(StartError, match="dynamic"):
        opened(change={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}})


def test_with_two_sets_of_rotary_factors_no_prompt_gets_the_wrong_one(opened):
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 1e4}
    short = opened(change={"rope_parameters": rope})
    assert short.plan.max_len == 63 and "63" in short.plan.notes[0]
    with pytest.raises(PromptError, match="64 tokens is longer"):
        ask(short, prompts=(Prompt(tokens=(5,) * 64),))
    long = opened(change={"rope_parameters": rope}, max_len=200)
    with pytest.raises(PromptError, match="at least 65 are needed"):
        ask(long, prompts=(Prompt(tokens=(5,) * 64),))
    with pytest.raises(pytest.fail.Exception, match="engine was started"):
        ask(long, prompts=(Prompt(tokens=(5,) * 65),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_written_file_is_what_the_safetensors_package_reads(dtype):
    tensors = {"a": torch.randn(3, 4).to(dtype), "empty": torch.empty(0, 4, dtype=dtype), "é": torch.ones(1).to(dtype)}
    file = io.BytesIO()
    saved = blob.write_safetensors(file, tensors, {"note": "\"ü\""})
    assert saved == blob.Saved(3, len(file.getvalue()))
    read = load(file.getvalue())
    assert read.keys() == tensors.keys() and all(torch.equal(read[key], tensors[key]) for key in read)
    assert int.from_bytes(file.getvalue()[:8], "little") % 8 == 0
