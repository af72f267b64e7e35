#!/usr/bin/env python3
"""How long `vlens param` takes for one weight of a large checkpoint, and how much memory. Prints, never asserts.

    param_read.py [N]

A checkpoint of 500 MB is made on the spot; one weight of 10 MB is read N times (10 by default), whole processes, each
timed command in turn with the others, medians:

  import   python -c "import click, rich.table, rich.console": the least that such a command can take
  script   python -c: safetensors' safe_open, the same weight, its norm, mean, minimum and maximum by numpy
  param    vlens param NAME: statistics and histogram, as a table
  file     vlens param NAME -o FILE, of the TransformerLens name, which is permuted
  slice    vlens param NAME[0:10] --values

Memory is the largest resident set of any process of a command.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLENS = [sys.executable, "-m", "vlens_cli", "param"]
D_MODEL, D_MLP, LAYERS = 1024, 2432, 12
NAME, LENS = "model.layers.5.mlp.gate_proj.weight", "blocks.5.mlp.W_gate"
SCRIPT = f"""
import sys, numpy as np
from safetensors import safe_open
with safe_open(sys.argv[1], "np") as file:
    x = file.get_tensor("{NAME}").astype(np.float64)
print(np.linalg.norm(x), x.mean(), x.min(), x.max())
"""


def shapes() -> dict[str, tuple[int, ...]]:
    block = {
        "input_layernorm": (D_MODEL,), "post_attention_layernorm": (D_MODEL,), "mlp.gate_proj": (D_MLP, D_MODEL),
        "mlp.up_proj": (D_MLP, D_MODEL), "mlp.down_proj": (D_MODEL, D_MLP),
        **{f"self_attn.{p}_proj": (D_MODEL, D_MODEL) for p in "qkvo"},
    }  # fmt: skip
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in block.items()}
    return {"model.embed_tokens.weight": (4096, D_MODEL), **layers, "model.norm.weight": (D_MODEL,)}


def make(folder: Path) -> None:
    """Write the checkpoint."""
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    save_file({name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes().items()},
              folder / "model.safetensors")  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS,
        "hidden_size": D_MODEL, "num_attention_heads": 16, "intermediate_size": D_MLP, "vocab_size": 4096,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds, and the largest resident set in MB."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command} failed:\n{said}")
    return seconds, used.ru_maxrss / 1000


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory(prefix="vl-bench-") as name:
        folder = Path(name)
        # In a process of its own: what this one has held counts as its children's largest.
        subprocess.run([sys.executable, __file__, "--make", name], check=True)
        size = (folder / "model.safetensors").stat().st_size
        print(f"a checkpoint of {size / 1e6:.0f} MB, one weight of {4 * D_MODEL * D_MLP / 1e6:.1f} MB")
        model = ["-m", name, "--table"]
        commands = {
            "import": [sys.executable, "-c", "import click, rich.table, rich.console"],
            "script": [sys.executable, "-c", SCRIPT, f"{name}/model.safetensors"],
            "param": [*VLENS, NAME, *model],
            "file": [*VLENS, LENS, "-o", "w.safetensors", *model],
            "slice": [*VLENS, f"{NAME}[0:10]", "--values", *model],
            "norm": [*VLENS, "model.norm.weight", *model],
        }
        runs: dict[str, list[tuple[float, float]]] = {what: [] for what in commands}
        for turn in range(n + 1):
            for what, command in commands.items():
                found = timed(command, folder)
                if turn:
                    runs[what].append(found)
        report(runs)


def report(runs: dict[str, list[tuple[float, float]]]) -> None:
    seconds = {what: statistics.median(second for second, _ in found) for what, found in runs.items()}
    memory = {what: max(mb for _, mb in found) for what, found in runs.items()}
    for what, found in runs.items():
        least = min(second for second, _ in found)
        print(f"{what:7} median {1000 * seconds[what]:5.0f} ms   min {1000 * least:5.0f}   at most {memory[what]:5.1f} MB")
    tensor = 4 * D_MODEL * D_MLP / 1e6
    print(f"param over import: {seconds['param'] / seconds['import']:.2f}, over the script: "
          f"{seconds['param'] / seconds['script']:.2f}")
    for what in ("param", "file"):
        above = {least: (memory[what] - memory[least]) / tensor for least in ("import", "norm")}
        print(f"memory of {what} over the weight: {above['import']:.2f} above import, {above['norm']:.2f} above a weight of "
              "4 kB")


if __name__ == "__main__":
    make(Path(sys.argv[2])) if sys.argv[1:2] == ["--make"] else main()
