"""`python -m vlens_cli.driver.installed`: what of the engine's packages imports, as JSON, for `vlens doctor`.

A process of its own: the client imports none of them, and a package that is broken may end the process that tries.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from vlens_cli.driver.hide import hide_broken_packages


def found() -> dict[str, Any]:
    """{"hidden": optional packages that do not import, "errors": package -> why it does not, "devices": [...]}."""
    hidden = hide_broken_packages()
    errors = {name: fault for name in ("torch", "transformers", "vllm") if (fault := _fault(lambda n=name: import_module(n)))}
    return {"hidden": hidden, "errors": errors, "devices": [] if "torch" in errors else _devices()}


def _fault(body: Callable[[], Any]) -> str | None:
    try:
        body()
    except Exception as fault:  # whatever a broken package raises
        return " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
    return None


def _devices() -> list[dict[str, Any]]:
    """GPUs that torch sees, with their bytes."""
    import torch

    if not torch.cuda.is_available():
        return []
    sizes = [torch.cuda.mem_get_info(n) for n in range(torch.cuda.device_count())]
    return [{"name": torch.cuda.get_device_name(n), "free": free, "total": total} for n, (free, total) in enumerate(sizes)]


if __name__ == "__main__":
    # What the packages print, C libraries included, must not mix with the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.redirect_stdout(io.StringIO()):
        text = json.dumps(found())
    answer.write(text)
    answer.flush()
    # An orderly end of vLLM takes seconds.
    os._exit(0)
