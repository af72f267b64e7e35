"""Calls of workers in other processes: what crosses, and what is said of a process that is gone. No engine."""

from __future__ import annotations

import json
import time
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from vlens_cli.driver import boot, carry, internals
from vlens_cli.driver.base import Edit
from vlens_cli.driver.engine import Engine
from vlens_cli.driver.vllm_driver import VLLMDriver
from vlens_cli.driver.workers import RemoteWorkers
from vlens_cli.errors import QueryError, StartError
from vlens_cli.families import catalog_for
from vlens_cli.query import EngineSpec


class Lost(RuntimeError):
    """What an executor raises that has lost a process."""


def workers(calls: list, is_failed: bool = False, fault: type[Exception] = Lost) -> RemoteWorkers:
    def rpc(method: str, args: tuple):
        if method == "vlens_sees":
            return [True]
        calls.append(args[0])
        raise fault("cancelled")

    executor = SimpleNamespace(is_failed=is_failed)
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor))
    return RemoteWorkers(SimpleNamespace(collective_rpc=rpc, llm_engine=SimpleNamespace(engine_core=core)), 1, 1)


def test_a_call_of_a_worker_that_is_gone_says_so():
    calls: list = []
    found = workers(calls, is_failed=True)
    with pytest.raises(QueryError, match="a worker process of the engine has ended") as caught:
        found.call("vlens_lens", torch.ones(2))
    assert (calls, caught.value.code, found.died) == (["vlens_lens"], "worker_died", True)


@pytest.fixture
def vllm():
    boot.prepare()
    import vllm

    return vllm


def test_a_worker_that_was_killed_is_named_with_its_signal(vllm, monkeypatch):
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    monkeypatch.setattr(internals, "_ended", {})
    internals.note_ended_workers()
    internals.note_ended_workers()
    alive, killed = (get_context("spawn").Process(target=time.sleep, args=(60,)) for _ in range(2))
    alive.start(), killed.start()
    killed.kill()
    MultiprocExecutor._ensure_worker_termination([alive, killed])
    # The one that the executor has ended itself is none of them.
    assert alive.exitcode is not None and internals.killed_worker() == (1, -9)
    with pytest.raises(QueryError, match=r"has ended: rank 1, killed by signal 9 \(Killed\); the engine ends too"):
        workers([], is_failed=True).call("vlens_lens")


def test_of_workers_that_fell_together_the_killed_one_is_named(monkeypatch):
    monkeypatch.setattr(internals, "_ended", {0: -6, 1: -9, 2: 1})
    assert internals.killed_worker() == (1, -9)
    monkeypatch.setattr(internals, "_ended", {0: 1})
    assert internals.killed_worker() is None


def test_a_worker_that_is_killed_while_the_engine_starts_is_the_start_s_error(vllm, tiny, monkeypatch):
    def started(**arguments):
        internals._ended[1] = -9
        raise Exception("WorkerProc initialization failed due to an exception in a background process.")

    monkeypatch.setattr(vllm, "LLM", started)
    config = json.loads((tiny("llama") / "config.json").read_text())
    spec = EngineSpec(str(tiny("llama")), "llama", tp=2)
    with pytest.raises(StartError, match=r"has ended: rank 1, killed by signal 9") as caught:
        boot.boot(spec, boot.plan(spec, config, catalog_for(config)))
    assert caught.value.code == "worker_died" and "lack of memory" in caught.value.hint


def test_a_question_of_the_start_that_fails_is_the_start_s_error(tiny, monkeypatch):
    ended = []

    def lost(self):
        raise QueryError("a worker process of the engine has ended", hint="look", code="worker_died")

    monkeypatch.setattr(Engine, "__init__", lambda self, *args: setattr(self, "_llm", "llm"))
    monkeypatch.setattr(VLLMDriver, "_find_points", lost)
    monkeypatch.setattr(boot, "shut_down", ended.append)
    with pytest.raises(StartError, match="a worker process") as caught:
        VLLMDriver(EngineSpec(str(tiny("llama")), "llama"), None, None)
    assert (caught.value.code, caught.value.hint, ended) == ("worker_died", "look", ["llm"])


def test_what_ray_says_of_a_lost_process_is_remembered():
    found = workers([], fault=type("ActorDiedError", (Exception,), {}))
    assert not found.died
    with pytest.raises(QueryError, match="has ended"):
        found.call("vlens_take", "key")
    assert found.died


def test_another_fault_is_what_it_is():
    found = workers([])
    with pytest.raises(Lost):
        found.call("vlens_take", "key")
    assert not found.died


@pytest.mark.parametrize("through", ["file", "bytes"])
def test_what_is_carried_comes_as_it_was(tmp_path, through):
    row = torch.randn(6).to(torch.bfloat16)
    edit = Edit("blocks.0.hook_mlp_out", (1, 2), None, (0,), keep=0.0, value=row[2:4], along=-1.0)
    value = {"a": (1, None, True, 2.5, "text"), "nested": {"tensor": [torch.arange(3), torch.empty(0), torch.tensor(4.0)]}, "edits": (edit,)}
    if through == "file":
        carry.write(tmp_path / "f", value)
        got = carry.read(tmp_path / "f")
    else:
        got = carry.from_bytes(carry.to_bytes(value))
    assert got["a"] == value["a"]
    for one, other in zip(got["nested"]["tensor"], value["nested"]["tensor"], strict=True):
        assert one.shape == other.shape and torch.equal(one, other)
    (back,) = got["edits"]
    assert (back.name, back.positions, back.dims, back.keep, back.along) == (edit.name, (1, 2), (0,), 0.0, -1.0)
    assert torch.equal(back.value, row[2:4]) and back.value.dtype == torch.bfloat16
