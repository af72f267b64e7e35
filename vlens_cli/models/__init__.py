"""What the user calls a model -> a folder: a path, a hub name (cached or to be downloaded), or the demo model.

Runs in the user's shell, before every command: what a path or a ready demo model does not need (the hub, the making of
the demo model) is in modules of its own, loaded when it is needed; torch, numpy and vLLM never.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from vlens_cli import env
from vlens_cli.env import DEMO
from vlens_cli.errors import PathError, VlensError
from vlens_cli.models.folder import Model, is_whole, load

__all__ = ["DEMO", "DEMO_NAME", "Model", "at_hand", "is_whole", "resolve"]

DEMO_NAME = "SmolLM2-135M-Instruct"


def resolve(asked: str | None) -> Model:
    """The model that `asked` names; None: VLENS_MODEL, the config file or the demo model. Called by every command.

    Raises PathError for a path that is no model folder, UsageError for what is no name at all, and StartError for a
    model that is broken, missing, gated or cannot be reached.
    """
    if asked is not None:
        return _find(asked)
    named, where = env.default_model()
    try:
        return _find(named)
    except VlensError as fault:
        if named != DEMO:
            fault.hint = f"{fault.hint} (the model was named in {where})".strip()
        raise


def at_hand(asked: str | None) -> Path | None:
    """The folder that `asked` names, as `resolve` takes it, where nothing has to be fetched or made; else None.

    Raises what `resolve` raises for a name that cannot be one, and does not look whether the folder is whole.
    """
    named = env.default_model()[0] if asked is None else asked
    if named == DEMO:
        return _demo_folder()
    path = _existing(named)
    if path is not None or _looks_like_path(named):
        return path
    from vlens_cli.models import hub

    return hub.cached_snapshot(*hub.split_name(named))


def may_come(named: str) -> bool:
    """Whether a model that is not at hand can be fetched or made: no folder can."""
    return not _looks_like_path(named)


def _find(asked: str) -> Model:
    if asked == DEMO:
        return load(_made_demo(), f"{DEMO_NAME} (demo)", None)
    if path := _existing(asked):
        if not path.is_dir():
            _refuse_file(path, asked)
        return load(path, asked, None)
    if _looks_like_path(asked):
        _refuse_missing(asked)
    from vlens_cli.models import hub

    return hub.find(*hub.split_name(asked))


def _demo_folder() -> Path:
    return env.cache_folder() / "models" / DEMO_NAME


def _made_demo() -> Path:
    folder = _demo_folder()
    if not is_whole(folder):
        from vlens_cli.models import demo

        demo.make(folder)
    return folder


def _existing(asked: str) -> Path | None:
    """The path that `asked` names, if something is there. Raises PathError where that cannot be looked up."""
    try:
        path = Path(asked).expanduser()
        return path if asked and path.exists() else None
    except PermissionError as fault:
        raise PathError(f"no permission to look into the model folder: {asked}", code="bad_path") from fault
    except (OSError, RuntimeError, ValueError):  # too long a name, no such ~user, a null byte: nothing is there
        return None


# Paths that are no folders


def _looks_like_path(asked: str) -> bool:
    if asked.startswith(("/", "./", "../", "~")) or asked.endswith("/") or asked in (".", ".."):
        return True
    # A revision may hold slashes: org/name@refs/pr/1.
    name = asked.partition("@")[0]
    return name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _refuse_file(path: Path, asked: str) -> NoReturn:
    if path.suffix.lower() == ".gguf" or _starts_with(path, b"GGUF"):
        raise PathError(f"a GGUF file is not a model that vlens runs: {asked}",
                        hint="name a folder with config.json and *.safetensors, or a hub name", code="model_is_gguf")
    raise PathError(f"the model is a file, not a folder: {asked}", hint=f"try -m {path.parent}", code="model_is_file")


def _starts_with(path: Path, magic: bytes) -> bool:
    try:
        # Only of regular files: reading from a pipe would wait.
        return path.is_file() and path.open("rb").read(len(magic)) == magic
    except OSError:
        return False


def _refuse_missing(asked: str) -> NoReturn:
    near = _near_folders(Path(os.path.expanduser(asked)))
    from vlens_cli.models import hub

    raise PathError(f"no such model folder: {asked}", code="model_not_found",
                    hint=f"did you mean {' or '.join(near)}?" if near else hub.known_names())


def _near_folders(path: Path) -> list[str]:
    """Folders beside the missing one with a name like its; none when its parent is missing too."""
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except (OSError, ValueError):
        return []
    from difflib import get_close_matches

    near = get_close_matches(path.name, names, n=3, cutoff=0.6)
    return [str(path.with_name(name)) for name in near]
