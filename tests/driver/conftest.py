"""Fixtures of the tests that run engines, and of the reference that they are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests say `from compare import ...`, however pytest was started

from tiny import tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Path]:
    """tiny(family, variant=None): the folder of a tiny random model; tiny.py names families and variants."""
    return tiny_model


@pytest.fixture(scope="session")
def engines():
    """engines.open(folder, chunk=..., ...): a driver on a real engine, in this process."""
    from engines import Engines
    from vlens_cli.driver.boot import prepare

    prepare()
    engines = Engines()
    yield engines
    engines.close()
