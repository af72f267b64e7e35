"""Calls of workers in other processes: what crosses, and what is said of a process that is gone. No engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vlens_cli.driver import carry
from vlens_cli.driver.base import Edit
from vlens_cli.driver.workers import RemoteWorkers
from vlens_cli.errors import QueryError


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
