"""The command line as its user meets it: real processes, real engines, and what they leave behind.

Everything is as the user has it but the `VLENS_*` variables, which are cleared, and the folder for temporary files,
which is the run's own, so that what is left in it can be told from what others leave.
"""

from __future__ import annotations

import glob
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VLENS = [sys.executable, "-m", "vlens_cli"]
MARK = "E2E_RUN"  # inherited by whatever a run starts
PATIENCE = 240


@dataclass(frozen=True)
class Run:
    """A command that ended. `cpu` counts its processor seconds; `left` names what it left behind: processes, temporary
    files, sockets, shared memory."""

    code: int
    out: str
    err: str
    seconds: float
    cpu: float
    left: list[str] = field(default_factory=list)

    @property
    def body(self) -> Any:
        """Standard output, which is one JSON document and a newline."""
        return json.loads(self.out)


class Traces:
    """What a run leaves: made before it starts, asked after it ended."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        # Short: the path of a socket must be.
        self.temporary = Path(tempfile.mkdtemp(prefix="e2e-"))
        self._shared = self._common()

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("VLENS_", "_VLENS"))}
        path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
        ours = {"PYTHONPATH": path, MARK: self.mark, "TMPDIR": str(self.temporary), "HF_HUB_OFFLINE": "1"}
        return kept | ours | (more or {})

    def processes(self) -> list[int]:
        """Those that the run started and that are not gone."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it ended, or is another user's
                continue
        return found

    def left(self) -> list[str]:
        # Shared memory is everybody's: what another engine has there goes when that engine does.
        """Asked once: it takes the temporary files away."""
        end = time.monotonic() + 30
        while any(not text.startswith("temporary") for text in self._found()) and time.monotonic() < end:
            time.sleep(0.5)
        found = self._found()
        shutil.rmtree(self.temporary, ignore_errors=True)
        return found

    def _found(self) -> list[str]:
        own = [path.relative_to(self.temporary) for path in self.temporary.rglob("*") if not path.is_dir()]
        return [
            *(f"process {pid}" for pid in self.processes()),
            *(f"temporary file {path}" for path in own),  # sockets are there too
            *sorted(self._common() - self._shared),
        ]

    @staticmethod
    def _common() -> set[str]:
        """Not /tmp: other engines come and go there, and this run's temporary files are in its own folder."""
        return set(glob.glob("/dev/shm/*"))


@contextmanager
def started(command: list[str], cwd: Path, env: dict[str, str] | None = None, **more: Any) -> Iterator[Any]:
    """A command left running, in a process group of its own: the process, and its traces. Killed at the end."""
    traces = Traces()
    process = subprocess.Popen(command, cwd=cwd, env=traces.environment(env), start_new_session=True, **more)
    try:
        yield process, traces
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(traces.temporary, ignore_errors=True)


def run(command: list[str], cwd: Path, env: dict[str, str] | None = None, **more: Any) -> Run:
    """Run a command to its end. Its standard input is empty, unless `input` or `stdin` is given."""
    traces = Traces()
    if "input" not in more:
        more.setdefault("stdin", subprocess.DEVNULL)
    begun, used = time.monotonic(), cpu_seconds()
    done = subprocess.run(
        command, cwd=cwd, env=traces.environment(env), capture_output=True, text=True, encoding="utf-8",
        timeout=PATIENCE, **more,
    )  # fmt: skip
    seconds = time.monotonic() - begun
    return Run(done.returncode, done.stdout, done.stderr, seconds, cpu_seconds() - used, traces.left())


def cpu_seconds() -> float:
    """Of all children that ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def vlens(cwd: Path, *args: str, **more: Any) -> Run:
    return run([*VLENS, *args], cwd, **more)


def capture(cwd: Path, *args: str, **more: Any) -> Run:
    """`vlens capture` in its own process, not the resident one."""
    return vlens(cwd, "capture", "--no-daemon", *args, **more)


def bare_python(folder: Path) -> str:
    """A Python with what vlens itself depends on, and no engine; nothing is downloaded."""
    from importlib.metadata import distribution

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    # The four of pyproject.toml, and what rich brings.
    for name in ("click", "rich", "safetensors", "numpy", "markdown-it-py", "mdurl", "pygments"):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(found.locate_file(top))
    return python
