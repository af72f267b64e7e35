"""Where resident engines live on disk: the runtime directory, one folder an engine, and who is alive.

    RUNTIME/                 0700, the user's own
      FINGERPRINT.lock       held while an engine is started or replaced; outside what is removed
      FINGERPRINT/           socket  status.json  log
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vlens_cli import __version__, env
from vlens_cli.errors import StartError
from vlens_cli.models.folder import stamps

if TYPE_CHECKING:
    from vlens_cli.query import EngineSpec

# sun_path holds 108 bytes with its end.
LONGEST_SOCKET = 106
# Beside VLLM_*: variables that choose devices or change numbers.
NUMBER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_F32_DEFAULT", "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "LD_PRELOAD", "PYTHONPATH",
)


class Status(NamedTuple):
    """What a daemon writes of itself, once it listens. `started` is its process's start, in clock ticks since boot:
    with the pid it names one process for ever."""

    pid: int
    started: int
    fingerprint: str
    model: str
    folder: str
    protocol: int
    version: str


class Home(NamedTuple):
    """The folder of one engine."""

    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def _status(self) -> Path:
        return self.folder / "status.json"

    @property
    def lock(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.lock")

    def write_status(self, status: Status) -> None:
        draft = self.folder / "status.draft"
        draft.write_text(json.dumps(status._asdict()), encoding="utf-8")
        draft.chmod(0o600)
        draft.replace(self._status)

    def status(self) -> Status | None:
        """What a daemon wrote here; None where none did, or where the file is no such record."""
        try:
            return Status(**json.loads(self._status.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def alive(self) -> Status | None:
        """The status, if the process that wrote it still runs."""
        status = self.status()
        return status if status is not None and process_start(status.pid) == status.started else None

    def forget(self) -> None:
        """Take away what leads to a daemon, and leave its log."""
        for path in (self.socket, self._status):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Take the folder away in one step: another process may make it anew while its files are removed."""
        gone = self.folder.with_name(f"{self.folder.name}.gone-{os.getpid()}")
        with suppress(OSError):
            self.folder.rename(gone)
        import shutil

        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def locked(home: Home, doing: str, show) -> Iterator[None]:
    """Hold an engine's lock: of those who would start it, one does and the others wait. The system lets go of it when
    the holder ends, however it ends. `doing` is for `under_way`."""
    with open(home.lock, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            show("waiting for another vlens, which is starting this engine")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(doing)
        file.flush()
        yield


def under_way() -> list[str]:
    """What those do who hold an engine's lock: an engine that starts or ends may be in no folder."""
    found = []
    for path in directory().glob("*.lock"):
        with suppress(OSError), open(path, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(file.read())
    return [doing for doing in found if doing]


def home(fingerprint: str) -> Home:
    return Home(directory() / fingerprint)


def homes() -> list[Home]:
    """Every engine's folder, oldest first."""
    # Whatever else lies in a folder that the user has named is not ours to end or remove.
    folders = [path for path in directory().iterdir() if re.fullmatch(r"[0-9a-f]{16}", path.name) and path.is_dir()]
    return [Home(path) for path in sorted(folders, key=_modified)]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@cache
def directory() -> Path:
    """The runtime directory, made if it is missing.

    Raises StartError where it cannot be made, or is not the user's alone: a socket in it runs queries as the user.
    """
    named = env.runtime_folder()
    chosen = [named] if named else _usual()
    for path in chosen:
        # The name of a fingerprint, and of the socket in it.
        if len(os.fsencode(path / ("0" * 16) / "socket")) <= LONGEST_SOCKET and _made(path, last=path == chosen[-1]):
            return path
    return _fallback()


def _usual() -> list[Path]:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return [Path(base) / "vlens"] if os.path.isabs(base) and os.path.isdir(base) else []


def _fallback() -> Path:
    path = Path("/tmp") / f"vlens-{os.getuid()}"
    _made(path, last=True)
    return path


def _made(path: Path, last: bool) -> bool:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = path.lstat()
    except OSError as fault:
        if not last:
            return False
        raise StartError(f"cannot make the runtime directory: {path}: {fault.strerror}", code="runtime_unwritable",
                         hint=f"{env.RUNTIME.name}=/another/folder moves it, --no-daemon does without") from fault
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise StartError(f"the runtime directory is not yours alone: {path}", code="runtime_unsafe",
                         hint=f"chmod 700 {path} if it is yours, or {env.RUNTIME.name}=/another/folder")
    if not os.access(path, os.W_OK):
        raise StartError(f"cannot write the runtime directory: {path}", code="runtime_unwritable",
                         hint=f"{env.RUNTIME.name}=/another/folder moves it, --no-daemon does without")
    return True


def fingerprint(spec: EngineSpec) -> str:
    """16 hex digits that name an engine: what it is started with, the model's files by size and times, this Python and
    the variables that change numbers. Two commands with one fingerprint share an engine."""
    # What it loads takes longer than a TAB needs otherwise.
    import hashlib

    fields = spec.as_json() | {"name": None}
    parts = [fields, stamps(spec.model), sys.executable, sys.prefix, _engine_packages(), _variables()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _engine_packages() -> list[str]:
    """The engine's packages with their versions, by the names of their metadata folders: no import, no parsing."""
    found = []
    for base in sys.path:
        with suppress(OSError):
            found += [n for n in os.listdir(base) if n.endswith(".dist-info") and n.startswith(("vllm", "torch-"))]
    return sorted(set(found))


def _variables() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith("VLLM_") or name in NUMBER_VARIABLES]
    return {name: os.environ[name] for name in sorted(names)}


@cache
def version() -> str:
    """vlens' version and the newest change of its code, read once a process: a daemon of other code must not answer."""
    root = Path(__file__).parent.parent
    newest = max(entry.stat().st_mtime_ns for folder in (root, *(p for p in root.iterdir() if p.is_dir()))
                 for entry in os.scandir(folder) if entry.name.endswith((".py", ".toml")))
    return f"{__version__}+{newest}"


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where none has that pid, or it is dead but not yet reaped.

    The 22nd field of /proc/PID/stat, counted from the end of the name, which may hold anything (man proc).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def log_tail(path: Path, lines: int = 5) -> str:
    """The last lines of a log that say something."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
