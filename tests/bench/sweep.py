#!/usr/bin/env python3
"""A layer x position sweep of patches, against what a user would do otherwise. Prints, never asserts.

    sweep.py [CELLS] [--model demo]

One run, on the Eiffel Tower and Colosseum prompts (10 tokens), every layer and position:

  sweep     vlens patch --sweep layer,pos, a whole process, through the warm resident engine, three times
  a cell    one `vlens patch -i` a cell, whole processes; CELLS of them (20 by default), as if all were asked
  loop      the same cells as a TransformerLens loop in a process that has loaded its model: run_with_hooks a cell,
            without the loading; where warm_query.py finds a TransformerLens
  cells     the sweep over one half of the layers: the cost a cell
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile

from cold_capture import settings_of
from warm_query import VLENS, lens_python, timed

BASE = "The Eiffel Tower is located in the city of"
SOURCE = "The Colosseum is located in the city of"

LOOP = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformer_lens.model_bridge import TransformerBridge
folder, base, source = sys.argv[1:]
hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model = TransformerBridge.boot_transformers(folder, hf_model=hf, tokenizer=AutoTokenizer.from_pretrained(folder))
_, cache = model.run_with_cache(source, names_filter=lambda name: name.endswith("hook_resid_post"))
n = cache["blocks.0.hook_resid_post"].shape[1]
layers = hf.config.num_hidden_layers
model.run_with_hooks(base)
began = time.perf_counter()
for layer in range(layers):
    name = f"blocks.{layer}.hook_resid_post"
    for pos in range(n):
        def patch(value, hook):
            value[:, pos] = cache[name][:, pos]
            return value
        model.run_with_hooks(base, fwd_hooks=[(name, patch)])[0, -1]
print(json.dumps([layers * n, time.perf_counter() - began]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="?", type=int, default=20)
    parser.add_argument("--model", default="demo")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vl-bench-") as folder:
        environment = os.environ | {"VLENS_RUNTIME": f"{folder}/run", "VLENS_MODEL": asked.model}
        try:
            timed([*VLENS, "engine", "start"], environment)
            measure(asked, environment)
        finally:
            timed([*VLENS, "engine", "stop"], environment)


def measure(asked: argparse.Namespace, environment: dict[str, str]) -> None:
    def sweep(hook: str) -> tuple[float, dict]:
        seconds, printed = timed([*VLENS, "patch", "--hook", hook, "--sweep", "layer,pos", "--source", SOURCE, "--json", BASE],
                                 environment)
        return seconds, json.loads(printed)

    _, found = sweep("blocks.*.hook_resid_post")
    layers, positions = len(found["sweep"]["grid"]), len(found["sweep"]["tokens"])
    whole = statistics.median(sweep("blocks.*.hook_resid_post")[0] for _ in range(3))
    half = statistics.median(sweep(f"blocks.{{{layers // 2}-{layers - 1}}}.hook_resid_post")[0] for _ in range(3))
    cells = layers * positions
    print(f"sweep of {layers} x {positions}: {whole:.2f} s, {whole / cells * 1000:.1f} ms a cell; its later half "
          f"{half:.2f} s")
    each = []
    for n in range(asked.cells):
        edit = f"blocks.{n * 7 % layers}.hook_resid_post[pos={n % positions}] = @source"
        each.append(timed([*VLENS, "patch", "-i", edit, "--source", SOURCE, "--json", BASE], environment)[0])
    print(f"one query a cell: {statistics.median(each) * 1000:.0f} ms each, so {statistics.median(each) * cells:.1f} s: "
          f"{statistics.median(each) * cells / whole:.1f} times the sweep")
    if python := lens_python():
        model = settings_of(asked.model)["arguments"]["model"]
        _, printed = timed([python, "-c", LOOP, model, BASE, SOURCE], environment | {"HF_HUB_OFFLINE": "1"})
        n, seconds = json.loads(printed.splitlines()[-1])
        print(f"TransformerLens, a loop of {n} forwards: {seconds:.1f} s: {seconds / n * cells / whole:.1f} times the sweep")


if __name__ == "__main__":
    sys.exit(main())
