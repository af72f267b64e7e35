"""The resident engine with a real model in it: what it answers, and what it is after many queries and after faults."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "driver"))

from tiny import tiny_model  # noqa: E402
from vlens_cli import memory  # noqa: E402
from vlens_cli.daemon import client, launch, runtime  # noqa: E402
from vlens_cli.errors import VlensError  # noqa: E402
from vlens_cli.query import CaptureQuery, EngineSpec, Prompt  # noqa: E402

ROOT = Path(__file__).parents[2]
HOOKS = ("blocks.*.hook_resid_post", "blocks.1.attn.hook_z", "logits")


class Engine:
    """A runtime directory of its own, and commands in it."""

    def __init__(self) -> None:
        self.work = Path(tempfile.mkdtemp(prefix="vl-", dir="/tmp"))
        self.model = tiny_model("llama", "tokenizer")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("VLENS_")} | {
            "VLENS_RUNTIME": str(self.work / "run"), "VLENS_MODEL": str(self.model), "PYTHONPATH": str(ROOT),
            # What a killed engine leaves goes with the rest.
            "TMPDIR": str(self.work),
        }  # fmt: skip
        self.spec = EngineSpec(model=os.path.realpath(self.model), name="tiny")

    def start(self, *args: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "vlens_cli", *args], env=self.environment, text=True, cwd=self.work,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *args: str) -> dict:
        done = self.start(*args)
        out, err = done.communicate(timeout=300)
        assert done.returncode == 0, err
        return json.loads(out)

    def capture(self, prompt: str, *args: str) -> dict:
        return self.run("capture", *(word for hook in HOOKS for word in ("--hook", hook)), "--values", *args, prompt)

    @property
    def folders(self) -> list[Path]:
        (self.work / "run").mkdir(mode=0o700, exist_ok=True)
        return [path for path in (self.work / "run").iterdir() if path.is_dir()]

    @property
    def pids(self) -> list[int]:
        found = [runtime.Home(path).alive() for path in self.folders]
        return [status.pid for status in found if status]

    def close(self) -> None:
        self.start("engine", "stop").communicate(timeout=60)
        shutil.rmtree(self.work, ignore_errors=True)


def until(state, engine: Engine, asked: subprocess.Popen) -> None:
    """Wait for a state of the engine, while `asked` waits for its answer: a slow machine is slow, not wrong."""
    while not state(engine):
        assert asked.poll() is None, asked.communicate()
        time.sleep(0.05)


def listens(engine: Engine) -> bool:
    return bool(engine.pids)


def busy(engine: Engine) -> bool:
    described = launch.describe(runtime.Home(engine.folders[0])) if engine.folders else None
    return bool(described) and described["state"] == "busy"


def values(body: dict) -> dict:
    """What was computed: without the time that it took."""
    return {k: v for k, v in body.items() if k != "seconds"}


@pytest.fixture(scope="module")
def engine():
    one = Engine()
    yield one
    one.close()


@pytest.fixture
def asking(engine, monkeypatch):
    """ask(prompt) on the engine from this process."""
    monkeypatch.setenv("VLENS_RUNTIME", str(engine.work / "run"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(runtime, "directory", runtime.directory.__wrapped__)

    def ask(prompt: str, hooks: tuple[str, ...] = HOOKS, **fields: object) -> dict:
        query = CaptureQuery((Prompt(text=prompt),), hooks, values=True, **fields)
        return values(client.ask(engine.spec, query).body)

    return ask


def test_a_live_weight_by_the_command_is_the_checkpoints(engine):
    from safetensors.torch import load_file

    fused, one = "model.layers.1.mlp.gate_up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    file = engine.work / "w.safetensors"
    said = engine.run("param", fused, one, "-o", str(file))
    assert [entry["source"] for entry in said["params"]] == ["engine", "checkpoint"]
    found, stored = load_file(file), load_file(engine.model / "model.safetensors")
    assert found[one].equal(stored[one]) and found[fused][256:].equal(stored[one])
    live = engine.run("param", one, "--from", "engine", "--values")["params"][0]
    assert live["source"] == "engine" and live["values"] == stored[one].tolist()


def test_twenty_clients_at_once_on_a_cold_machine_get_what_each_gets_alone(engine):
    prompts = [f"The tower number {n} is in " + "the city " * (n % 5) for n in range(20)]
    running = [engine.start("capture", "--hook", HOOKS[n % 3], "--values", prompts[n]) for n in range(20)]
    replies = [one.communicate(timeout=300) for one in running]
    assert [one.returncode for one in running] == [0] * 20, [err for _, err in replies]
    assert len(engine.pids) == 1
    for n in (0, 7, 14, 19):
        alone = engine.run("capture", "--hook", HOOKS[n % 3], "--values", prompts[n])
        assert values(alone) == values(json.loads(replies[n][0])), "not bitwise what it is alone"


def test_the_daemon_and_a_process_of_its_own_give_one_output(engine):
    text = "The Eiffel Tower is in the city of Paris."
    assert values(engine.capture(text)) == values(engine.capture(text, "--no-daemon"))


def test_a_failing_query_leaves_the_next_bitwise_unchanged(engine, asking):
    before, pids = asking("The Eiffel Tower"), engine.pids
    for wrong in ("blocks.0.hook_embed", "logits[pos=99]", 'logits[pos="Rome"]'):
        with pytest.raises(VlensError):
            asking("The Eiffel Tower", (wrong,))
    with pytest.raises(VlensError, match="longer than this engine takes"):
        asking("Paris " * 600)
    assert asking("The Eiffel Tower") == before and engine.pids == pids


def test_a_large_query_that_is_broken_off_frees_the_engine_and_leaves_it_as_it_was(engine, asking):
    before = asking("The Eiffel Tower")
    file = engine.work / "many.txt"
    file.write_text("\n".join(f"{n} " + "the city of towers " * 60 for n in range(300)))
    large = engine.start("capture", "--hook", "blocks.*.hook_resid_post", "--pos", "-1", "-f", str(file))
    until(busy, engine, large)
    small = time.monotonic()
    assert asking("The Eiffel Tower") == before, "a small query between two pieces"
    assert time.monotonic() - small < 60 and large.poll() is None
    large.send_signal(signal.SIGINT)
    assert large.wait(60) == 130
    large.communicate()
    assert asking("The Eiffel Tower") == before


def test_a_thousand_queries_leave_memory_and_descriptors_flat(engine, asking):
    engine.capture("warm")
    (pid,) = engine.pids
    seen = []
    for n in range(1000):
        asking(f"The number {n} is {n * n % 97}", ("blocks.2.hook_resid_post",))
        if n in (100, 999):
            seen.append((memory.resident(pid), len(os.listdir(f"/proc/{pid}/fd"))))
    (rss, fds), (rss_after, _) = seen
    assert rss_after < 1.02 * rss
    # The last connection may not be closed yet.
    deadline = time.monotonic() + 60
    while len(os.listdir(f"/proc/{pid}/fd")) > fds:
        assert time.monotonic() < deadline, "descriptors stay open"
        time.sleep(0.05)


@pytest.mark.parametrize("when", ["while it loads", "during a query"])
def test_killed_it_is_missed_at_once_and_the_next_command_works(engine, when):
    engine.start("engine", "stop").communicate(timeout=60)
    if when == "during a query":
        engine.capture("warm")
        file = engine.work / "long.txt"
        file.write_text("\n".join("the city of towers " * 60 for n in range(300)))
        asked = engine.start("capture", "--hook", "logits[pos=-1]", "-f", str(file))
        until(busy, engine, asked)
    else:
        asked = engine.start("capture", "--hook", "logits", "cold")
        until(listens, engine, asked)
        time.sleep(1)
    (pid,) = engine.pids
    os.kill(pid, signal.SIGKILL)
    out, err = asked.communicate(timeout=60)
    assert asked.returncode == (1 if when == "during a query" else 3), err
    assert out == "" and "the engine ended" in err and "hint: " in err
    assert engine.capture("again")["prompts"][0]["tokens"]


def of_group(pgid: int) -> list[int]:
    """Processes that the engine has started, itself included, but for those that have ended already."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            found += [int(path.parent.name)] if int(group) == pgid and state != "Z" else []
    return found


