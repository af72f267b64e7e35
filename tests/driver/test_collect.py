"""Many prompts into a folder: every row is that of the prompt alone, whatever breaks off in between."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compare import relative_error
from engines import capture
from safetensors import safe_open
from test_numbers import spread
from vlens_cli.driver import capture as answerer
from vlens_cli.driver import collect as collector
from vlens_cli.driver import fill, outlet, session, shards
from vlens_cli.errors import PathError, PromptError, QueryError, UsageError
from vlens_cli.query import CaptureQuery, CollectQuery, EngineSpec, Interventions, Prompt

POST = "blocks.2.hook_resid_post"
RESID = [f"blocks.{i}.hook_resid_post" for i in range(4)]
PATTERN = "blocks.1.attn.hook_pattern"
# What is read, what is formed, what is rebuilt at the end, what is unembedded.
KINDS = [*RESID, "blocks.1.hook_resid_mid", "blocks.0.attn.hook_z", "ln_final.hook_scale", "blocks.3.ln1.hook_normalized",
         "blocks.1.attn.hook_result", PATTERN, "unembed.hook_out"]
LENGTHS = [5, 1, 40, 7, 16, 17, 3, 60, 2, 9, 31, 12] * 2
# Of one token the engine's own values depend on what is beside it: FACTS say by 1.5e-6.
CLOSE = 1e-5


def prompts(lengths=LENGTHS) -> list[dict]:
    return [{"tokens": [(t + 7 * n) % 500 + 3 for t in spread(length, 500)], "where": f"p.jsonl:{n + 1}", "id": f"id{n}"}
            for n, length in enumerate(lengths)]


@pytest.fixture
def opened(engines, tiny):
    """opened(variant, **spec): a session on the tests' engine."""

    def open_one(variant: str | None = None, **fields) -> session.Session:
        folder = tiny("llama", variant)
        driver = engines.open(folder, **fields)
        config = json.loads((folder / "config.json").read_text())
        one = session.Session(EngineSpec(os.path.realpath(folder), folder.name, **fields), config)
        one._driver = driver
        return one

    return open_one


def collect(one: session.Session, folder: Path, records: list[dict], *hooks: str, said: list[str] | None = None, **fields):
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryFile() as spool:
        spool.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
        spool.flush()
        query = CollectQuery(count=len(records), folder=str(folder), token="t0", hooks=hooks or (POST,), **fields)
        assert CollectQuery.from_json(json.loads(json.dumps(query.as_json()))) == query
        return one.answer(query, (said if said is not None else []).append, spool).body


def read(folder: Path) -> list[dict]:
    """Every prompt in order, {"tokens", "id", hook point: rows, "positions"}, through the index alone, which is checked."""
    index = json.loads((folder / shards.INDEX).read_text())
    total, seen, found = 0, set(), {}
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(folder / name, "pt") as file:
            about = {key: json.loads(text) for key, text in file.metadata().items()}
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            assert {key for key, at in index["weight_map"].items() if at == name} == tensors.keys()
            assert not seen & tensors.keys()
            seen |= tensors.keys()
            total += sum(t.nbytes for t in tensors.values())
            found |= _of_shard(tensors, about)
    assert total == index["metadata"]["total_size"] and index["metadata"]["n_prompts"] == len(found)
    assert list(found) == list(range(len(found))), "each prompt once, in order"
    return list(found.values())


def _of_shard(tensors: dict, about: dict) -> dict[int, dict]:
    first, n = about["prompts"][0]["prompt"], len(about["prompts"])
    run = f"{first}:{first + n}/"

    def rows(t, offsets, k):
        return t[offsets[k] : offsets[k + 1]]

    found = {}
    for k, prompt in enumerate(about["prompts"]):
        one = {"id": prompt.get("id"), "text": prompt["text"],
               "tokens": rows(tensors[run + "tokens"], tensors[run + "token_offsets"], k).tolist()}
        for name in about["axes"]:
            if f"{first + k}/{name}" in tensors:
                one[name] = tensors[f"{first + k}/{name}"]
            elif about["reduce"]:
                one[name] = tensors[run + name][k : k + 1]
            else:
                own = f"{run}{name}." if f"{run}{name}.offsets" in tensors else run
                one[name] = rows(tensors[run + name], tensors[own + "offsets"], k)
                one[f"positions of {name}"] = rows(tensors[own + "positions"], tensors[own + "offsets"], k).tolist()
        found[prompt["prompt"]] = one
    return found


