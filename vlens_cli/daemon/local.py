"""A session in this process: what the resident engine has too, and what `--no-daemon` asks alone."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vlens_cli.daemon import launch
from vlens_cli.driver.quiet import engine_output
from vlens_cli.errors import StartError
from vlens_cli.query import EngineSpec, Query, Reply

if TYPE_CHECKING:
    from vlens_cli.driver.session import Session


def ask(spec: EngineSpec, query: Query, progress: Callable[[str], None], into: BinaryIO | None) -> Reply:
    """Run one query on an engine of its own. Raises what `Session.answer` raises, and StartError."""
    with engine_output():
        try:
            return open_session(spec).answer(query, progress, into)
        except StartError as error:
            launch.name_idle_engines(error)
            raise


def check_spec(spec: EngineSpec) -> None:
    """Refuse what an engine cannot be started with, as far as config.json says: before another one makes room for it.

    Raises UsageError, StartError.
    """
    from vlens_cli.driver import boot
    from vlens_cli.families import catalog_for

    config = _config(spec)
    boot.plan(spec, config, catalog_for(config))


def open_session(spec: EngineSpec) -> Session:
    """A session that has not started its engine yet."""
    from vlens_cli.driver.session import Session

    gc.enable()
    return Session(spec, _config(spec))


def _config(spec: EngineSpec) -> dict[str, Any]:
    return json.loads((Path(spec.model) / "config.json").read_text(encoding="utf-8"))
