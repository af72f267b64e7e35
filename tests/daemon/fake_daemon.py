"""The real daemon with a fake engine: `python fake_daemon.py FOLDER SPEC KEEP_ALIVE`, as vlens_cli.daemon takes them.

The fake session obeys the real one's interface and does what a prompt says, so that a test decides when the engine
is slow, fails or dies:

    sleep S        works S seconds: asks every 50 ms whether its asker has left, lets small queries in every 0.2 s
    deaf S         works S seconds, and does not ask whether its asker has left
    ranks end      works until it is broken off, and has lost its workers then
    file N         writes N bytes of `pattern` into the asker's file; `file N crash` dies in the middle
    large N        a reply of N characters
    crash S        the process dies, at once or after S seconds
    raise, wrong, bug, full     QueryError; PromptError before any engine; ZeroDivisionError; the disk is full
    anything else  an answer that depends on the prompt, the hooks, the engine's spec and the weight file

FAKE_STARTING is how many seconds the engine takes to start, or a file that it waits for; FAKE_FAILING makes it fail
(`memory`: for want of it), FAKE_STARTED names a file that gets one line per process started; FAKE_VERSION and
FAKE_PROTOCOL stand for those of another vlens.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import time
from pathlib import Path

from vlens_cli import memory
from vlens_cli.daemon import local, runtime, wire
from vlens_cli.errors import PromptError, QueryError, StartError, UsageError
from vlens_cli.query import RUNNING, SCHEMA_VERSION, Reply, Saved, SleepQuery, StartQuery

WEIGHTS = "model.safetensors"


def pattern(n_bytes: int) -> bytes:
    """What `file N` writes: no two stretches alike, so that a hole or a shift shows."""
    return b"".join(b"%07d\n" % n for n in range(n_bytes // 8 + 1))[:n_bytes]


def right(prompt: str, hooks: tuple[str, ...], dtype: str | None, weights: bytes) -> str:
    """The one right answer."""
    return hashlib.sha256(repr((prompt, tuple(hooks), dtype, weights)).encode()).hexdigest()


def _wait(what: str) -> None:
    """Seconds, or until a file is there."""
    while what.startswith("/"):
        if os.path.exists(what):
            return
        time.sleep(0.02)
    time.sleep(float(what))


class FakeSession:
    """See the real one in vlens_cli/driver/session.py."""

    def __init__(self, spec) -> None:
        self.spec = spec
        self._weights: bytes | None = None
        self._cancelled = lambda: False
        self._between = lambda: None
        self.asleep = self.died = False
        self.buffer_bytes = 0

    def end_workers(self) -> None:
        """It has none."""

    @property
    def can_sleep(self) -> bool:
        return self.started and bool(os.environ.get("FAKE_GPU")) and not self.asleep

    def sleep(self) -> int:
        if not os.environ.get("FAKE_GPU"):
            raise UsageError("no GPU", hint="stop it", code="cannot_sleep")
        self.asleep = True
        return 2 * 10**9

    @property
    def started(self) -> bool:
        return self._weights is not None

    def watch(self, cancelled, between, waiting) -> None:
        self._cancelled, self._between = cancelled, between

    @staticmethod
    def is_small(query) -> bool:
        return sum(len(p.text or p.tokens or ()) for p in getattr(query, "prompts", ())) <= 2000

    def answer(self, query, progress, into=None) -> Reply:
        if isinstance(query, SleepQuery):
            return Reply({"model": {"name": self.spec.name}, "freed_bytes": self.sleep()})
        asked = [] if isinstance(query, StartQuery) else query.prompts
        if any(prompt.text == "wrong" for prompt in asked):
            raise PromptError("a wrong prompt", hint="ask another")
        self._start(progress)
        if isinstance(query, StartQuery):
            return Reply({"model": {"name": self.spec.name}}, ("engine notes",))
        progress(RUNNING)
        prompts = [self._prompt(prompt.text, query, into) for prompt in asked]
        saved = None
        if into is not None:
            into.flush()
            saved = Saved(1, os.fstat(into.fileno()).st_size)
        body = {"schema_version": SCHEMA_VERSION, "command": "capture", "pid": os.getpid(), "prompts": prompts}
        return Reply(body, saved=saved)

    def _start(self, progress) -> None:
        self.asleep = self.died = False
        if self.started:
            return
        progress(f"starting the engine for {self.spec.name}")
        _wait(os.environ.get("FAKE_STARTING", "0.2"))
        if os.environ.get("FAKE_FAILING"):
            if os.environ["FAKE_FAILING"] == "memory":
                raise memory.shortage(10**12, [memory.machine()])
            raise StartError("the weights are broken", code="bad_checkpoint")
        self._weights = (Path(self.spec.model) / WEIGHTS).read_bytes()

    def _prompt(self, text: str, query, into) -> dict:
        word, *more = text.split()
        if word == "sleep":
            self._sleep(float(more[0]))
        elif word == "deaf":
            time.sleep(float(more[0]))
        elif word == "ranks":
            self._lose_ranks()
        elif word == "crash":
            time.sleep(float(more[0]) if more else 0)
            os._exit(9)
        elif word == "raise":
            raise QueryError("the forward failed")
        elif word == "bug":
            1 / 0
        elif word == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif word == "file":
            self._write(pattern(int(more[0])), into, crash="crash" in more)
        answer = {"text": text[:80], "answer": right(text, query.hooks, self.spec.dtype, self._weights)}
        return answer | ({"long": "x" * int(more[0])} if word == "large" else {})

    @staticmethod
    def _write(data: bytes, into, crash: bool) -> None:
        half = len(data) // 2
        into.write(data[:half])
        if crash:
            into.flush()
            os._exit(9)
        into.write(data[half:])

    def _lose_ranks(self) -> None:
        while not self._cancelled():
            time.sleep(0.05)
        self.died = True
        raise QueryError("a worker process of the engine has ended", code="worker_died")

    def _sleep(self, seconds: float) -> None:
        """Work: the time that small queries take in between is not counted as this one's own."""
        done, piece = 0.0, 0.0
        while done < seconds:
            if self._cancelled():
                raise QueryError("the query was broken off: its asker has left", code="cancelled")
            time.sleep(0.05)
            done, piece = done + 0.05, piece + 0.05
            if piece >= 0.2:
                self._between()
                piece = 0.0


def install() -> None:
    """Put the fakes where the real daemon, and `--no-daemon`, look for them."""
    local.open_session = FakeSession
    version = os.environ.get("FAKE_VERSION", "test")
    if version != "real":
        runtime.version = lambda: version
    wire.PROTOCOL = int(os.environ.get("FAKE_PROTOCOL", wire.PROTOCOL))


def note_start() -> None:
    """One line, so that a test counts processes, and its end finds each of them."""
    if named := os.environ.get("FAKE_STARTED"):
        line = json.dumps({"pid": os.getpid(), "started": runtime.process_start(os.getpid())}) + "\n"
        with open(named, "a", encoding="utf-8") as file:
            file.write(line)


if __name__ == "__main__":
    note_start()
    install()
    from vlens_cli.daemon.server import main

    time.sleep(float(os.environ.get("FAKE_LISTENING", "0")))
    main(*sys.argv[1:])
