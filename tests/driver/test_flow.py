"""How many requests are in flight at once."""

from __future__ import annotations

import pytest
from test_numbers import spread
from vlens_cli.driver.base import Request

NEW = 40


@pytest.fixture
def flight(engines, tiny, monkeypatch):
    """The engine, and how many requests it had in flight in each of its steps."""
    driver = engines.open(tiny("llama"))
    flying, seen = set(), []
    submit, step = driver.submit, driver.step

    def submitted(key, request):
        flying.add(key)
        submit(key, request)

    def stepped():
        seen.append(len(flying))
        ended = step()
        flying.difference_update(ended)
        return ended

    monkeypatch.setattr(driver, "submit", submitted)
    monkeypatch.setattr(driver, "step", stepped)
    monkeypatch.setattr(driver, "rate", 0.0)
    return driver, seen


def generating(count: int) -> list[Request]:
    return [Request(tuple((t + n) % 500 for t in spread(4, 500)), {}, NEW) for n in range(count)]


def test_requests_that_generate_run_beside_each_other(flight):
    driver, seen = flight
    results = driver.run(generating(64))
    assert max(seen) == 64 and len(seen) < NEW + 10
    assert [r.new_tokens for r in results] == [driver.run([r])[0].new_tokens for r in generating(64)]


def test_those_that_the_engine_would_let_wait_are_not_in_flight(flight, monkeypatch):
    driver, seen = flight
    monkeypatch.setattr("vlens_cli.driver.boot.MAX_REQUESTS", 8)
    driver.run(generating(20))
    assert max(seen) == 8 and len(seen) < 3 * (NEW + 10)


def test_prompts_are_in_flight_as_fast_as_they_are_computed(flight, monkeypatch):
    driver, seen = flight
    monkeypatch.setattr("vlens_cli.driver.flow.SECONDS", 0)
    driver.run([Request(tuple(spread(100, 500)), {}) for _ in range(40)])
    # 512 rows at least: five prompts, and the one that passes it.
    assert max(seen) == 6
