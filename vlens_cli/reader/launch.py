"""The shell's side of the reader: start it, ask, and make sure that it is gone. Light."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from vlens_cli.daemon import wire
from vlens_cli.errors import EXIT_FAILED, BugError, QueryError, StartError, UsageError, VlensError, EXIT_BUG, EXIT_START


class Reader:
    """A reader process. It imports while this one finds out what to ask, so it is started first."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -S: its packages' place is told to it, and `site` would take longer than numpy's own start.
                [sys.executable, "-m", "vlens_cli.reader", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=_environment(),
                # Ctrl-C is for this process, which then ends the reader.
                process_group=0,
            )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *fault: object) -> None:
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def ask(self, frame: dict[str, Any], into: BinaryIO | None = None) -> dict[str, Any]:
        """Its answer. Raises the errors of `reader.answer`, and QueryError where it died."""
        try:
            wire.send(self._sock, frame, into.fileno() if into is not None else None)
            answer = wire.receive(self._sock)
        except wire.WireError as fault:
            raise QueryError(f"the process that reads weights ended with status {self._process.wait()}",
                             code="reader_died") from fault
        if error := answer.get("error"):
            raise _error(error)
        return answer


def _environment() -> dict[str, str]:
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Sums need no threads, and starting them takes as long as the sums.
    return os.environ | {"PYTHONPATH": os.pathsep.join(path), "OPENBLAS_NUM_THREADS": "1"}


def _error(fields: dict[str, Any]) -> VlensError:
    kinds = {EXIT_FAILED: QueryError, EXIT_START: StartError, EXIT_BUG: BugError}
    return kinds.get(fields["exit"], UsageError)(fields["message"], hint=fields["hint"], code=fields["code"])
