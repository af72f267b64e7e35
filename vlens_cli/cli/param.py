"""`vlens param`: weights, by any of their names, from the checkpoint or from the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vlens_cli import __version__, params
from vlens_cli.cli import asking, options, output, render
from vlens_cli.errors import UsageError, VlensError
from vlens_cli.query import SCHEMA_VERSION, ParamQuery, Reply, Saved

if TYPE_CHECKING:
    from pathlib import Path

    from vlens_cli.models import Model
    from vlens_cli.params import Param, ParamRequest, Weights
    from vlens_cli.reader.launch import Reader


class Typed(NamedTuple):
    """The command line of `vlens param`."""

    names: tuple[str, ...]
    pattern: str | None
    source: str
    values: bool
    svd: int | None
    compare: str | None
    raw: bool
    allow_pickle: bool
    as_json: bool
    as_table: bool
    output: str | None
    model: str | None
    dtype: str
    max_len: int | None
    chunk: int | None
    keep_alive: str | None
    timeout: float | None
    no_daemon: bool


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of weights of the model that is named, if its files are at hand: a TAB never downloads anything."""
    from vlens_cli import models
    from vlens_cli.models.folder import load

    try:
        folder = models.at_hand(ctx.params.get("model"))
        weights = params.of_folder(folder, load(folder, "", None).config) if folder else None
    except (OSError, ValueError, AttributeError, VlensError):
        return []
    return [name for name in (weights.names if weights else ()) if name.startswith(incomplete)]


@click.command("param")
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_name)
@click.option("--list", "pattern", is_flag=False, flag_value="*", metavar="[PATTERN]", shell_complete=complete_name,
              help="List the weights whose names match, with shape, dtype and where they are; all without a PATTERN.")
@click.option("--from", "source", type=click.Choice(["auto", "checkpoint", "engine"]), default="auto",
              help="Where values are read. Default: the checkpoint; the engine for what only it has, and with --dtype.")
@click.option("--values", is_flag=True, help="Print every value.")
@click.option("--svd", type=click.IntRange(min=1), metavar="K",
              help="The K largest singular values, by head where there are heads.")
@click.option("--compare", metavar="MODEL",
              help="The difference from the weight of the same name in MODEL's checkpoint.")
@click.option("--raw", is_flag=True, help="Tensors of a quantized checkpoint as they are stored.")
@click.option("--allow-pickle", is_flag=True,
              help="Read a checkpoint of *.bin files, which are pickled (weights only).")
@options.output_format
@click.option("-o", "--output", metavar="FILE", help="Write the tensors to FILE.safetensors, under the names as asked.")
@options.model
@options.engine_spec
@options.residency
def command(**typed: Any) -> None:
    """Weights, by their TransformerLens, checkpoint or engine names.

    `*` in a NAME stands for anything; brackets choose: [head=3], [0:10].

    \b
    vlens param blocks.0.attn.W_Q
    vlens param 'blocks.*.attn.W_O[head=3]' -o wo.safetensors
    vlens param --list '*.0.*'
    """
    asked = Typed(**typed)
    as_json = output.wants_json(asked.as_json, asked.as_table)
    if asked.pattern is not None:
        _list(asked, as_json)
        return
    requests = _requests(asked)
    target = asking.file_of(asked.output, None)
    live = asked.source == "engine" or asked.dtype != "auto"
    reply = None if live else _read(asked, requests, target, as_json)
    if reply is None:
        reply = _ask(asked, target, live)
    asking.show(reply, target, as_json, render.params)


def _requests(asked: Typed) -> tuple[ParamRequest, ...]:
    if not asked.names:
        raise UsageError("no weight is named", hint="`vlens param --list` lists the weights of the model")
    if asked.source == "checkpoint" and asked.dtype != "auto":
        raise UsageError("--dtype is the engine's, and a checkpoint has its own", hint="--from engine")
    if asked.source == "engine" and asked.raw:
        raise UsageError("--raw is for tensors of a checkpoint, and --from engine takes none from there",
                         hint="leave out one of them")
    return tuple(map(params.parse, asked.names))


# From the checkpoint


def _read(asked: Typed, requests: tuple[ParamRequest, ...], target: Path | None, as_json: bool) -> Reply | None:
    """The reply, from the checkpoint alone; None where a name needs the engine, and it may be asked."""
    from vlens_cli import models
    from vlens_cli.reader.launch import Reader

    with Reader(threads=asked.svd is not None) as reader:
        model = models.resolve(asked.model)
        weights = _weights(model, reader, asked.allow_pickle)
        found = params.resolve(requests, weights)
        if asked.source == "auto" and any(param.view is None for param in found):
            return None
        if asked.values:
            params.check_values(found)
        entries = [params.entry(param, weights, "checkpoint", asked.raw) for param in found]
        body = _body(model, weights, entries, compare=asked.compare)
        frame = {
            "readings": [params.reading(param, weights, asked.raw) for param in found],
            "others": _others(asked, requests, found, reader), "values": asked.values, "svd": asked.svd,
            "metadata": params.metadata(body["model"], entries, __version__),
        }
        answer = _answered(reader, frame, target, (lambda: None) if as_json else render.load)
    for each, described in zip(entries, answer["described"], strict=True):
        each.update(described)
    return Reply(body, params.notes(found, weights), answer["saved"] and Saved(*answer["saved"]))


