#!/usr/bin/env python3
"""What full logits cost in the warm engine, against the forward alone plus the unembedding product. Prints, never asserts.

    logits.py [TOKENS] [TURNS] [--model demo]

In one process, medians of TURNS (5), every row of TOKENS (2,000) tokens:

  forward    the engine's forward with the final norm's output captured
  product    those rows times the unembedding, by torch, in pieces of 256
  logits     what `vlens logits -o FILE` does: forward, logits of every row, their statistics, the file
  position   the same for the last position alone
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="?", type=int, default=2000)
    parser.add_argument("turns", nargs="?", type=int, default=5)
    parser.add_argument("--model", default="demo")
    asked = parser.parse_args()

    from vlens_cli import models
    from vlens_cli.driver.quiet import engine_output
    from vlens_cli.driver.session import Session
    from vlens_cli.query import EngineSpec

    found = models.resolve(asked.model)
    with engine_output():
        session = Session(EngineSpec(model=str(found.folder), name=found.name), found.config)
        session.driver(lambda text: None)
    report(session, asked.tokens, asked.turns)


def report(session: object, n_tokens: int, turns: int) -> None:
    import torch
    from vlens_cli.driver.base import Request, Want
    from vlens_cli.query import LogitsQuery, Prompt

    driver, d_vocab = session.driver(lambda text: None), session.catalog.dims.d_vocab
    weight = driver.directions(list(range(d_vocab)))["unembed"]
    turn = iter(range(10**6))

    def prompt() -> tuple[int, ...]:
        """Ids that no earlier turn had."""
        first = next(turn)
        return tuple((7919 * (n + first) + 104729) % (d_vocab - 10) + 5 for n in range(n_tokens))

    def forward() -> torch.Tensor:
        (result,) = driver.run([Request(prompt(), {"ln_final.hook_out": Want()})])
        return result.captured["ln_final.hook_out"].value

    rows = forward().float()

    def product() -> None:
        for piece in rows.split(256):
            piece @ weight.T

    def logits(**more: object) -> None:
        with tempfile.TemporaryFile() as file:
            reply = session.answer(LogitsQuery((Prompt(tokens=prompt()),), **more), lambda text: None, file)
        json.dumps(reply.body)

    runs: dict[str, Callable[[], object]] = {"forward": forward, "product": product, "logits": logits,
                                             "position": lambda: logits(pos="-1")}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(turns + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if n:
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name:9} median {median[name]:6.2f} s   min {min(values):6.2f}   max {max(values):6.2f}")
    print(f"logits over forward + product: {median['logits'] / (median['forward'] + median['product']):.2f}")
    print(f"one position over forward: {median['position'] / median['forward']:.2f}")
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    print(f"peak memory grew by {peak:.0f} MB; whole logits are {n_tokens * d_vocab * 4 / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
