"""Frames, and what a daemon does with those that are none."""

from __future__ import annotations

import ast
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from daemon_tools import HOOK, ROOT, finish, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlens_cli.daemon import client, runtime, wire
from vlens_cli.query import CaptureQuery, EngineSpec, Prompt

QUERY = CaptureQuery(prompts=(Prompt("hello"),), hooks=(HOOK,)).as_json()
FRAME = {"protocol": wire.PROTOCOL, "version": "test", "verb": "capture", "query": QUERY, "keep_alive": 900.0}


def framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(15)
    sock.connect(str(path))
    return sock


def told(path: Path, data: bytes, end: bool = True) -> list[dict]:
    """The frames that a daemon answers to some bytes, until it closes."""
    with connected(path) as sock:
        try:
            sock.sendall(data)
            if end:
                sock.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass
        frames = []
        while True:
            try:
                frames.append(wire.receive(sock))
            except wire.WireError:
                return frames


@pytest.fixture
def warm(vlens):
    vlens.capture()
    return vlens


# Frames


def test_a_frame_and_a_descriptor_arrive_as_they_were_sent(tmp_path):
    one, other = socket.socketpair()
    frame = {"text": "ünï\udcff\x00😀", "number": 1.5, "list": [None, True]}
    with one, other, open(tmp_path / "file", "wb") as file:
        sender = threading.Thread(target=wire.send, args=(one, frame, file.fileno()))
        sender.start()
        found, descriptor = wire.receive_with_descriptor(other)
        sender.join()
        os.write(descriptor, b"through")
        os.close(descriptor)
        wire.send(other, frame)
        assert wire.receive(one) == found == frame
    assert (tmp_path / "file").read_bytes() == b"through"


def test_a_large_frame_with_a_descriptor_arrives_whole():
    one, other = socket.socketpair()
    frame = {"text": "x" * 5_000_000}
    with one, other:
        sender = threading.Thread(target=wire.send, args=(one, frame, 0))
        sender.start()
        found, descriptor = wire.receive_with_descriptor(other)
        sender.join()
    os.close(descriptor)
    assert found == frame


def test_nothing_is_sent_after_the_frame():
    """The other side may have answered and closed by then; sending nothing to it fails all the same."""

    class Closing:
        def sendmsg(self, buffers, *rest):
            return sum(map(len, buffers))

        def sendall(self, data):
            raise BrokenPipeError(32, "Broken pipe")

    wire.send(Closing(), {"a": 1}, descriptor=0)


def test_an_oversized_length_is_refused_before_anything_is_read():
    one, other = socket.socketpair()
    with one, other:
        one.sendall(struct.pack(">I", 1000))
        with pytest.raises(wire.WireError, match="1000 bytes, more than 999"):
            wire.receive(other, limit=999)


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)))
@settings(deadline=None)
def test_any_json_crosses_unchanged(value):
    one, other = socket.socketpair()
    with one, other:
        wire.send(one, {"value": value})
        assert wire.receive(other) == {"value": value}


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_a_frame_or_a_wire_error(data):
    one, other = socket.socketpair()
    with other:
        with one:
            one.sendall(data)
        try:
            assert isinstance(wire.receive(other), dict)
        except wire.WireError:
            pass


# What a daemon answers


BAD = {
    "not JSON": (framed(b"not json"), "bad_frame"),
    "not UTF-8": (framed(b'{"verb": "\xff\xfe"}'), "bad_frame"),
    "no object": (framed(b"[1, 2]"), "bad_frame"),
    "nothing in it": (framed(b""), "bad_frame"),
    "null": (framed(b"null"), "bad_frame"),
    "deep": (framed(b"[" * 200_000), "bad_frame"),
    "deep objects": (framed(b'{"a":' * 200_000), "bad_frame"),
    "a long number": (framed(b'{"a": ' + b"9" * 10_000 + b"}"), "bad_frame"),
    "oversized": (struct.pack(">I", wire.MAX_FRAME + 1), "bad_frame"),
    "the largest length": (b"\xff\xff\xff\xff" + b"x" * 1000, "bad_frame"),
    **{f"verb {verb!r}": (framed(json.dumps(FRAME | {"verb": verb}).encode()), "unknown_verb")
       for verb in ("shutdown", "", None, 7, "__class__", ["capture"], {"a": 1})},
    **{f"query {query!r:.40}": (framed(json.dumps(FRAME | {"query": query}).encode()), "bad_frame")
       for query in (None, 7, "text", [], {}, QUERY | {"more": 1}, QUERY | {"prompts": 3}, QUERY | {"prompts": ["a"]},
                     QUERY | {"prompts": [{"text": "a"}]}, QUERY | {"hooks": None}, QUERY | {"hooks": 3})},
    **{f"keep_alive {stay!r:.20}": (framed(json.dumps(FRAME | {"keep_alive": stay}).encode()), "bad_frame")
       for stay in ("soon", [], {}, 10**400)},
    "no keep_alive": (framed(json.dumps({k: v for k, v in FRAME.items() if k != "keep_alive"}).encode()), "bad_frame"),
}  # fmt: skip


