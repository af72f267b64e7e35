"""The hub: its cache on disk, read without a hub client, and downloads into it by huggingface_hub."""

from __future__ import annotations

import glob
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vlens_cli.env import DEMO
from vlens_cli.errors import INSTALL_HINT, StartError, UsageError
from vlens_cli.models.folder import Model, is_whole, load

T = TypeVar("T")

NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+")
REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*")
COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds until a hub that does not answer is called unreachable.
PATIENCE = 3.5
SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")


def split_name(asked: str) -> tuple[str, str]:
    """`org/name@revision` in its parts. Raises UsageError for what the hub would not take as a name."""
    name, at, revision = asked.partition("@")
    bad = not NAME.fullmatch(name) or name[0] in "-." or "--" in name or ".." in name
    if bad or (at and (not REVISION.fullmatch(revision) or ".." in revision)):
        raise UsageError(f"not a model's name: {asked!r}", code="model_not_found",
                         hint="name a folder, a hub name such as org/name or org/name@revision, or demo")
    return name, revision or "main"


def find(name: str, revision: str) -> Model:
    """The model of that name, downloaded where it is not in the cache. Raises StartError."""
    shown = name if revision == "main" else f"{name}@{revision}"
    folder = cached_snapshot(name, revision)
    if folder is None:
        if switch := switched_off():
            raise StartError(f"the model is not in the hub cache, and the hub is switched off: {shown}",
                             hint=_near_or(name, f"unset {switch} to download it"), code="hub_offline")
        folder = _download(name, revision, shown)
    return load(folder, shown, folder.name)


def cached_models() -> list[str]:
    """Names that work without a network: `demo`, and the whole models of the hub cache. For completion and hints."""
    found = {DEMO}
    for folder in _cache().glob("models--*"):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if cached_snapshot(name, "main"):
            found.add(name)
    return sorted(found)


def known_names() -> str:
    """For a hint."""
    return f"models that need no network: {', '.join(cached_models())}"


def switched_off() -> str | None:
    """The variable that switches the hub off, if one does: huggingface_hub's words for true."""
    on = ("1", "on", "yes", "true")
    return next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
                 if os.environ.get(name, "").lower() in on), None)


def _cache() -> Path:
    """Where huggingface_hub keeps models, by its own rules, without importing it."""
    get = os.environ.get
    home = get("HF_HOME") or os.path.join(get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def cached_snapshot(name: str, revision: str) -> Path | None:
    """The whole snapshot of a revision in the hub cache; None for one that is absent or was broken off."""
    store = _cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (store / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    folder = store / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and is_whole(folder) else None


def _near_or(name: str, otherwise: str) -> str:
    """A hint: cached models and folders here whose name, or last part of it, is like `name`; else `otherwise`."""
    here = [path.parent.name for path in Path().glob("*/config.json")]
    near = [each for each in cached_models() + sorted(here)
            if _alike(name, each) or _alike(name.rpartition("/")[2], each.rpartition("/")[2])]
    return f"did you mean {' or '.join(near[:3])}?" if near else otherwise


def _alike(one: str, other: str) -> bool:
    from difflib import SequenceMatcher

    return SequenceMatcher(None, one.lower(), other.lower()).ratio() > 0.7


def answers(seconds: float) -> bool:
    """Whether the hub takes a connection within that time."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    try:
        _within(seconds, lambda: socket.create_connection(address, seconds).close())
    except OSError:  # TimeoutError among them
        return False
    return True


def _download(name: str, revision: str, shown: str) -> Path:
    """Fetch a model into the hub cache. Raises StartError; within seconds where the hub gives nothing."""
    try:
        import huggingface_hub
        from huggingface_hub import utils
    except ImportError as fault:
        raise StartError(f"the model is not in the hub cache, and huggingface_hub is not installed to fetch it: {shown}",
                         hint=INSTALL_HINT, code="no_engine") from fault
    utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
        print(f"downloading {shown}", file=sys.stderr)
    files = _ask_hub(huggingface_hub, name, revision, shown)
    return _fetch(huggingface_hub, name, revision, shown, files)


def _ask_hub(hub: Any, name: str, revision: str, shown: str) -> list[str]:
    """The model's files, if this account may have them."""
    def ask() -> list[str]:
        api = hub.HfApi()
        info = api.model_info(name, revision=revision, timeout=PATIENCE)
        # A gated model shows its files to everybody, and refuses each of them.
        if info.gated:
            api.auth_check(name)
        return [sibling.rfilename for sibling in info.siblings or ()]

    try:
        return _within(PATIENCE, ask)
    except Exception as fault:  # the transport below huggingface_hub, and so its errors, changed with its versions
        raise _fault_of(fault, name, shown) from fault


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises, or TimeoutError: name lookups obey no timeout of the client's."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except Exception as fault:  # handed to the caller's thread, which raises it
            outcome.append((None, fault))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:g} s")
    result, fault = outcome[0]
    if fault:
        raise fault
    return result


def _fetch(hub: Any, name: str, revision: str, shown: str, files: list[str]) -> Path:
    side, weights = _wanted_files(files)
    if not weights:
        raise StartError(f"the model has no safetensors or .bin weights on the hub: {shown}",
                         hint="vlens does not run GGUF and other formats; name the original model", code="bad_model")
    try:
        # Weights last: a snapshot that has them is whole, however an earlier try was broken off.
        for wanted in (side, weights):
            folder = hub.snapshot_download(name, revision=revision, allow_patterns=[glob.escape(f) for f in wanted])
    except Exception as fault:  # as in _ask_hub
        raise _fault_of(fault, name, shown) from fault
    return Path(folder)


def _wanted_files(files: list[str]) -> tuple[list[str], list[str]]:
    """Config and tokenizer, and the weights: of the top folder only, .bin only where there is nothing else."""
    top = [name for name in files if "/" not in name]
    tensors = [name for name in top if name.endswith(".safetensors")]
    # Mistral's own copy of the same weights.
    tensors = [name for name in tensors if not name.startswith("consolidated")] or tensors
    pickles = [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
    return [name for name in top if name.endswith(SIDE_FILES)], tensors or pickles


def _fault_of(fault: Exception, name: str, shown: str) -> StartError:
    """huggingface_hub's exceptions in vlens' words. A gated model is a kind of missing one there: the order counts."""
    from huggingface_hub import constants, errors

    if isinstance(fault, errors.GatedRepoError):
        return StartError(f"the model is gated, and this account has no access: {shown}", code="model_gated",
                          hint="ask for access on the model's page, then `hf auth login`")
    if isinstance(fault, errors.RevisionNotFoundError):
        return StartError(f"the model has no such revision: {shown}", hint=f"try -m {name}", code="model_missing")
    if isinstance(fault, errors.RepositoryNotFoundError):
        return StartError(f"no such model on the hub, or it is private: {shown}", code="model_missing",
                          hint=_near_or(name, "check the name; a private model needs `hf auth login`"))
    return StartError(f"the hub cannot be reached: {constants.ENDPOINT}: {_one_line(fault)}", code="hub_unreachable",
                      hint=_near_or(name, known_names()))


def _one_line(fault: Exception) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[0][:200].rstrip(".") if lines else type(fault).__name__