def alone(one: session.Session, record: dict, names=(POST,), **want) -> dict[str, torch.Tensor]:
    return capture(one._driver, [record["tokens"]], list(names), **want)[0]


@pytest.mark.parametrize("fields", [{}, {"chunk": 16}], ids=["whole", "chunks"])
def test_every_row_is_that_of_the_prompt_alone(opened, tmp_path, fields):
    one, records, said = opened(**fields), prompts(), []
    body = collect(one, tmp_path / "out", records, *KINDS, shard_bytes=800_000, said=said)
    assert len(body["shards"]) > 3 and not list((tmp_path / "out").glob(".*"))
    (note,) = [text for text in said if text.startswith("note:")]
    assert "24 prompts of 406 tokens" in note and "MB to write" in note
    got = read(tmp_path / "out")
    assert [(g["tokens"], g["id"]) for g in got] == [(r["tokens"], r["id"]) for r in records]
    for record, mine in zip(records, got, strict=True):
        for name, want in alone(one, record, KINDS).items():
            assert relative_error(mine[name], want) < CLOSE, (name, len(record["tokens"]))
        assert mine[f"positions of {POST}"] == list(range(len(record["tokens"])))
    assert one._driver._call("vlens_state") == {"requests": 0, "hooks": 0}


@pytest.mark.parametrize("how", ["mean", "last", "max", "norm"])
def test_reductions_are_over_the_asked_positions(opened, tmp_path, how):
    one, records = opened(chunk=16), prompts()
    names = [POST, "blocks.0.attn.hook_z", "unembed.hook_out", "blocks.1.attn.hook_result"]
    collect(one, tmp_path / "out", records, *names, reduce=how)
    over = {"mean": lambda t: t.mean(0), "last": lambda t: t[-1], "max": lambda t: t.amax(0), "norm": lambda t: t.norm(dim=0)}
    for record, mine in zip(records, read(tmp_path / "out"), strict=True):
        for name, want in alone(one, record, names).items():
            assert mine[name].shape == (1, *want.shape[1:]) and relative_error(mine[name][0], over[how](want)) < CLOSE
    body = one.answer(CaptureQuery((Prompt(tokens=tuple(records[2]["tokens"])),), (POST,), pos="3:30", reduce=how),
                      lambda text: None).body
    (row,) = body["prompts"][0]["hooks"][POST]["rows"]
    want = over[how](alone(one, records[2])[POST][3:30])
    assert row["pos"] == (29 if how == "last" else how) and row["norm"] == pytest.approx(float(want.norm()), rel=1e-5)


def test_hooks_with_positions_of_their_own_have_offsets_of_their_own(opened, tmp_path):
    one, records = opened(chunk=16), prompts([40, 33, 38])
    collect(one, tmp_path / "out", records, POST, f"{RESID[0]}[pos=-1,2]", "blocks.1.attn.hook_z[head=1][pos=5:25]", pos="1:4")
    for record, mine in zip(records, read(tmp_path / "out"), strict=True):
        last = len(record["tokens"]) - 1
        for name, at in ((POST, [1, 2, 3]), (RESID[0], [2, last]), ("blocks.1.attn.hook_z", list(range(5, 25)))):
            want = alone(one, record, [name])[name][at]
            assert mine[f"positions of {name}"] == at
            assert torch.equal(mine[name], want[:, [1]] if name.endswith("hook_z") else want)


def test_what_is_written_can_be_narrower(opened, tmp_path):
    one, records = opened(), prompts([9, 30])
    collect(one, tmp_path / "out", records, save_dtype="bfloat16")
    for record, mine in zip(records, read(tmp_path / "out"), strict=True):
        assert torch.equal(mine[POST], alone(one, record)[POST].bfloat16())


