"""The daemon's life: it starts once, answers right, is replaced and ends when it should."""

from __future__ import annotations

import json
import os
import re
import shutil
import time

import pytest
from daemon_tools import ROOT, finish, make_model, wait_for
from fake_daemon import WEIGHTS

from vlens_cli.daemon import launch, runtime

HOOKS = [f"blocks.{layer}.{point}" for layer in range(4) for point in
         ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_mid", "hook_resid_post")]

STOPPED = "error: the engine was stopped during the query\n\nhint: the next command starts a new one\n"


def twenty_at_once(vlens, name: str, **env: str) -> set[int]:
    """Twenty clients with prompts and hooks of their own, each answered right; the pids that answered."""
    clients = [vlens.capturing(f"{name} {n}", hook=hook, **env) for n, hook in enumerate(HOOKS)]
    done = [finish(client) for client in clients]
    assert [one.answer for one in done] == [vlens.right(f"{name} {n}", hook) for n, hook in enumerate(HOOKS)]
    return {one.pid for one in done}


# Starting


def test_the_second_command_finds_the_engine_of_the_first(vlens):
    first, second = vlens.capture("one"), vlens.capture("two")
    assert first.pid == second.pid == vlens.engines()[0]["pid"]
    assert (first.answer, second.answer) == (vlens.right("one"), vlens.right("two"))
    assert len(vlens.started) == 1


def test_twenty_clients_on_a_cold_machine_start_one_daemon(vlens):
    pids = twenty_at_once(vlens, "cold", FAKE_STARTING="1")
    assert pids == {vlens.started[0]["pid"]}
    assert len(vlens.started) == 1


def test_twenty_clients_on_a_warm_daemon_get_each_its_own_answer(vlens):
    assert vlens.run("engine", "start").code == 0
    assert twenty_at_once(vlens, "warm") == {one["pid"] for one in vlens.started}
    assert len(vlens.started) == 1


def test_a_daemon_that_listens_late_is_waited_for_by_all(vlens):
    clients = [vlens.capturing(f"late {n}", FAKE_LISTENING="1.5") for n in range(5)]
    assert [finish(client).answer for client in clients] == [vlens.right(f"late {n}") for n in range(5)]
    assert len(vlens.started) == 1


def test_an_engine_that_does_not_start_says_why_and_the_next_command_tries_again(vlens):
    failed = vlens.capture(FAKE_FAILING="1")
    assert (failed.code, failed.out) == (3, "")
    assert failed.err == "error: the weights are broken\n"
    # With what it had taken, but for its log.
    vlens.all_gone()
    assert vlens.run("engine", "status").code == 1
    assert vlens.home.log.exists() and vlens.run("engine", "log").code == 0
    assert vlens.capture().answer == vlens.right("hello")


def test_an_engine_that_does_not_start_is_tried_once_for_all_who_wait(vlens):
    begin = vlens.work / "begin"
    clients = [vlens.capturing(f"hello {n}", FAKE_FAILING="1", FAKE_STARTING=str(begin)) for n in range(4)]
    wait_for(lambda: any(one["waiting"] == 3 for one in vlens.engines()), 30)
    begin.touch()
    assert {(done.code, done.err) for done in map(finish, clients)} == {(3, "error: the weights are broken\n")}
    assert len(vlens.started) == 1
    vlens.all_gone()


def test_where_memory_is_short_idle_engines_are_named(vlens):
    vlens.capture(VLENS_KEEP="2")
    short = vlens.capture("hello", "--dtype", "float16", VLENS_KEEP="2", FAKE_FAILING="memory")
    assert short.code == 3
    assert re.search(rf"^hint: `vlens engine stop -m {vlens.model}` frees 0\.\d GB; --dtype", short.err, re.MULTILINE)
    (idle,) = vlens.engines()
    assert idle["state"] == "idle"
    assert vlens.run("engine", "stop", "-m", str(vlens.model)).code == 0
    vlens.all_gone()


def test_a_daemon_that_ends_before_it_listens_is_reported_with_its_last_line(vlens):
    done = vlens.capture(FAKE_LISTENING="soon")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: the engine ended while starting: ValueError: could not convert"), done.err
    assert "hint: `vlens engine log`" in done.err
    log = vlens.run("engine", "log", "-n", "1")
    assert (log.code, log.err) == (0, "")
    assert log.out.startswith("ValueError: could not convert")


def test_engine_start_shows_the_engine_and_keeps_notes_apart(vlens):
    done = vlens.run("engine", "start", "--keep-alive", "2h")
    assert (done.code, done.err) == (0, "note: engine notes\n")
    (one,) = json.loads(done.out)["engines"]
    assert (one["state"], one["keep_alive_s"], one["model"]) == ("idle", 7200.0, str(vlens.model))
    assert one["pid"] == vlens.started[0]["pid"]


def test_an_engine_on_a_gpu_sleeps_until_the_next_query(vlens):
    pid = vlens.capture("one", FAKE_GPU="1").pid
    done = vlens.run("engine", "sleep")
    assert (done.code, done.err) == (0, "1 engine asleep: 2.0 GB of GPU memory freed\n")
    assert vlens.engines()[0]["asleep"] and "asleep" in vlens.run("engine", "status", "--table").out
    again = vlens.capture("two")
    assert (again.pid, again.answer) == (pid, vlens.right("two")) and not vlens.engines()[0]["asleep"]


def test_an_idle_engine_on_a_gpu_goes_to_sleep_by_itself(vlens):
    pid = vlens.capture("one", FAKE_GPU="1", VLENS_SLEEP="0.1").pid
    wait_for(lambda: vlens.engines()[0]["asleep"], what="asleep")
    assert vlens.capture("two").pid == pid


def test_an_engine_on_a_processor_does_not_sleep(vlens):
    vlens.capture("one")
    done = vlens.run("engine", "sleep")
    assert done.code != 0 and "no GPU" in done.err and not vlens.engines()[0]["asleep"]


def test_a_time_of_sleep_that_is_none_is_refused_before_an_engine_starts(vlens):
    done = vlens.run("capture", "--hook", HOOKS[0], "one", VLENS_SLEEP="soon")
    assert done.code == 2 and "soon" in done.err and vlens.started == []


def test_without_daemon_nothing_stays(vlens):
    done = vlens.capture("alone", "--no-daemon")
    assert done.answer == vlens.right("alone")
    assert vlens.started == []
    assert not vlens.runtime.exists()


def test_the_client_of_a_warm_daemon_imports_no_torch_and_no_numpy(vlens):
    vlens.capture()
    marker = vlens.work / "imports"
    assert vlens.capture("light", FAKE_IMPORTS=str(marker)).answer == vlens.right("light")
    loaded = set(marker.read_text().split())
    assert "vlens_cli.daemon.client" in loaded
    heavy = {"torch", "numpy", "vllm", "transformers", "safetensors", "vlens_cli.daemon.server", "vlens_cli.driver.session"}
    assert loaded & heavy == set()
    # Slow to import, and the engine checks what they would check.
    assert loaded & {"rich", "tomllib", "vlens_cli.families", "vlens_cli.models.hub"} == set()


def test_what_is_refused_waits_for_no_engine(vlens):
    missing = "blocks.9.hook_resid_post"
    refused = vlens.capture(hook=missing)
    assert (refused.code, vlens.started) == (2, [])
    assert "layers 0 to 3" in refused.err
    vlens.capture()
    busy = vlens.capturing("sleep 100")
    vlens.in_state("busy")
    assert vlens.capture(hook=missing).err == refused.err
    assert busy.poll() is None and vlens.engines()[0]["state"] == "busy"


# Other engines


def test_another_spec_replaces_the_first_engine(vlens):
    first = vlens.capture()
    second = vlens.capture("hello", "--dtype", "float16")
    assert second.answer == vlens.right("hello", dtype="float16")
    assert second.pid != first.pid
    assert vlens.alive() == [second.pid]
    assert [one["pid"] for one in vlens.engines()] == [second.pid]


@pytest.mark.parametrize("args, told", [(["--max-len", "1000000"], "more than this model takes"),
                                        (["--tp", "64"], "does not divide this model's")])
def test_an_engine_that_cannot_be_started_ends_no_other(vlens, args, told):
    first = vlens.capture()
    refused = vlens.capture("hello", *args)
    assert refused.code == 2 and told in refused.err
    assert [one["pid"] for one in vlens.engines()] == [first.pid] and len(vlens.started) == 1


def test_keep_2_keeps_two_and_ends_the_oldest_for_a_third(vlens):
    first = vlens.capture(VLENS_KEEP="2")
    second = vlens.capture("hello", "--dtype", "float16", VLENS_KEEP="2")
    assert set(vlens.alive()) == {first.pid, second.pid}
    assert vlens.capture(VLENS_KEEP="2").pid == first.pid
    third = vlens.capture("hello", "--dtype", "bfloat16", VLENS_KEEP="2")
    assert set(vlens.alive()) == {second.pid, third.pid}
    assert third.err == f"note: ending the idle engine of {vlens.model}; VLENS_KEEP=3 lets it stay\n" and not second.err


def test_a_busy_engine_is_not_ended_for_another(vlens):
    busy = vlens.capturing("sleep 4")
    vlens.in_state("busy")
    other = vlens.capture("hello", "--dtype", "float16")
    assert other.answer == vlens.right("hello", dtype="float16")
    assert finish(busy).answer == vlens.right("sleep 4")


def test_a_daemon_whose_first_query_was_refused_is_idle_and_makes_room(vlens):
    assert vlens.capture("wrong").code == 2
    (one,) = vlens.engines()
    assert one["state"] == "idle"
    second = vlens.capture("hello", "--dtype", "float16")
    assert vlens.alive() == [second.pid]


def test_a_model_saved_again_in_place_is_another_engine(vlens):
    first = vlens.capture()
    # As long as before, and as old: only the time of the change tells.
    path = vlens.model / WEIGHTS
    before = path.stat()
    path.write_bytes(b"other weights")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    second = vlens.capture()
    assert second.answer == vlens.right("hello") != first.answer
    assert vlens.alive() == [second.pid]


def test_one_model_by_two_names_is_one_engine(vlens):
    (vlens.work / "link").symlink_to("model")
    first = vlens.capture("hello", "-m", "./link")
    assert vlens.capture().pid == first.pid


def test_another_model_is_asked_even_where_one_is_warm(vlens):
    make_model(vlens.work / "other", b"weights of the other")
    vlens.capture("hello", "-m", "./other")
    assert vlens.capture().answer == vlens.right("hello")


# Other code


def test_another_version_is_restarted_once_with_its_reason(vlens):
    first = vlens.capture(FAKE_VERSION="old")
    second = vlens.capture(FAKE_VERSION="new")
    assert (second.code, second.err) == (0, "note: restarting the engine: the engine runs vlens old, this is new\n")
    body = json.loads(second.out)
    assert body["prompts"][0]["answer"] == vlens.right("hello")
    assert vlens.alive() == [body["pid"]] != [first.pid]
    assert vlens.capture(FAKE_VERSION="new").pid == body["pid"]


def test_another_protocol_is_restarted_once_with_its_reason(vlens):
    vlens.capture(FAKE_PROTOCOL="0")
    second = vlens.capture()
    assert (second.code, second.err) == (0, "note: restarting the engine: the engine speaks protocol 0, this vlens 1\n")
    body = json.loads(second.out)
    assert body["prompts"][0]["answer"] == vlens.right("hello")
    assert vlens.alive() == [body["pid"]]


def test_many_clients_of_another_version_restart_the_daemon_once(vlens):
    vlens.capture(FAKE_VERSION="old")
    clients = [vlens.capturing(f"new {n}", FAKE_VERSION="new") for n in range(8)]
    done = [finish(client) for client in clients]
    assert [one.code for one in done] == [0] * 8, [one.err for one in done]
    assert [json.loads(one.out)["prompts"][0]["answer"] for one in done] == [vlens.right(f"new {n}") for n in range(8)]
    assert {one.err.count("note: restarting") for one in done} <= {0, 1}
    assert len(vlens.started) == 2
    assert len(vlens.alive()) == 1


def test_code_that_was_changed_is_another_version(vlens):
    copy = vlens.work / "site"
    shutil.copytree(ROOT / "vlens_cli", copy / "vlens_cli", ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": str(copy), "FAKE_VERSION": "real"}
    first = vlens.capture(**env)
    assert vlens.capture(**env).pid == first.pid
    (copy / "vlens_cli" / "driver" / "session.py").touch()
    second = vlens.capture(**env)
    assert second.code == 0
    assert second.err.startswith("note: restarting the engine: the engine runs vlens ")
    assert second.err.count("\n") == 1
    assert json.loads(second.out)["pid"] != first.pid


# Ending


def test_keep_alive_ends_the_daemon(vlens):
    done = vlens.capture("hello", "--keep-alive", "2s")
    assert done.answer == vlens.right("hello")
    time.sleep(1)
    assert vlens.alive() == [done.pid]
    vlens.all_gone(4)
    assert vlens.homes() == []
    assert vlens.run("engine", "status").code == 1


def test_a_query_renews_the_time_that_is_left(vlens):
    first = vlens.capture("hello", "--keep-alive", "2s")
    for _ in range(3):
        time.sleep(1)
        assert vlens.capture("hello", "--keep-alive", "2s").pid == first.pid


@pytest.mark.parametrize("prompt", ["hello", "large 20000000"])
def test_keep_alive_0_ends_the_daemon_after_the_whole_answer(vlens, prompt):
    done = vlens.capture(prompt, "--keep-alive", "0")
    assert done.answer == vlens.right(prompt)
    vlens.all_gone(1.5)
    assert vlens.homes() == []


def test_clients_with_keep_alive_0_at_once_and_in_a_row_are_all_answered(vlens):
    for turn in range(3):
        clients = [vlens.capturing(f"brief {turn} {n}", "--keep-alive", "0") for n in range(8)]
        done = [finish(client) for client in clients]
        assert [(one.code, one.err) for one in done] == [(0, "")] * 8
        assert [one.answer for one in done] == [vlens.right(f"brief {turn} {n}") for n in range(8)]
    vlens.all_gone()


def test_stop_then_capture_ten_times_in_a_row(vlens):
    pids = []
    for turn in range(10):
        done = vlens.capture(f"turn {turn}")
        assert done.answer == vlens.right(f"turn {turn}")
        stopped = vlens.run("engine", "stop")
        assert (stopped.code, stopped.out, stopped.err) == (0, "", f"stopped 1 engine: pid {done.pid}\n")
        assert vlens.alive() == []
        pids.append(done.pid)
    assert len(vlens.started) == 10


def test_stop_ends_only_the_model_that_is_named(vlens):
    make_model(vlens.work / "other")
    first = vlens.capture(VLENS_KEEP="2")
    other = vlens.capture("hello", "-m", "./other", VLENS_KEEP="2")
    assert vlens.run("engine", "stop", "-m", "./other").err == f"stopped 1 engine: pid {other.pid}\n"
    assert vlens.alive() == [first.pid]


def test_stop_where_none_runs_says_so(vlens):
    done = vlens.run("engine", "stop")
    assert (done.code, done.out, done.err) == (0, "", "no engine runs\n")


def test_stop_breaks_off_the_running_query_and_its_asker_is_told(vlens):
    client = vlens.capturing("sleep 20")
    vlens.in_state("busy")
    time.sleep(0.5)
    stopped = vlens.run("engine", "stop")
    assert stopped.err.endswith(f"stopped 1 engine: pid {vlens.started[0]['pid']}\n")
    assert vlens.alive() == []
    done = finish(client)
    assert (done.code, done.out) == (1, "")
    assert done.err == STOPPED
    assert vlens.capture().answer == vlens.right("hello")


def test_a_query_whose_ranks_were_told_to_end_with_their_engine_says_that_it_was_stopped(vlens):
    client = vlens.capturing("ranks end")
    vlens.in_state("busy")
    time.sleep(0.5)
    vlens.run("engine", "stop")
    done = finish(client)
    assert (done.code, done.out, done.err) == (1, "", STOPPED)


def test_stop_of_an_engine_that_starts_does_not_wait_for_it(vlens):
    client = vlens.capturing("hello", FAKE_STARTING="30")
    wait_for(lambda: vlens.engines() and vlens.engines()[0]["doing"])
    began = time.monotonic()
    stopped = vlens.run("engine", "stop")
    # Less than what a query is given to end by itself, and the start takes.
    assert time.monotonic() - began < launch.STOP_PATIENCE
    assert vlens.alive() == []
    assert stopped.err.endswith(f"stopped 1 engine: pid {vlens.started[0]['pid']}\n")
    done = finish(client)
    assert (done.code, done.out, done.err) == (3, "", STOPPED.replace("during the query", "while it started"))


def test_stop_says_what_it_waits_for(vlens, monkeypatch):
    monkeypatch.setattr(launch, "BREAK_OFF_PATIENCE", 1.5)
    client = vlens.capturing("deaf 20")
    vlens.in_state("busy")
    (home,), said = vlens.homes(), []
    assert launch.stop(home, said.append, break_off=True) == vlens.started[0]["pid"]
    assert said == [f"note: waiting for the engine to end: pid {vlens.started[0]['pid']}, capture of 1 hook in 1 prompt"]
    assert finish(client).err == STOPPED


def test_an_engine_that_makes_way_for_new_code_answers_what_it_is_at(vlens):
    client = vlens.capturing("sleep 3", FAKE_VERSION="old")
    vlens.in_state("busy")
    assert vlens.capture(FAKE_VERSION="new").code == 0
    assert finish(client).answer == vlens.right("sleep 3")


def test_a_daemon_whose_folder_is_gone_ends(vlens):
    first = vlens.capture()
    shutil.rmtree(vlens.home.folder)
    vlens.all_gone(2)
    assert vlens.capture().pid != first.pid


# What is said of it


def test_status_where_none_runs(vlens):
    done = vlens.run("engine", "status")
    assert (done.code, done.err) == (1, "no engine runs\n")
    assert json.loads(done.out)["engines"] == []


def test_status_says_what_another_vlens_is_at(vlens):
    client = vlens.capturing("hello", FAKE_LISTENING="3")
    wait_for(lambda: vlens.started)
    status = vlens.run("engine", "status")
    assert (status.code, status.err) == (1, f"no engine runs; another vlens is starting the engine of {vlens.model}\n")
    assert finish(client).answer == vlens.right("hello")
    with runtime.locked(vlens.home, "stopping another", lambda text: None):
        status = vlens.run("engine", "status")
    assert (status.code, status.err) == (0, "another vlens is stopping another\n")
    assert vlens.run("engine", "status").err == ""


def test_status_shows_starting_idle_and_busy_with_what(vlens):
    client = vlens.capturing("sleep 3", FAKE_STARTING="3")
    wait_for(vlens.engines)
    starting = vlens.run("engine", "status")
    assert json.loads(starting.out)["engines"][0]["state"] == "starting"
    vlens.in_state("busy")
    busy = vlens.run("engine", "status")
    (one,) = json.loads(busy.out)["engines"]
    assert (one["state"], one["doing"], one["idle_left_s"]) == ("busy", "capture of 1 hook in 1 prompt", None)
    assert one["doing_for_s"] > 0
    assert "busy: capture of 1 hook in 1 prompt, for" in vlens.run("engine", "status", "--table").out
    assert finish(client).answer == vlens.right("sleep 3")
    idle = vlens.run("engine", "status")
    assert [done.code for done in (starting, busy, idle)] == [0, 0, 0]
    (one,) = json.loads(idle.out)["engines"]
    assert one["pid"] == vlens.started[0]["pid"]
    assert (one["state"], one["doing"], one["model"]) == ("idle", None, str(vlens.model))
    assert 800 < one["idle_left_s"] <= 900
    assert one["rss_bytes"] > 1e6
    assert {"fingerprint", "socket", "log"} <= set(one)


def test_log_shows_the_daemon_s_output_and_its_path(vlens):
    assert vlens.run("engine", "log").code == 1
    vlens.capture("bug")
    shown = vlens.run("engine", "log", "-n", "1")
    assert (shown.code, shown.out, shown.err) == (0, "ZeroDivisionError: division by zero\n", "")
    path = vlens.run("engine", "log", "--path")
    assert path.out == f"{vlens.home.log}\n"
