"""Ask one query and get its reply. For now the engine lives in the asking process and ends with it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vlens_cli.errors import StartError
from vlens_cli.query import CaptureQuery, EngineSpec, Reply


def ask(
    spec: EngineSpec, query: CaptureQuery, progress: Callable[[str], None] = lambda text: None,
    into: BinaryIO | None = None,
) -> Reply:
    """Run one query to its end. `progress` gets a line whenever something long begins; tensors
    are written into the open file `into`.

    Raises the errors of `Session.capture`; StartError where no engine is installed.
    """
    config = json.loads((Path(spec.model) / "config.json").read_text(encoding="utf-8"))
    with engine_output():
        try:
            from vlens_cli.driver.session import Session
        except ImportError as missing:
            raise StartError(
                f"no engine is installed: the package {missing.name} is missing",
                hint="pip install 'vlens_cli[cpu]' for this machine's processor, or 'vlens_cli[cuda]' for NVIDIA GPUs",
                code="no_engine",
            ) from missing
        return Session(spec, config).capture(query, progress, into)


@contextmanager
def engine_output() -> Iterator[None]:
    """Keep what the engine and its libraries print (Python and C alike) out of stdout and stderr.

    stdout is data, and the engine's log is dozens of lines: both descriptors point to an unlinked file meanwhile.
    With VLENS_LOG=1 it all goes to stderr.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    through = os.environ.get("VLENS_LOG", "") not in ("", "0")
    with tempfile.TemporaryFile() as log:
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
