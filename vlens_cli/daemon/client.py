"""Ask one query and get its reply, from the resident engine, or from one that lives in this process and ends with it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

from vlens_cli.errors import (
    EXIT_BUG, EXIT_FAILED, EXIT_START, BugError, QueryError, StartError, UsageError, VlensError,
)
from vlens_cli.query import CollectQuery, EngineSpec, Query, Reply

Show = Callable[[str], None]


class Asking(NamedTuple):
    """How to ask: through the resident engine or not; how long it then stays (None: for ever); how long to wait for an
    answer (None: as long as it takes)."""

    daemon: bool = True
    keep_alive: float | None = 900.0
    timeout: float | None = None


def ask(
    spec: EngineSpec, query: Query, progress: Show = lambda text: None,
    into: BinaryIO | None = None, how: Asking = Asking(), check: Callable[[], None] = lambda: None,
) -> Reply:
    """Run one query to its end. `progress` gets a line whenever something long begins; tensors are written into the
    open file `into`. `check` refuses what the engine would refuse: it is called before an engine is started or waited
    for, and not where one answers at once.

    Raises the errors of `Session.answer`; StartError where no engine is installed or it does not start; QueryError
    where the engine ends or does not answer in time.
    """
    if how.daemon:
        return _ask_daemon(spec, query, progress, into, how, check)
    check()
    from vlens_cli.daemon import local

    return local.ask(spec, query, progress, into)


def ask_running(home: Any, query: Query, how: Asking = Asking()) -> Reply | None:
    """Ask the engine of `home`; None where none runs there, or one of other code. Raises as `ask` does."""
    from vlens_cli.daemon import launch

    sock = launch.connect(home, how.timeout)
    if sock is None:
        return None
    with sock:
        answer = _converse(sock, home, query, lambda text: None, None, how, lambda: None)
    if answer is None or answer.get("restart"):
        return None
    if error := answer.get("error"):
        raise _error(error)
    return Reply.from_json(answer["reply"])


def _ask_daemon(spec: EngineSpec, query: Query, progress: Show, into: BinaryIO | None, how: Asking,
                check: Callable[[], None]) -> Reply:
    from vlens_cli.daemon import launch, runtime

    home = runtime.home(runtime.fingerprint(spec))
    for attempt in range(3):
        sock = launch.connect(home, how.timeout)
        if sock is None:
            check()
            from vlens_cli.daemon import local  # not loaded where an engine answers at once

            local.check_spec(spec)
            sock = launch.connect_or_start(home, spec, how.keep_alive, how.timeout, progress)
        with sock:
            answer = _converse(sock, home, query, progress, into, how, check)
        if answer is None:
            # It ended between the connection and the first word: its time was up.
            _begin_again(query, into)
            continue
        if reason := answer.get("restart"):
            if attempt == 0:
                print(f"note: restarting the engine: {reason}", file=sys.stderr)
            launch.clear_outdated(home, progress)
            _begin_again(query, into)
            continue
        if error := answer.get("error"):
            raise _error(error)
        return Reply.from_json(answer["reply"])
    raise QueryError("the engine ended before it answered, again and again", code="engine_died",
                     hint="`vlens engine log` shows what it said")


def _converse(sock: Any, home: Any, query: Query, progress: Show, into: BinaryIO | None, how: Asking,
              check: Callable[[], None]) -> dict[str, Any] | None:
    """Send the query and hear it out: the last frame, or None where the engine ended without a word."""
    from vlens_cli.daemon import launch, runtime, wire

    frame = {"protocol": wire.PROTOCOL, "version": runtime.version(), "verb": query.verb, "query": query.as_json(),
             "keep_alive": how.keep_alive}
    deadline = None if how.timeout is None else time.monotonic() + how.timeout
    phase, kills = "", 0
    try:
        wire.send(sock, frame, into.fileno() if into is not None else None)
        while True:
            sock.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            frame = wire.receive(sock)
            if frame.get("final"):
                return frame
            if not phase and frame["phase"] != "run":
                check()
                kills = _kills()
            phase = frame["phase"]
            progress(frame["progress"])
    except KeyboardInterrupt:
        if phase == "start":
            progress("note: the engine goes on starting in the background; `vlens engine stop` ends it")
        raise
    except TimeoutError as fault:
        raise launch.timed_out(home, how.timeout) from fault
    except wire.WireError as fault:
        if not phase:
            return None
        ended = launch.home_ended(home)
        raise (launch.died(ended, _kills() > kills) if phase == "start" else _broken_off(ended, phase)) from fault


def _kills() -> int:
    from vlens_cli import memory

    return memory.kills()


def _begin_again(query: Query, into: BinaryIO | None) -> None:
    """Whoever did not finish may have written already; but a file of prompts is only read."""
    if into is not None and not isinstance(query, CollectQuery):
        into.seek(0)
        into.truncate()


def _broken_off(how: str, phase: str) -> QueryError:
    when = "during the query" if phase == "run" else "before this query's turn"
    return QueryError(f"the engine ended {when}" + (f": {how}" if how else ""), code="engine_died",
                      hint="the next command starts a new one; lack of memory is a usual cause, and `vlens engine log` shows "
                      "what it said")


def _error(fields: dict[str, Any]) -> VlensError:
    """An error that crossed the wire, as the class of its exit code: foreign classes are not rebuilt."""
    kinds = {EXIT_FAILED: QueryError, EXIT_START: StartError, EXIT_BUG: BugError}
    return kinds.get(fields["exit"], UsageError)(fields["message"], hint=fields["hint"], code=fields["code"])
