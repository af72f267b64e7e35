#!/usr/bin/env python3
"""Every hook point and every edit on a GPU, against transformers, in every mode of the engine. Exit code 1 if one is off.

    check.py [--families llama,gemma2] [--dtypes float32,bfloat16] [--modes eager-v1,eager-v2,compiled-v1,compiled-v2]
    check.py --modes tp2-mp,pp2-mp,tp2-ray,pp2-ray --jobs 1     (two GPUs; Ray runs already, see RAY_ADDRESS)

For each family (a tiny random model), dtype and mode, in a process of its own:

  points    how many hook points passed the proof at load, and how many compiled mode had built in and refused
  reads     largest relative error of a point, over prompts of 10 and 150 tokens in chunks of 64 with 6 generated tokens,
            against transformers fed the same tokens, on the processor, in the same dtype
  edits     the same for every operation at every editable point: of the values there, and of the logits
  others    whether a request that runs beside an edited one is bitwise what it is beside the same one unedited
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from unittest.mock import MagicMock

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "driver")]

import parts  # noqa: E402

SHORT = [3, 17, 256, 99, 4, 500, 31, 8, 77, 120]
LONG = [(7919 * n + 104729) % 502 + 5 for n in range(150)]
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
GRAPHS = [1, 4, 16, 64]
MODES = ("eager-v1", "eager-v2", "compiled-v1", "compiled-v2")
RANKS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="llama,gemma2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--jobs", type=int, default=4 if which("nvidia-smi") else 1, help="engines at once")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        part(*asked.part.split(","))
        return 0
    from tiny import tiny_model

    families, rows = asked.families.split(","), []
    for family in families:
        tiny_model(family)
    every = itertools.product(families, asked.dtypes.split(","), asked.modes.split(","))
    with ThreadPoolExecutor(asked.jobs) as pool:
        for row in pool.map(lambda one: _engine(*one, asked.jobs), every):
            rows.append(row)
            print(_line(row) + (f"\n{row['fault']}" if row["fault"] else ""), flush=True)
            parts.save("check.json", rows)
    right = sum(not row["fault"] for row in rows)
    print(f"{right} of {len(rows)} right")
    return int(right < len(rows))


def _engine(family: str, dtype: str, mode: str, jobs: int) -> dict:
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    found, fault = parts.run(__file__, ["--part", f"{family},{dtype},{mode}"], 400,
                             {"VLLM_USE_V2_MODEL_RUNNER": str(int(mode.endswith("v2"))), "OMP_NUM_THREADS": threads,
                              "TORCHINDUCTOR_COMPILE_THREADS": threads})
    row = {"family": family, "dtype": dtype, "mode": mode}
    for one in found:
        row |= one
    row["fault"] = fault or ("" if row.get("right") else "\n".join(row.get("faults", [])) or "another request was changed")
    return row


def _line(row: dict) -> str:
    def number(name: str) -> str:
        return f"{row[name]:.1e} {row[name + '_at']}" if name in row else "-"

    return (f"{row['family']:8} {row['dtype']:8} {row['mode']:12} points {row.get('points', '-')!s:4} refused "
            f"{row.get('refused', '-')!s:3} reads {number('reads'):44} edits {number('edits'):44} others "
            f"{'same' if row.get('others') else 'NOT THE SAME' if 'others' in row else '-'}  boot {row.get('boot', 0):.0f} s of "
            f"{row.get('seconds', 0):.0f}")


def part(family: str, dtype: str, mode: str) -> None:
    """One engine."""
    if find_spec("pytest") is None:
        # Helpers are taken from test files, whose tests are not run here.
        sys.modules["pytest"] = MagicMock()
    import time

    import torch
    from tiny import tiny_model
    from vlens_cli.driver import boot
    from vlens_cli.driver.boot import plan, prepare
    from vlens_cli.driver.graph import limits
    from vlens_cli.families import catalog_for
    from vlens_cli.query import EngineSpec

    kind, way = mode.split("-")
    prepare(kind == "compiled")
    from vlens_cli.driver.base import Request, Want
    from vlens_cli.driver.graph.driver import driver_for

    folder = tiny_model(family)
    config = json.loads((folder / "config.json").read_text())
    catalog = catalog_for(config)
    hooks = None
    if kind == "compiled":
        hooks = tuple(name for name in catalog.names if not limits.why_not(catalog.row(name)))
    spec = EngineSpec(os.path.realpath(folder), family, dtype=dtype, chunk=64, compile_hooks=hooks,
                      **({**RANKS[kind], "executor": way} if kind in RANKS else {}))
    if hooks:
        # Few graphs are enough: single rows, batches that are padded, and whole chunks.
        arguments = boot.engine_arguments
        boot.engine_arguments = lambda *of: arguments(*of) | {"compilation_config": {"cudagraph_capture_sizes": GRAPHS}}
    began = time.time()
    driver = driver_for(spec, plan(spec, config, catalog), catalog)
    names = driver.supported_hook_points
    built = hooks or catalog.names
    refused = {n: driver.non_fireable_hook_points[n] for n in built if n in driver.non_fireable_hook_points}
    uneditable = {n: driver.non_editable_hook_points[n] for n in names if catalog.editable(n)
                  and n in driver.non_editable_hook_points and not (hooks and limits.why_not_edited(catalog.row(n)))}
    # Of a rank in another process it is not seen.
    executor = driver._llm.llm_engine.engine_core.engine_core.model_executor
    runner = type(executor if kind in RANKS else executor.driver_worker.worker.model_runner)
    parts.report(points=len(names), refused=len(refused), reasons=refused, uneditable=uneditable, boot=time.time() - began,
                 runner=f"{runner.__module__}.{runner.__name__}", tf32=torch.backends.cuda.matmul.allow_tf32)
    faults = [f"{n} is refused: {why}" for n, why in refused.items()] + [f"{n}: {why}" for n, why in uneditable.items()]

    reads = {n: Want() for n in names}
    results = driver.run([Request(tuple(p), reads, 6) for p in (SHORT, LONG)])
    faults += _compare_reads(folder, dtype, results)
    edit = _edits(driver, folder, dtype)
    faults += edit
    same = _others(driver, Request, Want)
    parts.report(seconds=time.time() - began, others=same, right=not faults and same, faults=faults[:12])
    driver.close()


def _compare_reads(folder: Path, dtype: str, results: list) -> list[str]:
    from compare import LOWEST, of_prompt, reference, relative_error

    fed = [[*prompt, *r.new_tokens[:-1]] for prompt, r in zip((SHORT, LONG), results, strict=True)]
    want = reference(folder, fed, dtype)
    errors: dict[str, float] = {}
    for n, result in enumerate(results):
        own = of_prompt(want, n)
        for name, got in result.captured.items():
            if name in own and not name.endswith("expert_indices"):
                a, b = got.value.float(), own[name].float()
                if name.endswith("hook_attn_scores"):
                    a, b = a.masked_fill(a <= LOWEST, 0), b.masked_fill(b <= LOWEST, 0)
                errors[name] = max(errors.get(name, 0.0), relative_error(a, b))
    at = max(errors, key=errors.__getitem__)
    parts.report(reads=errors[at], reads_at=at, compared=len(errors), read_errors=errors)
    return [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= LIMITS[dtype]]


def _edits(driver: object, folder: Path, dtype: str) -> list[str]:
    """Every operation at the editable points of the first and last layer."""
    import torch
    from compare import logit_error, relative_error
    from test_writes import by_transformers, cases_of, run_cases
    from vlens_cli.driver.base import LOGITS

    captured = driver.supported_hook_points
    driver.supported_hook_points = tuple(n for n in captured if n not in driver.non_editable_hook_points)
    cases = cases_of(driver, (0, 3), torch.Generator().manual_seed(1), SHORT)
    driver.supported_hook_points = captured
    with tempfile.TemporaryDirectory() as work:
        want = by_transformers(folder, SHORT, cases, Path(work), fp64=False)
    errors: dict[str, float] = {}
    # transformers' edits are in fp32: bf16's are held to what bf16 explains.
    for n, (case, result) in enumerate(zip(cases, run_cases(driver, SHORT, cases), strict=True)):
        key = f"{case[0].name}/{n % 4}"
        logits = logit_error(result.captured[LOGITS].value, want[f"logits/{n}"])
        own = max(relative_error(result.captured[e.name].value, want[f"got/{n}/{e.name}"]) for e in case)
        errors[key] = max(logits, own)
    at = max(errors, key=errors.__getitem__)
    parts.report(edits=errors[at], edits_at=at, edit_cases=len(cases), edit_errors=errors)
    return [f"edit of {name} is off by {error:.1e}" for name, error in errors.items() if not error <= LIMITS[dtype]]


def _others(driver: object, Request: type, Want: type) -> bool:
    """A request beside an edited one, over prefill in chunks and decode steps."""
    import torch
    from vlens_cli.driver.base import Edit

    names = [n for n in driver.supported_hook_points if n.endswith(("hook_resid_post", "ln_final.hook_out"))]
    edit = Edit("blocks.1.hook_resid_post", None, value=torch.ones(128))

    def batch(edits: tuple) -> list:
        return driver.run([Request(tuple(LONG), dict.fromkeys(names, Want()), 8),
                           Request(tuple(SHORT), dict.fromkeys(names, Want()), 8, edits=edits)])

    plain, edited = batch(()), batch((edit,))
    untouched = plain[0].new_tokens == edited[0].new_tokens and all(
        torch.equal(plain[0].captured[n].value, edited[0].captured[n].value) for n in names)
    changed = not torch.equal(plain[1].captured[names[-1]].value, edited[1].captured[names[-1]].value)
    return untouched and changed and edited[1].fired == (edited[1].chunks,)


if __name__ == "__main__":
    sys.exit(main())
