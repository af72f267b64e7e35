"""A model folder: whether it is one, and what its config says."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlens_cli.errors import StartError

LOADED = (".json", ".safetensors", ".bin", ".model", ".jinja", ".txt", ".tiktoken")


@dataclass(frozen=True)
class Model:
    """A model that was found.

    name       what the user called it, for display
    folder     absolute, symbolic links resolved: however it was spelt, one model is one folder
    revision   the hub's commit, or None
    config     the parsed config.json
    """

    name: str
    folder: Path
    revision: str | None = None
    config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


def load(folder: Path, name: str, revision: str | None) -> Model:
    """Check the folder and read its config. Raises StartError for what is no whole model."""
    folder = folder.resolve()
    config = _read_json_object(folder / "config.json")
    for key in ("architectures", "model_type"):
        if not config.get(key):
            raise _broken(f"config.json has no {key}: {folder}")
    if not _weights(folder):
        raise _broken(f"no weights (*.safetensors, *.bin) in the model folder: {folder}")
    if missing := _missing_shards(folder):
        raise _broken(f"{len(missing)} weight files are missing from {folder}: {missing[0]}"
                      + (" and others" if len(missing) > 1 else ""))
    return Model(name, folder, revision, config)


def stamps(folder: str | Path) -> list[tuple[str, int, int, int]]:
    """What tells the files that decide what is loaded from any that were there before or come later: name, size, and the
    times of the last change, of which the second cannot be set."""
    with os.scandir(folder) as entries:
        seen = [(entry.name, entry.stat()) for entry in entries if entry.name.endswith(LOADED) and entry.is_file()]
    return sorted((name, found.st_size, found.st_mtime_ns, found.st_ctime_ns) for name, found in seen)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a config and every weight file that it names."""
    try:
        return (folder / "config.json").is_file() and bool(_weights(folder)) and not _missing_shards(folder)
    except StartError:
        return False


def _broken(message: str, hint: str = "a model folder holds config.json and *.safetensors as transformers saves them"
            ) -> StartError:
    return StartError(message, hint=hint, code="bad_model")


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as fault:
        raise _no_config(path.parent) from fault
    except json.JSONDecodeError as fault:
        raise _broken(f"{path.name} is not JSON: {path} line {fault.lineno}: {fault.msg}") from fault
    except (UnicodeDecodeError, RecursionError) as fault:
        raise _broken(f"{path.name} is not JSON: {path}") from fault
    except OSError as fault:
        raise _broken(f"cannot read {path}: {fault.strerror}", "check the file's permissions") from fault
    if not isinstance(fields, dict):
        raise _broken(f"{path.name} is not a JSON object: {path}")
    return fields


def _no_config(folder: Path) -> StartError:
    """Say what the folder is instead, where it is something that people name by mistake."""
    if any(folder.glob("*.gguf")):
        return _broken(f"the model folder holds a GGUF file, which vlens does not run: {folder}")
    inner = sorted(str(path.parent) for path in folder.glob("*/config.json"))
    if inner:
        return _broken(f"no config.json in the model folder: {folder}", f"did you mean {' or '.join(inner[:3])}?")
    return _broken(f"no config.json in the model folder: {folder}")


def _weights(folder: Path) -> list[Path]:
    """The weight files; a link whose target is gone is none."""
    return [path for pattern in ("*.safetensors", "*.bin") for path in sorted(folder.glob(pattern))
            if path.is_file() and path.name != "training_args.bin"]


def _missing_shards(folder: Path) -> list[str]:
    """Files that the index of the weights names and the folder lacks. Of two kinds of weights, safetensors count."""
    name = "model.safetensors.index.json" if any(folder.glob("*.safetensors")) else "pytorch_model.bin.index.json"
    if not (folder / name).is_file():
        return []
    shards = _read_json_object(folder / name).get("weight_map")
    if not isinstance(shards, dict):
        raise _broken(f"{name} has no weight_map: {folder}")
    return sorted(shard for shard in set(map(str, shards.values())) if not (folder / shard).is_file())
