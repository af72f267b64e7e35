"""vlens with a fake engine: `python fake_vlens.py ARGS...` is the real command line up to `client.ask`.

FAKE chooses what the engine does; the model is the folder of -m (tiny.json beside it otherwise).
The reply obeys the shape that the real one has; each value is its own position, so a test can tell rows apart.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

from vlens_cli import hooks
from vlens_cli.errors import QueryError, StartError
from vlens_cli.families import catalog_for
from vlens_cli.query import CaptureQuery, CollectQuery, EngineSpec, Reply, Saved

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 32,
}
ODD_TOKEN = " \x1b[31m[bold]\u202e\n"


@dataclass(frozen=True)
class Asking:
    daemon: bool
    keep_alive: float | None
    timeout: float | None


def resolve(asked: str | None) -> types.SimpleNamespace:
    if asked == "missing":
        raise StartError("there is no model: missing", hint="name a folder")
    return types.SimpleNamespace(name=asked or "tiny", folder=Path("/models/tiny"), revision=None, config=CONFIG)


def ask(
    spec: EngineSpec, query: CaptureQuery, progress=lambda text: None, into=None, how=None, check=lambda: None,
) -> Reply:
    check()
    mode = os.environ.get("FAKE", "")
    progress("loading weights")
    if mode == "slow":
        print("engine started", file=sys.stderr, flush=True)
        time.sleep(60)
    if mode == "bug":
        raise ZeroDivisionError("one\nbug")
    if mode == "pipe":
        raise BrokenPipeError(32, "Broken pipe")
    if isinstance(query, CollectQuery):
        return _collected(spec, query, progress, into, mode)
    prompts = [_prompt(spec, query, prompt) for prompt in query.prompts]
    model = {"name": spec.name, "folder": spec.model, "revision": None, "family": "llama", "dtype": "float32"}
    body = {"schema_version": 1, "command": "capture", "vlens": "0.1.0", "model": model, "prompts": prompts}
    if mode == "echo":
        body["spec"], body["query"], body["how"] = spec.as_json(), query.as_json(), vars(how)
    if into is not None:
        into.write(BLOB)
    return Reply(body, notes=("two BOS\x1b[0m",), saved=None if into is None else Saved(1, len(BLOB)))


def _collected(spec: EngineSpec, query: CollectQuery, progress, into, mode: str) -> Reply:
    progress("note: about 1.0 kB to write")
    if mode == "died":
        Path(query.folder, f".capture-00001-of-00001.safetensors.{query.token}.vlens-tmp").write_text("half")
        raise QueryError("the engine ended during the query", code="engine_died")
    into.seek(0)
    lines = [json.loads(line) for line in into]
    assert len(lines) == query.count
    Path(query.folder, "capture-00001-of-00001.safetensors").write_bytes(BLOB)
    model = {"name": spec.name, "folder": spec.model, "revision": None, "family": "llama", "dtype": "float32"}
    body = {"model": model, "n_prompts": len(lines), "n_tokens": 3 * len(lines), "n_resumed": 1, "skipped": [],
            "shards": [{"file": "capture-00001-of-00001.safetensors", "prompts": [0, len(lines)], "bytes": len(BLOB)}]}
    echo = {"query": query.as_json(), "lines": lines} if mode == "echo" else {}
    return Reply(body | echo, saved=Saved(1, len(BLOB)))


def _prompt(spec: EngineSpec, query: CaptureQuery, prompt) -> dict:
    n_tokens = int(os.environ.get("FAKE_TOKENS", "3"))
    catalog = catalog_for(CONFIG)
    selected = hooks.resolve(map(hooks.parse, query.hooks), catalog, query.pos, query.head, query.dim)
    tokens = [{"pos": i, "id": 7, "text": ODD_TOKEN, "piece": "Ġ"} for i in range(n_tokens)]
    return {
        "text": prompt.text,
        "chunks": 1,
        "tokens": tokens,
        "hooks": {one.name: _hook(one, catalog, n_tokens, query.values) for one in selected},
    }


def _hook(one: hooks.Selected, catalog, n_tokens: int, values: bool) -> dict:
    where = hooks.positions(one.pos, n_tokens, lambda text: []) if one.pos else range(n_tokens)
    axes = catalog.axes(one.name)
    if axes[-1] == "key":
        return _table(one, catalog, n_tokens, list(where), values)
    inner = [catalog.size(axis) for axis in axes[1:]]
    inner[-2:-1] = [len(one.head)] if one.head else inner[-2:-1]
    return {
        **({"heads": list(one.head)} if one.head else {}),
        "shape": [len(where), *inner],
        "dtype": "float32",
        "axes": list(axes),
        "derived": catalog.derived(one.name),
        "positions": list(where),
        "rows": [_row(pos, inner, values) for pos in where],
    }


def _table(one: hooks.Selected, catalog, n_tokens: int, where: list[int], values: bool) -> dict:
    """A pattern that looks at the query itself: 0.9, and at the first position: 0.1."""
    heads = list(one.head or range(catalog.size("head")))
    keys = list(hooks.positions(one.key, n_tokens, lambda text: []) if one.key else range(n_tokens))
    rows = []
    for head in heads:
        for pos in where:
            exact = [0.9 * (key == pos) + 0.1 * (key == 0) for key in keys]
            rows.append({"head": head, "pos": pos, "entropy": 0.325083, "top": [{"key": pos, "value": 0.9}],
                         **({"percent": [round(100 * share) for share in exact]} if n_tokens <= 200 else {}),
                         **({"values": exact} if values else {})})
    return {
        **({"heads": heads} if one.head else {}), **({"dims": keys} if one.key else {}),
        "shape": [len(heads), len(where), len(keys)], "dtype": "float32", "axes": list(catalog.axes(one.name)),
        "derived": True, "positions": where, "rows": rows,
    }


def _row(pos: int, inner: list[int], values: bool) -> dict:
    top = {"dim": 1, "value": 1 / 3, **({"head": 2} if len(inner) == 2 else {})}
    row = {"pos": pos, "norm": float("nan"), "mean": float("-inf"), "std": float("inf"), "min": 0.1 + 0.2, "max": 1e-30}
    row["top"] = [top]
    if values:
        flat = [pos + i / 1000 for i in range(inner[-1])]
        row["values"] = [flat] * inner[0] if len(inner) == 2 else flat
    return row


BLOB = b"what the engine wrote"


def proofs(folder: Path) -> list[dict]:
    """With FAKE_PROOF, what one engine has proved."""
    if not os.environ.get("FAKE_PROOF"):
        return []
    return [{"pid": 77, "fingerprint": "f", "dtype": "bfloat16", "passed": ["hook_embed"],
             "refused": {"blocks.1.attn.hook_z": "failed the proof at load"},
             "not_editable": {"hook_embed": "what comes after does not obey"}}]


def install() -> None:
    """Put the fakes where the command line imports models and client from."""
    fakes = {"vlens_cli.models": {"resolve": resolve}, "vlens_cli.daemon.client": {"ask": ask, "Asking": Asking},
             "vlens_cli.daemon.launch": {"proofs": proofs}}
    for name, fake in fakes.items():
        module = types.ModuleType(name)
        vars(module).update(fake)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        setattr(__import__(parent, fromlist=["_"]), child, module)


if __name__ == "__main__":
    install()
    if marker := os.environ.get("FAKE_IMPORTS"):  # what is loaded when the process ends
        leave = os._exit
        os._exit = lambda code: (Path(marker).write_text("\n".join(sys.modules)), leave(code))
    from vlens_cli.cli.main import main

    main()
