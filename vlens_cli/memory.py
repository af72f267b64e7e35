"""How much memory is free, who holds it, and the error that says so when an engine does not fit.

Light: nothing but the standard library; what a GPU holds is asked of nvidia-smi.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from vlens_cli.errors import StartError

SHOWN = 3
# Smaller ones are no reason.
LEAST_SHOWN = 200 * 10**6
SMI_PATIENCE = 10.0

# The code of the error.
SHORT = "out_of_memory"
# Of the messages in which torch (2.11 to 2.13), vLLM (0.26 to 0.32) and the C++ library say that memory was short.
_SHORTAGE = re.compile(r"out of memory|can(no|')t allocate memory|not enough memory|free memory on device|"
                      r"no available memory for the cache|std::bad_alloc", re.IGNORECASE)


class Holder(NamedTuple):
    """A process and the memory that it holds."""

    pid: int
    name: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {gigabytes(self.bytes)}"


class Pool(NamedTuple):
    """One memory that an engine may be put into: the machine's, or a GPU's."""

    name: str
    free: int
    holders: tuple[Holder, ...]


def gigabytes(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB"


def shortage(needed: int | None, pools: Sequence[Pool], cause: str = "") -> StartError:
    """The error of an engine that does not fit, or did not: `needed` bytes (None: not known) of each of `pools`; `cause`
    is what the system said."""
    takes = "" if needed is None else f": it takes about {gigabytes(needed)}"
    free = "; ".join(f"{gigabytes(pool.free)} of {pool.name} are free{_held(pool)}"
                     for pool in pools)
    said = f" ({cause})" if cause else ""
    return StartError(f"the engine does not fit into memory{takes}{said}; {free}", code=SHORT,
                      hint="--dtype bfloat16 or a smaller --max-len takes less")


def is_short(fault: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, says that memory was short."""
    while fault is not None:
        if isinstance(fault, MemoryError) or getattr(fault, "errno", None) == errno.ENOMEM or _SHORTAGE.search(str(fault)):
            return True
        fault = fault.__cause__ or fault.__context__
    return False


def _held(pool: Pool) -> str:
    return f", the most is held by {', '.join(map(str, pool.holders))}" if pool.holders else ""


# The machine's memory


def available() -> int:
    """Bytes that this process could still use: the machine's without swapping (man proc, MemAvailable), and no more than
    its control group and its own limits leave."""
    text = Path("/proc/meminfo").read_text()
    free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", text)[1])
    return max(0, min(free, *_group_rooms(), *_limit_rooms()))


def machine() -> Pool:
    return Pool("memory", available(), holders())


def holders() -> tuple[Holder, ...]:
    """The processes with the most resident memory."""
    found = [Holder(pid, _name(pid), resident(pid)) for pid in _pids()]
    return _largest(found)


def resident(pid: int) -> int:
    """Resident memory of a process in bytes, 0 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def resident_with_children(pid: int) -> int:
    """The same of a process and all that it has started: the workers of several ranks."""
    try:
        children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        children = []
    return resident(pid) + sum(resident_with_children(int(child)) for child in children)


def kills() -> int:
    """How many processes the system has killed for want of memory since it started."""
    try:
        found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _largest(found: list[Holder]) -> tuple[Holder, ...]:
    large = sorted(found, key=lambda one: -one.bytes)[:SHOWN]
    return tuple(one for one in large if one.bytes >= LEAST_SHOWN)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _name(pid: int) -> str:
    """The program's name; of Python's, whether it is one of ours."""
    try:
        if b"\0vlens_cli.daemon\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return "vlens engine"
        return " ".join(Path(f"/proc/{pid}/comm").read_text(errors="replace").split()) or "?"
    except OSError:
        return "?"


def _limit_rooms() -> Iterator[int]:
    """What `ulimit -v` and `ulimit -d` leave."""
    status = Path("/proc/self/status").read_text()
    for kind, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit - 1024 * int(re.search(rf"{field}:\s+(\d+)", status)[1])


def _group_rooms(root: Path = Path("/sys/fs/cgroup"), of: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """What each control group that this process is in leaves; pages of files that nobody uses count as free.

    Both layouts (kernel documentation, cgroup-v1/memory and cgroup-v2).
    """
    try:
        lines = of.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = (root, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        base, *names = files
        inner = Path(path.lstrip("/"))
        # In a container the path may be the host's, and the group itself is mounted as the root.
        yield from (room for folder in (inner, *inner.parents) if (room := _room(base / folder, *names)) is not None)


def _room(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        unused = re.search(rf"^{reclaimable} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        return int(most) - int((folder / used).read_text()) + (int(unused[1]) if unused else 0)
    except (OSError, ValueError):
        return None


# GPUs


def gpus() -> tuple[Pool, ...]:
    """The GPUs that this process may use, in its order, as nvidia-smi tells; none where that gives no answer."""
    rows = [row for row in _smi("--query-gpu=index,uuid,memory.free") if len(row) == 3]
    chosen = rows if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is None else _visible(rows, named)
    running = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory") if chosen else []
    return tuple(Pool(f"GPU {index}'s memory", _mebibytes(free), _largest(_on(uuid, running))) for index, uuid, free in chosen)


def _visible(rows: list[list[str]], named: str) -> list[list[str]]:
    """In the order named, by index or by the beginning of the uuid; the first name that is none ends the list, as CUDA
    has it."""
    chosen = []
    for name in map(str.strip, named.split(",")):
        found = [row for row in rows if name and (row[0] == name or row[1].startswith(name))]
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _on(uuid: str, running: list[list[str]]) -> list[Holder]:
    return [Holder(int(pid), os.path.basename(name) or "?", _mebibytes(used))
            for on, pid, name, used in (row for row in running if len(row) == 4) if on == uuid and pid.isdigit()]


def _mebibytes(text: str) -> int:
    return int(text) * 2**20 if text.isdigit() else 0


def _smi(query: str) -> list[list[str]]:
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              timeout=SMI_PATIENCE, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()] if done.returncode == 0 else []
