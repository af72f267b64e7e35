"""What `vlens param` does: weights read, asked for, listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vlens_cli import __version__, models, params
from vlens_cli.cli import asking, options, output, render
from vlens_cli.errors import UsageError
from vlens_cli.reply import SCHEMA_VERSION, Reply, Saved

if TYPE_CHECKING:
    from pathlib import Path

    from vlens_cli.cli.param import Typed
    from vlens_cli.models import Model
    from vlens_cli.params import Param, ParamRequest, Weights
    from vlens_cli.reader.launch import Reader


# From the checkpoint


def read(asked: Typed, target: Path | None, as_json: bool, reader: Reader) -> Reply | None:
    """The reply, from the checkpoint alone; None where a name needs the engine, and it may be asked."""
    model = models.resolve(asked.model)
    weights = _weights(model, reader, asked.allow_pickle)
    requests = params.requested(asked.names, weights)
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
        from vlens_cli.reader import launch

        with launch.reader() as reader:
            return _weights(model, reader, allow_pickle)
    answer = reader.ask({"pickled": str(model.folder)})
    return params.of_pickled(answer["tensors"], model.config)


def _others(asked: Typed, requests: Sequence[ParamRequest], found: Sequence[Param], reader: Reader
            ) -> list[dict[str, Any]]:
    """The readings of the same names in the model that is compared with."""
    if asked.compare is None:
        return []
    weights = _weights(models.resolve(asked.compare), reader, asked.allow_pickle)
    theirs = params.of_other(requests, found, weights, asked.compare)
    return [params.reading(param, weights, asked.raw) for param in theirs]


def _body(model: Model, weights: Weights, entries: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION, "command": "param", "vlens": __version__,
        "model": {"name": model.name, "folder": str(model.folder), "revision": model.revision,
                  "family": weights.family, "dtype": None},
        **{key: value for key, value in more.items() if value is not None},
        "params": entries,
    }


# From the engine


def ask(asked: Typed, target: Path | None, live: bool) -> Reply:
    """The reply of the engine; names are checked before it is waited for."""
    from vlens_cli import families
    from vlens_cli.query import ParamQuery

    model = models.resolve(asked.model)
    families.catalog_for(model.config)
    if (weights := params.of_folder(model.folder, model.config)) is not None:
        params.resolve(params.requested(asked.names, weights), weights)
    query = ParamQuery(
        names=asked.names, live=live, values=asked.values, svd=asked.svd, raw=asked.raw,
        compare=None if asked.compare is None else str(models.resolve(asked.compare).folder),
    )
    how = options.asking(asked.keep_alive, asked.timeout, asked.no_daemon)
    return asking.ask(options.spec(model, asked._asdict()), query, target, how)


# A list


def show_list(asked: Typed, as_json: bool) -> None:
    """`--list`: from the headers alone."""
    if asked.names:
        raise UsageError(f"--list takes one pattern: {asked.pattern}, {', '.join(asked.names)}",
                         hint="quote a pattern that holds stars and braces")
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
