"""The workers of one engine, as the driver calls them: in this process, or in others, on this machine or not.

A call of workers in other processes carries the name of a method and of two files of memory that have no name in any
folder (they are gone with this process): what the method is given, and what each stage returns. A worker that cannot
open them, on another machine, gets and gives the same through the ranks' own network, by way of rank 0.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from vlens_cli import errors
from vlens_cli.driver import boot, carry, internals
from vlens_cli.errors import QueryError, StartError, VlensError


class Workers(Protocol):
    """`call` runs a method on every rank and gives what each pipeline stage returns, in their order; raises what it raised,
    or QueryError where a worker process has ended.

    local   the one rank is in this process, and is given objects as they are
    died    a worker process has ended: the engine answers nothing more
    """

    local: bool
    died: bool

    def call(self, method: str, *args: Any) -> list[Any]: ...

    def check_alive(self, fault: Exception) -> None:
        """Raises QueryError where a worker process has ended, as `fault` or the engine says."""


class LocalWorker:
    """The single rank's worker, in this process: nothing is copied."""

    local = True
    died = False

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def check_alive(self, fault: Exception) -> None:
        """It ends with this process."""

    def call(self, method: str, *args: Any) -> list[Any]:
        return self._llm.collective_rpc(method, args=args)


class RemoteWorkers:
    """Ranks in processes of their own: `tp` in each of `pp` stages."""

    local = False

    def __init__(self, llm: Any, tp: int, pp: int) -> None:
        """Raises StartError where rank 0 is on another machine."""
        self._llm = llm
        self._stages = pp
        self._said_dead = False
        with _memory() as path:
            token = secrets.token_hex(16)
            with open(path, "w") as file:
                file.write(token)
            seen = llm.collective_rpc("vlens_sees", args=(path, token))
        if not seen[0]:
            raise StartError("rank 0 of the engine is on another machine than this process", code="rank_elsewhere",
                             hint="start vlens on the machine that Ray gives the first GPU of")
        self._relayed = tuple(stage for stage in range(pp) if not seen[stage * tp])
        self._told = not all(seen)

    def call(self, method: str, *args: Any) -> list[Any]:
        with _memory() as given, _several(self._stages) as returned:
            carry.write(given, args)
            try:
                faults = self._llm.collective_rpc("vlens_call", args=(method, given, self._told, returned, self._relayed))
            except Exception as fault:
                # Whatever an executor raises that has lost a process.
                self.check_alive(fault)
                raise
            for fault in faults:
                if fault is not None:
                    raise _raised(fault)
            return [carry.read(path) for path in returned]


    @property
    def died(self) -> bool:
        return self._said_dead or internals.has_failed(self._llm)

    def check_alive(self, fault: Exception) -> None:
        self._said_dead = self._said_dead or internals.says_dead(fault)
        if self.died:
            raise boot.worker_died(QueryError, internals.killed_worker()) from fault


@contextmanager
def _memory() -> Iterator[str]:
    """The path of an empty file in memory, which other processes of this user can open."""
    descriptor = os.memfd_create("vlens")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def _several(count: int) -> Iterator[list[str]]:
    descriptors = [os.memfd_create("vlens") for _ in range(count)]
    try:
        yield [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def fault_of(raised: Exception) -> dict[str, str]:
    """An exception of a worker, for the driver."""
    if isinstance(raised, VlensError):
        return {"kind": type(raised).__name__, **raised.as_dict()}
    return {"kind": "LookupError" if isinstance(raised, LookupError) else "",
            "message": f"{type(raised).__name__}: {' '.join(str(raised).split())}"}


def _raised(fault: dict[str, str]) -> Exception:
    kind = getattr(errors, fault["kind"], None) if fault["kind"] else None
    if kind is not None and issubclass(kind, VlensError):
        return kind(fault["message"], hint=fault["hint"], code=fault["code"])
    if fault["kind"] == "LookupError":
        return LookupError(fault["message"])
    return QueryError(f"a rank of the engine failed: {fault['message']}", hint=errors.LOG_HINT)


def one(found: Sequence[Any]) -> Any:
    """What the one stage gave that has what was asked."""
    return next((each for each in found if each is not None), None)
