"""`vlens config`: the settings in force, and where each comes from."""

from __future__ import annotations

from typing import Any

import click

from vlens_cli import env
from vlens_cli.cli import complete, options, output
from vlens_cli.errors import UsageError
from vlens_cli.reply import SCHEMA_VERSION


@click.command("config")
@click.argument("key", required=False, metavar="[KEY]", shell_complete=complete.words(*env.KEYS))
@options.output_format
def command(key: str | None, as_json: bool, as_table: bool) -> None:
    """The settings in force, and where each comes from; with a KEY, its value alone.

    \b
    vlens config
    vlens config model
    VLENS_KEEP_ALIVE=2h vlens config

    An option comes first, then the environment, then vlens.toml of this folder or the nearest above it, then the user's
    file, then the default. Files are edited by hand: a line is KEY = "VALUE".
    """
    found = env.settings()
    if key is not None:
        output.emit(_value(key, found))
        return
    files = [{"of": of, "path": str(path), "exists": path.is_file()}
             for of, path in (("project", env.project_file()), ("user", env.config_file())) if path is not None]
    body = {"schema_version": SCHEMA_VERSION, "command": "config", "files": files, "settings": [
        {"variable": one.variable.name, "key": one.variable.key or None, "value": one.value, "origin": one.origin,
         "meaning": one.variable.meaning} for one in found]}
    from vlens_cli.cli import render

    output.emit(render.to_json(body) if output.wants_json(as_json, as_table) else _table(body))


def _value(key: str, found: list[env.Setting]) -> str:
    for one in found:
        if key in (one.variable.key, one.variable.name):
            return one.value
    raise UsageError(f"there is no such setting: {key}", hint=f"the settings are {', '.join(env.KEYS)}", code="unknown_key")


def _table(body: dict[str, Any]) -> str:
    from vlens_cli.cli.render import draw, line, table, visible

    columns = [("key", "left"), ("value", "left"), ("from", "left"), ("variable", "left"), ("meaning", "fold")]
    rows = [(one["key"] or "", visible(one["value"]), visible(one["origin"]), one["variable"], one["meaning"])
            for one in body["settings"]]
    files = [line(f"{one['of']} file: {visible(one['path'])}" + ("" if one["exists"] else " (there is none)")) for one in body["files"]]
    return draw(table(columns, rows), line(), *files)
