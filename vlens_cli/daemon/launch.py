"""Starting and ending daemon processes: connect, and only where nobody listens, lock, connect again, start.

What only a start needs is imported there: an engine that runs is asked in less time than that takes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlens_cli import env
from vlens_cli.daemon import runtime, wire
from vlens_cli.errors import INSTALL_HINT, QueryError, StartError, VlensError, how_ended

if TYPE_CHECKING:
    from vlens_cli.query import EngineSpec

Show = Callable[[str], None]

# From the start of the process to its socket: Python and a few light modules.
LISTEN_PATIENCE = 20.0
# Between a polite and an impolite end.
STOP_PATIENCE = 10.0
# The same where what it is at is broken off: a step of the engine's, and its reply.
BREAK_OFF_PATIENCE = 3.0
# From here on a wait is told.
SILENCE = 1.0


def connect(home: runtime.Home, timeout: float | None) -> socket.socket | None:
    """A connection to the daemon of `home`; None where nobody listens.

    Raises QueryError where somebody does and does not take the connection in time.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(str(home.socket))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except (TimeoutError, BlockingIOError) as fault:
        sock.close()
        raise timed_out(home, timeout) from fault
    except OSError as fault:
        sock.close()
        raise StartError(f"cannot connect to the engine: {home.socket}: {fault.strerror}", code="no_connection") from fault
    return sock


def timed_out(home: runtime.Home, timeout: float | None) -> QueryError:
    return QueryError(f"the engine did not answer within {timeout:g} s: {home.socket}", code="timeout",
                      hint="it may be busy: `vlens engine status`; --timeout waits longer")


def connect_or_start(home: runtime.Home, spec: EngineSpec, keep_alive: float | None, timeout: float | None,
                     show: Show) -> socket.socket:
    """A connection to the engine of `home`, where nobody listened: it is started, by this process or by another."""
    with runtime.locked(home, f"starting the engine of {spec.name}", show):
        # Who held the lock may have started it.
        sock = connect(home, timeout)
        if sock is None:
            check_installed()
            make_room(home, env.keep(), show)
            show("starting the engine's process")
            start(home, argv(home, spec, keep_alive))
            sock = connect(home, timeout)
    if sock is None:
        raise died(home_ended(home))
    return sock


def clear_outdated(home: runtime.Home, show: Show) -> None:
    """End a daemon that runs other code than this, unless somebody else has replaced it already."""
    with runtime.locked(home, "ending an outdated engine", show):
        status = home.alive()
        if status is None or (status.version, status.protocol) != (runtime.version(), wire.PROTOCOL):
            show("ending the outdated engine")
            stop(home)


def make_room(home: runtime.Home, keep: int, show: Show) -> None:
    """Stop idle engines, oldest first, until one more is within `keep`: before the new one takes its memory."""
    others = [other for other in runtime.homes() if other != home and other.alive()]
    for other in others:
        if len(others) < keep:
            return
        described = describe(other)
        if described is not None and described["state"] == "idle":
            show(f"note: ending the idle engine of {described['model']}; {env.KEEP.name}={keep + 1} lets it stay")
            stop(other)
            others = [one for one in others if one != other]


def describe(home: runtime.Home, timeout: float = 2.0) -> dict[str, Any] | None:
    """What a daemon says of itself; None where it does not answer."""
    return _asked(home, "status", timeout)


def proofs(folder: Path, timeout: float = 2.0) -> list[dict[str, Any]]:
    """What the running engines of a model have proved at load (`Session.proof`), with their pids; none of one that is
    still starting, or has another vlens's code."""
    found = []
    for home in runtime.homes():
        status = home.alive()
        if status is not None and status.folder == str(folder) and (proof := _asked(home, "proof", timeout)):
            found.append({"pid": status.pid, "fingerprint": status.fingerprint, **proof})
    return found


def _asked(home: runtime.Home, verb: str, timeout: float, **fields: Any) -> dict[str, Any] | None:
    try:
        sock = connect(home, timeout)
        if sock is None:
            return None
        with sock:
            wire.send(sock, {"verb": verb, **fields})
            return wire.receive(sock)["reply"]
    except (QueryError, StartError, wire.WireError, TimeoutError, KeyError):
        return None


def name_idle_engines(error: VlensError) -> None:
    """Put the idle engines that could be stopped into the hint of an error that says that memory is short."""
    from vlens_cli import memory

    if error.code != memory.SHORT:
        return
    import shlex

    described = [describe(home) for home in runtime.homes()]
    stops = [f"`vlens engine stop -m {shlex.quote(one['folder'])}` frees {memory.gigabytes(one['rss_bytes'])}"
             for one in described if one is not None and one["state"] == "idle" and one["pid"] != os.getpid()]
    error.hint = "; ".join(filter(None, [*stops, error.hint]))


