"""Parts of a test or benchmark, each in a process of its own: one that fails says so, and the others go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "RESULT "


def report(**found: Any) -> None:
    """What a part has found, for `run` in the other process."""
    print(MARK + json.dumps(found), flush=True)


def run(script: str, arguments: list[str], limit: float, environment: dict[str, str] | None = None
        ) -> tuple[list[dict[str, Any]], str]:
    """(what the part reported, what went wrong or nothing)."""
    began = time.time()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                                "VLLM_LOGGING_LEVEL": "WARNING"} | (environment or {})
    try:
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=limit,
                              env=environment, start_new_session=True)
        said, code = done.stdout, done.returncode
        last = done.stderr
    except subprocess.TimeoutExpired as late:
        said, code = (late.stdout or b"").decode(errors="replace"), f"none: more than {limit:.0f} s"
        last = (late.stderr or b"").decode(errors="replace")
    found = [json.loads(line.removeprefix(MARK)) for line in said.splitlines() if line.startswith(MARK)]
    fault = "" if code == 0 else f"exit code {code} after {time.time() - began:.0f} s\n{_tail(last)}"
    return found, fault


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and "it/s]" not in line]
    return "\n".join(lines[-45:])


def save(name: str, found: Any) -> None:
    """Into $OUT, where it is set."""
    if out := os.environ.get("OUT"):
        Path(out, name).write_text(json.dumps(found, indent=1))
