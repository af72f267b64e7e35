"""The weights of a family by TransformerLens' names, as data: params/FAMILY.toml, for the command that asks for them.

A file has a table for each weight, by its name with {i} for the layer:
    axes        their names, in TransformerLens' order
    checkpoint  "TENSOR LAYOUT": where it lies in a checkpoint; {e} in the tensor's name runs over the axis `expert`
    engine      "ROLE.ATTRIBUTE LAYOUT": where it lies in the engine, in the module that has the role
    tied        the weight whose value it is where embeddings are tied
    aliases     other names
and [sizes]: axis -> config key, for axes that no other table of the family has.
layout.py has the language of layouts. Rows and fields add to, and replace, those of the family that this one is `like`;
with `fresh = true` nothing is taken from there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vlens_cli import families
from vlens_cli.errors import BugError


class ParamRow(NamedTuple):
    """One weight of a family.

    tensor, layout                of a checkpoint
    module, attribute, live       of an engine: role, path of the parameter in its module, layout; empty for none
    """

    name: str
    axes: tuple[str, ...]
    tensor: str
    layout: str
    module: str
    attribute: str
    live: str
    tied: str = ""
    aliases: tuple[str, ...] = ()


@cache
def load(family: str) -> dict[str, ParamRow]:
    """The weights of a family, with what it inherits; a row that contradicts itself is a BugError."""
    return {name: _row(family, name, entry) for name, entry in _fields(family).items() if name != "sizes"}


def sizes(family: str) -> dict[str, str]:
    """Axes that only weights have -> the config key of their length."""
    return _fields(family).get("sizes", {})


@cache
def _fields(family: str) -> dict[str, dict[str, Any]]:
    import tomllib

    path = Path(__file__).parent / "params" / f"{family}.toml"
    own = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    like = families.load(family).like
    base = {} if own.pop("fresh", False) or not like else _fields(like)
    known = families.load(family).modules
    # Of a family whose modules are others, what lies in a module that this one has not.
    base = {name: entry for name, entry in base.items() if name == "sizes" or name in own or _role(entry) in known}
    return {name: {**base.get(name, {}), **own.get(name, {})} for name in {**base, **own}}


def _role(entry: dict[str, Any]) -> str:
    return entry["engine"].partition(".")[0]


def _row(family: str, name: str, entry: dict[str, Any]) -> ParamRow:
    tensor, _, layout = entry["checkpoint"].partition(" ")
    place, _, live = entry.get("engine", "").partition(" ")
    module, _, attribute = place.partition(".")
    if not layout or (place and (module not in families.load(family).modules or not live)):
        raise BugError(f"family {family}: the row of {name} needs a tensor with its layout, and a known module")
    return ParamRow(
        name=name, axes=tuple(entry["axes"].split()), tensor=tensor, layout=layout, module=module, attribute=attribute,
        live=live, tied=entry.get("tied", ""), aliases=tuple(entry.get("aliases", ())),
    )
