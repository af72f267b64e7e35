"""The resident process: listens at once, starts its engine when the first query has passed its checks, answers in turn.

The main thread owns the engine and works through a queue; a thread accepts connections, and one thread a connection
reads its query, watches whether the asker is still there, and sends what the engine's thread tells it. The socket is
there within a fraction of a second, before torch is imported: who comes while the engine loads waits on an open
connection, hears what is being waited for, and gets the reason if it does not start.
"""

from __future__ import annotations

import errno
import json
import math
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from vlens_cli import env, memory
from vlens_cli.daemon import launch, local, runtime, wire
from vlens_cli.errors import BugError, QueryError, StartError, VlensError
from vlens_cli.query import QUERIES, RUNNING, EngineSpec

# A client writes its query at once; who connects and says nothing is let go.
PATIENCE = 10.0
# How soon the engine's thread sees that its socket is no longer its own, and a connection that its asker left.
TICK = 0.25
BACKLOG = 128
FIRST_QUERY = 60.0
# How long a reply to a slow reader may take.
REPLY_PATIENCE = 60.0
NEXT_HINT = "the next command starts a new one"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(eq=False)
class Job:
    """One query on its way: `events` carries frames from the engine's thread to the connection's."""

    verb: str
    query: Any
    keep_alive: float | None
    file: BinaryIO | None
    label: str
    events: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    gone: threading.Event = field(default_factory=threading.Event)
    told: threading.Event = field(default_factory=threading.Event)

    def progress(self, text: str, phase: str = "") -> None:
        """A line for the asker; `phase` says what is lost if this process ends now: wait, start or run."""
        running = text.startswith(RUNNING) or text.startswith("note: ") and self.told.is_set()
        phase = phase or ("run" if running else "start")
        self.events.put({"progress": text, "phase": phase})
        if phase == "run":
            # If the forward ends this process, the asker must know that it had begun, or it asks another engine.
            self.told.wait(TICK)


