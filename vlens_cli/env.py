"""Every VLENS_* variable: its name, its default, its meaning; and the readers that give their values.

An empty variable counts as one that is not set. The README's table and `doctor` are made from `VARIABLES`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from vlens_cli.errors import PathError, UsageError

DEMO = "demo"


class Variable(NamedTuple):
    """One row of the table. `default` is what a reader of the documentation is told, not a value to compute with."""

    name: str
    default: str
    meaning: str


MODEL = Variable("VLENS_MODEL", "the config file's `model`, else the demo model",
                 "model that is used when --model is not given: a folder, a hub name, or `demo`")
CACHE = Variable("VLENS_CACHE", "$XDG_CACHE_HOME/vlens or ~/.cache/vlens",
                 "folder where the demo model is kept")
CONFIG = Variable("VLENS_CONFIG", "$XDG_CONFIG_HOME/vlens/vlens.toml or ~/.config/vlens/vlens.toml",
                  "config file, TOML; its key: `model`")
RUNTIME = Variable("VLENS_RUNTIME", "$XDG_RUNTIME_DIR/vlens or /tmp/vlens-UID",
                   "folder of the resident engines' sockets, status files and logs")
KEEP_ALIVE = Variable("VLENS_KEEP_ALIVE", "15m", "how long a resident engine stays after its last query: 90s, 15m, 2h, "
                      "0, forever")
KEEP = Variable("VLENS_KEEP", "1", "how many resident engines may stay at once; beyond it idle ones stop, oldest first")
SLEEP = Variable("VLENS_SLEEP", "5m", "how long after its last query a resident engine on a GPU moves its weights to the "
                 "host's memory, until the next: 90s, 5m, 2h, 0, forever")
LOG = Variable("VLENS_LOG", "0", "with --no-daemon, 1 lets the engine's own log through, on stderr")

DEBUG = Variable("VLENS_DEBUG", "0", "1 shows the traceback of every error, on stderr")

VARIABLES = (MODEL, CACHE, CONFIG, RUNTIME, KEEP_ALIVE, KEEP, SLEEP, LOG, DEBUG)
CONFIG_KEYS = ("model",)


class Setting(NamedTuple):
    """A variable as it stands in this process: the value in force, and whether the environment gave it."""

    variable: Variable
    value: str
    is_set: bool


def settings() -> list[Setting]:
    """Every variable with the value in force, for `doctor`. Raises what the readers raise."""
    values = {MODEL: default_model()[0], CACHE: str(cache_folder()), CONFIG: str(config_file()),
              RUNTIME: str(runtime_folder() or ""), KEEP_ALIVE: keep_alive_text(), KEEP: str(keep()), SLEEP: sleep_text(),
              LOG: str(int(engine_log())), DEBUG: str(int(debug()))}
    return [Setting(variable, values[variable], _get(variable) is not None) for variable in VARIABLES]


def default_model() -> tuple[str, str]:
    """The model when --model is not given, and where it was set: the variable's name, the config file, or `default`.

    Raises PathError for a config file that cannot be used.
    """
    if model := _get(MODEL):
        return model, MODEL.name
    path = config_file()
    if model := _read_config(path).get("model"):
        # A path in a file means the same wherever the user stands.
        return (str(path.parent / model) if model.startswith(("./", "../")) else model), str(path)
    return DEMO, "default"


def cache_folder() -> Path:
    """The folder where vlens keeps models; it may not exist yet. Raises PathError without a home."""
    if named := _get(CACHE):
        return _absolute(named)
    return _xdg("XDG_CACHE_HOME", ".cache") / "vlens"


def config_file() -> Path:
    """The config file's path; it may not exist. Raises PathError without a home."""
    if named := _get(CONFIG):
        return _absolute(named)
    return _xdg("XDG_CONFIG_HOME", ".config") / "vlens" / "vlens.toml"


def runtime_folder() -> Path | None:
    """The folder that VLENS_RUNTIME names; None where the usual one is meant."""
    named = _get(RUNTIME)
    return _absolute(named) if named else None


