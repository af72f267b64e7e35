"""Running vlens with its real daemon and a fake engine, each test in a runtime directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_daemon import WEIGHTS, right

from vlens_cli.daemon import runtime

ROOT = Path(__file__).parents[2]
HOOK = "blocks.3.hook_resid_post"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 32,
}


def wait_for(condition, seconds: float = 10.0, what: str = "") -> Any:
    """The first true value of `condition`; fails where it takes longer."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.02)
    return value


@dataclass
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def body(self) -> dict[str, Any]:
        said = [line for line in self.err.splitlines() if not line.startswith("note: ending the idle engine of ")]
        assert (self.code, said) == (0, []), f"exit {self.code}: {self.err}"
        return json.loads(self.out)

    @property
    def answer(self) -> str:
        return self.body["prompts"][0]["answer"]

    @property
    def pid(self) -> int:
        return self.body["pid"]


@dataclass
class Vlens:
    """vlens, its model and its runtime directory."""

    work: Path
    script: Path = Path(__file__).with_name("vlens_fake.py")
    clients: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def runtime(self) -> Path:
        return self.work / "r"

    @property
    def model(self) -> Path:
        return self.work / "model"

    @property
    def started(self) -> list[dict[str, int]]:
        """Every daemon process that ever began here: pid and start time."""
        path = self.work / "started"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def environment(self, **env: str) -> dict[str, str]:
        return os.environ | {"VLENS_RUNTIME": str(self.runtime), "VLENS_MODEL": str(self.model),
                             "FAKE_STARTED": str(self.work / "started")} | env

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        client = subprocess.Popen(
            [sys.executable, str(self.script), *args], cwd=self.work, env=self.environment(**env), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )
        self.clients.append(client)
        return client

    def capturing(self, prompt: str, *args: str, hook: str = HOOK, **env: str) -> subprocess.Popen[str]:
        return self.start("capture", "--hook", hook, *args, "--", prompt, **env)

    def run(self, *args: str, **env: str) -> Done:
        return finish(self.start(*args, **env))

    def capture(self, prompt: str = "hello", *args: str, hook: str = HOOK, **env: str) -> Done:
        return finish(self.capturing(prompt, *args, hook=hook, **env))

    def right(self, prompt: str, hook: str = HOOK, dtype: str | None = None) -> str:
        return right(prompt, (hook,), dtype, (self.model / WEIGHTS).read_bytes())

    def engines(self) -> list[dict[str, Any]]:
        """What `engine status` says, asked without a new process."""
        from vlens_cli.daemon import launch

        found = [launch.describe(home, timeout=30) for home in self.homes()]
        return [one for one in found if one]

    def homes(self) -> list[runtime.Home]:
        folders = self.runtime.iterdir() if self.runtime.exists() else []
        return [runtime.Home(path) for path in folders if path.is_dir()]

    @property
    def home(self) -> runtime.Home:
        (home,) = self.homes()
        return home

    def in_state(self, state: str, seconds: float = 10.0) -> dict[str, Any]:
        """The one engine, once it is in a state."""
        return wait_for(lambda: next((one for one in self.engines() if one["state"] == state), None), seconds, state)

    def alive(self) -> list[int]:
        """Daemons that run now."""
        return [one["pid"] for one in self.started if runtime.process_start(one["pid"]) == one["started"]]

    def all_gone(self, seconds: float = 10.0) -> None:
        wait_for(lambda: not self.alive(), seconds, "every daemon gone")

    def close(self) -> None:
        for client in self.clients:
            if client.poll() is None:
                client.kill()
            client.communicate()
        recorded = [{"pid": s.pid, "started": s.started} for home in self.homes() if (s := home.alive())]
        for one in [*self.started, *recorded]:
            if runtime.process_start(one["pid"]) == one["started"] and one["pid"] != os.getpid():
                os.kill(one["pid"], signal.SIGKILL)
        self.all_gone()
        shutil.rmtree(self.work)


def finish(client: subprocess.Popen[str], seconds: float = 40.0) -> Done:
    out, err = client.communicate(timeout=seconds)
    return Done(client.returncode, out, err)


def make_model(folder: Path, weights: bytes = b"first weights") -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / WEIGHTS).write_bytes(weights)