class Server:
    """One resident engine. `home` is its folder, `spec` what it serves; `session` is made in the main thread."""

    def __init__(self, home: runtime.Home, spec: EngineSpec, keep_alive: float | None) -> None:
        self._home = home
        self._spec = spec
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._session: Any = None
        self._keep_alive = keep_alive
        # Read once: a config file that breaks later must not end a running engine.
        self._sleep_after = env.sleep_after()
        # The client that started this process is about to ask.
        self._idle_since = time.monotonic() + FIRST_QUERY
        self._running: tuple[Job, float] | None = None
        self._stopping = threading.Event()
        self._breaking_off = threading.Event()
        self._open = 0
        self._open_changed = threading.Condition()
        self._socket = self._listen()
        self._inode: int | None = os.stat(home.socket).st_ino

    def serve(self) -> None:
        """Answer until the time is up, `stop` is asked, or the socket is no longer this server's."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        while not self._over():
            try:
                job = self._jobs.get(timeout=TICK)
            except queue.Empty:
                self._doze()
                continue
            self._work(job)
            # The job holds the reply, and this name would hold it until the next one.
            del job
        self.close()
        self._send_away()

    def _doze(self) -> None:
        """Leave the GPU to others when nobody has asked for a while; the next query wakes the engine."""
        after = self._sleep_after
        if after is None or self._running or self._open or time.monotonic() - self._idle_since < after:
            return
        if self._session is not None and self._session.can_sleep:
            self._session.sleep()

    def close(self) -> None:
        """Take the socket's name away first: who comes now starts a new engine instead of talking to a dying one."""
        if self._owns_socket():
            self._home.remove()

    def end_workers(self) -> None:
        """Processes that the engine has started: they would notice the end of this one, but seconds later."""
        if self._session is not None:
            self._session.end_workers()

    def say_stopped(self) -> None:
        """Tell whose query was running when this process was told to end, and those who wait."""
        self.close()
        if self._running:
            started = self._session is not None and self._session.started
            self._running[0].events.put(_error(_stopped() if started else StartError(
                "the engine was stopped while it started", hint=NEXT_HINT, code="engine_stopped")))
        self._send_away(1.0)

    def _send_away(self, patience: float = REPLY_PATIENCE) -> None:
        """Tell those who still wait to ask another engine, and let all replies be sent before the process ends."""
        deadline = time.monotonic() + patience
        with self._open_changed:
            while self._open and time.monotonic() < deadline:
                while not self._jobs.empty():
                    self._jobs.get().events.put({"final": True, "restart": "the engine is stopping"})
                self._open_changed.wait(TICK)

    def _listen(self) -> socket.socket:
        """Bind under another name and rename: whoever sees the socket can connect to it."""
        draft = self._home.socket.with_name("socke~")
        draft.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(draft))
        os.chmod(draft, 0o600)
        listener.listen(BACKLOG)
        self._home.write_status(self._status())
        draft.rename(self._home.socket)
        return listener

    def _status(self) -> runtime.Status:
        return runtime.Status(
            pid=os.getpid(), started=runtime.process_start(os.getpid()) or 0, fingerprint=self._home.folder.name,
            model=self._spec.name, folder=self._spec.model, protocol=wire.PROTOCOL, version=runtime.version(),
        )

    def _over(self) -> bool:
        return (self._stopping.is_set() or self._idle_left() == 0 or not self._owns_socket()
                or self._session is not None and self._session.died)

    def _owns_socket(self) -> bool:
        try:
            return os.stat(self._home.socket).st_ino == self._inode
        except OSError:
            return False

    def _idle_left(self) -> float | None:
        """Seconds until the time is up; None while a query runs or waits, and with `forever`."""
        if self._keep_alive is None or self._running or self._open:
            return None
        return max(0.0, self._idle_since + self._keep_alive - time.monotonic())

    # The engine's thread

    def _work(self, job: Job) -> None:
        if job.gone.is_set():
            return
        self._running = (job, time.monotonic())
        try:
            frame = self._answer(job)
        except VlensError as error:
            if self._stopping.is_set() and self._session is not None and (
                    error.code == "cancelled" or self._session.died):
                # Its workers were told to end as this process was; the query did not fail by itself.
                error = _stopped()
            launch.name_idle_engines(error)
            frame = {"error": {**error.as_dict(), "exit": error.exit_code}}
            if self._session is None or isinstance(error, StartError) and not self._session.started:
                self._give_up(frame)
        except OSError as fault:
            frame = {"error": _not_written(fault)} if job.file and fault.errno in DISK_FULL else self._bug(fault)
        except Exception as fault:
            # Whatever it is, it must reach the asker, and the engine must live for the others.
            frame = self._bug(fault)
        self._keep_alive = job.keep_alive
        self._running = None
        self._idle_since = time.monotonic()
        job.events.put({"final": True, **frame})

    def _give_up(self, frame: dict[str, Any]) -> None:
        """The engine did not start: end, for what it has taken by then comes back only with the process, and vLLM does
        not start twice in one. Those who waited for it get the same answer; the log stays for `engine log`."""
        self._inode = None
        self._home.forget()
        self._stopping.set()
        while not self._jobs.empty():
            self._jobs.get().events.put({"final": True, **frame})

    def _bug(self, fault: Exception) -> dict[str, Any]:
        """A fault of ours as an error frame; its traceback goes to the log."""
        traceback.print_exception(fault)
        bug = BugError(f"a bug in vlens: {type(fault).__name__}: {' '.join(str(fault).split())}",
                       hint=f"the traceback is in {self._home.log}")
        return {"error": {**bug.as_dict(), "exit": bug.exit_code}}

    def _answer(self, job: Job) -> dict[str, Any]:
        if self._session is None:
            job.progress("reading the model's settings")
            self._session = local.open_session(self._spec)
        elif self._session.started:
            # From here on its end is this query's failure, also while a long file is tokenized.
            job.progress(RUNNING)
        self._watch(job)
        return {"reply": self._session.answer(job.query, job.progress, job.file).as_json()}

    def _between(self) -> None:
        """Between two pieces of a large query: answer the small ones that wait, on this same thread."""
        big = self._running
        waiting = [self._jobs.get_nowait() for _ in range(self._jobs.qsize())]
        for job in waiting:
            if self._session.is_small(job.query):
                self._work(job)
            else:
                self._jobs.put(job)
        self._running = big
        if big:
            self._watch(big[0])

    def _watch(self, job: Job) -> None:
        self._session.watch(lambda: job.gone.is_set() or self._breaking_off.is_set(), self._between, self._small_waits)

    def _small_waits(self) -> bool:
        return any(self._session.is_small(job.query) for job in list(self._jobs.queue))

    # The connections' threads

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # Out of descriptors, say; the next may find some.
                time.sleep(TICK)
                continue
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        descriptor = None
        with connection:
            connection.settimeout(PATIENCE)
            try:
                if not _same_user(connection):
                    return
                frame, descriptor = wire.receive_with_descriptor(connection)
                self._handle(connection, frame, descriptor)
            except wire.WireError as fault:
                if not fault.ended:
                    _try_send(connection, _error(QueryError(f"not a query: {fault}", code="bad_frame")))
            except VlensError as error:
                _try_send(connection, _error(error))
            except (TimeoutError, OSError):
                pass
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _handle(self, connection: socket.socket, frame: dict[str, Any], descriptor: int | None) -> None:
        verb = frame.get("verb")
        if not isinstance(verb, str):
            raise QueryError(f"an unknown verb: {verb!r}", code="unknown_verb")
        if verb == "status":
            wire.send(connection, {"final": True, "reply": self.describe()})
        elif verb == "proof":
            session = self._session
            proof = session.proof() if session is not None and session.started else None
            wire.send(connection, {"final": True, "reply": proof})
        elif verb == "stop":
            # The name goes first: who comes now starts a new engine instead of waiting for one that ends.
            self.close()
            self._stopping.set()
            if frame.get("break_off"):
                self._breaking_off.set()
            wire.send(connection, {"final": True, "reply": self.describe()})
        elif frame.get("protocol") != wire.PROTOCOL or frame.get("version") != runtime.version():
            wire.send(connection, {"final": True, "restart": _skew(frame)})
        else:
            self._enqueue(connection, verb, frame, descriptor)

    def _enqueue(self, connection: socket.socket, verb: Any, frame: dict[str, Any], descriptor: int | None) -> None:
        job = _job(verb, frame, descriptor)
        with self._open_changed:
            self._open += 1
        try:
            if running := self._running:
                job.progress(f"waiting: {running[0].label}, for {time.monotonic() - running[1]:.0f} s", "wait")
            self._jobs.put(job)
            self._relay(connection, job)
        finally:
            job.gone.set()
            if job.file is not None:
                job.file.close()
            with self._open_changed:
                self._open -= 1
                self._open_changed.notify_all()

    def _relay(self, connection: socket.socket, job: Job) -> None:
        """Send what the engine's thread says, until the last word, or until the asker has left."""
        while True:
            try:
                event = job.events.get(timeout=TICK)
            except queue.Empty:
                if _left(connection):
                    return
                continue
            # Long replies to a slow reader may take their time.
            connection.settimeout(REPLY_PATIENCE if event.get("final") else PATIENCE)
            wire.send(connection, event)
            if event.get("phase") == "run":
                job.told.set()
            if event.get("final"):
                return

    def describe(self) -> dict[str, Any]:
        """What `engine status` shows."""
        running = self._running
        session = self._session
        started = session is not None and session.started
        state = "idle" if not running else "busy" if started else "starting"
        return {
            "pid": os.getpid(), "model": self._spec.name, "folder": self._spec.model, "state": state,
            "doing": running[0].label if running else None,
            "doing_for_s": round(time.monotonic() - running[1], 3) if running else None,
            "waiting": self._jobs.qsize(), "spec": self._spec.as_json(), "fingerprint": self._home.folder.name,
            "socket": str(self._home.socket), "log": str(self._home.log), "version": runtime.version(),
            "rss_bytes": memory.resident_with_children(os.getpid()), "idle_left_s": self._idle_left(),
            "keep_alive_s": self._keep_alive, "asleep": started and session.asleep,
            "buffer_bytes": session.buffer_bytes if started else 0,
        }


