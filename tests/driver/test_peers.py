"""Every name that TransformerLens' own bridge over transformers caches and vlens answers holds one value, in every family:
`make test-peers`, or with `VLENS_PEERS_PYTHON` the Python of an environment that has TransformerLens."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from compare import BRIDGE, LOWEST, PEERS_PYTHON, relative_error
from engines import capture
from safetensors.torch import load_file
from test_numbers import SHORT, mended
from vlens_cli.families import FAMILIES

pytestmark = pytest.mark.slow
if subprocess.run([PEERS_PYTHON, "-c", "import transformer_lens"], capture_output=True).returncode:
    pytest.skip("TransformerLens is not installed", allow_module_level=True)

# Where the bridge's value is not what the name says: logits before what follows the unembedding (`logits` has them all),
# scores that are the pattern, outputs of sublayers with the stream in them, an embedding before its norm's place.
BEFORE_THE_END = {"unembed.hook_out", "hook_unembed"}
OTHER = {
    **dict.fromkeys(("gemma2", "cohere", "granite"), BEFORE_THE_END),
    "opt": {"attn.hook_attn_scores"},
    "bloom": {"attn.hook_hidden_states", "attn.hook_out", "mlp.hook_out", "hook_embed"},
}


@pytest.fixture
def cached(tmp_path):
    """cached(folder): what TransformerLens over transformers caches of SHORT."""

    def made(folder: Path) -> dict[str, torch.Tensor]:
        out = tmp_path / "out.safetensors"
        BRIDGE.ask("cache", folder=str(folder), tokens=SHORT, out=str(out))
        return load_file(out)

    return made


def as_ours(theirs: torch.Tensor, ours: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
    """The bridge's value in our axes: without the batch, positions before heads, weights by chosen expert."""
    if indices is not None:
        return theirs.gather(1, indices.long())
    theirs = theirs[0] if theirs.ndim > 1 and theirs.shape[0] == 1 else theirs
    if theirs.ndim == 3 and theirs.shape != ours.shape and theirs.transpose(0, 1).shape == ours.shape:
        theirs = theirs.transpose(0, 1)
    return theirs.reshape(ours.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_shared_name_holds_the_bridges_value(tiny, engines, cached, family, capsys):
    folder = tiny(family, "tokenizer")
    want = cached(folder)
    with mended(engines, folder, family) as driver:
        (got,) = capture(driver, [SHORT])
    errors: dict[str, float] = {}
    for name, theirs in want.items():
        canonical = driver.catalog.canonical(name)
        if canonical not in got or re.sub(r"^blocks\.\d+\.", "", name) in OTHER.get(family, ()):
            continue
        ours = got[canonical]
        chosen = got.get(canonical.replace("weights", "indices")) if name.endswith("expert_weights") else None
        theirs = as_ours(theirs, ours, chosen)
        if name.endswith("attn_scores"):
            assert ((theirs <= LOWEST) == (ours <= LOWEST)).all()
            theirs, ours = (t.masked_fill(t <= LOWEST, 0) for t in (theirs, ours))
        errors[name] = relative_error(ours, theirs)
    worst = max(errors, key=errors.get)
    with capsys.disabled():
        print(f"\n{family}: {len(errors)} names of {len(want) - 2} equal the bridge's, the worst {worst} by {errors[worst]:.1e}", end="")
    assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}
    assert relative_error(got["unembed.hook_out"], want["logits"][0]) <= 1e-5
    assert len(errors) >= 100
