"""Frames between client and daemon: a length, a JSON object, nothing else. Nothing is ever pickled.

A frame is 4 bytes, big-endian, the number of bytes of a JSON object in UTF-8. A client sends one frame with the
query, and beside its first byte, where tensors are wanted, the descriptor of the open file that they go into. The
server answers with any number of `{"progress": text, ...}` frames and one with `"final": true`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

# Separate from the package's version: raised when a frame changes its meaning.
PROTOCOL = 1
# A query of a million token ids is 7 MB; a reply has a few hundred bytes a row.
MAX_FRAME = 256 * 2**20

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The other side ended, or sent what is no frame. `ended` where it closed between frames."""

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


def send(sock: socket.socket, frame: dict[str, Any], descriptor: int | None = None) -> None:
    """One frame, whole. Raises WireError where the other side is gone, TimeoutError by the socket's own time-out."""
    data = json.dumps(frame, ensure_ascii=False).encode("utf-8", "surrogatepass")
    packet = _LENGTH.pack(len(data)) + data
    try:
        sent = socket.send_fds(sock, [packet], [descriptor]) if descriptor is not None else 0
        if sent < len(packet):
            sock.sendall(memoryview(packet)[sent:])
    except TimeoutError:
        raise
    except OSError as fault:
        raise WireError(f"the other side is gone: {fault.strerror}", ended=True) from fault


def receive(sock: socket.socket, limit: int = MAX_FRAME) -> dict[str, Any]:
    """One frame, whole. Raises WireError, and TimeoutError by the socket's own time-out."""
    head = _read(sock, _LENGTH.size, at_start=True)
    return _body(sock, head, limit)


def receive_with_descriptor(sock: socket.socket, limit: int = MAX_FRAME) -> tuple[dict[str, Any], int | None]:
    """One frame and the descriptor that came with it, which the caller must close."""
    try:
        head, descriptors, _, _ = socket.recv_fds(sock, _LENGTH.size, 4)
    except TimeoutError:
        raise
    except OSError as fault:
        raise WireError(f"the other side is gone: {fault.strerror}", ended=True) from fault
    for surplus in descriptors[1:]:
        os.close(surplus)
    descriptor = descriptors[0] if descriptors else None
    try:
        if not head:
            raise WireError("the other side ended", ended=True)
        return _body(sock, head + _read(sock, _LENGTH.size - len(head)), limit), descriptor
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise


def _body(sock: socket.socket, head: bytes, limit: int) -> dict[str, Any]:
    (size,) = _LENGTH.unpack(head)
    if size > limit:
        raise WireError(f"a frame of {size} bytes, more than {limit}")
    try:
        frame = json.loads(_read(sock, size))
    except (ValueError, RecursionError) as fault:
        raise WireError("a frame that is not JSON") from fault
    if not isinstance(frame, dict):
        raise WireError("a frame that is not a JSON object")
    return frame


def _read(sock: socket.socket, size: int, at_start: bool = False) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            piece = sock.recv(min(size - len(data), 2**20))
        except TimeoutError:
            raise
        except OSError as fault:
            raise WireError(f"the other side is gone: {fault.strerror}", ended=True) from fault
        if not piece:
            raise WireError("the other side ended", ended=True) if at_start and not data else WireError(
                "the other side ended in the middle of a frame", ended=True)
        data += piece
    return bytes(data)
