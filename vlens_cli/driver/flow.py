"""Requests on their way through the engine: as many in flight as fill the next second, each handed on as it ends.

The engine's scheduler joins what is in flight into forwards; it is never given more than it is about to compute, so that
a query of thousands of prompts holds no more than one of a few, and ends within a step when it is broken off.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vlens_cli.driver import boot
from vlens_cli.driver.base import Request, Result
from vlens_cli.errors import LOG_HINT, QueryError, VlensError

if TYPE_CHECKING:
    from vlens_cli.driver.vllm_driver import VLLMDriver

# Other queries wait until what is in flight has ended, so it is about as much as takes this long; fewer tokens do not
# fill a processor.
SECONDS = 1.0
LEAST_TOKENS = 512


class Flow:
    """One run of requests. `cancelled` is asked between two steps. Where `waiting` says so no request follows, and
    `between` is called when none is in flight: it may run others."""

    def __init__(self, driver: VLLMDriver, cancelled: Callable[[], bool], between: Callable[[], None],
                 waiting: Callable[[], bool]) -> None:
        self._driver = driver
        self._cancelled, self._between, self._waiting = cancelled, between, waiting
        self._flying: dict[str, tuple[int, Request]] = {}
        self._tokens = 0
        self._number = 0
        self._over = self._draining = self._worked = False
        # One that was asked for, and did not fit beside those in flight.
        self._next: Request | None = None
        self._ended, self._since = 0, time.monotonic()

    def run(self, requests: Iterator[Request | None]) -> Iterator[tuple[int, Result]]:
        """(number, result) of each request as it ends. None among them: what is before it ends before the next is asked
        for. Raises VlensError; nothing is in flight when this ends, in whatever way."""
        try:
            yield from self._run(requests)
        except VlensError:
            self._driver.abandon()
            raise
        except Exception as fault:
            # The seam: whatever vLLM, torch or a tap raised in the middle of an accepted query.
            self._driver.check_alive(fault)
            self._driver.abandon()
            raise QueryError(f"the forward failed: {type(fault).__name__}: {boot.one_line(fault)}",
                             hint=LOG_HINT) from fault
        except BaseException:
            self._driver.abandon()
            raise

    def _run(self, requests: Iterator[Request | None]) -> Iterator[tuple[int, Result]]:
        while True:
            self._fill(requests)
            if self._flying:
                yield from self._step()
            elif self._over:
                return
            elif self._draining:
                self._draining = False
            else:
                self._between()
                self._worked, self._ended, self._since = False, 0, time.monotonic()

    def _fill(self, requests: Iterator[Request | None]) -> None:
        while not (self._over or self._draining or self._worked and self._waiting()) and (
                not self._flying or self._tokens < max(LEAST_TOKENS, self._driver.rate * SECONDS)):
            request = next(requests, self) if self._next is None else self._next
            self._next = None
            if request is self:
                self._over = True
            elif request is None:
                self._draining = True
            elif self._flying and not self._fits(request):
                self._next = request
                return
            else:
                self._add(request)

    def _fits(self, request: Request) -> bool:
        """Whether a request can run beside those in flight. No prompt is cut in two by what is beside it: a last token that
        is left over is multiplied in another order, and would be other bits in the next run."""
        cut = request.max_new_tokens == 1 and self._tokens + _size(request) > self._driver.plan.chunk
        return not cut and self._driver.fits([one for _, one in self._flying.values()], request)

    def _add(self, request: Request) -> None:
        key = uuid.uuid4().hex
        self._driver.submit(key, request)
        self._flying[key] = self._number, request
        self._number += 1
        self._tokens += _size(request)

    def _step(self) -> Iterator[tuple[int, Result]]:
        if self._cancelled():
            raise QueryError("the query was broken off: its asker has left", code="cancelled")
        ended = self._driver.step()
        self._worked = True
        for key, output in ended.items():
            number, request = self._flying.pop(key)
            self._tokens -= _size(request)
            self._ended += _size(request)
            yield number, self._driver.result(request, key, output)
        if self._ended >= LEAST_TOKENS:
            now = time.monotonic()
            self._driver.rate = self._ended / (now - self._since)
            self._ended, self._since = 0, now


def _size(request: Request) -> int:
    return len(request.tokens) + request.max_new_tokens
