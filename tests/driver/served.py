"""Jobs that a process of another kind does, one process for a whole test run: its imports take the longest. Both ends.

A line of its stdin is a JSON object, the job's name under `job` and its arguments; a line of its stdout is
`{"error": null or a traceback}`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path


class Served:
    """The asking end: starts the process of a script, which calls `serve`, when it is first asked.

    It ends when its stdin does, at the latest with this process.
    """

    def __init__(self, script: Path, python: str = sys.executable) -> None:
        self._command = [python, str(script)]
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: str, **arguments: object) -> None:
        """Have one job done. Raises RuntimeError, with the end of the traceback, where it fails."""
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, text=True)
            atexit.register(self._end, self._process)
        self._process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            status, self._process = self._process.wait(), None
            raise RuntimeError(f"{job} with {arguments.get('folder')}: its process ended with status {status}")
        error = json.loads(answer)["error"]
        if error is not None:
            raise RuntimeError(f"{job} with {arguments.get('folder')} failed:\n{error[-4000:]}")

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.stdin.close()
        process.wait()


def serve(jobs: Mapping[str, Callable[..., object]]) -> None:
    """The answering end: do jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    for line in sys.stdin:
        error = None
        try:
            asked = json.loads(line)
            jobs[asked.pop("job")](**asked)
        except Exception:  # the asker gets it whole, and the next job is another
            error = traceback.format_exc()
        print(json.dumps({"error": error}), file=answers, flush=True)
        gc.collect()  # a model and its hooks hold each other
