"""Every name in the cache of TransformerLens' own bridge, for every family: answered, or refused with the reason.

bridge_names.json has the names that TransformerLens 4.3.0's bridge over transformers cached of the tiny models: those of
all families, then what each has beside them; `name@1,2` is in these layers only. `make test-peers` compares the values.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlens_cli.families import FAMILIES, Catalog, load
from vlens_cli.families import Dims

LAYERS = 4
NAMES = json.loads(Path(__file__).with_name("bridge_names.json").read_text())

# What no engine forms and nothing rebuilds, or what is no activation: the only names that may be refused.
TABLES = ("hook_cos", "hook_sin", "embed.hook_in")
MIXTURE = ("mlp.hook_pre", "mlp.hook_post")
# Of latent attention, and of the experts that all positions have, this version gives what goes in and what comes out.
INNER = ("attn.hook_", "attn.q_", "attn.kv_", "mlp.shared_experts.")


def named(family: str) -> list[str]:
    """The concrete names of one family's cache."""
    found = []
    for name in NAMES["all"] + NAMES[family]:
        name, _, layers = name.partition("@")
        each = [int(i) for i in layers.split(",")] if layers else range(LAYERS)
        found += dict.fromkeys(name.replace("{i}", str(i)) for i in each)
    return found


def may_be_refused(family: str, name: str) -> bool:
    if name.endswith(TABLES) or (family in ("mixtral", "gpt_oss") and name.endswith(MIXTURE)):
        return True
    return family == "deepseek_v2" and name.partition(".")[2].partition(".")[2].startswith(INNER)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_of_the_bridge_is_answered_or_refused_with_its_reason(family, capsys):
    catalog = Catalog(load(family), Dims(LAYERS, 128, 4, 2, 32, 256, 512, 4, 2), {})
    names = named(family)
    refused = {name: catalog.refusal(name) for name in names if catalog.canonical(name) is None}
    with capsys.disabled():
        print(f"\n{family}: {len(names) - len(refused)} of {len(names)} names of the bridge are answered", end="")
    assert {name for name, reason in refused.items() if not reason} == set()
    assert {name for name in refused if not may_be_refused(family, name)} == set()
    assert len(names) - len(refused) >= 120
