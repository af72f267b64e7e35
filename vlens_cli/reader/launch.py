"""The shell's side of the reader: start it, ask, and make sure that it is gone. Light."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from vlens_cli.daemon import wire
from vlens_cli.errors import (
    EXIT_BUG, EXIT_FAILED, EXIT_START, BugError, QueryError, StartError, UsageError, VlensError,
)


_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from vlens_cli.reader.serve import main
main(int(sys.argv[2]))
"""


class Reader:
    """A reader process. It imports while this one finds out what to ask, so it is started first.

    Sums need no `threads`, and starting them takes as long as the sums.
    """

    def __init__(self, threads: bool = False) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -S: it is told where the packages are; finding out by itself takes as long as a tenth of the answer.
                # -P: a file of the user's folder must not stand in for one of Python's modules.
                [sys.executable, "-S", "-P", "-c", _MAIN, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env=os.environ | ({} if threads else {"OPENBLAS_NUM_THREADS": "1"}),
                # Ctrl-C is for this process, which then ends the reader.
                process_group=0,
            )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *fault: object) -> None:
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def ask(self, frame: dict[str, Any], into: BinaryIO | None = None, meanwhile: Callable[[], None] = lambda: None
            ) -> dict[str, Any]:
        """Its answer; `meanwhile` is called while it works.

        Raises the errors of `reader.answer`, and QueryError where it died.
        """
        try:
            wire.send(self._sock, frame, into.fileno() if into is not None else None)
            meanwhile()
            answer = wire.receive(self._sock)
        except wire.WireError as fault:
            raise QueryError(f"the process that reads weights ended with status {self._process.wait()}",
                             code="reader_died") from fault
        if error := answer.get("error"):
            raise _error(error)
        return answer


def _error(fields: dict[str, Any]) -> VlensError:
    kinds = {EXIT_FAILED: QueryError, EXIT_START: StartError, EXIT_BUG: BugError}
    return kinds.get(fields["exit"], UsageError)(fields["message"], hint=fields["hint"], code=fields["code"])
