#!/usr/bin/env python3
"""Large work: many prompts to disk, against what the engine does without capture, and what transformers does. Prints, never
asserts.

    large.py [--model demo] [--prompts 300] [--many 2000] [--turns 2] [--parts rates,transformers,memory,linear]

  rates         PROMPTS prompts of 5 to 200 tokens, in turn: `LLM.generate(max_tokens=1)` of a plain vLLM process with the
                same arguments and environment, all prompts in one call; whole commands, through the resident engine, of all
                hook_resid_post into shards, and the same with --reduce last. tokens/s, ratios of medians
  transformers  the same prompts in a process of their own: batches by length, padded, `output_hidden_states`, to disk
  memory        MANY prompts through the resident engine: its anonymous memory (RssAnon) while they run, over that when idle;
                then a hundred of them alone, one command each: the largest relative error of a whole tensor and of a row
  linear        100 tokens a prompt, from 1,000 to 100,000 tokens, on a model of four small layers: seconds a thousand tokens;
                and with one hook point asked of the hundreds that exist
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from cold_capture import settings_of
from warm_query import BEGIN, VLENS, timed

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "driver")]
RESID = "blocks.*.hook_resid_post"

# argv: settings. A line of stdin is a file of prompts; a line of stdout is how many seconds they took.
PLAIN = BEGIN + """
llm = LLM(**settings["arguments"])
params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
for line in sys.stdin:
    prompts = [{"prompt_token_ids": json.loads(one)["tokens"]} for one in open(line.strip())]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    print(time.perf_counter() - began, file=out, flush=True)
"""

# argv: the model's folder, the file of prompts, a folder for the results.
TRANSFORMERS = """
import json, sys, time
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
folder, prompts, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
ids = sorted((json.loads(line)["tokens"] for line in open(prompts)), key=len)
batches, most = [[]], 2048
for one in ids:
    if batches[-1] and (len(batches[-1]) + 1) * len(one) > most:
        batches.append([])
    batches[-1].append(one)
