#!/usr/bin/env python3
"""What compiled mode, prefill, capture, sweeps and sleep cost on a GPU, an 8B shape with random bf16 weights. Prints one
table, never asserts.

    gpu.py [--parts boot-plain,boot,plain,resid,default,prefill-plain,prefill,sweep,loop,warm] [--small] [--repeat 5]
           [--folder DIR]

Every part is a process of its own; the weights are written once (16 GB, in /dev/shm by default).

  boot-plain, boot   from the first import to a compiled engine that is ready, compiled code in its cache: vLLM as it
            comes, and vlens with the default set of points
  plain     compiled vLLM as it comes: tokens/s of 1, 8 and 64 requests, 128 tokens each
  resid     vlens --compile with resid_post of every block built in: no edits, one request edited, all, all and one layer captured
  default   the same with the default set of points
  prefill-plain, prefill   8,192 tokens in eager vLLM, and in vlens with one capture, and with every resid_post to the host
  sweep, loop   resid_post patched at every layer and position of 32 tokens: vlens, and a transformers loop with hooks
  warm      `vlens capture` as a whole process, the engine resident; `engine sleep`, and the time to an answer after it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import models  # noqa: E402
import parts  # noqa: E402

PARTS = ("boot-plain", "boot", "plain", "resid", "default", "prefill-plain", "prefill", "sweep", "loop", "warm")
SETS = {"resid": ("blocks.*.hook_resid_post",), "default": None}
BATCHES = (1, 8, 64)
PROMPT, NEW = 16, 128
LONG = 8192
POSITIONS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--small", action="store_true", help="a model of 2 layers, to try this script on a processor")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm/vlens-bench-8b")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one part")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.small and asked.folder == parser.get_default("folder"):
        asked.folder += "-small"
    if asked.part:
        part(asked)
        return
    began = time.time()
    models.write(Path(asked.folder), models.SMALL if asked.small else models.LLAMA_8B)
    print(f"weights in {asked.folder}: {time.time() - began:.0f} s", flush=True)
    rows: list[dict] = []
    common = ["--folder", asked.folder, "--repeat", str(asked.repeat), *(["--small"] if asked.small else [])]
    for name in asked.parts.split(","):
        began = time.time()
        found, fault = parts.run(__file__, ["--part", name, *common], asked.limit)
        if name.startswith("boot") and not fault:
            # The first may have compiled.
            found, fault = parts.run(__file__, ["--part", name, *common], asked.limit)
        rows += [{"part": name, **one} for one in found]
        print(f"{name}: {time.time() - began:.0f} s" + (f"\nFAILED: {fault}" if fault else ""), flush=True)
        parts.save("bench.json", rows)
    print(table(rows))


def table(rows: list[dict]) -> str:
    """Every figure, and its share of the plain one where there is one."""
    plain = {(row["what"], row.get("requests")): row["value"] for row in rows if row["part"].endswith("plain") or row["part"] == "loop"}
    lines = []
    for row in rows:
        base = plain.get((row.get("base", row["what"]), row.get("requests")))
        share = f"{row['value'] / base:7.3f} of plain" if base and "plain" not in row["part"] and row["part"] != "loop" else ""
        which = f"{row['requests']:3} requests" if "requests" in row else ""
        lines.append(f"{row['part']:14} {row['what']:52} {which:12} {row['value']:12.4g} {row['unit']:9} {share}"
                     f"{'  ' + row['note'] if row.get('note') else ''}")
    return "\n".join(lines)


def part(asked: argparse.Namespace) -> None:
    name = asked.part
    if name == "plain":
        decode_plain(asked)
    elif name in SETS:
        decode(asked, SETS[name])
    elif name.startswith("boot"):
        boots(asked, name == "boot-plain")
    else:
        {"prefill-plain": prefill_plain, "prefill": prefill, "sweep": sweep, "loop": loop, "warm": warm}[name](asked)


def say(what: str, value: float, unit: str, **more: object) -> None:
    parts.report(what=what, value=value, unit=unit, **more)


def sync() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(repeat: int, body) -> float:
    """Median seconds of `body`, after one turn to warm up."""
    body()
    found = []
    for _ in range(repeat):
        sync()
        began = time.perf_counter()
        body()
        sync()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def prompt(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple((7919 * (n + 31 * first) + 104729) % 500 + 5 for n in range(length))


def sizes(asked: argparse.Namespace) -> tuple[int, int]:
    """(new tokens, long prompt)"""
    return (16, 512) if asked.small else (NEW, LONG)


# Engines


def plain_engine(asked: argparse.Namespace, eager: bool):
    """vLLM as a user would start it, with the same limits and the same memory for keys and values."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    from vlens_cli.driver import boot

    spec, plan, _ = planned(asked, None)
    boot.hide_broken_packages()
    from vllm import LLM

    return LLM(**boot.engine_arguments(spec, plan)
               | {"enforce_eager": eager, "async_scheduling": None, "additional_config": {}})