def test_what_a_dtype_does_not_hold_is_refused(opened, tmp_path, monkeypatch):
    one, records = opened(), prompts([9, 30])
    large = Interventions((f"{POST}[pos=4][dim=7] = 65520",))
    with pytest.raises(QueryError, match=f"{POST} has values that float16 does not hold: beyond 65504"):
        collect(one, tmp_path / "out", records, interventions=large, save_dtype="float16")
    assert not list((tmp_path / "out").iterdir())
    collect(one, tmp_path / "out", records, interventions=large, save_dtype="bfloat16")
    assert read(tmp_path / "out")[0][POST][4, 7] == 65536
    query = CaptureQuery(tuple(Prompt(tokens=tuple(r["tokens"])) for r in records), (POST,), interventions=large,
                         save_dtype="float16")
    for rows in (10**6, 0):
        monkeypatch.setattr(answerer, "ROWS_BESIDE_FILE", rows)
        with tempfile.TemporaryFile() as file, pytest.raises(QueryError, match="float16 does not hold"):
            one.answer(query, lambda text: None, file)
    # The largest number that there is, and what is infinite by itself.
    for value in ("65504", "inf"):
        edits = Interventions((f"{POST}[pos=4][dim=7] = {value}",), allow_nan=True)
        collect(one, tmp_path / value, records, interventions=edits, save_dtype="float16")
        assert read(tmp_path / value)[0][POST][4, 7] == float(value)


def test_interventions_hold_in_every_prompt(opened, tmp_path):
    one, records = opened("tokenizer"), prompts([9, 9, 9])
    edits = Interventions(("blocks.1.hook_resid_post[pos=2] = @source", "blocks.0.hook_mlp_out *= 0.5",
                           "blocks.3.ln1.hook_normalized[pos=1] = 0"),
                          (Prompt(tokens=tuple(records[1]["tokens"])),))
    names = (POST, "blocks.3.ln1.hook_normalized", "blocks.3.hook_resid_post")
    collect(one, tmp_path / "out", records, *names, interventions=edits, shard_bytes=1)
    for record, mine in zip(records, read(tmp_path / "out"), strict=True):
        query = CaptureQuery((Prompt(tokens=tuple(record["tokens"])),), names, values=True, interventions=edits)
        hooks = one.answer(query, lambda text: None).body["prompts"][0]["hooks"]
        for name in names:
            want = torch.tensor([row["values"] for row in hooks[name]["rows"]])
            assert relative_error(mine[name], want) < CLOSE


@pytest.fixture
def small_steps(monkeypatch):
    """A few prompts in flight, however fast the model is."""
    monkeypatch.setattr("vlens_cli.driver.flow.LEAST_ROWS", 64)
    monkeypatch.setattr("vlens_cli.driver.flow.SECONDS", 0)


def broken_off_after(one: session.Session, n: int, monkeypatch) -> None:
    steps = []
    monkeypatch.setattr(one._driver, "step", lambda step=one._driver.step: (steps.append(1), step())[1])
    one.watch(lambda: len(steps) >= n, lambda: None, lambda: False)


def unwatched(one: session.Session) -> None:
    one.watch(lambda: False, lambda: None, lambda: False)


def test_no_prompt_is_cut_in_two_by_those_beside_it(opened, tmp_path):
    one, records = opened(chunk=64), prompts([40, 30, 33, 31, 64, 2, 62, 7, 9, 100, 25] * 3)
    ended = []
    stream = one.stream
    one.stream = lambda *args: (ended.append(pair[1].chunks) or pair for pair in stream(*args))
    collect(one, tmp_path / "out", records, *RESID)
    assert sorted(ended) == [1] * 30 + [2] * 3
    for record, mine in zip(records, read(tmp_path / "out"), strict=True):
        for name, want in alone(one, record, RESID).items():
            assert torch.equal(mine[name], want), (name, len(record["tokens"]))


def test_broken_off_and_resumed_it_is_what_an_unbroken_run_gives(opened, tmp_path, monkeypatch, small_steps):
    one, records = opened(chunk=64), prompts()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    collect(one, whole, records, *RESID, shard_bytes=100_000)
    broken_off_after(one, 5, monkeypatch)
    with pytest.raises(QueryError) as caught:
        collect(one, broken, records, *RESID, shard_bytes=100_000)
    unwatched(one)
    assert caught.value.code == "cancelled"
    there = sorted(path.name for path in broken.iterdir())
    assert there and len(there) < len(list(whole.iterdir())) - 1 and shards.INDEX not in there
    assert all((broken / name).read_bytes() == (whole / name).read_bytes() for name in there)
    (broken / f".capture-00009-of-00009.safetensors.dead{shards.DRAFT_END}").write_text("left by a kill")
    run = []
    monkeypatch.setattr(one._driver, "submit", lambda key, request, do=one._driver.submit: (run.append(request), do(key, request)))
    body = collect(one, broken, records, *RESID, shard_bytes=100_000, resume=True)
    assert len(run) == len(records) - body["n_resumed"] and 0 < body["n_resumed"] < len(records)
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()}
    run.clear()
    assert collect(one, broken, records, *RESID, shard_bytes=100_000, resume=True)["n_resumed"] == len(records) and not run


