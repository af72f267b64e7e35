"""vlens with its real daemon and a fake engine, each test in a runtime directory of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from daemon_tools import ROOT, Vlens, make_model


@pytest.fixture(autouse=True)
def user_state(tmp_path, monkeypatch):
    """No test sees or changes what the user has."""
    for name in list(os.environ):
        if name.startswith(("VLENS_", "VLLM_", "HF_", "XDG_", "_VLENS", "FAKE")) or name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(autouse=True)
def vlens(user_state):
    """Short paths: a socket's has 107 bytes."""
    one = Vlens(Path(tempfile.mkdtemp(prefix="vl-", dir="/tmp")))
    make_model(one.model)
    yield one
    one.close()
