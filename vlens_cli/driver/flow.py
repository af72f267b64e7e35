"""Requests on their way through the engine: as many in flight as fill the next second, each handed on as it ends.

The engine's scheduler joins what is in flight into forwards; it is never given more than it is about to compute, so that
a query of thousands of prompts holds no more than one of a few, and ends within a step when it is broken off.
"""

from __future__ import annotations

import operator
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vlens_cli.driver import boot
from vlens_cli.driver.base import Request, Result
from vlens_cli.errors import LOG_HINT, QueryError, VlensError

if TYPE_CHECKING:
    from vlens_cli.driver.vllm_driver import VLLMDriver

# Other queries wait until what is in flight has ended, so its next forwards are about as much as takes this long; fewer
# rows do not fill a processor.
SECONDS = 1.0
LEAST_ROWS = 512


class Flow:
    """One run of requests. `cancelled` is asked between two steps. Where `waiting` says so no request follows, and
    `between` is called when none is in flight: it may run others."""

    def __init__(self, driver: VLLMDriver, cancelled: Callable[[], bool], between: Callable[[], None],
                 waiting: Callable[[], bool]) -> None:
        self._driver = driver
        self._cancelled, self._between, self._waiting = cancelled, between, waiting
        self._flying: dict[str, tuple[int, Request, tuple[int, ...]]] = {}
        # Of each of the driver's `room`s, what those in flight need.
        self._needed = [0] * len(driver.room)
        # What the next forwards compute: the rows of prompts that end with their forward; those of prompts that go on and
        # were not read yet; and a row of each request that goes on. What it will generate takes its time whatever else is
        # in flight, and is no reason to leave others out.
        self._ending = self._unread = self._going_on = 0
        self._number = 0
        self._over = self._draining = self._worked = False
        # One that was asked for, and did not fit beside those in flight.
        self._next: Request | None = None
        self._computed, self._since = 0, time.monotonic()

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
                self._worked, self._computed, self._since = False, 0, time.monotonic()

    def _fill(self, requests: Iterator[Request | None]) -> None:
        while not (self._over or self._draining or self._worked and self._waiting()) and (
                not self._flying or self._rows < max(LEAST_ROWS, self._driver.rate * SECONDS)):
            request = next(requests, self) if self._next is None else self._next
            self._next = None
            if request is self:
                self._over = True
            elif request is None:
                self._draining = True
            else:
                needs = self._driver.needs(request)
                if self._flying and not self._fits(request, needs):
                    self._next = request
                    return
                self._add(request, needs)

    def _fits(self, request: Request, needs: Sequence[int]) -> bool:
        """Whether a request can run beside those in flight. No prompt is cut in two by what is beside it: a last token that
        is left over is multiplied in another order, and would be other bits in the next run."""
        plan = self._driver.plan
        cut = request.max_new_tokens == 1 and self._rows + len(request.tokens) > plan.chunk
        if cut or self._going_on >= plan.most_requests:
            return False
        return all(map(operator.le, map(operator.add, self._needed, needs), self._driver.room))

    def _add(self, request: Request, needs: tuple[int, ...]) -> None:
        key = uuid.uuid4().hex
        self._driver.submit(key, request)
        self._flying[key] = self._number, request, needs
        self._needed = list(map(operator.add, self._needed, needs))
        self._number += 1
        if request.max_new_tokens == 1:
            self._ending += len(request.tokens)
        else:
            self._unread += len(request.tokens)
            self._going_on += 1

    @property
    def _rows(self) -> int:
        return self._ending + self._unread + self._going_on

    def _step(self) -> Iterator[tuple[int, Result]]:
        if self._cancelled():
            raise QueryError("the query was broken off: its asker has left", code="cancelled")
        ended = self._driver.step()
        self._worked = True
        read = min(self._unread, max(0, self._driver.plan.chunk - self._going_on))
        self._unread -= read
        self._computed += read + self._going_on
        for key, output in ended.items():
            number, request, needs = self._flying.pop(key)
            self._needed = list(map(operator.sub, self._needed, needs))
            if request.max_new_tokens == 1:
                self._ending -= len(request.tokens)
                self._computed += len(request.tokens)
            else:
                self._going_on -= 1
            yield number, self._driver.result(request, key, output)
        if self._computed >= LEAST_ROWS:
            now = time.monotonic()
            self._driver.rate = self._computed / (now - self._since)
            self._computed, self._since = 0, now