def test_a_folder_that_holds_another_capture_is_not_gone_on_with(opened, tmp_path):
    one, records, out = opened(), prompts([5, 9]), tmp_path / "out"
    collect(one, out, records)
    with pytest.raises(PathError, match="already holds a capture") as caught:
        collect(one, out, records)
    assert "--resume" in caught.value.hint
    for what, change in (("hooks", {"hooks": [RESID[0]]}), ("reduce", {"reduce": "mean"}), ("written_as", {"save_dtype": "float16"}),
                         ("prompts", {"records": prompts([5, 8])}), ("shard_size", {"shard_bytes": 10})):
        asked = {"records": records, "hooks": [POST]} | change
        with pytest.raises(UsageError, match=f"another query: .*{what}"):
            collect(one, out, asked.pop("records"), *asked.pop("hooks"), resume=True, **asked)
    with shards.Folder(str(out), "other"), pytest.raises(PathError, match="another capture is writing"):
        collect(one, out, records, resume=True)


def test_what_has_a_shards_name_is_not_written_over(opened, tmp_path):
    one, records, out = opened(), prompts([5, 9]), tmp_path / "out"
    out.mkdir()
    name = "capture-00001-of-00001.safetensors"
    (out / name).write_text("no shard")
    with pytest.raises(PathError, match="already holds a capture"):
        collect(one, out, records)
    assert (out / name).read_text() == "no shard"
    (out / name).unlink()
    (out / name).mkdir()
    with pytest.raises(QueryError, match="Is a directory") as caught:
        collect(one, out, records, resume=True)
    assert "make room" not in caught.value.hint and [path.name for path in out.iterdir()] == [name]


def test_a_bad_prompt_in_the_middle_is_named_before_anything_runs_or_left_out(opened, tmp_path, monkeypatch):
    one, records = opened(), prompts([5, 9, 12])
    records[1] = {"tokens": list(range(3, 203)) * 3, "where": "p.jsonl:2"}
    monkeypatch.setattr(one, "stream", lambda *args: pytest.fail("something ran"))
    with pytest.raises(PromptError) as caught:
        collect(one, tmp_path / "out", records)
    assert caught.value.message.startswith("p.jsonl:2: a prompt of 600 tokens is longer")
    with pytest.raises(UsageError) as caught:
        collect(one, tmp_path / "out", prompts([5, 9]), pos="7")
    assert caught.value.message.startswith("p.jsonl:1: there is no position 7")
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.undo()
    body = collect(one, tmp_path / "out", records, skip_bad=True)
    assert body["n_prompts"] == 2 and body["skipped"][0]["where"] == "p.jsonl:2" and "600 tokens" in body["skipped"][0]["reason"]
    assert [one["id"] for one in read(tmp_path / "out")] == ["id0", "id2"]


@pytest.mark.parametrize(("most", "free", "says"), [(1000, 10**9, "--max-bytes allows 1.0 kB"), (None, 2000, "2.0 kB are free")])
def test_what_does_not_fit_is_refused_before_the_engine(opened, tmp_path, monkeypatch, most, free, says):
    one = opened()
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
    monkeypatch.setattr(one, "driver", lambda progress: pytest.fail("an engine was asked"))
    with pytest.raises(UsageError, match=f"takes 7.2 kB, and {says}"):
        collect(one, tmp_path / "out", prompts([9, 5]), max_bytes=most)