def keep_alive_text() -> str:
    """What VLENS_KEEP_ALIVE says, or its default; `seconds` reads it."""
    return _get(KEEP_ALIVE) or KEEP_ALIVE.default


def keep() -> int:
    """How many engines may stay. Raises UsageError for what is no count."""
    text = _get(KEEP) or KEEP.default
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{KEEP.name} is not a number of engines: {text}", hint=f"{KEEP.name}=2")
    return int(text)


def sleep_text() -> str:
    """What VLENS_SLEEP says, or its default."""
    return _get(SLEEP) or SLEEP.default


def sleep_after() -> float | None:
    """Seconds without a query after which an engine goes to sleep; None for never. Raises UsageError."""
    return seconds(sleep_text())


def seconds(text: str) -> float | None:
    """A duration as typed (`2`, `90s`, `15m`, `2h`) in seconds; None for `forever`. Raises UsageError."""
    if text == "forever":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", text.strip())
    if not found:
        raise UsageError(f"not a duration: {text}", hint="90s, 15m, 2h, 0 or forever")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def engine_log() -> bool:
    """Whether the engine's own log goes to stderr."""
    return _is_on(LOG)


def debug() -> bool:
    """Whether an error shows its traceback."""
    return _is_on(DEBUG)


def _is_on(variable: Variable) -> bool:
    return (_get(variable) or "0") != "0"


def _get(variable: Variable) -> str | None:
    return os.environ.get(variable.name) or None


def _xdg(variable: str, usual: str) -> Path:
    base = os.environ.get(variable, "")
    # The XDG specification: a relative path there is invalid and must be ignored.
    return Path(base) if os.path.isabs(base) else _absolute(f"~/{usual}")


def _absolute(named: str) -> Path:
    try:
        return Path(os.path.abspath(Path(named).expanduser()))
    except RuntimeError as fault:  # pathlib's way to say that there is no home, or no such user
        raise PathError(f"no home folder: {named}", hint=f"set HOME, or {CACHE.name} and {CONFIG.name}") from fault


def _read_config(path: Path) -> dict[str, str]:
    """The config file's keys; none where there is no file, unless VLENS_CONFIG names it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as fault:
        if _get(CONFIG) is None:
            return {}
        raise PathError(f"no such config file: {path}", hint=f"unset {CONFIG.name}", code="bad_config") from fault
    except UnicodeDecodeError as fault:
        raise _bad_config(path, "line 1: it is not UTF-8 text") from fault
    except OSError as fault:
        raise PathError(f"cannot read the config file {path}: {fault.strerror}", code="bad_config") from fault
    # Its import takes longer than most commands' own work, and most users have no such file.
    import tomllib

    try:
        return _checked(path, tomllib.loads(text))
    except tomllib.TOMLDecodeError as fault:
        raise _bad_config(path, _placed(str(fault))) from fault


def _checked(path: Path, fields: dict[str, object]) -> dict[str, str]:
    """Refuse what would otherwise be passed over in silence: an unknown key, a value that is no text."""
    for key, value in fields.items():
        if key not in CONFIG_KEYS:
            raise _bad_config(path, f"{_line_of(path, key)}: unknown key {key}")
        if not isinstance(value, str):
            raise _bad_config(path, f"{_line_of(path, key)}: {key} is not a text in quotes")
    return {key: str(value) for key, value in fields.items()}


def _bad_config(path: Path, what: str) -> PathError:
    return PathError(f"bad config file {path}, {what}", hint='a line looks like this: model = "org/name"',
                     code="bad_config")


def _placed(message: str) -> str:
    """`... (at line 3, column 9)` as `line 3: ...`; tomllib tells the line in its message only."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message)
    if not found:
        return message
    return f"line {found[2]}: {found[1]}" if found[2] else f"last line: {found[1]}"


def _line_of(path: Path, key: str) -> str:
    """Where a key stands, for the message: the first line that names it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next((n for n, line in enumerate(lines, 1) if re.match(rf"\s*\[*\s*[\"']?{re.escape(key)}\b", line)), 1)
    return f"line {number}"
