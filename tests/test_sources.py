"""The sources themselves: no name that is not defined, and nothing imported in vain unless the line says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_undefined_and_no_unused_names():
    done = subprocess.run([sys.executable, "-m", "pyflakes", "vlens_cli", "tests"], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr
    found = [line for line in done.stdout.splitlines() if not _meant(line)]
    assert not found, "\n".join(found)


def _meant(line: str) -> bool:
    file, number = re.match(r"(.+?):(\d+):", line).groups()
    return "# noqa" in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(number) - 1]
