"""Interventions from the command line: `-i`, `--spec`, `--source`, checked as far as that goes without an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from vlens_cli import interventions
from vlens_cli.cli import prompts
from vlens_cli.errors import PathError, UsageError, VlensError
from vlens_cli.interventions import Intervention, Source
from vlens_cli.query import Interventions


def collect(asked: Any, source_is_read: bool) -> Interventions:
    """What options.interventions gives, its files found from here. Raises UsageError and its kinds."""
    given = [*map(interventions.parse, asked.expressions), *(one for name in asked.specs for one in _entries(name))]
    for path in interventions.files(given):
        _check_file(path)
    sources = (*(prompts.one(text, "the source", asked.chat, asked.system) for text in asked.sources),
               *(prompts.typed_ids(ids, "--source-tokens") for ids in asked.source_tokens))
    if source_is_read and sources and not any(isinstance(one.value, Source) for one in given):
        raise UsageError("--source is what @source takes its values from, and no intervention has it", code="no_source",
                         hint="-i 'blocks.8.hook_resid_post[pos=3] = @source'")
    expressions = tuple(str(interventions.with_paths(one, _absolute)) for one in given)
    return Interventions(expressions, sources, asked.seed, asked.allow_nan)


def check(asked: Interventions, catalog: Any) -> None:
    """Raises UsageError or HookError for what this model does not take."""
    interventions.check(map(interventions.parse, asked.expressions), catalog, allow_nan=asked.allow_nan,
                        has_source=bool(asked.sources))


def _entries(name: str) -> Iterator[Intervention]:
    """The interventions of one `--spec` file; faults say which entry."""
    try:
        with open(name, "rb") as file:
            found = json.loads(file.read().decode("utf-8-sig"))
    except OSError as fault:
        raise PathError(f"this file cannot be read, {fault.strerror}: {name}") from fault
    except (ValueError, RecursionError) as fault:
        raise PathError(f"this file is not JSON: {name}: {fault}") from fault
    if not isinstance(found, list):
        raise UsageError(f"a file of --spec holds a list of interventions, and this one does not: {name}",
                         code="bad_spec", hint='[{"hook": "blocks.5.hook_mlp_out", "op": "scale", "factor": 0.5}]')
    for n, entry in enumerate(found):
        try:
            yield interventions.from_spec(entry)
        except VlensError as fault:
            raise UsageError(f"{name}, entry {n}: {fault.message}", hint=fault.hint, code=fault.code) from fault


def _check_file(path: str) -> None:
    where = _absolute(path)
    if os.path.isdir(where):
        raise PathError(f"an intervention names a folder: {path}", hint="name a .safetensors file")
    if not os.path.exists(where):
        raise PathError(f"there is no such file: {path}", hint="the value of an intervention is a number, "
                        "FILE.safetensors:KEY, @source, mean(...), proj(...) or noise(...)")
    if not os.access(where, os.R_OK):
        raise PathError(f"this file cannot be read: {path}")


def _absolute(path: str) -> str:
    # The shell leaves a tilde inside a quoted expression alone.
    return os.path.abspath(os.path.expanduser(path))
