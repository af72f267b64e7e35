"""How much memory is free, who holds it, and what is said where an engine does not fit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlens_cli import memory
from vlens_cli.memory import Holder, Pool

GB = 10**9


def test_what_is_available_is_some_of_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory.available() < total


@pytest.mark.parametrize("limit", ["-v", "-d"])
def test_a_limit_of_the_shell_counts(limit):
    code = f"ulimit {limit} 500000; exec {sys.executable} -c 'from vlens_cli import memory; print(memory.available())'"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < 500000 * 1024


def rooms(tmp_path: Path, lines: str) -> list[int]:
    (tmp_path / "self").write_text(lines)
    return list(memory._group_rooms(tmp_path, tmp_path / "self"))


def test_control_groups_of_the_new_kind(tmp_path):
    inner = tmp_path / "user/job"
    inner.mkdir(parents=True)
    for folder, most in ((inner, "max"), (tmp_path / "user", "1000")):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    # The root of a machine has no limit and no files for it.
    assert rooms(tmp_path, "0::/user/job\n") == [500]


def test_control_groups_of_the_old_kind(tmp_path):
    # Inside a container the path is the host's, and the group is the root.
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000\n")
    (folder / "memory.usage_in_bytes").write_text("900\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\n")
    assert rooms(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n") == [200]


def test_who_holds_memory(monkeypatch):
    monkeypatch.setattr(memory, "SHOWN", 10_000)
    code = "held = bytearray(b'x') * 300_000_000; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = {one.pid: one for one in memory.holders()}
        child.communicate(b"\n")
    assert 300_000_000 <= found[child.pid].bytes < 400_000_000
    assert found[child.pid].name.startswith("python")
    assert [one.bytes for one in found.values()] == sorted((one.bytes for one in found.values()), reverse=True)


SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) printf '0, GPU-aaaa-1, 1000\\n1, GPU-bbbb-2, 80000\\n' ;;
*) printf 'GPU-aaaa-1, 77, /usr/bin/python3, 70000\\nGPU-aaaa-1, 78, [Not Found], 10\\nGPU-bbbb-2, 79, other, [N/A]\\n' ;;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus(smi):
    first, second = memory.gpus()
    assert first == Pool("GPU 0's memory", 1000 * 2**20, (Holder(77, "python3", 70000 * 2**20),))
    assert second == Pool("GPU 1's memory", 80000 * 2**20, ())


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [("1", "1"), ("1,0", "10"), ("GPU-bbbb", "1"), ("GPU-", ""), ("", ""), ("-1", ""), ("0,7,1", "0"), (" 1 , 0 ", "10")],
)
def test_gpus_that_this_process_may_use_in_its_order(smi, monkeypatch, visible, wanted):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "".join(pool.name[4] for pool in memory.gpus()) == wanted


@pytest.mark.parametrize("script", [None, "#!/bin/sh\nexit 9\n", "#!/bin/sh\necho nonsense\n"])
def test_without_a_gpu_that_answers(tmp_path, monkeypatch, script):
    monkeypatch.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}:/usr/bin:/bin")
    if script:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert memory.gpus() == ()


def test_what_is_said():
    pools = [Pool("memory", 2 * GB, (Holder(7, "chrome", 3 * GB), Holder(8, "vlens engine", GB)))]
    error = memory.shortage(12 * GB, pools)
    assert (error.code, error.exit_code) == ("out_of_memory", 3)
    assert error.message == ("the engine does not fit into memory: it takes about 12.0 GB; 2.0 GB of memory are free, the "
                             "most is held by chrome (pid 7) 3.0 GB, vlens engine (pid 8) 1.0 GB")
    assert "--dtype bfloat16" in error.hint
    unknown = memory.shortage(None, [Pool("GPU 0's memory", GB, ())], "CUDA error")
    assert unknown.message == "the engine does not fit into memory (CUDA error); 1.0 GB of GPU 0's memory are free"


def raised_from(inner: Exception) -> Exception:
    try:
        raise RuntimeError("the engine core did not start") from inner
    except RuntimeError as fault:
        return fault


@pytest.mark.parametrize(
    "fault",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                     "to allocate 40000000000 bytes. Error code 12 (Cannot allocate memory)"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        ValueError("Free memory on device (3.1/139.8 GiB) on startup is less than desired GPU memory utilization"),
        raised_from(MemoryError()),
    ],
)
def test_shortages_are_known(fault):
    assert memory.is_short(fault)


def test_other_faults_are_no_shortage():
    assert not memory.is_short(raised_from(ValueError("no such architecture")))