def check_installed() -> None:
    """Before a process is started for nothing. Raises StartError."""
    from importlib.util import find_spec

    for name in ("torch", "vllm"):
        if find_spec(name) is None:
            raise StartError(f"no engine is installed: the package {name} is missing", hint=INSTALL_HINT,
                             code="no_engine")


def argv(home: runtime.Home, spec: EngineSpec, keep_alive: float | None) -> list[str]:
    seconds = "forever" if keep_alive is None else str(keep_alive)
    return [sys.executable, "-m", "vlens_cli.daemon", str(home.folder), json.dumps(spec.as_json()), seconds]


def start(home: runtime.Home, command: Sequence[str]) -> None:
    """Start a daemon and wait until it listens. Only with the lock held, and nobody listening.

    Raises StartError with the log's last lines where it ends before that.
    """
    import subprocess

    if status := home.alive():
        # It has lost its socket, or never got so far; nobody can reach it.
        end(status)
    home.remove()
    home.folder.mkdir(mode=0o700)
    with open(home.log, "wb") as log:
        # Another session: the terminal's Ctrl-C and hang-up are not for it. Started anew, never forked: CUDA.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                                 cwd="/", env=_environment())
    deadline = time.monotonic() + LISTEN_PATIENCE
    while not home.socket.exists():
        if (code := child.poll()) is not None:
            # Nothing but its own traceback is in the log so early.
            raise died(how_ended(code) if code < 0 else runtime.log_tail(home.log, 1).strip()[:300])
        if time.monotonic() > deadline:
            child.kill()
            raise StartError(f"the engine's process did not listen within {LISTEN_PATIENCE:g} s", code="engine_failed",
                             hint=f"its log is {home.log}")
        time.sleep(0.01)


def _environment() -> dict[str, str]:
    """This process's environment, with this vlens first on the path wherever the daemon stands."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def died(how: str, for_memory: bool = False) -> StartError:
    """The error of an engine that ended before it was ready; `for_memory`: the system killed a process meanwhile."""
    if for_memory:
        from vlens_cli import memory

        error = memory.shortage(None, [memory.machine(), *memory.gpus()], "it ended while starting, and the system has "
                                "killed a process for lack of memory meanwhile")
        name_idle_engines(error)
        return error
    return StartError("the engine ended while starting" + (f": {how}" if how else ""),
                      code="engine_died", hint="`vlens engine log` shows what it said; too little memory ends it silently")


def home_ended(home: runtime.Home) -> str:
    """How the process of an engine ended that said no word; empty where it ended in order.

    The log's last line is not asked: whatever it says was said before. Only the parent is told of the signal.
    """
    status = home.status()
    if status is None:
        return ""
    # Its connections close a moment before it can be waited for.
    deadline = time.monotonic() + SILENCE
    pid = 0
    with suppress(ChildProcessError):
        while not pid and time.monotonic() < deadline:
            pid, state = os.waitpid(status.pid, os.WNOHANG)
            time.sleep(0.01)
    return how_ended(os.waitstatus_to_exitcode(state)) if pid else "its process was killed, or crashed"


def stop(home: runtime.Home, show: Show = lambda text: None, break_off: bool = False) -> int | None:
    """End the daemon of `home` and wait until its process is gone; its pid, None where none ran. It answers what it is at
    before, unless that is to be broken off."""
    status = home.alive()
    if status is None:
        home.remove()
        return None
    said = _asked(home, "stop", 1.0, break_off=break_off)
    # Nothing can break off a start but a signal.
    patience = 0.0 if said is None or break_off and said.get("state") == "starting" else (
        BREAK_OFF_PATIENCE if break_off else STOP_PATIENCE)
    if not _gone(status, min(patience, SILENCE)):
        doing = f", {said['doing']}" if said and said.get("doing") else ""
        show(f"note: waiting for the engine to end: pid {status.pid}{doing}")
        if not _gone(status, patience - SILENCE):
            end(status)
    if home.status() in (None, status):
        home.remove()
    return status.pid


def end(status: runtime.Status) -> None:
    """TERM, wait, KILL, wait: of the daemon's process group, and only while the pid is still that process."""
    for number, patience in ((signal.SIGTERM, STOP_PATIENCE), (signal.SIGKILL, STOP_PATIENCE)):
        if runtime.process_start(status.pid) != status.started:
            return
        try:
            os.killpg(status.pid, number)
        except ProcessLookupError:
            return
        if _gone(status, patience):
            return


def _gone(status: runtime.Status, patience: float) -> bool:
    """Wait for a process to end; whether it has."""
    deadline = time.monotonic() + patience
    while runtime.process_start(status.pid) == status.started:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