def _job(verb: Any, frame: dict[str, Any], descriptor: int | None) -> Job:
    """A frame as a job. Raises QueryError for an unknown verb or a query of another shape."""
    if verb not in QUERIES:
        raise QueryError(f"an unknown verb: {verb!r}", code="unknown_verb")
    try:
        query = QUERIES[verb].from_json(frame["query"])
        keep_alive = frame["keep_alive"]
        keep_alive = None if keep_alive is None else float(keep_alive)
        if keep_alive is not None and not 0 <= keep_alive < math.inf:
            raise ValueError(f"keep_alive {keep_alive}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as fault:
        raise QueryError(f"a query of another shape: {fault}", code="bad_frame") from fault
    file = os.fdopen(os.dup(descriptor), "wb") if descriptor is not None else None
    return Job(verb, query, keep_alive, file, label=f"{verb} of {query.summary()}")


def _not_written(fault: OSError) -> dict[str, Any]:
    error = QueryError(f"the file could not be written, {fault.strerror}", code="output_failed")
    return {**error.as_dict(), "exit": error.exit_code}


def _skew(frame: dict[str, Any]) -> str:
    if frame.get("protocol") != wire.PROTOCOL:
        return f"the engine speaks protocol {wire.PROTOCOL}, this vlens {frame.get('protocol')}"
    return f"the engine runs vlens {runtime.version()}, this is {frame.get('version')}"


def _stopped() -> QueryError:
    return QueryError("the engine was stopped during the query", hint=NEXT_HINT, code="engine_stopped")


def _error(error: VlensError) -> dict[str, Any]:
    return {"final": True, "error": {**error.as_dict(), "exit": error.exit_code}}


def _try_send(connection: socket.socket, frame: dict[str, Any]) -> None:
    try:
        wire.send(connection, frame)
    except (wire.WireError, TimeoutError):
        pass


def _left(connection: socket.socket) -> bool:
    """Whether the other side has closed; it sends nothing after its query, so anything readable is its end."""
    return bool(select.select([connection], [], [], 0)[0]) and not _peek(connection)


def _peek(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1, socket.MSG_PEEK)
    except OSError:
        return b""


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid()


def main(folder: str, spec_json: str, keep_alive: str) -> None:
    """Run by `python -m vlens_cli.daemon`, in a process group of its own, its output going to the log."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runtime.version()
    seconds = None if keep_alive == "forever" else float(keep_alive)
    server = Server(runtime.Home(Path(folder)), EngineSpec.from_json(json.loads(spec_json)), seconds)
    # An exception, so that whatever runs is left in order: a start leaves no temporary files.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    try:
        server.serve()
    except SystemExit:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.say_stopped()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.close()
        server.end_workers()
        sys.stdout.flush()
        # Nothing is left to save, an orderly end of vLLM takes seconds, and its memory is wanted.
        os._exit(0)
