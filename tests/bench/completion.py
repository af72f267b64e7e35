#!/usr/bin/env python3
"""How long a TAB takes, whole processes as a shell starts them, of every kind of name. Prints, never asserts.

    completion.py [N] [--model demo]

One engine of the model runs. Each kind in turn with the others, medians of N (20 by default):

  import    python -c "import click": the least that such an answer can take
  pass      python -c pass
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLENS = [sys.executable, "-m", "vlens_cli"]
ASKED = 0.15
# What stands on the line when TAB is pressed; {folder} is the model's.
KINDS = {
    "commands": "vlens ",
    "command": "vlens ca",
    "option": "vlens capture --h",
    "hook of the engine": "vlens capture --hook blocks.3.hook_resid_p",
    "hook of a config": "vlens capture -m {other} --hook blocks.3.hook_resid_p",
    "hook to change": "vlens patch -i blocks.3.hook_resid_p",
    "lens": "vlens logits --lens blocks.3.",
    "weight": "vlens param blocks.3.attn.W_",
    "weight of a folder": "vlens param -m {other} model.layers.3.",
    "weight list": "vlens param --list blocks.3.",
    "model": "vlens capture -m d",
    "engine": "vlens engine stop -m d",
    "file": "vlens capture -f pro",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n", nargs="?", type=int, default=20)
    parser.add_argument("--model", default="demo")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from vlens_cli.models import resolve

    with tempfile.TemporaryDirectory(prefix="vl-bench-") as name:
        # Another folder with the same files is another model, of which no engine runs.
        other = Path(name) / "other"
        other.mkdir()
        for file in resolve(asked.model).folder.iterdir():
            (other / file.name).symlink_to(file)
        environment = os.environ | {"VLENS_RUNTIME": f"{name}/run", "VLENS_MODEL": asked.model, "PYTHONPATH": str(ROOT)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            subprocess.run([*VLENS, "engine", "start"], env=environment, check=True, capture_output=True)
            report(times(asked.n, environment, str(other)))
        finally:
            subprocess.run([*VLENS, "engine", "stop"], env=environment, capture_output=True)


def times(n: int, environment: dict[str, str], other: str) -> dict[str, list[float]]:
    """Seconds of each kind."""
    python = [sys.executable, "-c"]
    commands = {"pass": ([*python, "pass"], environment), "import": ([*python, "import click"], environment)}
    for kind, line in KINDS.items():
        words = line.format(other=other)
        asking = {"_VLENS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        commands[kind] = (VLENS, environment | asking)
    found: dict[str, list[float]] = {kind: [] for kind in commands}
    for turn in range(n + 1):
        for kind, (command, env) in commands.items():
            began = time.perf_counter()
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
            seconds = time.perf_counter() - began
            if kind in KINDS and not done.stdout:
                sys.exit(f"nothing was offered for: {kind}\n{done.stderr}")
            if turn:
                found[kind].append(seconds)
    return found


def report(found: dict[str, list[float]]) -> None:
    for kind, seconds in found.items():
        median = statistics.median(seconds)
        late = "   more than asked" if kind in KINDS and median > ASKED else ""
        print(f"{kind:20} median {1000 * median:4.0f} ms   min {1000 * min(seconds):4.0f}   max {1000 * max(seconds):4.0f}{late}")


if __name__ == "__main__":
    main()
