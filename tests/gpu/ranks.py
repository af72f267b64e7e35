#!/usr/bin/env python3
"""An 8B shape with random bf16 weights on one GPU and over two: every residual point alike within bfloat16, every weight of
some layers bit for bit the checkpoint's. Exit code 1 if one is off.

    ranks.py [--modes tp2-mp,pp2-mp,tp2-ray] [--small] [--folder DIR]     (Ray runs already, see RAY_ADDRESS)

Every engine is a process of its own; the weights are written once (16 GB, in /dev/shm by default). --small is a model of two
layers, for two ranks on a processor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import models
import parts

PROMPT = tuple((7919 * n + 104729) % 500 + 5 for n in range(100))
RESIDUAL = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
RANKS = {"one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
# Of a whole tensor, in relative norm. bfloat16 keeps 8 bits, and 32 layers add to what each rounds.
LIMITS = {"bfloat16": 5e-2, "float32": 1e-5}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="tp2-mp,pp2-mp")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", default="/dev/shm/vlens-bench-8b")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder = Path(f"{asked.folder}-small" if asked.small else asked.folder)
    if asked.part:
        part(folder, *asked.part)
        return 0
    config = models.write(folder, models.SMALL if asked.small else models.LLAMA_8B) / "config.json"
    dtype, faulty = json.loads(config.read_text())["torch_dtype"], False
    with tempfile.TemporaryDirectory() as work:
        for mode in ("one", *asked.modes.split(",")):
            found, fault = parts.run(__file__, [*sys.argv[1:], "--part", mode, f"{work}/{mode}.safetensors"], 280)
            row = {"mode": mode, **{key: value for one in found for key, value in one.items()}}
            if not fault and mode != "one":
                row["off"], row["at"] = off(Path(work), mode)
            row["fault"] = fault or "; ".join(faults(row, dtype))
            faulty |= bool(row["fault"])
            print(json.dumps(row), flush=True)
    return int(faulty)


def faults(row: dict, dtype: str) -> list[str]:
    found = list(row["refused"])
    if "off" in row and not row["off"] <= LIMITS[dtype]:
        found.append(f"{row['at']} is off by {row['off']:.1e}")
    if row["changed"]:
        found.append(f"weights that are not the checkpoint's: {row['changed'][:5]}")
    return found


def off(work: Path, mode: str) -> tuple[float, str]:
    """The largest difference from one rank, in relative norm, and where."""
    from safetensors.torch import load_file

    alone, several = (load_file(work / f"{which}.safetensors") for which in ("one", mode))
    errors = {name: float((several[name].double() - value.double()).norm() / value.double().norm())
              for name, value in alone.items()}
    at = max(errors, key=errors.__getitem__)
    return errors[at], at


def part(folder: Path, mode: str, out: str) -> None:
    """One engine: its residual points into a file, its weights against the checkpoint."""
    from vlens_cli.driver import boot
    from vlens_cli.families import catalog_for
    from vlens_cli.query import EngineSpec

    boot.prepare()
    kind, _, executor = mode.partition("-")
    config = json.loads((folder / "config.json").read_text())
    catalog = catalog_for(config)
    spec = EngineSpec(os.path.realpath(folder), "8b", max_len=1000, **RANKS[kind], **({"executor": executor} if executor else {}))
    from safetensors.torch import save_file
    from vlens_cli.driver.base import Request, Want
    from vlens_cli.driver.graph.driver import driver_for

    began = time.time()
    driver = driver_for(spec, boot.plan(spec, config, catalog), catalog)
    refused = [f"{name} is refused: {why}" for name, why in driver.non_fireable_hook_points.items()]
    parts.report(boot=time.time() - began, points=len(driver.supported_hook_points), refused=refused[:5])
    names = [name for name in driver.supported_hook_points if name.endswith(RESIDUAL)]
    (result,) = driver.run([Request(PROMPT, dict.fromkeys(names, Want()))])
    save_file({name: one.value.contiguous() for name, one in result.captured.items()}, out)
    began = time.time()
    compared, changed = weights(driver, folder, config["num_hidden_layers"])
    parts.report(residual=len(names), weights=compared, changed=changed, param_seconds=time.time() - began)
    driver.close()


def weights(driver: object, folder: Path, layers: int) -> tuple[int, list[str]]:
    """How many tensors of the checkpoint were compared, and which differ: of the first, middle and last layer, and the ends."""
    import torch
    from safetensors import safe_open
    from vlens_cli import params

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    chosen = {f"layers.{i}." for i in (0, layers // 2, layers - 1)}
    names = [name for name in index if "layers." not in name or any(one in name for one in chosen)]
    held, changed = params.of_model(str(folder)), []
    for name in names:
        got = driver.weights(held).tensor(held.param(name))
        with safe_open(folder / index[name], "pt") as file:
            if not torch.equal(file.get_tensor(name), got):
                changed.append(name)
    return len(names), changed


if __name__ == "__main__":
    sys.exit(main())
