"""Running vlens as a shell does: a real process, with the user's state out of the way."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_vlens.py")
HOOK = "blocks.3.hook_resid_post"


@pytest.fixture(autouse=True)
def user_state(tmp_path_factory, monkeypatch):
    """No test sees or changes what the user has: configuration, caches, models."""
    for name in list(os.environ):
        ours = name.startswith(("VLENS_", "HF_", "XDG_", "_VLENS", "FAKE"))
        if ours or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "CI"):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(home / name.lower()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@dataclass(frozen=True)
class Shell:
    """Runs vlens in a folder; `fake` runs it with the fake engine."""

    folder: Path

    def real(self, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, "-m", "vlens_cli", *args], **more)

    def fake(self, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, str(FAKE), *args], **more)

    def start(self, *args: str, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
        """The fake one, left running."""
        command = [sys.executable, str(FAKE), *args]
        return subprocess.Popen(command, cwd=self.folder, env=os.environ | (env or {}), text=True, **more)

    def _run(self, command: list[str], env: dict[str, str] | None = None, **more: Any):
        if "input" not in more:
            more.setdefault("stdin", subprocess.DEVNULL)
        for stream in ("stdout", "stderr"):
            more.setdefault(stream, subprocess.PIPE)
        return subprocess.run(
            command, cwd=self.folder, env=os.environ | (env or {}), text=True, encoding="utf-8", timeout=30, **more
        )


@pytest.fixture
def shell(tmp_path) -> Shell:
    folder = tmp_path / "work"
    folder.mkdir()
    return Shell(folder)


@pytest.fixture
def hook() -> str:
    return HOOK