def _answered(reader: Reader, frame: dict[str, Any], target: Path | None, meanwhile: Callable[[], None]
              ) -> dict[str, Any]:
    if target is None:
        return reader.ask(frame, None, meanwhile)
    with output.whole_file(target) as file:
        return reader.ask(frame, file, meanwhile)


def _weights(model: Model, reader: Reader | None, allow_pickle: bool) -> Weights:
    """The weights of a folder. Raises UsageError for pickled ones, unless they are allowed."""
    found = params.of_folder(model.folder, model.config)
    if found is not None:
        return found
    if not allow_pickle:
        raise UsageError(f"the weights are pickled, and reading them may run what they say: {model.folder}",
                         hint="save them again: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW), or "
                         "--allow-pickle reads them without running anything but torch's own", code="pickled")
    if reader is None:
        from vlens_cli.reader.launch import Reader

        with Reader() as reader:
            return _weights(model, reader, allow_pickle)
    answer = reader.ask({"pickled": str(model.folder)})
    return params.of_pickled(answer["tensors"], model.config)


def _others(asked: Typed, requests: Sequence[ParamRequest], found: Sequence[Param], reader: Reader
            ) -> list[dict[str, Any]]:
    """The readings of the same names in the model that is compared with."""
    if asked.compare is None:
        return []
    from vlens_cli import models

    weights = _weights(models.resolve(asked.compare), reader, asked.allow_pickle)
    theirs = {param.name: param for param in params.resolve(requests, weights)}
    if missing := [param.name for param in found if param.name not in theirs]:
        raise UsageError(f"{asked.compare} has no {missing[0]}", code="unknown_param")
    return [params.reading(theirs[param.name], weights, asked.raw) for param in found]


def _body(model: Model, weights: Weights, entries: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION, "command": "param", "vlens": __version__,
        "model": {"name": model.name, "folder": str(model.folder), "revision": model.revision,
                  "family": weights.family, "dtype": None},
        **{key: value for key, value in more.items() if value is not None},
        "params": entries,
    }


# From the engine


def _ask(asked: Typed, target: Path | None, live: bool) -> Reply:
    from vlens_cli import families, models

    model = models.resolve(asked.model)
    families.catalog_for(model.config)
    if (weights := params.of_folder(model.folder, model.config)) is not None:
        params.resolve(map(params.parse, asked.names), weights)
    query = ParamQuery(
        names=asked.names, live=live, values=asked.values, svd=asked.svd, raw=asked.raw,
        compare=None if asked.compare is None else str(models.resolve(asked.compare).folder),
    )
    how = options.asking(asked.keep_alive, asked.timeout, asked.no_daemon)
    return asking.ask(options.spec(model, asked.dtype, asked.max_len, asked.chunk), query, target, how)


# A list


def _list(asked: Typed, as_json: bool) -> None:
    if asked.names:
        raise UsageError(f"--list takes one pattern: {asked.pattern}, {', '.join(asked.names)}",
                         hint="quote a pattern that holds stars and braces")
    from vlens_cli import models

    model = models.resolve(asked.model)
    weights = _weights(model, None, asked.allow_pickle)
    found = [weights.param(name) for name in params.matching(asked.pattern, weights)]
    body = _body(model, weights, [params.entry(param, weights) for param in found])
    output.emit(render.to_json(body) if as_json else render.param_list(body, _rows(body["params"])))


def _rows(entries: Iterable[dict[str, Any]]) -> list[list[str]]:
    """A row for each weight, layers of one shape in one row."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        key = params.fold(entry["name"]), tuple(entry["shape"]), entry["dtype"], tuple(entry["kinds"])
        groups.setdefault(key, []).append(entry)
    return [_row(group) for group in groups.values()]


def _where(entry: dict[str, Any], places: list[str]) -> str:
    if "tied_to" in entry:
        return f"= {entry['tied_to']}"
    return ("= " if entry["tied"] else "") + ", ".join(dict.fromkeys(places))


def _row(group: list[dict[str, Any]]) -> list[str]:
    first = group[0]
    many = len(group) > 1
    place = first["tensors"] if first["kinds"] != ["checkpoint"] else first["files"]
    if first["name"] in first["tensors"]:
        place = list(dict.fromkeys(file for entry in group for file in entry["files"]))
    where = [params.fold(text) if many else text for text in place]
    return [
        params.fold(first["name"]) if many else first["name"], f"{len(group)}" if many else "",
        " and ".join(params.KIND_WORDS[kind] for kind in first["kinds"]), render.axes(first), first["dtype"],
        _where(first, where),
    ]
