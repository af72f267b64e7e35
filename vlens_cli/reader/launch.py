"""The shell's side of the reader: start it, ask, and make sure that it is gone. Light."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

# What else is needed is imported when the reader imports too.
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, BinaryIO, NoReturn

    from vlens_cli.errors import VlensError

# The reader that `begin` started, until it is taken.
_begun: Reader | None = None
# With these another reader is wanted, or none.
_OTHERS = ("--svd", "--list", "--from", "--dtype", "--help", "-h")


def begin(args: Sequence[str]) -> None:
    """Start a reader for a command line of `vlens param` that is not parsed yet."""
    global _begun
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # The socket would take the place of one of them.
        return
    if args and not any(arg.startswith(_OTHERS) for arg in args):
        _begun = Reader()


def reader(threads: bool = False) -> Reader:
    """The reader that was begun, or a new one."""
    global _begun
    taken, _begun = _begun, None
    if taken is not None and threads:
        taken.close()
        taken = None
    return taken or Reader(threads)


class Reader:
    """A reader process. It imports while this one finds out what to ask, so it is started first.

    Sums need no `threads`, and starting them takes as long as the sums.
    """

    def __init__(self, threads: bool = False) -> None:
        self._sock, theirs = socket.socketpair()
        # Forked, not spawned: a Python that is up is a tenth of the answer. Nothing here has threads, or waits in a buffer.
        self._pid = os.fork()
        if not self._pid:
            self._sock.close()
            _serve(theirs, threads)
        theirs.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; a second call does nothing."""
        self._sock.close()
        if self._pid is not None:
            from signal import SIGKILL

            os.kill(self._pid, SIGKILL)
            self._wait()

    def _wait(self) -> int:
        pid, self._pid = self._pid, None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def ask(self, frame: dict[str, Any], into: BinaryIO | None = None, meanwhile: Callable[[], None] = lambda: None
            ) -> dict[str, Any]:
        """Its answer; `meanwhile` is called while it works.

        Raises the errors of `reader.answer`, and QueryError where it died.
        """
        from vlens_cli.daemon import wire
        from vlens_cli.errors import QueryError

        try:
            wire.send(self._sock, frame, into.fileno() if into is not None else None)
            meanwhile()
            answer = wire.receive(self._sock)
        except wire.WireError as fault:
            raise QueryError(f"the process that reads weights ended with status {self._wait()}",
                             code="reader_died") from fault
        if error := answer.get("error"):
            raise _error(error)
        return answer


def _serve(sock: socket.socket, threads: bool) -> NoReturn:
    """What the reader does, and all that it does."""
    code = 1
    try:
        # Ctrl-C is for the other process, which then ends this one.
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nowhere, descriptor)
        if not threads:
            os.environ["OPENBLAS_NUM_THREADS"] = "1"
        from vlens_cli.reader import serve

        serve.main(sock)
        code = 0
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _error(fields: dict[str, Any]) -> VlensError:
    from vlens_cli.errors import EXIT_BUG, EXIT_FAILED, EXIT_START, BugError, QueryError, StartError, UsageError

    kinds = {EXIT_FAILED: QueryError, EXIT_START: StartError, EXIT_BUG: BugError}
    return kinds.get(fields["exit"], UsageError)(fields["message"], hint=fields["hint"], code=fields["code"])
