"""The shell's side of the reader: start it, ask, and make sure that it is gone. Light."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

# What else is needed is imported when the reader imports too.
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, BinaryIO

    from vlens_cli.errors import VlensError

_MAIN = """
import sys
sys.path[:] = sys.argv[2].split(chr(10))
from vlens_cli.reader.serve import main
main(int(sys.argv[1]))
"""
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
        with theirs:
            theirs.set_inheritable(True)
            self._pid = os.posix_spawn(
                # -S: it is told where the packages are; finding out by itself takes as long as a tenth of the answer.
                # -P: a file of the user's folder must not stand in for one of Python's modules.
                sys.executable, [sys.executable, "-S", "-P", "-c", _MAIN, str(theirs.fileno()), "\n".join(_path())],
                os.environ | ({} if threads else {"OPENBLAS_NUM_THREADS": "1"}),
                file_actions=[(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1)],
                # Ctrl-C is for this process, which then ends the reader.
                setpgroup=0,
            )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; a second call does nothing."""
        self._sock.close()
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
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


def _path() -> list[str]:
    """Where this process finds modules, and the folder that holds this package: an editable install is found by a hook
    of `site`, and not by the path."""
    import vlens_cli

    own = os.path.dirname(os.path.dirname(vlens_cli.__file__))
    return sys.path if own in sys.path else [*sys.path, own]


def _error(fields: dict[str, Any]) -> VlensError:
    from vlens_cli.errors import EXIT_BUG, EXIT_FAILED, EXIT_START, BugError, QueryError, StartError, UsageError

    kinds = {EXIT_FAILED: QueryError, EXIT_START: StartError, EXIT_BUG: BugError}
    return kinds.get(fields["exit"], UsageError)(fields["message"], hint=fields["hint"], code=fields["code"])