@pytest.mark.parametrize("what", ["the prompts", "the offsets", "the index"])
def test_a_disk_that_is_full_at_another_moment(opened, tmp_path, monkeypatch, what):
    one, records = opened(), prompts([5, 9])

    def full(*args, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where = {"the prompts": (collector.Collection, "_take_in"), "the offsets": (shards.os, "pwrite"),
             "the index": (shards.Folder, "write_index")}[what]
    monkeypatch.setattr(*where, full)
    with pytest.raises(QueryError) as caught:
        collect(one, tmp_path / "out", records)
    monkeypatch.undo()
    assert caught.value.message == f"this folder could not be written, No space left on device: {tmp_path / 'out'}"
    assert caught.value.hint == "make room; --resume goes on with what is finished"
    assert not list((tmp_path / "out").glob(".*"))
    assert collect(one, tmp_path / "out", records, resume=True)["n_resumed"] == (2 if what == "the index" else 0)


def test_a_full_disk_leaves_nothing_half_written(opened, tmp_path, monkeypatch):
    one, records = opened(), prompts()
    written = []

    def full(file, buffers, offset, write=os.pwritev):
        written.append(sum(map(len, buffers)))
        if sum(written) > 150_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(QueryError) as caught:
        collect(one, tmp_path / "out", records, *RESID, shard_bytes=60_000)
    monkeypatch.undo()
    assert caught.value.code == "output_failed" and f"No space left on device: {tmp_path}" in caught.value.message
    there = list((tmp_path / "out").iterdir())
    assert all(shards.header_of(path) for path in there)
    collect(one, tmp_path / "out", records, *RESID, shard_bytes=60_000, resume=True)
    assert len(read(tmp_path / "out")) == len(records)


def test_rows_that_did_not_come_are_an_error(opened, tmp_path, monkeypatch):
    one = opened()
    monkeypatch.setattr(outlet.Outlet, "keep", lambda *args: None)
    with pytest.raises(QueryError, match=f"{POST} gave 0 rows where 5 were asked"):
        collect(one, tmp_path / "out", prompts([5]))
    assert not list((tmp_path / "out").iterdir())


def test_a_forward_waits_for_the_disk(opened, tmp_path, monkeypatch):
    one, held = opened(), []
    monkeypatch.setattr(outlet, "MOST_QUEUED", 40_000)

    def watched(self, name, value, places, send=outlet.Outlet._send):
        send(self, name, value, places)
        held.append(self._queued)

    monkeypatch.setattr(outlet.Outlet, "_send", watched)
    collect(one, tmp_path / "out", prompts([60] * 20), *RESID)
    largest = max(held)
    assert 0 < largest <= max(40_000, 60 * 20 * 128 * 4) and len(held) >= 8


def test_others_are_let_in_with_nothing_in_flight(opened, tmp_path, small_steps):
    one, states = opened(chunk=64), []

    def between() -> None:
        states.append(one._driver._call("vlens_state")["requests"])
        one._driver.run([])

    one.watch(lambda: False, between, lambda: len(states) < 3)
    collect(one, tmp_path / "out", prompts())
    unwatched(one)
    # Reading the prompts lets others in too, by the clock.
    assert len(states) >= 3 and not any(states)
    assert len(read(tmp_path / "out")) == len(LENGTHS)


def test_one_large_file_is_what_a_small_one_would_be(opened, tmp_path, monkeypatch):
    one = opened(chunk=16)
    query = CaptureQuery(tuple(Prompt(tokens=tuple(r["tokens"])) for r in prompts([5, 40, 17])), tuple(KINDS))

    def written(rows: int) -> tuple[dict, dict]:
        monkeypatch.setattr(answerer, "ROWS_BESIDE_FILE", rows)
        path = tmp_path / f"{rows}.safetensors"
        with path.open("w+b") as file:
            reply = one.answer(query, lambda text: None, file)
            file.flush()
        assert reply.saved == (len(KINDS) * 3, path.stat().st_size)
        with safe_open(path, "pt") as found:
            return {key: found.get_tensor(key) for key in found.keys()}, found.metadata()

    small, large = written(10**6), written(0)
    assert small[1] == large[1] and small[0].keys() == large[0].keys()
    for key, value in small[0].items():
        assert large[0][key].dtype == value.dtype and relative_error(large[0][key], value) < CLOSE, key


def test_a_prompt_is_never_cut_and_a_shard_never_empty():
    sizes = [(50, 1, 1), (50, 1, 1), (1, 1, 1), (500, 1, 1), (10, 1, 1)]
    assert shards.cut(sizes, 100) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert shards.cut([(0, shards.SHARD_TOKENS, 0)] * 3, 100) == [(0, 1), (1, 2), (2, 3)]
    assert shards.cut([], 100) == [] and shards.cut([(1, 1, 1)], 100) == [(0, 1)]


def test_progress_says_how_far_and_how_long(monkeypatch):
    said, now = [], iter([0.0, 1.0, 1.2, 4.0])
    monkeypatch.setattr(fill.time, "monotonic", lambda: next(now))
    tally = fill.Tally(said.append, 4, 400)
    for _ in range(3):
        tally.add(100)
    assert said == ["running [######..................] 1 of 4 prompts, 100 tokens/s, 0:03 left",
                    "running [##################......] 3 of 4 prompts, 75 tokens/s, 0:01 left"]
