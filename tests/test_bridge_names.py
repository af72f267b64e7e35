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

# What is no activation, and, of a mixture of experts, what the bridge gives under names of what no engine forms for every
# position (its input and its output, which have names of their own): the only names that may be refused.
TABLES = ("hook_cos", "hook_sin", "embed.hook_in")
MIXTURE = ("mlp.hook_pre", "mlp.hook_post")


def named(family: str) -> list[str]:
    """The concrete names of one family's cache."""
    found = []
    for name in NAMES["all"] + NAMES[family]:
        name, _, layers = name.partition("@")
        each = [int(i) for i in layers.split(",")] if layers else range(LAYERS)
        found += dict.fromkeys(name.replace("{i}", str(i)) for i in each)
    return found


def of_mixtures(names: list[str]) -> set[str]:
    """Those that mean nothing in their layer, a mixture of experts: an engine refuses them there. Its gate is a router, and
    no part of an MLP."""
    blocks = [f"blocks.{i}" for i in range(LAYERS)]
    return {f"{block}.{point}" for block in blocks for point in MIXTURE if f"{block}.mlp.router.hook_in" in names
            or (f"{block}.mlp.gate.hook_in" in names and f"{block}.mlp.in.hook_in" not in names)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_of_the_bridge_is_answered_or_refused_with_its_reason(family, capsys):
    catalog = Catalog(load(family), Dims(LAYERS, 128, 4, 2, 32, 256, 512, 4, 2), {})
    names = named(family)
    mixed = of_mixtures(names)
    refused = {name: catalog.refusal(name) for name in names if catalog.canonical(name) is None}
    # Where a family has dense layers too, an engine refuses what the others lack.
    refused |= {name: catalog.row(catalog.canonical(name)).absent for name in mixed - refused.keys()}
    with capsys.disabled():
        print(f"\n{family}: {len(names) - len(refused)} of {len(names)} names of the bridge are answered", end="")
    assert {name for name, reason in refused.items() if not reason} == set()
    assert {name for name in refused if not name.endswith(TABLES) and name not in mixed} == set()
    assert len(names) - len(refused) >= 120