def planned(asked: argparse.Namespace, hooks: tuple[str, ...] | None):
    from vlens_cli.driver import boot
    from vlens_cli.families import catalog_for
    from vlens_cli.query import EngineSpec

    config = json.loads((Path(asked.folder) / "config.json").read_text())
    catalog = catalog_for(config)
    spec = EngineSpec(os.path.realpath(asked.folder), "bench", max_len=1000 if asked.small else 16384, chunk=256 if asked.small else 8192,
                      compile_hooks=hooks, compile_buffer=None)
    return spec, boot.plan(spec, config, catalog), catalog


def vlens_engine(asked: argparse.Namespace, hooks: tuple[str, ...] | None):
    spec, plan, catalog = planned(asked, hooks)
    from vlens_cli.driver import boot

    boot.prepare(hooks is not None)
    from vlens_cli.driver.graph.driver import driver_for

    return driver_for(spec, plan, catalog)


def generate(engine, prompts, new: int):
    """The engine's own loop, as vlens runs it."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
    for n, ids in enumerate(prompts):
        engine.add_request(str(n), {"prompt_token_ids": list(ids)}, params)
    while engine.has_unfinished_requests():
        engine.step()


# Parts


def boots(asked: argparse.Namespace, plain: bool) -> None:
    from vlens_cli.query import COMPILE_HOOKS

    began = time.time()
    if plain:
        plain_engine(asked, eager=False)
    else:
        vlens_engine(asked, COMPILE_HOOKS)
    say("second compiled boot", time.time() - began, "s")


def decode_plain(asked: argparse.Namespace) -> None:
    llm = plain_engine(asked, eager=False)
    new, _ = sizes(asked)
    for b in BATCHES:
        prompts = [prompt(PROMPT, n) for n in range(b)]
        seconds = timed(asked.repeat, lambda: generate(llm.llm_engine, prompts, new))
        say("decode", b * new / seconds, "tokens/s", requests=b, note=f"{seconds / new * 1e3:.3f} ms a step")


def decode(asked: argparse.Namespace, hooks: tuple[str, ...] | None) -> None:
    import torch
    from vlens_cli.query import COMPILE_HOOKS

    driver = vlens_engine(asked, hooks or COMPILE_HOOKS)
    from vlens_cli.driver.base import Edit, Request, Want

    new, _ = sizes(asked)
    layers, width = driver.catalog.n_layers, driver.catalog.dims.d_model
    point = f"blocks.{layers // 2}.hook_resid_post"
    edit = (Edit(point, None, value=0.01 * torch.randn(width)),)
    capture = {f"blocks.{layers // 2 + layers // 4}.hook_resid_post": Want()}
    for b in BATCHES:
        for what, edited, captured in (("decode", 0, {}), ("decode, one edited", 1, {}), ("decode, all edited", b, {}),
                                       ("decode, all edited, one layer captured", b, capture)):
            requests = [Request(prompt(PROMPT, n), captured, new, edit if n < edited else ()) for n in range(b)]
            seconds = timed(asked.repeat, lambda: driver.run(requests))
            say(what, b * new / seconds, "tokens/s", requests=b, base="decode", note=f"{seconds / new * 1e3:.3f} ms a step")
    driver.close()


def prefill_plain(asked: argparse.Namespace) -> None:
    import torch

    llm = plain_engine(asked, eager=True)
    _, long = sizes(asked)
    turns = iter(range(10**6))
    seconds = timed(asked.repeat, lambda: generate(llm.llm_engine, [prompt(long, next(turns))], 1))
    say("prefill", long / seconds, "tokens/s", note=f"{seconds:.3f} s")
    if torch.cuda.is_available():
        rows = torch.zeros(32 * long * 4096, dtype=torch.bfloat16, device="cuda")
        host = torch.empty_like(rows, device="cpu", pin_memory=True)
        copied = timed(asked.repeat, lambda: host.copy_(rows, non_blocking=True))
        say("pinned copy of every resid_post", copied, "s", note=f"{rows.numel() * 2 / copied / 1e9:.1f} GB/s")


def prefill(asked: argparse.Namespace) -> None:
    driver = vlens_engine(asked, None)
    from vlens_cli.driver.base import Request, Want

    _, long = sizes(asked)
    turns = iter(range(10**6))
    layers = driver.catalog.n_layers
    every = {f"blocks.{i}.hook_resid_post": Want() for i in range(layers)}
    one = {f"blocks.{layers // 2}.hook_resid_post": Want()}
    for what, captured in (("prefill", {}), ("prefill, one capture", one), ("prefill, every resid_post to the host", every)):
        seconds = timed(asked.repeat, lambda: driver.run([Request(prompt(long, next(turns)), captured)]))
        say(what, long / seconds, "tokens/s", base="prefill", note=f"{seconds:.3f} s")
    driver.close()


def sweep(asked: argparse.Namespace) -> None:
    driver = vlens_engine(asked, None)
    from vlens_cli.driver.base import LOGITS, Edit, Request, Want

    base, source = prompt(POSITIONS), prompt(POSITIONS, 1)
    layers = driver.catalog.n_layers
    names = [f"blocks.{i}.hook_resid_post" for i in range(layers)]

    def cells() -> list:
        (run,) = driver.run([Request(source, {n: Want() for n in names})])
        last = {LOGITS: Want((POSITIONS - 1,))}
        return driver.run_variants([
            Request(base, last, edits=(Edit(n, (p,), keep=0.0, value=run.captured[n].value[p : p + 1]),))
            for n in names for p in range(POSITIONS)])

    seconds = timed(1, cells)
    say("sweep", layers * POSITIONS / seconds, "cells/s", note=f"{layers} x {POSITIONS} in {seconds:.2f} s")
    driver.close()


def loop(asked: argparse.Namespace) -> None:
    from vlens_cli.driver.hide import hide_broken_packages

    hide_broken_packages()
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(asked.folder, dtype="auto").to(device).eval()
    base, source = (torch.tensor([prompt(POSITIONS, n)], device=device) for n in (0, 1))
    layers = model.model.layers
    found: dict[int, torch.Tensor] = {}

    def first(output):
        return output[0] if isinstance(output, tuple) else output

    def keep(i: int):
        return lambda module, args, output: found.__setitem__(i, first(output).clone())

    handles = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
    cells = 64 if not asked.small else 8
    with torch.inference_mode():
        model(source)
        for handle in handles:
            handle.remove()

        def run() -> None:
            for n in range(cells):
                i, p = n * 7 % len(layers), n % POSITIONS

                def patch(module, args, output, i=i, p=p):
                    first(output)[:, p] = found[i][:, p]

                handle = layers[i].register_forward_hook(patch)
                model(base).logits[0, -1].cpu()
                handle.remove()

        seconds = timed(1, run)
    say("sweep", cells / seconds, "cells/s", note=f"{cells} cells, {seconds / cells * 1e3:.1f} ms each")


def warm(asked: argparse.Namespace) -> None:
    """Whole processes, as from a shell."""
    runtime = "/tmp/vlens-bench-gpu"
    environment = os.environ | {"VLENS_RUNTIME": runtime, "VLENS_MODEL": asked.folder}
    vlens = [sys.executable, "-m", "vlens_cli"]

    forwards = []

    def process(*command: str) -> float:
        began = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        if "capture" in command:
            forwards.append(json.loads(done.stdout)["seconds"]["forward"])
        return seconds

    def run(*arguments: str) -> float:
        return process(*vlens, *arguments)

    ids = ",".join(map(str, prompt(10)))
    capture = ("capture", "--hook", "blocks.1.hook_resid_post", "--tokens", ids, "--json")
    try:
        say("engine start", run("engine", "start"), "s")
        run(*capture)
        seconds = [(run(*capture), process(sys.executable, "-c", "import click")) for _ in range(11)]
        whole, least = zip(*seconds, strict=True)
        say("vlens capture, a whole process", statistics.median(whole), "s",
            note=f"min {min(whole):.3f}; its forward {statistics.median(forwards):.3f}")
        say("python -c 'import click'", statistics.median(least), "s")
        say("engine sleep", run("engine", "sleep"), "s")
        say("wake and capture", run(*capture), "s")
        say("vlens capture after it", run(*capture), "s")
    finally:
        say("engine stop", run("engine", "stop"), "s")


if __name__ == "__main__":
    main()