began = time.perf_counter()
with torch.inference_mode():
    for n, batch in enumerate(batches):
        width = len(batch[-1])
        padded = torch.tensor([one + [0] * (width - len(one)) for one in batch])
        mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in batch])
        states = model(padded, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states[1:]
        save_file({f"blocks.{i}": state[mask.bool()] for i, state in enumerate(states)}, f"{out}/{n}.safetensors")
print(time.perf_counter() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--many", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--parts", default="rates,transformers,memory,linear")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vl-bench-") as folder:
        for part in asked.parts.split(","):
            PARTS[part](asked, Path(folder))


def write_prompts(path: Path, lengths: list[int], d_vocab: int = 400) -> int:
    """Random tokens; returns how many."""
    pick = random.Random(0)
    path.write_text("".join(json.dumps({"tokens": [pick.randrange(3, d_vocab) for _ in range(n)]}) + "\n" for n in lengths))
    return sum(lengths)


def lengths_of(count: int) -> list[int]:
    pick = random.Random(1)
    return [pick.randrange(5, 201) for _ in range(count)]


def opened(model: str) -> Any:
    """A session with its engine, in this process."""
    from vlens_cli.daemon import local
    from vlens_cli.driver import boot
    from vlens_cli.models import resolve
    from vlens_cli.query import EngineSpec

    found = resolve(model)
    boot.prepare()
    one = local.open_session(EngineSpec(model=str(found.folder), name=found.name))
    one.driver(lambda text: None)
    return one


def collected(one: Any, prompts: Path, out: Path, hooks: tuple[str, ...] = (RESID,), **fields: Any) -> float:
    """Seconds from the query to its answer, all of it on disk."""
    from vlens_cli.query import CollectQuery

    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with tempfile.TemporaryFile() as spool:
        lines = [json.dumps({**json.loads(line), "where": ""}).encode() for line in prompts.read_text().splitlines()]
        spool.write(b"\n".join(lines))
        spool.flush()
        began = time.perf_counter()
        one.answer(CollectQuery(len(lines), str(out), "bench", hooks, **fields), lambda text: None, spool)
        return time.perf_counter() - began


def rates(asked: argparse.Namespace, folder: Path) -> None:
    environment = os.environ | {"VLENS_RUNTIME": f"{folder}/run", "VLENS_MODEL": asked.model, "PYTHONPATH": str(ROOT)}
    prompts = folder / "prompts.jsonl"
    n_tokens = write_prompts(prompts, lengths_of(asked.prompts))
    plain = subprocess.Popen([sys.executable, "-c", PLAIN, json.dumps(settings_of(asked.model))], text=True, cwd=ROOT,
                             env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def generated(file: Path) -> float:
        plain.stdin.write(f"{file}\n")
        plain.stdin.flush()
        return float(plain.stdout.readline())

    def captured(file: Path, *options: str) -> float:
        shutil.rmtree(folder / "out", ignore_errors=True)
        return timed([*VLENS, "capture", "--json", "--hook", RESID, "-f", str(file), "-o", f"{folder}/out/", *options],
                     environment)[0]

    runs = {"plain": lambda file: generated(file), "to disk": lambda file: captured(file),
            "reduce last": lambda file: captured(file, "--reduce", "last")}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    try:
        write_prompts(folder / "few.jsonl", [100] * 8)
        for run in runs.values():
            run(folder / "few.jsonl")
        for turn in range(asked.turns):
            for name in list(runs) if turn % 2 == 0 else reversed(runs):
                seconds[name].append(runs[name](prompts))
                print(f"  {name} {seconds[name][-1]:.2f} s", file=sys.stderr)
    finally:
        plain.stdin.close()
        plain.wait(60)
        timed([*VLENS, "engine", "stop"], environment)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    print(f"{asked.prompts} prompts, {n_tokens} tokens, {asked.turns} runs each")
    for name, found in median.items():
        print(f"  {name:12} {n_tokens / found:8.0f} tokens/s, {median['plain'] / found:.2f} of plain", flush=True)


def transformers(asked: argparse.Namespace, folder: Path) -> None:
    prompts = folder / "prompts.jsonl"
    n_tokens = write_prompts(prompts, lengths_of(asked.prompts))
    model = settings_of(asked.model)["arguments"]["model"]
    (folder / "hf").mkdir()
    done = subprocess.run([sys.executable, "-c", TRANSFORMERS, model, str(prompts), str(folder / "hf")], capture_output=True,
                          text=True)
    if done.returncode:
        sys.exit(done.stderr)
    print(f"  transformers {n_tokens / float(done.stdout.splitlines()[-1]):8.0f} tokens/s, the same to disk")


def memory(asked: argparse.Namespace, folder: Path) -> None:
    """The engine's anonymous memory, twenty times a second."""
    environment = os.environ | {"VLENS_RUNTIME": f"{folder}/run", "VLENS_MODEL": asked.model, "PYTHONPATH": str(ROOT)}
    prompts = folder / "many.jsonl"
    n_tokens = write_prompts(prompts, lengths_of(asked.many))
    write_prompts(folder / "one.jsonl", [200])
    try:
        timed([*VLENS, "capture", "--json", "--hook", RESID, "-f", str(folder / "one.jsonl"), "-o", f"{folder}/one/"],
              environment)
        (engine,) = json.loads(timed([*VLENS, "engine", "status", "--json"], environment)[1])["engines"]
        idle, seen, over = anonymous(engine["pid"]), [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                seen.append(anonymous(engine["pid"]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        seconds, _ = timed([*VLENS, "capture", "--json", "--hook", RESID, "-f", str(prompts), "-o", f"{folder}/many/"],
                           environment)
        over.set()
        watcher.join()
        errors = against_alone(prompts, folder, environment, asked.many)
    finally:
        timed([*VLENS, "engine", "stop"], environment)
    written = sum(path.stat().st_size for path in (folder / "many").iterdir())
    print(f"{asked.many} prompts, {n_tokens} tokens, {written / 1e9:.1f} GB in {seconds:.0f} s: RssAnon {idle / 1e6:.0f} MB "
          f"idle, at most {(max(seen) - idle) / 1e6:+.0f} MB while they ran")
    print(f"  {errors}", flush=True)
    shutil.rmtree(folder / "many")


def against_alone(prompts: Path, folder: Path, environment: dict[str, str], count: int) -> str:
    """What differs between a hundred of the prompts, each asked alone, and their rows in the shards."""
    from safetensors import safe_open

    ids = [json.loads(line)["tokens"] for line in prompts.read_text().splitlines()]
    index = json.loads((folder / "many" / "capture.safetensors.index.json").read_text())
    keys = [key for key in index["weight_map"] if key.endswith("/tokens")]
    runs = sorted(tuple(map(int, key.partition("/")[0].split(":"))) for key in keys)
    in_order = [n for first, stop in runs for n in range(first, stop)] == list(range(count))
    sample = {*random.Random(2).sample(range(count), 100)}
    whole = row = 0.0
    same = in_order and index["metadata"]["n_prompts"] == count
    for first, stop in runs:
        run = f"{first}:{stop}"
        with safe_open(folder / "many" / index["weight_map"][f"{run}/tokens"], "pt") as shard:
            offsets, tokens = shard.get_tensor(f"{run}/offsets").tolist(), shard.get_tensor(f"{run}/tokens").tolist()
            same &= tokens == [token for n in range(first, stop) for token in ids[n]]
            for n in sorted(sample & {*range(first, stop)}):
                timed([*VLENS, "capture", "--json", "--hook", RESID, "--tokens", ",".join(map(str, ids[n])), "-o",
                       f"{folder}/alone.safetensors"], environment)
                with safe_open(folder / "alone.safetensors", "pt") as alone:
                    for name in alone.keys():
                        want = alone.get_tensor(name).double()
                        off = shard.get_slice(f"{run}/{name}")[offsets[n - first] : offsets[n - first + 1]].double() - want
                        whole = max(whole, float(off.norm() / want.norm()))
                        row = max(row, float((off.norm(dim=-1) / want.norm(dim=-1)).max()))
    return (f"{'each prompt once and in order' if same else 'PROMPTS ARE MISSING OR OUT OF ORDER'}; {len(sample)} of them alone, "
            f"all layers: off by at most {whole:.1e} of a tensor, {row:.1e} of a row")


def anonymous(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def linear(asked: argparse.Namespace, folder: Path) -> None:
    from tiny import tiny_model

    one, prompts = opened(str(tiny_model("llama"))), folder / "tiny.jsonl"
    write_prompts(prompts, [100] * 100)
    collected(one, prompts, folder / "tiny")
    for n_tokens in (1_000, 3_000, 10_000, 30_000, 100_000):
        write_prompts(prompts, [100] * (n_tokens // 100))
        seconds = min(collected(one, prompts, folder / "tiny") for _ in range(asked.turns))
        few = min(collected(one, prompts, folder / "tiny", ("blocks.0.hook_resid_post",)) for _ in range(asked.turns))
        print(f"  {n_tokens:7} tokens: {seconds:6.2f} s, {1e6 * seconds / n_tokens:5.0f} us a token; of one hook "
              f"{1e6 * few / n_tokens:5.0f}")
    one.close()


PARTS = {"rates": rates, "transformers": transformers, "memory": memory, "linear": linear}


if __name__ == "__main__":
    main()