def test_what_is_no_query_is_answered_with_an_error_and_harms_nobody(warm):
    """One daemon for all, so that what one of them leaves behind shows in the next."""
    wrong = {}
    (before,) = warm.engines()
    for name, (data, code) in BAD.items():
        frames = told(warm.home.socket, data, end=False)
        codes = [frame.get("error", {}).get("code") for frame in frames if frame.get("final")]
        if codes != [code]:
            wrong[name] = frames
    assert warm.capture("still").answer == warm.right("still")
    assert [one["pid"] for one in warm.engines()] == [before["pid"]]
    assert wrong == {}


@pytest.mark.parametrize("stay", [float("nan"), -5])
def test_a_time_that_is_none_is_no_query(warm, stay):
    frames = told(warm.home.socket, framed(json.dumps(FRAME | {"keep_alive": stay}).encode()), end=False)
    assert [frame.get("error", {}).get("code") for frame in frames] == ["bad_frame"]
    assert warm.capture("still").pid == warm.started[0]["pid"]


def test_truncated_frames_are_let_go(warm):
    (pid,) = warm.alive()
    whole = framed(json.dumps(FRAME).encode())
    for length in (0, 1, 3, 4, 5, 50, len(whole) - 1):
        assert told(warm.home.socket, whole[:length]) == []
    assert told(warm.home.socket, whole)[-1]["reply"]["body"]["pid"] == pid


def test_many_that_connect_and_say_nothing_hold_nobody(warm):
    silent = [connected(warm.home.socket) for _ in range(50)]
    assert warm.capture("through").answer == warm.right("through")
    for sock in silent:
        sock.close()


def test_a_malformed_query_does_not_touch_the_large_one_that_runs(warm):
    prompt = "sleep 2 " + "word " * 600
    large = warm.capturing(prompt)
    warm.in_state("busy")
    query = QUERY | {"prompts": [{**QUERY["prompts"][0], "text": 5}]}
    with connected(warm.home.socket) as bad:
        bad.sendall(framed(json.dumps(FRAME | {"query": query}).encode()))
        waiting = warm.capturing("small")
        assert finish(waiting).answer == warm.right("small")
        assert finish(large).answer == warm.right(prompt)


def test_a_waiting_asker_hears_what_runs_and_since_when(warm):
    running = warm.capturing("sleep 2")
    warm.in_state("busy")
    frames = told(warm.home.socket, framed(json.dumps(FRAME).encode()), end=False)
    assert frames[0]["progress"].startswith("waiting: capture of 1 hook in 1 prompt, for ")
    assert frames[-1]["reply"]["body"]["prompts"][0]["answer"] == warm.right("hello")
    assert finish(running).code == 0


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200) | st.binary(max_size=200).map(framed) | st.builds(
    lambda changes: framed(json.dumps(FRAME | changes).encode()),
    # keep_alive is left out: a number there is right, and 0 ends the daemon.
    st.dictionaries(st.sampled_from(["protocol", "version", "verb", "query", "x"]),
                    st.none() | st.integers() | st.text() | st.lists(st.integers(), max_size=3), min_size=1)))
def test_random_bytes_get_an_error_or_are_let_go(warm, data):
    (pid,) = warm.alive()
    for frame in told(warm.home.socket, data):
        assert set(frame) & {"final", "progress"}
    assert warm.alive() == [pid]
    (one,) = warm.engines()
    assert one["pid"] == pid


def test_the_daemon_answers_after_all_random_bytes(warm):
    import random

    source = random.Random(7)
    for _ in range(200):
        told(warm.home.socket, source.randbytes(source.randrange(100)))
        told(warm.home.socket, framed(source.randbytes(source.randrange(100))))
    assert warm.capture("after").answer == warm.right("after")
    assert len(warm.started) == 1
    pid = warm.started[0]["pid"]
    wait_for(lambda: len(os.listdir(f"/proc/{pid}/task")) <= 3)
    assert len(os.listdir(f"/proc/{pid}/fd")) <= 8


# The client


def test_a_query_that_is_asked_again_begins_its_file_again(vlens, monkeypatch):
    """A daemon that ends without a word may have written half of the file."""
    monkeypatch.setenv("VLENS_RUNTIME", str(vlens.runtime))
    monkeypatch.setattr(runtime, "directory", runtime.directory.__wrapped__)
    spec = EngineSpec(str(vlens.model), "m")
    home = runtime.home(runtime.fingerprint(spec))
    home.folder.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(home.socket))
    listener.listen()
    listener.settimeout(10)

    def serve() -> None:
        for text in (b"half of", b"whole"):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                _, descriptor = wire.receive_with_descriptor(connection)
                os.write(descriptor, text)
                os.close(descriptor)
                # The client has sent all it sends, and listens.
                time.sleep(0.2)
                if text == b"whole":
                    wire.send(connection, {"final": True, "reply": {
                        "body": {}, "notes": [], "saved": {"tensors": 1, "bytes": 5}}})
                    connection.recv(1)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    with listener, open(vlens.work / "file", "wb") as file:
        client.ask(spec, CaptureQuery((Prompt("a"),), (HOOK,)), into=file, how=client.Asking(timeout=10))
        server.join(5)
    assert (vlens.work / "file").read_bytes() == b"whole"


def test_nothing_of_ours_is_pickled():
    """Outside of driver/, where vLLM has its own ways; strings and comments may speak of it."""
    guilty = []
    for path in (ROOT / "vlens_cli").rglob("*.py"):
        if "driver" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                     [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            guilty += [f"{path}: {name}" for name in names
                       if name.partition(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
                       or name.startswith("multiprocessing")]
    assert guilty == []
