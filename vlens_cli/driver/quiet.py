"""Keeping what the engine prints apart from what its user prints."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from vlens_cli import env


@contextmanager
def engine_output() -> Iterator[None]:
    """Keep what the engine and its libraries print (Python and C alike) out of stdout and stderr.

    stdout is data, and the engine's log is dozens of lines: both descriptors point to an unlinked file meanwhile.
    With VLENS_LOG=1 it all goes to stderr. Where Python's own streams are others, as in a notebook, the engine gets those
    of the descriptors, and keeps them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    through = env.engine_log()
    with (tempfile.TemporaryFile() as log, redirect_stdout(sys.__stdout__ or sys.stdout),
          redirect_stderr(sys.__stderr__ or sys.stderr)):
        os.dup2(2 if through else log.fileno(), 1)
        os.dup2(2 if through else log.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, copy in enumerate(kept, start=1):
                os.dup2(copy, descriptor)
                os.close(copy)
