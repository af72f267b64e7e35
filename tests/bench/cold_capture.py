#!/usr/bin/env python3
"""How long a cold `vlens capture` takes against a plain vLLM script, and what memory each takes. Prints, never asserts.

    cold_capture.py [N] [--model demo] [--json]

Whole processes, alternating, N of each (5 by default), after one unmeasured round that fills the disk cache:

  vlens   python -m vlens_cli capture --no-daemon --hook blocks.3.hook_resid_post PROMPT --json
  plain   a script that makes `vllm.LLM` with the arguments and environment that vlens would give it, hides the same
          packages that do not import, and generates one token for the same prompt

Seconds are wall-clock; memory is the process's own peak resident set, in MiB (its finished children count by the
largest). The ratio is of the medians, vlens over plain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROMPT = "The Eiffel Tower is located in the city of"
HOOK = "blocks.3.hook_resid_post"

# What vlens would start the engine with. A process of its own: it may import what it likes and is not measured.
SETTINGS = """
import json, os, sys
before = dict(os.environ)
from vlens_cli.driver import boot, hide
from vlens_cli.families import catalog_for
from vlens_cli.models import resolve
from vlens_cli.query import EngineSpec

model = resolve(sys.argv[1])
spec = EngineSpec(model=str(model.folder), name=model.name)
boot.prepare()
print(json.dumps({
    "arguments": boot.engine_arguments(spec, boot.plan(spec, model.config, catalog_for(model.config))),
    "environment": {name: value for name, value in os.environ.items() if before.get(name) != value},
    "hidden": [name for name in hide.OPTIONAL if sys.modules.get(name, True) is None],
}))
"""

# The plain script. It tokenizes by itself where the arguments say that vLLM does not, as vlens does.
PLAIN = """
import json, os, sys
settings = json.loads(sys.argv[1])
os.environ.update(settings["environment"])
for name in settings["hidden"]:
    sys.modules[name] = None
from vllm import LLM, SamplingParams

arguments, prompt = settings["arguments"], sys.argv[2]
llm = LLM(**arguments)
if arguments.get("skip_tokenizer_init"):
    from transformers import AutoTokenizer
    ids = AutoTokenizer.from_pretrained(arguments["model"])(prompt).input_ids
    answer = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0, detokenize=False))
else:
    answer = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
print(json.dumps({"token": answer[0].outputs[0].token_ids[0], "prompt": list(answer[0].prompt_token_ids)}))
"""


@dataclass(frozen=True)
class Run:
    """One measured process: wall-clock seconds, peak resident memory in MiB, and its stdout."""

    seconds: float
    mib: float
    stdout: str


def measure(command: list[str]) -> Run:
    """Run a command to its end; a failure ends the benchmark with what it said."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)  # this child's own usage, not the largest of all so far
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode != 0:
            name = " ".join(command[1:4]) if command[1] == "-m" else "a script"
            sys.exit(f"{name} ended with {process.returncode}:\n{err.read()[-4000:]}")
        kib = usage.ru_maxrss / 1024 if sys.platform == "darwin" else usage.ru_maxrss
        return Run(seconds, kib / 1024, out.read())


def settings_of(model: str) -> dict[str, Any]:
    """What vlens would start its engine with: arguments, environment, hidden packages."""
    return json.loads(measure([sys.executable, "-c", SETTINGS, model]).stdout.splitlines()[-1])


def commands(model: str) -> dict[str, list[str]]:
    vlens = [sys.executable, "-m", "vlens_cli", "capture", "--no-daemon", "--model", model, "--hook", HOOK, PROMPT]
    plain = [sys.executable, "-c", PLAIN, json.dumps(settings_of(model)), PROMPT]
    return {"vlens": [*vlens, "--json"], "plain": plain}


def same_prompt(vlens: Run, plain: Run) -> bool:
    """Whether both fed the engine the same tokens."""
    tokens = json.loads(vlens.stdout)["prompts"][0]["tokens"]
    return [token["id"] for token in tokens] == json.loads(plain.stdout.splitlines()[-1])["prompt"]


def summary(runs: list[Run]) -> dict[str, float]:
    seconds = [run.seconds for run in runs]
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "peak_mib": statistics.median(run.mib for run in runs),
    }


def benchmark(model: str, n: int) -> dict[str, Any]:
    asked = commands(model)
    warm_up = {name: measure(command) for name, command in asked.items()}
    runs: dict[str, list[Run]] = {name: [] for name in asked}
    for i in range(n):
        order = list(asked) if i % 2 == 0 else list(reversed(asked))  # neither is always first
        for name in order:
            runs[name].append(measure(asked[name]))
            print(f"{name} {runs[name][-1].seconds:.2f} s", file=sys.stderr)
    result: dict[str, Any] = {name: summary(measured) for name, measured in runs.items()}
    return {
        "benchmark": "cold_capture",
        "repetitions": n,
        "same_prompt": same_prompt(warm_up["vlens"], warm_up["plain"]),
        **result,
        "ratio": result["vlens"]["median_s"] / result["plain"]["median_s"],
        "ratio_of_minima": result["vlens"]["min_s"] / result["plain"]["min_s"],
        "memory_ratio": result["vlens"]["peak_mib"] / result["plain"]["peak_mib"],
    }


def show(result: dict[str, Any]) -> None:
    for name in ("vlens", "plain"):
        r = result[name]
        print(
            f"{name}  median {r['median_s']:6.2f} s   min {r['min_s']:6.2f}   max {r['max_s']:6.2f}"
            f"   peak {r['peak_mib']:6.0f} MiB"
        )
    print(
        f"ratio  median {result['ratio']:.3f}   min {result['ratio_of_minima']:.3f}"
        f"   memory {result['memory_ratio']:.3f}   ({result['repetitions']} runs each)"
    )
    if not result["same_prompt"]:
        print("the two did not feed the same tokens: the ratio means little")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n", nargs="?", type=int, default=5, help="measured runs of each")
    parser.add_argument("--model", default="demo", help="as `vlens --model` takes it")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    result = benchmark(options.model, options.n)
    print(json.dumps(result)) if options.json else show(result)


if __name__ == "__main__":
    main()
