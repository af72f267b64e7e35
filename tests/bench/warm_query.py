#!/usr/bin/env python3
"""How long the warm commands take, against what a user would do otherwise. Prints, never asserts.

    warm_query.py [N] [--model demo]

One run, whole processes, each timed command in turn with the others, medians of N (20 by default), with bytecode
cached as in any second command of a user's; no prompt is asked twice:

  import    python -c "import click, rich.table, rich.console": the least that such a command can take
  generate  `LLM.generate` of one token in a warm plain vLLM process, same arguments, same prompts
  capture   vlens capture --hook blocks.3.hook_resid_post PROMPT, through the resident engine
  help, status, completion of a hook name

then 30 layers x 2,000 tokens of hook_resid_post to disk (138 MB with the demo model), from the end of the forward, which
the reply tells, to the client's exit, against dd of the same size.

Where VLENS_BENCH_TRANSFORMER_LENS names a Python that has TransformerLens (4.3; `pip install transformer-lens` in an
environment of its own), or ~/.cache/vlens-tests/transformer-lens is such an environment, the same capture is timed as a
TransformerLens script too, a whole process.
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
from collections.abc import Callable
from pathlib import Path

from cold_capture import settings_of

ROOT = Path(__file__).parents[2]
VLENS = [sys.executable, "-m", "vlens_cli"]
IMPORT = [sys.executable, "-c", "import click, rich.table, rich.console"]
WORDS = "the of and a in is it as was with be by on not he his but at are this".split()

# How a script of plain vLLM begins; argv: settings.
BEGIN = """
import json, os, sys, time
settings = json.loads(sys.argv[1])
os.environ.update(settings["environment"])
for name in settings["hidden"]:
    sys.modules[name] = None
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams
"""

PLAIN = BEGIN + """
from transformers import AutoTokenizer
llm = LLM(**settings["arguments"])
tokenizer = AutoTokenizer.from_pretrained(settings["arguments"]["model"])
params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
print("ready", file=out, flush=True)
for line in sys.stdin:
    ids = tokenizer(json.loads(line))["input_ids"]
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    print(time.perf_counter() - began, file=out, flush=True)
"""


# The same capture by TransformerLens; argv: the model's folder, the prompt.
LENS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformer_lens.model_bridge import TransformerBridge
folder, prompt = sys.argv[1:]
hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model = TransformerBridge.boot_transformers(folder, hf_model=hf, tokenizer=AutoTokenizer.from_pretrained(folder))
_, cache = model.run_with_cache(prompt, names_filter="blocks.3.hook_resid_post")
print(cache["blocks.3.hook_resid_post"].norm(dim=-1))
"""
LENS_RUNS = 3


def lens_python() -> str | None:
    """The Python that has TransformerLens; None where there is none."""
    usual = Path("~/.cache/vlens-tests/transformer-lens/bin/python").expanduser()
    named = os.environ.get("VLENS_BENCH_TRANSFORMER_LENS") or (str(usual) if usual.exists() else None)
    if named is None:
        return None
    asked = subprocess.run([named, "-c", "import transformer_lens"], capture_output=True)
    return named if asked.returncode == 0 else None


def prompts() -> Callable[[], str]:
    """Different prompts of about ten tokens, without end."""
    n = iter(range(10**6))
    return lambda: " ".join(["The", *(WORDS[(next(n) * 7 + k) % 19] for k in range(8)), "Tower"])


def timed(command: list[str], environment: dict[str, str], **more: object) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, **more)
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1):
        sys.exit(f"{command} failed:\n{done.stderr}")
    return seconds, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n", nargs="?", type=int, default=20)
    parser.add_argument("--model", default="demo")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vl-bench-") as folder:
        environment = os.environ | {"VLENS_RUNTIME": f"{folder}/run", "VLENS_MODEL": asked.model}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            timed([*VLENS, "engine", "start"], environment)
            small(asked, environment)
            large(environment, Path(folder))
        finally:
            timed([*VLENS, "engine", "stop"], environment)


def small(asked: argparse.Namespace, environment: dict[str, str]) -> None:
    plain = subprocess.Popen([sys.executable, "-c", PLAIN, json.dumps(settings_of(asked.model))], text=True, cwd=ROOT,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    plain.stdout.readline()
    prompt = prompts()

    def generate() -> float:
        plain.stdin.write(json.dumps(prompt()) + "\n")
        plain.stdin.flush()
        return float(plain.stdout.readline())

    def capture() -> float:
        return timed([*VLENS, "capture", "--hook", "blocks.3.hook_resid_post", prompt()], environment)[0]

    completing = environment | {"_VLENS_COMPLETE": "bash_complete", "COMP_CWORD": "3",
                                "COMP_WORDS": "vlens capture --hook blocks.3.hook_resid_p"}
    runs: dict[str, Callable[[], float]] = {
        "import": lambda: timed(IMPORT, environment)[0], "generate": generate, "capture": capture,
        "help": lambda: timed([*VLENS, "--help"], environment)[0],
        "status": lambda: timed([*VLENS, "engine", "status"], environment)[0],
        "completion": lambda: timed(VLENS, completing)[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(asked.n + 1):
        for name, run in runs.items():
            spent = run()
            if turn:
                seconds[name].append(spent)
    plain.stdin.close()
    plain.wait(60)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:11} median {median[name] * 1000:6.0f} ms   min {min(values) * 1000:6.0f}   max {max(values) * 1000:6.0f}")
    if python := lens_python():
        folder = settings_of(asked.model)["arguments"]["model"]
        lens = statistics.median(
            timed([python, "-c", LENS, folder, prompt()], environment | {"HF_HUB_OFFLINE": "1"})[0] for _ in range(LENS_RUNS))
        print(f"TransformerLens median {lens * 1000:6.0f} ms: {lens / median['capture']:.1f} times a warm capture")
    allowed = median["import"] + 1.5 * median["generate"] + 0.03
    print(f"capture over import + 1.5 generate + 30 ms: {median['capture'] / allowed:.2f}")
    for name in ("help", "status", "completion"):
        print(f"{name} over import: {(median[name] - median['import']) * 1000:+.0f} ms")


LARGE_RUNS = 5


def large(environment: dict[str, str], folder: Path) -> None:
    text = " ".join(WORDS[(n * n + n // 7) % 19] for n in range(1999))
    out = folder / "large.safetensors"
    command = [*VLENS, "capture", "--hook", "blocks.*.hook_resid_post", "--json", "-o", str(out), "-"]
    tails, copies = [], []
    for turn in range(LARGE_RUNS + 1):
        _, printed = timed(command, environment, input=f"{turn} {text}")
        tails.append(time.time() - json.loads(printed)["seconds"]["ended"])
        copies.append(timed(["dd", "if=/dev/zero", f"of={folder}/zeros", "bs=1M",
                             f"count={out.stat().st_size // 2**20}"], environment)[0])
        # Each writes a new file.
        (folder / "zeros").unlink()
    # The first writes into memory that nothing has used yet.
    tail, copy = statistics.median(tails[1:]), statistics.median(copies[1:])
    print(f"large capture, {out.stat().st_size / 1e6:.0f} MB: from the end of the forward {tail * 1000:.0f} ms, "
          f"dd of the same size {copy * 1000:.0f} ms: over 2 dd + 50 ms: {tail / (2 * copy + 0.05):.2f}")


if __name__ == "__main__":
    main()
