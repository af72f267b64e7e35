"""What `launch` runs: answers readings that come over a socket, until its other side closes."""

from __future__ import annotations

import os
import socket
from typing import Any, BinaryIO

from vlens_cli.daemon import wire
from vlens_cli.errors import BugError, QueryError, VlensError


def main(sock: socket.socket) -> None:
    """Answer until the other side is gone."""
    # Before the first word, so that it runs while the asker still finds out what to ask.
    import vlens_cli.reader.answer  # noqa: F401

    while True:
        try:
            frame, into = wire.receive_with_descriptor(sock)
        except wire.WireError:
            return
        wire.send(sock, _answered(frame, into))


def _answered(frame: dict[str, Any], into: int | None) -> dict[str, Any]:
    try:
        if "pickled" in frame:
            from vlens_cli.reader import pickled

            return {"tensors": pickled.listed(frame["pickled"])}
        with os.fdopen(into, "wb") if into is not None else open(os.devnull, "wb") as file:
            return _read(frame, file if into is not None else None)
    except VlensError as error:
        return {"error": {**error.as_dict(), "exit": error.exit_code}}
    except MemoryError:
        error = QueryError("there is not enough memory for this weight", hint="a selector such as [0:10] chooses",
                           code="out_of_memory")
        return {"error": {**error.as_dict(), "exit": error.exit_code}}
    except OSError as fault:
        error = QueryError(f"the file could not be written: {fault.strerror}", code="output_failed")
        return {"error": {**error.as_dict(), "exit": error.exit_code}}
    except Exception as fault:
        bug = BugError(f"a bug in vlens: {type(fault).__name__}: {' '.join(str(fault).split())}")
        return {"error": {**bug.as_dict(), "exit": bug.exit_code}}


def _read(frame: dict[str, Any], into: BinaryIO | None) -> dict[str, Any]:
    from vlens_cli.reader import answer

    tensors = [answer.mapped(reading) for reading in frame["readings"]]
    others = [answer.mapped(reading) for reading in frame["others"]] or [None] * len(tensors)
    described = [answer.described(one, other, frame["values"], frame["svd"])
                 for one, other in zip(tensors, others, strict=True)]
    saved = None
    if into is not None:
        names = [reading["name"] for reading in frame["readings"]]
        saved = answer.saved(into, names, tensors, frame["metadata"])
    return {"described": described, "saved": saved}
