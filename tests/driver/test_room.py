"""An engine that memory does not hold is refused before it is started, and explained where it runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from vlens_cli import memory
from vlens_cli.driver import boot, room
from vlens_cli.errors import StartError
from vlens_cli.families import catalog_for
from vlens_cli.query import EngineSpec


def estimate(folder, **fields) -> int:
    config = json.loads((folder / "config.json").read_text())
    return room.needed(folder, config, boot.plan(EngineSpec(str(folder), "tiny", **fields), config, catalog_for(config)))


def test_what_an_engine_takes(tiny):
    folder = tiny("llama")
    weights = (folder / "model.safetensors").stat().st_size
    whole, half = estimate(folder), estimate(folder, dtype="bfloat16")
    kv_bytes = whole - room.OVERHEAD - weights
    assert kv_bytes > 0
    # The header is no weight.
    assert half - room.OVERHEAD == pytest.approx((whole - room.OVERHEAD) / 2, abs=20_000)


def test_what_does_not_fit_is_not_started(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1_000_000_000)
    with pytest.raises(StartError, match=r"about 2\.0 GB; 1\.0 GB of memory are free") as caught:
        with room.room_for(2_000_000_000):
            pytest.fail("an engine was started")
    assert caught.value.code == "out_of_memory"
    with room.room_for(1_000_000_000):
        pass


def test_running_out_while_starting_is_explained(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 3_000_000_000)
    with pytest.raises(StartError, match=r"about 1\.0 GB \(.*can't allocate memory.*\); 3\.0 GB of memory are free") as caught:
        with room.room_for(1_000_000_000), boot.translated():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert caught.value.code == "out_of_memory"


@pytest.mark.parametrize(("kills", "told"), [("78", "does not fit into memory"), ("77", "^a worker process")])
def test_a_worker_that_the_system_killed_for_memory_is_explained(monkeypatch, kills, told):
    monkeypatch.setattr(memory, "available", lambda: 3_000_000_000)
    monkeypatch.setattr(memory, "kills", iter(map(int, kills)).__next__)
    with pytest.raises(StartError, match=told), room.room_for(1_000_000_000):
        raise boot.worker_died(StartError, (1, -9))


def test_other_faults_pass(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 3_000_000_000)
    with pytest.raises(StartError) as caught, room.room_for(1), boot.translated():
        raise ValueError("no such architecture")
    assert caught.value.code == "engine_failed"


def test_a_gpu_counts_where_the_engine_uses_one(monkeypatch):
    monkeypatch.setattr(memory, "gpus", lambda: (memory.Pool("GPU 0's memory", 5, ()), memory.Pool("GPU 1's memory", 9, ())))
    monkeypatch.setattr(memory, "available", lambda: 3_000_000_000)
    monkeypatch.setattr(room, "_runs_on_gpu", lambda: True)
    with pytest.raises(StartError, match=r"0\.0 GB of GPU 0's memory are free$"), room.room_for(6):
        pass
    monkeypatch.setattr(room, "_runs_on_gpu", lambda: False)
    with room.room_for(6):
        pass


def test_a_shell_with_a_limit(tiny):
    command = f"ulimit -v 600000; exec {sys.executable} -m vlens_cli capture --no-daemon --json --hook hook_embed --tokens 1,2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True,
                          env=os.environ | {"VLENS_MODEL": str(tiny("llama"))}, timeout=60)
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["code"] == "out_of_memory"
    assert "GB of memory are free" in done.stderr
