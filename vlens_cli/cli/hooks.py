"""`vlens hooks`: the hook points of a model, from its config alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from vlens_cli.cli import complete, options, output, render
from vlens_cli.errors import StartError, UsageError
from vlens_cli.hooks import HookRequest, expand, fold, parse
from vlens_cli.reply import SCHEMA_VERSION

if TYPE_CHECKING:
    from vlens_cli.families import Catalog
    from vlens_cli.models import Model


@click.command("hooks")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...", shell_complete=complete.hook)
@click.option("--all", "every", is_flag=True, help="A row for each layer in the table, also without a pattern.")
@click.option("--aliases", is_flag=True, help="The other names of each hook point, in the table too.")
@options.output_format
@options.model
def command(
    patterns: tuple[str, ...], every: bool, aliases: bool, as_json: bool, as_table: bool, model: str | None
) -> None:
    """The hook points of a model, and the ones it does not give.

    \b
    vlens hooks
    vlens hooks 'blocks.3.*'
    vlens hooks --aliases 'blocks.*.attn.hook_q' -m ./my-model

    Needs no engine. 'blocks.3.*' is the whole block; elsewhere `*` stops at a dot, as in captures.
    """
    as_json = output.wants_json(as_json, as_table)
    requests = tuple(map(_parsed, patterns))
    from vlens_cli import families, models

    found = models.resolve(model)
    catalog = families.catalog_for(found.config)
    body = _body(found, catalog, requests) | {"engines": _proofs(found)}
    if as_json:
        output.emit(render.to_json(body))
    else:
        rows = _rows(body["hooks"], by_layer=every or bool(patterns), with_aliases=aliases)
        output.emit(render.hooks(body, rows, aliases))


def _proofs(model: Model) -> list[dict[str, Any]]:
    """What the engines that run for this model have proved at load; nothing where the runtime directory is no use."""
    from vlens_cli.daemon import launch

    try:
        return launch.proofs(model.folder)
    except StartError:
        return []


def _parsed(pattern: str) -> HookRequest:
    request = parse(pattern)
    if request.pattern != pattern:
        raise UsageError(f"a pattern takes no selectors here: {pattern}", hint=f"vlens hooks '{request.pattern}'")
    return request


def _named(request: HookRequest, catalog: Catalog) -> Iterable[str]:
    """The names that a pattern means. A `*` right after the layer is the whole block in a list: who asks what there is
    does not know yet which part has it."""
    names = expand(request, catalog)
    if not re.fullmatch(r"blocks\.[^.]+\.\*", request.pattern):
        return names
    layers = {catalog.layer(name) for name in names}
    return [name for name in catalog.names if catalog.layer(name) in layers]


def _body(model: Model, catalog: Catalog, requests: tuple[HookRequest, ...]) -> dict[str, Any]:
    """What `--json` prints. Names that are not given are listed where everything is."""
    wanted = {name for request in requests for name in _named(request, catalog)}
    names = [name for name in catalog.names if name in wanted or not requests]
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "hooks",
        "model": {
            "name": model.name,
            "folder": str(model.folder),
            "revision": model.revision,
            "family": catalog.family,
            "differs": catalog.spec.differs or None,
            "n_layers": catalog.n_layers,
        },
        "hooks": [_entry(name, catalog) for name in names],
        "refused": [] if requests else [{"name": n, "reason": reason} for n, reason in catalog.refused.items()],
    }


def _entry(name: str, catalog: Catalog) -> dict[str, Any]:
    """One hook point; sizes that are the prompt's are null."""
    from vlens_cli.families import TOKEN_AXES

    axes = catalog.axes(name)
    return {
        "name": name,
        "axes": list(axes),
        "shape": [None if axis in TOKEN_AXES else catalog.size(axis) for axis in axes],
        "derived": catalog.derived(name),
        "editable": catalog.editable(name),
        "aliases": list(catalog.aliases(name)),
        "definition": catalog.definition(name),
    }


def _rows(entries: list[dict[str, Any]], by_layer: bool, with_aliases: bool) -> list[list[str]]:
    """Rows of the table. Hook points that differ only in their layer are one, unless `by_layer`."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry["name"] if by_layer else fold(entry["name"]), []).append(entry)
    return [_row(name, group, by_layer, with_aliases) for name, group in groups.items()]


def _row(name: str, group: list[dict[str, Any]], by_layer: bool, with_aliases: bool) -> list[str]:
    first = group[0]
    aliases = dict.fromkeys(alias if by_layer else fold(alias) for entry in group for alias in entry["aliases"])
    cells = [
        name,
        _layers(entry["name"] for entry in group),
        _shape(first),
        "vlens" if first["derived"] else "the engine",
        "yes" if first["editable"] else "",
        first["definition"],
    ]
    return cells + ["\n".join(aliases)] * with_aliases


def _layers(names: Iterable[str]) -> str:
    """`0-29`, or `0-3, 5`, of the layers that names are in; nothing outside the blocks."""
    runs: list[list[int]] = []
    for layer in (int(name.split(".")[1]) for name in names if name.startswith("blocks.")):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _shape(entry: dict[str, Any]) -> str:
    sized = (
        axis if size is None else str(size) if axis == "one" else f"{axis} {size}"
        for axis, size in zip(entry["axes"], entry["shape"], strict=True)
    )
    return f"[{', '.join(sized)}]"
