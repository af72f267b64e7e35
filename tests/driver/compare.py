"""Comparing vlens' numbers with the reference: `reference` has reference.py do it once, the rest measures and asserts.

Errors are relative: the norm of the difference over the norm of the reference, in float64.

What float32 itself allows, transformers in float32 against float64 (`reference(..., fp64=True)`), worst hook: on the
demo model with 250 tokens of English 1.9e-6 over a tensor and 9.9e-6 in a row; with 250 random ids 1.2e-5 and 2.0e-4,
more than DESIGN.md's limits leave, since such a prompt's position 1 is ill-conditioned. Give the demo model text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from served import Served
from tiny import cache_folder, delete_old

SCRIPT = Path(__file__).with_name("reference.py")
REFERENCES = Served(Path(__file__).with_name("references.py"))

# TransformerLens, in the environment of the tests or in one of its own.
PEERS_PYTHON = os.environ.get("VLENS_PEERS_PYTHON", sys.executable)
BRIDGE = Served(Path(__file__).with_name("bridge_reference.py"), PEERS_PYTHON)

LOWEST = -60000.0  # scores below it, in any dtype, are masked

Values = Mapping[str, Any]  # name -> torch tensor or numpy array


def reference(
    folder: Path | str, prompts: Sequence[Sequence[int]], dtype: str = "float32", fp64: bool = False
) -> dict[str, Any]:
    """The reference's tensors, `p/NAME`, for prompts given as token ids. Run once, kept in the test cache."""
    from safetensors.torch import load_file

    return load_file(reference_file(folder, prompts, dtype, fp64))


def reference_file(
    folder: Path | str, prompts: Sequence[Sequence[int]], dtype: str = "float32", fp64: bool = False
) -> Path:
    """The safetensors file behind `reference`; its metadata hold the errors of the reference's own identities."""
    folder, cache = Path(folder).resolve(), cache_folder() / "reference"
    asked = json.dumps([[int(token) for token in prompt] for prompt in prompts])
    path = cache / f"{folder.name}-{_key(folder, asked, dtype, fp64)}.safetensors"
    if path.exists():
        os.utime(path)
        return path
    cache.mkdir(parents=True, exist_ok=True)
    delete_old(cache, "*.safetensors")
    with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as temporary:
        out = Path(temporary) / "out.safetensors"
        REFERENCES.ask("reference", folder=str(folder), prompts=json.loads(asked), out=str(out), dtype=dtype, fp64=fp64)
        out.replace(path)
    return path


def _key(folder: Path, asked: str, dtype: str, fp64: bool) -> str:
    """A hash of what decides the reference: the model's files by size and mtime, the prompts, the script."""
    files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in folder.iterdir() if f.is_file())
    parts = [str(folder), repr(files), asked, dtype, str(fp64), SCRIPT.read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def of_prompt(tensors: Values, p: int) -> dict[str, Any]:
    """The tensors of prompt p by hook name."""
    return {name.removeprefix(f"{p}/"): value for name, value in tensors.items() if name.startswith(f"{p}/")}


def relative_error(got: Any, want: Any) -> float:
    """Norm of the difference over norm of the reference, whole tensor. NaN where a value is."""
    got, want = _float64(got), _float64(want)
    _same_shape(got, want)
    return _ratio((got - want).norm().item(), want.norm().item())


def worst_row(got: Any, want: Any) -> tuple[int, float]:
    """The position (first axis) with the largest relative error, and that error."""
    got, want = _float64(got), _float64(want)
    _same_shape(got, want)
    differences = (got - want).flatten(1).norm(dim=1).tolist()
    errors = [_ratio(difference, size) for difference, size in zip(differences, want.flatten(1).norm(dim=1).tolist())]
    row = max(range(len(errors)), key=lambda i: math.inf if math.isnan(errors[i]) else errors[i])
    return row, errors[row]


def logit_error(got: Any, want: Any) -> float:
    """Largest difference over the largest logit."""
    got, want = _float64(got), _float64(want)
    _same_shape(got, want)
    return _ratio((got - want).abs().max().item(), want.abs().max().item())


def assert_close(got: Values, want: Values, whole: float = 1e-5, row: float = 1e-4) -> None:
    """Every hook of `got` equals the reference's: at most `whole` over the tensor and `row` in each position (head, of
    patterns and scores); logits also within `whole` of the largest logit, patterns within `whole` anywhere. Fails with every hook that does not, the worst first."""
    assert got, "nothing to compare"
    faults: list[tuple[float, str]] = []
    for name, value in got.items():
        if name not in want:
            faults.append((math.inf, f"{name}: the reference has no such hook"))
        elif tuple(value.shape) != tuple(want[name].shape):
            faults.append((math.inf, f"{name}: shape {tuple(value.shape)}, not {tuple(want[name].shape)}"))
        else:
            faults += _faults(name, value, want[name], whole, row)
    faults.sort(key=lambda fault: -fault[0])
    shown = [text for _, text in faults[:20]]
    assert not faults, f"{len(faults)} faults in {len(got)} hooks:\n" + "\n".join(shown)


def _faults(name: str, got: Any, want: Any, whole: float, row: float) -> list[tuple[float, str]]:
    if name.endswith("hook_attn_scores"):
        # The lowest number of the dtype, which would drown every error.
        hidden = want <= LOWEST
        if not (hidden == (got <= LOWEST)).all():
            return [(math.inf, f"{name}: other keys are masked")]
        got, want = got.masked_fill(hidden, 0), want.masked_fill(hidden, 0)
    at, worst = worst_row(got, want)
    measured = [("relative error", relative_error(got, want), whole), (f"row {at}", worst, row)]
    if name.endswith("hook_pattern"):
        measured.append(("absolute error", float((_float64(got) - _float64(want)).abs().max()), whole))
    if name.endswith("unembed.hook_out"):
        measured.append(("of the largest logit", logit_error(got, want), whole))
    return [
        (math.inf if math.isnan(error) else error / limit, f"{name}: {what} {error:.2e}, more than {limit:.0e}")
        for what, error, limit in measured
        if not error <= limit
    ]


def _ratio(difference: float, size: float) -> float:
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def _float64(value: Any) -> Any:
    import torch

    return torch.as_tensor(value).detach().to("cpu", torch.float64)


def _same_shape(got: Any, want: Any) -> None:
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
