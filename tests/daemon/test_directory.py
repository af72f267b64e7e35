"""The runtime directory: the user's alone, writable, short enough for a socket, and nothing else of it is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_tools import finish, wait_for

from vlens_cli.daemon import runtime

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
NOBODY = 65534


def refused(done, *said: str) -> None:
    assert (done.code, done.out) == (3, ""), done.err
    for text in said:
        assert text in done.err


def test_it_is_made_for_the_user_alone(vlens):
    vlens.capture()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (vlens.runtime, vlens.home.folder, vlens.home.socket)}
    assert modes == {"r": 0o700, vlens.home.folder.name: 0o700, "socket": 0o600}
    assert (vlens.home.folder / "status.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_open_to_others_it_is_refused(vlens, mode):
    vlens.runtime.mkdir()
    vlens.runtime.chmod(mode)
    refused(vlens.capture(), f"error: the runtime directory is not yours alone: {vlens.runtime}",
            f"hint: chmod 700 {vlens.runtime}", "VLENS_RUNTIME=")
    refused(vlens.run("engine", "status"), "not yours alone")
    assert vlens.started == []
    assert vlens.capture("alone", "--no-daemon").answer == vlens.right("alone")


@ROOT_ONLY
def test_of_another_owner_it_is_refused(vlens):
    vlens.runtime.mkdir(mode=0o700)
    os.chown(vlens.runtime, NOBODY, NOBODY)
    refused(vlens.capture(), f"error: the runtime directory is not yours alone: {vlens.runtime}", "VLENS_RUNTIME=")
    assert vlens.started == []


def test_a_link_is_refused(vlens):
    (vlens.work / "elsewhere").mkdir(mode=0o700)
    vlens.runtime.symlink_to("elsewhere")
    refused(vlens.capture(), "not yours alone")


@pytest.mark.parametrize("named", ["/proc/vlens", "/dev/null"])
def test_where_it_cannot_be_made_the_message_names_it_and_the_ways_out(vlens, named):
    done = vlens.capture(VLENS_RUNTIME=named)
    refused(done, f"error: cannot make the runtime directory: {named}: ", "hint: VLENS_RUNTIME=/another/folder moves it",
            "--no-daemon does without")
    assert vlens.capture("alone", "--no-daemon", VLENS_RUNTIME=named).answer == vlens.right("alone")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_where_it_cannot_be_written_the_message_names_it(vlens):
    vlens.runtime.mkdir(mode=0o500)
    refused(vlens.capture(), f"error: cannot write the runtime directory: {vlens.runtime}", "VLENS_RUNTIME=")


def test_a_home_that_cannot_be_written_is_not_needed(vlens):
    assert vlens.capture(HOME="/proc/nowhere").answer == vlens.right("hello")


def test_xdg_runtime_dir_is_used_where_nothing_is_named(vlens):
    base = vlens.work / "xdg"
    base.mkdir(mode=0o700)
    done = vlens.capture(VLENS_RUNTIME="", XDG_RUNTIME_DIR=str(base))
    try:
        assert done.answer == vlens.right("hello")
        (folder,) = [path for path in (base / "vlens").iterdir() if path.is_dir()]
        assert (folder / "socket").is_socket()
    finally:
        vlens.run("engine", "stop", VLENS_RUNTIME="", XDG_RUNTIME_DIR=str(base))
    assert vlens.alive() == []


def test_a_path_too_long_for_a_socket_falls_back_to_a_short_one(vlens):
    """The usual short directory may hold the user's own engines: they stay, and all of ours goes."""
    short = Path(f"/tmp/vlens-{os.getuid()}")
    before = set(short.iterdir()) if short.exists() else None
    env = {"VLENS_RUNTIME": str(vlens.work / ("long" * 30)), "VLENS_KEEP": "1000"}
    one = {"fingerprint": ""}
    try:
        done = vlens.capture(**env)
        assert done.answer == vlens.right("hello")
        status = json.loads(vlens.run("engine", "status", **env).out)
        (one,) = [engine for engine in status["engines"] if engine["pid"] == done.pid]
        assert Path(one["socket"]).parent.parent == short
        assert vlens.capture(**env).pid == done.pid
        assert vlens.run("engine", "stop", "-m", str(vlens.model), **env).err == f"stopped 1 engine: pid {done.pid}\n"
        assert vlens.alive() == []
    finally:
        # The lock's name is the engine's: nobody else's is touched.
        for path in set(short.iterdir()) - (before or set()) if short.exists() else ():
            if before is None or path.name == f"{one['fingerprint']}.lock":
                path.unlink()
        if before is None and short.exists():
            short.rmdir()


def test_a_relative_or_too_long_xdg_runtime_dir_is_passed_over(vlens, monkeypatch):
    monkeypatch.delenv("VLENS_RUNTIME", raising=False)
    monkeypatch.setattr(runtime, "_fallback", lambda: Path("/short"))
    for base in ("relative", str(vlens.work / ("long" * 30)), "/does/not/exist"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        if os.path.isabs(base) and base.startswith(str(vlens.work)):
            Path(base).mkdir()
        assert runtime.directory.__wrapped__() == Path("/short")


# Whatever else lies there


def test_stop_leaves_folders_alone_that_are_no_engine_s(vlens):
    """VLENS_RUNTIME may name a folder that holds more: a home, say."""
    vlens.runtime.mkdir(mode=0o700)
    (vlens.runtime / "thesis").mkdir()
    (vlens.runtime / "thesis" / "chapter").write_text("years of work")
    pid = vlens.capture().pid
    assert vlens.run("engine", "stop").err == f"stopped 1 engine: pid {pid}\n"
    vlens.run("engine", "stop")
    assert (vlens.runtime / "thesis" / "chapter").read_text() == "years of work"


def test_stop_does_not_break_an_engine_whose_process_just_starts(vlens):
    client = vlens.capturing("hello", FAKE_LISTENING="2")
    wait_for(lambda: vlens.started)
    assert vlens.run("engine", "stop").code == 0
    done = finish(client)
    # Stopped or not, it is no bug of vlens, and nothing is left that nobody can reach.
    assert done.code in (0, 3), done.err
    assert sorted(vlens.alive()) == sorted(one["pid"] for one in vlens.engines())


# Who may connect

CONNECT = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(5)
sock.connect(sys.argv[1])
sock.sendall(b'\\0\\0\\0\\x11{"verb":"status"}')
print(sock.recv(100))
"""


@ROOT_ONLY
def test_another_user_cannot_connect_and_is_not_heard_even_with_the_modes_opened(vlens):
    vlens.capture()
    path = str(vlens.home.socket)

    def as_nobody() -> subprocess.CompletedProcess:
        return subprocess.run(["/usr/bin/env", "python3", "-IS", "-c", CONNECT, path], user=NOBODY, group=NOBODY,
                              extra_groups=[], capture_output=True, text=True, cwd="/", env={"PATH": "/usr/bin:/bin"})

    if shutil.which("python3", path="/usr/bin:/bin") is None:
        pytest.skip("no Python that another user may run")
    shut = as_nobody()
    assert shut.returncode == 1
    assert "PermissionError" in shut.stderr
    for folder in (vlens.work, vlens.runtime, vlens.home.folder):
        folder.chmod(0o755)
    vlens.home.socket.chmod(0o666)
    opened = as_nobody()
    # It reached the socket, and got an end without a word: how it sees that depends on who is faster.
    assert "PermissionError" not in opened.stderr
    assert opened.stdout.strip() in ("", "b''"), opened
    as_root = subprocess.run([sys.executable, "-c", CONNECT, path], capture_output=True, text=True)
    assert "final" in as_root.stdout
