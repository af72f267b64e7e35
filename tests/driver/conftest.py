"""Fixtures of the tests that run engines, and of the reference that they are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests say `from compare import ...`, however pytest was started

from tiny import tiny_model  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one family, and of the demo model, run together, across files: one engine is open at a time, and opening
    it takes longer than they do."""
    models: dict[str, list[pytest.Item]] = {}
    for item in items:
        family = getattr(item, "callspec", None) and item.callspec.params.get("family")
        model = family or ("demo" if "demo_model" in item.fixturenames else None)
        if model and Path(__file__).parent in item.path.parents:
            models.setdefault(model, []).append(item)
    together = [item for found in models.values() for item in found]
    moved = set(together)
    if together:
        first = next(n for n, item in enumerate(items) if item in moved)
        items[:] = [*items[:first], *together, *(item for item in items[first:] if item not in moved)]


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
