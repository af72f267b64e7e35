"""Every setting: its variable, its key in a config file, its default, its meaning; and the readers that give their values.

A variable of the environment comes first, then the project's `vlens.toml` (of this folder or the nearest one above it),
then the user's, then the default. An empty variable counts as one that is not set. The README's table, `vlens config` and
`doctor` are made from `VARIABLES`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from vlens_cli.errors import PathError, UsageError

DEMO = "demo"


class Variable(NamedTuple):
    """One row of the table. `default` is what a reader of the documentation is told, not a value to compute with.

    key      in a config file; none where a file cannot set it
    project  whether a project's file may set it: what comes with a clone must not choose where files of the user lie
    """

    name: str
    default: str
    meaning: str
    key: str = ""
    project: bool = False


MODEL = Variable("VLENS_MODEL", "the demo model",
                 "model that is used when --model is not given: a folder, a hub name, or `demo`", "model", True)
KEEP_ALIVE = Variable("VLENS_KEEP_ALIVE", "15m", "how long a resident engine stays after its last query: 90s, 15m, 2h, "
                      "0, forever", "keep_alive", True)
KEEP = Variable("VLENS_KEEP", "1", "how many resident engines may stay at once; beyond it idle ones stop, oldest first",
                "keep", True)
SLEEP = Variable("VLENS_SLEEP", "5m", "how long after its last query a resident engine on a GPU moves its weights to the "
                 "host's memory, until the next: 90s, 5m, 2h, 0, forever", "sleep")
CACHE = Variable("VLENS_CACHE", "$XDG_CACHE_HOME/vlens or ~/.cache/vlens", "folder where the demo model is kept", "cache")
RUNTIME = Variable("VLENS_RUNTIME", "$XDG_RUNTIME_DIR/vlens or /tmp/vlens-UID",
                   "folder of the resident engines' sockets, status files and logs", "runtime")
CONFIG = Variable("VLENS_CONFIG", "vlens.toml here or above, then $XDG_CONFIG_HOME/vlens/vlens.toml or "
                  "~/.config/vlens/vlens.toml", "config file, TOML; named here, it is the only one that is read")
LOG = Variable("VLENS_LOG", "0", "with --no-daemon, 1 lets the engine's own log through, on stderr")
DEBUG = Variable("VLENS_DEBUG", "0", "1 shows the traceback of every error, on stderr")

VARIABLES = (MODEL, KEEP_ALIVE, KEEP, SLEEP, CACHE, RUNTIME, CONFIG, LOG, DEBUG)
KEYS = {each.key: each for each in VARIABLES if each.key}
DEFAULT = "default"
FILE_NAME = "vlens.toml"
DURATIONS = "90s, 2h, 0, forever"
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|)")


class Setting(NamedTuple):
    """A variable as it stands in this process: the value in force, and where it was set: the environment's variable, a
    config file, or `default`."""

    variable: Variable
    value: str
    origin: str

    @property
    def is_set(self) -> bool:
        return self.origin != DEFAULT


def settings() -> list[Setting]:
    """Every variable with the value in force. Raises what the readers raise."""
    values = {MODEL: default_model()[0], CACHE: str(cache_folder()), CONFIG: str(config_file()),
              RUNTIME: str(runtime_folder() or ""), KEEP_ALIVE: keep_alive_text(), KEEP: str(keep()), SLEEP: sleep_text(),
              LOG: str(int(engine_log())), DEBUG: str(int(debug()))}
    return [Setting(variable, values[variable], _found(variable)[1]) for variable in VARIABLES]


def default_model() -> tuple[str, str]:
    """The model when --model is not given, and where it was set: the variable's name, the config file, or `default`.

    Raises PathError for a config file that cannot be used.
    """
    model, where = _found(MODEL)
    if model is None:
        return DEMO, where
    # A path in a file means the same wherever the user stands.
    return (str(Path(where).parent / model) if where != MODEL.name and model.startswith(("./", "../")) else model), where


def cache_folder() -> Path:
    """The folder where vlens keeps models; it may not exist yet. Raises PathError without a home."""
    if named := _found(CACHE)[0]:
        return _absolute(named)
    return _xdg("XDG_CACHE_HOME", ".cache") / "vlens"


def config_file() -> Path:
    """The user's config file, or the one that is named; it may not exist. Raises PathError without a home."""
    if named := _get(CONFIG):
        return _absolute(named)
    return _xdg("XDG_CONFIG_HOME", ".config") / "vlens" / FILE_NAME


def project_file() -> Path | None:
    """The nearest `vlens.toml` of this folder and those above it, if there is one that counts: not where a file is named,
    and none of another user's, who would choose the model."""
    if _get(CONFIG) is not None:
        return None
    try:
        here = Path.cwd()
    except OSError:  # the folder is gone
        return None
    for folder in (here, *here.parents):
        path = folder / FILE_NAME
        try:
            if path.is_file():
                return path if path.stat().st_uid in (0, os.getuid()) else None
        except OSError:
            continue
    return None