@pytest.mark.parametrize("victim", ["worker", "daemon"])
def test_of_several_ranks_one_killed_is_missed_at_once_and_nothing_is_left(engine, victim):
    engine.start("engine", "stop").communicate(timeout=60)
    shared = set(os.listdir("/dev/shm"))
    engine.run("capture", "--tp", "2", "--hook", HOOKS[1], "warm")
    (pid,) = engine.pids
    workers = [one for one in of_group(pid) if b"VLLM::Worker" in Path(f"/proc/{one}/cmdline").read_bytes()]
    assert len(workers) == 2 and engine.run("engine", "status")["engines"][0]["rss_bytes"] > 2 * memory.resident(workers[0])
    file = engine.work / "long.txt"
    file.write_text("\n".join("the city of towers " * 60 for n in range(300)))
    asked = engine.start("capture", "--tp", "2", "--hook", "logits[pos=-1]", "-f", str(file))
    until(busy, engine, asked)
    time.sleep(1)
    os.kill(pid if victim == "daemon" else workers[1], signal.SIGKILL)
    killed = time.monotonic()
    out, err = asked.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert asked.returncode == 1 and out == "" and "ended" in err and "hint: " in err
    while of_group(pid) or set(os.listdir("/dev/shm")) - shared:
        assert time.monotonic() - killed < 10, (of_group(pid), os.listdir("/dev/shm"))
        time.sleep(0.1)
    assert engine.pids == []
    assert [path.name for path in engine.work.iterdir() if path.is_socket() or path.name.startswith("vlens-")] == []
    assert engine.capture("again")["prompts"][0]["tokens"]


def test_a_script_without_a_main_guard_may_open_a_driver(engine):
    script = engine.work / "script.py"
    script.write_text(
        "from vlens_cli.driver import open_driver\n"
        "with open_driver(executor='mp') as driver:\n"
        "    out = driver.forward([3, 4, 5], capture=['blocks.1.hook_out'])\n"
        "print(tuple(out.captured['blocks.1.hook_out'].shape))\n"
    )
    done = subprocess.run([sys.executable, str(script)], env=engine.environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "(1, 3, 128)\n"), done.stderr
