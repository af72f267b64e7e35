"""Many prompts through the resident engine, with a real model: who is killed in the middle, and who waits meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from daemon_tools import wait_for
from test_real_engine import Engine, until

from vlens_cli.driver import shards

N = 240
HOOK = "blocks.*.hook_resid_post"


@pytest.fixture(scope="module")
def engine():
    one = Engine()
    words = "The Eiffel Tower is located in the city of Paris and the Colosseum in Rome".split()
    lines = [json.dumps({"text": " ".join(words[(n * k + k) % len(words)] for k in range(20 + n % 60)), "id": n})
             for n in range(N)]
    (one.work / "prompts.jsonl").write_text("\n".join(lines))
    yield one
    one.close()


def collecting(engine: Engine, folder: str, *args: str) -> subprocess.Popen:
    return engine.start("capture", "--json", "--hook", HOOK, "-f", "prompts.jsonl", "-o", f"{folder}/", "--shard-size",
                        "300kB", "--chunk", "64", *args)


def finish(asked: subprocess.Popen) -> dict:
    out, err = asked.communicate(timeout=240)
    assert asked.returncode == 0, err
    return json.loads(out)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def has_begun(folder: Path, n: int = 3):
    return lambda engine: len(list(folder.glob("capture-*.safetensors"))) >= n


@pytest.fixture(scope="module")
def whole(engine) -> dict[str, bytes]:
    body = finish(collecting(engine, "whole"))
    assert body["n_prompts"] == N and len(body["shards"]) > 20
    return files(engine.work / "whole")


@pytest.mark.parametrize("victim", ["client", "daemon"])
def test_killed_in_the_middle(engine, whole, victim):
    folder = engine.work / victim
    asked = collecting(engine, victim)
    until(has_begun(folder), engine, asked)
    os.kill(asked.pid if victim == "client" else engine.pids[0], signal.SIGKILL)
    _, err = asked.communicate(timeout=60)
    if victim == "daemon":
        assert asked.returncode == 1 and "--resume goes on" in err
    # Of a client that is gone the engine takes away what is not whole.
    wait_for(lambda: not [name for name in os.listdir(folder) if name.startswith(".")], 60, "no drafts")
    left = files(folder)
    assert 3 <= len(left) < len(whole) - 1 and all(whole[name] == content for name, content in left.items())
    body = finish(collecting(engine, victim, "--resume"))
    assert body["n_resumed"] > 0 and body["n_prompts"] == N
    assert files(folder) == whole


def test_a_small_question_is_answered_in_the_middle_and_the_asker_can_leave(engine, whole):
    lines = (engine.work / "prompts.jsonl").read_text()
    (engine.work / "more.jsonl").write_text("\n".join([lines] * 20))
    folder = engine.work / "left"
    asked = collecting(engine, "left", "-f", "more.jsonl")
    until(has_begun(folder), engine, asked)
    found = engine.run("capture", "--hook", "blocks.1.hook_resid_post", "--chunk", "64", "The Eiffel Tower")
    assert found["prompts"][0]["hooks"] and asked.poll() is None, "it waited for the end"
    asked.send_signal(signal.SIGINT)
    asked.communicate(timeout=60)
    assert asked.returncode == 130
    assert engine.run("capture", "--hook", HOOK, "--chunk", "64", "The Eiffel Tower")["prompts"]
    assert all(shards.header_of(path) for path in folder.glob("capture-*.safetensors"))
    assert not list(folder.glob(".*"))