def runtime_folder() -> Path | None:
    """The folder that VLENS_RUNTIME, or a file, names; None where the usual one is meant."""
    named = _found(RUNTIME)[0]
    return _absolute(named) if named else None


def keep_alive_text() -> str:
    """What is set, or the default; `seconds` reads it. Raises UsageError for what is no duration."""
    return _duration(KEEP_ALIVE)


def keep() -> int:
    """How many engines may stay. Raises UsageError for what is no count."""
    text = _found(KEEP)[0] or KEEP.default
    if not _is_count(text):
        raise UsageError(f"{KEEP.name} is not a number of engines: {text}", hint=f"{KEEP.name}=2")
    return int(text)


def _is_count(text: str) -> bool:
    return re.fullmatch(r"0*[1-9][0-9]*", text) is not None


def sleep_text() -> str:
    """What VLENS_SLEEP says, or its default. Raises UsageError for what is no duration."""
    return _duration(SLEEP)


def _duration(variable: Variable) -> str:
    text = _found(variable)[0] or variable.default
    if not is_duration(text):
        raise UsageError(f"{variable.name} is not a duration: {text}", hint=f"{variable.name}=15m, or {DURATIONS}")
    return text


def sleep_after() -> float | None:
    """Seconds without a query after which an engine goes to sleep; None for never. Raises UsageError."""
    return seconds(sleep_text())


def seconds(text: str) -> float | None:
    """A duration as typed (`2`, `90s`, `15m`, `2h`) in seconds; None for `forever`. Raises UsageError."""
    if text == "forever":
        return None
    found = _TIME.fullmatch(text.strip())
    if not found:
        raise UsageError(f"not a duration: {text}", hint=f"15m, or {DURATIONS}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def is_duration(text: str) -> bool:
    return text == "forever" or _TIME.fullmatch(text.strip()) is not None


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


def _found(variable: Variable) -> tuple[str | None, str]:
    """(value, where it was set), from the environment or a file; (None, `default`)."""
    if (value := _get(variable)) is not None:
        return value, variable.name
    for path in filter(None, (project_file(), config_file())) if variable.key else ():
        if (value := _read_config(path).get(variable.key)) is not None:
            return value, str(path)
    return None, DEFAULT


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
        # utf-8-sig: Windows editors begin a file with a mark.
        text = path.read_text(encoding="utf-8-sig")
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
    except RecursionError as fault:
        raise _bad_config(path, "its brackets are too deep") from fault


def _checked(path: Path, fields: dict[str, object]) -> dict[str, str]:
    """Refuse what would otherwise be passed over in silence: an unknown key, a value of another kind."""
    of_user = path == config_file()
    for key, value in fields.items():
        if key not in KEYS:
            raise _bad_config(path, f"{_line_of(path, key)}: unknown key {key}", f"the keys are {', '.join(KEYS)}")
        if not of_user and not KEYS[key].project:
            raise _bad_config(path, f"{_line_of(path, key)}: {key} is for the user's own file, and this is a project's",
                              f"put it into {config_file()}, or set {KEYS[key].name}")
        count = key in _SHAPES and type(value) is int
        if not isinstance(value, str) and not count:
            raise _bad_config(path, f"{_line_of(path, key)}: {key} is not a text in quotes", _hint_for(key))
        if not str(value):
            raise _bad_config(path, f"{_line_of(path, key)}: {key} is empty", f"{_hint_for(key)}, or leave the line out")
        fits, what = _SHAPES.get(key, (None, ""))
        if fits and not fits(str(value)):
            raise _bad_config(path, f"{_line_of(path, key)}: {key} is not {what}: {value}", _hint_for(key))
    return {key: str(value) for key, value in fields.items()}


# Keys whose values are no free text: whether one fits, and what it must be.
_SHAPES = {KEEP.key: (_is_count, "a number of engines"), KEEP_ALIVE.key: (is_duration, "a duration"),
           SLEEP.key: (is_duration, "a duration")}


def _hint_for(key: str) -> str:
    """A line that would do."""
    if key == KEEP.key:
        return f'{key} = "2"'
    return f'{key} = "15m", or {DURATIONS}' if key in _SHAPES else f'{key} = "..."'


def _bad_config(path: Path, what: str, hint: str = 'a line looks like this: model = "org/name"') -> PathError:
    return PathError(f"bad config file {path}, {what}", hint=hint, code="bad_config")


def _placed(message: str) -> str:
    """`... (at line 3, column 9)` as `line 3: ...`; tomllib tells the line in its message only."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", message)
    if not found:
        return message
    return f"line {found[2]}: {found[1]}" if found[2] else f"last line: {found[1]}"


def _line_of(path: Path, key: str) -> str:
    """Where a key stands, for the message: the first line that names it."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    number = next((n for n, line in enumerate(lines, 1) if re.match(rf"\s*\[*\s*[\"']?{re.escape(key)}\b", line)), 1)
    return f"line {number}"
