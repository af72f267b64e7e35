"""Compiled mode on a processor: points in the graph against transformers, edits, other requests, and what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compare import assert_close, of_prompt, reference
from test_numbers import SHORT, spread
from test_writes import check_cases
from vlens_cli.cli import render
from vlens_cli.driver.base import LOGITS, Edit, Request, Want
from vlens_cli.driver.flow import Flow
from vlens_cli.driver.graph import limits
from vlens_cli.driver.graph.programs import Programs, steps
from vlens_cli.errors import QueryError, UsageError

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

CHUNK = 16
HOOKS = ("hook_embed", "blocks.*.hook_resid_pre", "blocks.*.hook_resid_post", "blocks.*.hook_attn_out", "blocks.*.hook_mlp_out",
         "blocks.*.attn.hook_z", "blocks.1.ln2.hook_scale", "ln_final.hook_out")
POST = "blocks.1.hook_resid_post"
LONG = spread(50, 512)


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory) -> Path:
    """A llama of two layers, at a path of this run's own: no cache of compiled code knows it."""
    from models import SMALL, write

    return write(tmp_path_factory.mktemp("compiled") / "llama", SMALL)


@pytest.fixture(scope="module")
def unhooked(two_layers, tmp_path_factory, engines) -> list[int]:
    """What plain compiled vLLM generates: it has left its graphs in the cache that every later engine of this file shares."""
    engines.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        yield plain_tokens(two_layers)
        engines.close()


def plain_tokens(folder: Path) -> list[int]:
    from vlens_cli.driver import boot
    from vlens_cli.families import catalog_for
    from vlens_cli.query import EngineSpec

    boot.prepare(compiled=True)
    from vllm import LLM, SamplingParams

    from vlens_cli.driver import internals

    internals.choose_compile_cache()
    internals.inspect_models_in_process()
    config = json.loads((folder / "config.json").read_text())
    spec = EngineSpec(os.path.realpath(folder), folder.name, chunk=CHUNK, compile_hooks=HOOKS)
    plan = boot.plan(spec, config, catalog_for(config))
    llm = LLM(**boot.engine_arguments(spec, plan) | {"additional_config": {}})
    try:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, detokenize=False)
        return list(llm.generate([{"prompt_token_ids": SHORT}], params, use_tqdm=False)[0].outputs[0].token_ids)
    finally:
        boot.shut_down(llm)


@pytest.fixture
def driver(engines, two_layers, unhooked):
    return engines.open(two_layers, chunk=CHUNK, compile_hooks=HOOKS)


def test_a_graph_without_hooks_is_not_served(driver, unhooked):
    (got,) = driver.run([Request(tuple(SHORT), {POST: Want()}, 5)])
    assert list(got.new_tokens) == unhooked and got.captured[POST].value.abs().min() > 0


def test_requests_are_in_flight_together_while_there_is_room_and_one_that_is_asked_twice_takes_it_twice(driver, monkeypatch):
    one = Request(tuple(SHORT), {POST: Want()}, 4)
    rows, edits = driver.needs(one)
    monkeypatch.setattr(type(driver), "room", (3 * rows, edits))
    flow = Flow(driver, lambda: False, lambda: None, lambda: False)
    together = []

    def step(step=driver.step):
        together.append(len(flow._flying))
        return step()

    monkeypatch.setattr(driver, "step", step)
    assert len(list(flow.run(iter([one] * 7)))) == 7
    assert max(together) == 3 and together[-1] == 1 and flow._needed == [0, 0]


def test_the_op_runs_only_where_the_tables_say_something(driver, monkeypatch):
    tables, ran = worker_of(driver)._taps.tables, set()

    def run(all_tables, site, *tensors, run=tables._run):
        ran.add(tables.sites[site].name)
        run(all_tables, site, *tensors)

    monkeypatch.setattr(tables, "_run", run)
    driver.run([Request(tuple(LONG), {POST: Want()}, 3, (Edit("blocks.0.hook_mlp_out", (4,), value=1.0),))])
    assert ran == {POST, "blocks.0.hook_mlp_out"}


def test_an_engine_step_of_nothing_does_not_begin_one(driver, monkeypatch):
    """vLLM's V2 runner forms logits in `sample_tokens`, which nobody calls after a step without rows: its last, if steps are
    scheduled ahead."""
    from vllm.v1.core.sched.output import SchedulerOutput

    request = Request(tuple(SHORT), {LOGITS: Want()}, 2, (Edit(LOGITS, (9, 10), value=2.0),))
    before = driver.run([request, request])
    worker = worker_of(driver)
    monkeypatch.setattr(worker, "_v2", True)

    def step(step=driver.step):
        found = step()
        worker.execute_model(SchedulerOutput.make_empty())
        return found

    monkeypatch.setattr(driver, "step", step)
    for was, now in zip(before, driver.run([request, request]), strict=True):
        assert torch.equal(was.captured[LOGITS].value, now.captured[LOGITS].value)


def test_requests_that_are_changed_alike_share_their_programs():
    memory = torch.zeros(100, dtype=torch.int32)
    programs, value = Programs(memory), torch.ones(4)
    steered, other = ({0: [Edit(POST, value=one)]} for one in (value, value.clone()))
    first, second = (programs.take(steered, {0: (4,)}) for _ in range(2))
    assert first is second and programs.take(other, {0: (4,)}).start == len(first.words)
    zeros = [programs.take({0: [Edit(POST, keep=0.0, value=zero)]}, {0: (4,)}) for zero in (0.0, -0.0)]
    assert zeros[0].start != zeros[1].start
    programs.give_back(first)
    assert programs.take(steered, {0: (4,)}) is first
    for _ in range(2):
        programs.give_back(first)
    moved = programs.take({0: [Edit(POST, value=2 * value)]}, {0: (4,)})
    (step,) = steps(memory, memory.view(torch.float32), moved.start + moved.programs[0][None], (1, 4))
    assert moved.start == first.start and step.value.eq(2).all()
    with pytest.raises(LookupError, match=r"edits of 412 bytes do not fit into the 400 "):
        programs.take({0: [Edit(POST, value=torch.ones(94))]}, {0: (94,)})


def test_a_graph_that_does_not_call_the_op_fails_the_query_and_the_engine_lives(driver, monkeypatch):
    request = Request(tuple(SHORT), {POST: Want()}, 3)
    (before,) = driver.run([request])
    driver._call("vlens_drop")  # and with it what was counted so far
    monkeypatch.setattr(worker_of(driver)._taps.tables, "_run", lambda *args: None)
    with pytest.raises(QueryError, match=rf"served 0 rows .* {POST} where 12 "):
        driver.run([request])
    monkeypatch.undo()
    (after,) = driver.run([request])
    assert torch.equal(before.captured[POST].value, after.captured[POST].value)


def worker_of(driver):
    return driver._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def test_every_built_point_equals_transformers_in_chunks_and_in_decode_steps(driver, two_layers):
    assert {*driver.plan.built, LOGITS} <= {*driver.supported_hook_points}
    wants = dict.fromkeys(driver.supported_hook_points, Want())
    results = driver.run([Request(tuple(p), wants, 4) for p in (SHORT, LONG)])
    assert [r.chunks for r in results] == [4, 7]
    fed = [[*p, *r.new_tokens[:-1]] for p, r in zip((SHORT, LONG), results, strict=True)]
    want = reference(two_layers, fed)
    for n, result in enumerate(results):
        assert_close({name: got.value for name, got in result.captured.items()}, of_prompt(want, n))


def test_chosen_positions_heads_and_dims_are_slices_of_the_whole(driver):
    z = "blocks.1.attn.hook_z"
    asked = {POST: Want(positions=(0, 15, 16, 51)), z: Want(positions=(17,), heads=(1, 3), dims=(0, 5))}
    whole, some = (r.captured for r in driver.run([Request(tuple(LONG), dict.fromkeys(asked, Want()), 4),
                                                   Request(tuple(LONG), asked, 4)]))
    assert torch.equal(some[POST].value, whole[POST].value[[0, 15, 16, 51]])
    assert torch.equal(some[z].value, whole[z].value[17:18, [1, 3]][..., [0, 5]])


def test_every_operation_at_every_editable_point_equals_transformers(driver, two_layers, tmp_path):
    assert {POST, LOGITS, "hook_embed", "blocks.0.attn.hook_z"}.isdisjoint(driver.non_editable_hook_points)
    check_cases(driver, two_layers, (0, 1), tmp_path)


def test_other_requests_of_a_batch_keep_their_bits(driver):
    names = [POST, "blocks.0.attn.hook_z", LOGITS]
    edit = Edit("blocks.0.hook_resid_post", None, value=torch.ones(128))

    def batch(edits):
        requests = [Request(tuple(LONG), dict.fromkeys(names, Want()), 6),
                    Request(tuple(SHORT), dict.fromkeys(names, Want()), 6, edits=edits)]
        return driver.run(requests)

    (plain, changed), (beside, edited) = batch(()), batch((edit,))
    assert plain.new_tokens == beside.new_tokens
    assert all(torch.equal(plain.captured[n].value, beside.captured[n].value) for n in names)
    assert edited.fired == (edited.chunks,)
    assert not torch.equal(changed.captured[POST].value, edited.captured[POST].value)


def test_a_generated_position_is_edited_and_those_before_it_keep_their_bits(driver):
    at, value = len(SHORT) + 2, torch.linspace(-1, 1, 128)
    (plain,) = driver.run([Request(tuple(SHORT), {POST: Want()}, 5)])
    (edited,) = driver.run([Request(tuple(SHORT), {POST: Want()}, 5, edits=(Edit(POST, (at,), keep=0.0, value=value),))])
    assert edited.fired == (1,) and torch.equal(edited.captured[POST].value[at], value)
    assert torch.equal(edited.captured[POST].value[:at], plain.captured[POST].value[:at])


def test_what_is_not_built_or_does_not_fit_is_refused_with_what_to_type(driver):
    with pytest.raises(UsageError) as missing:
        driver.run([Request(tuple(SHORT), {"blocks.0.mlp.hook_post": Want()})])
    assert "--compile-hooks 'blocks.*.mlp.hook_post'" in f"{missing.value} {missing.value.hint}"
    small, prompt = replace(driver.plan, buffer=1 << 20, chunk=1024), tuple(spread(600, 512))
    edit = Edit(POST, tuple(range(600)), value=torch.ones(600, 128))
    for request, what in ((Request(prompt, edits=(edit,)), "edits"),
                          (Request(prompt, dict.fromkeys(driver.plan.built, Want())), "captures in one forward")):
        with pytest.raises(UsageError, match=f"{what} of .* MiB do not fit into the .* MiB") as large:
            limits.check(request, driver.catalog, small)
        enough = int(re.search(r"--compile-buffer (\d+) is enough", large.value.hint)[1])
        limits.check(request, driver.catalog, replace(small, buffer=enough << 20))


def test_sleep_is_for_gpus(driver):
    with pytest.raises(UsageError, match="runs on a processor"):
        driver.sleep()


def test_memory_of_tables_and_buffers_is_stated(driver):
    tables = worker_of(driver)._taps.tables
    shown = render.engines([{"pid": 1, "model": "m", "state": "idle", "rss_bytes": 10**9, "idle_left_s": None,
                             "buffer_bytes": driver.buffer_bytes}])
    assert "1.00 GB, buffers 0.27 GB" in shown
    assert driver.buffer_bytes == tables.n_bytes and driver.plan.buffer <= tables.n_bytes < 1.1 * driver.plan.buffer


@pytest.mark.parametrize(("dtype", "labelled"), [("float32", True), ("bfloat16", False)])
def test_float32_that_is_tf32_is_labelled(two_layers, monkeypatch, dtype, labelled):
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    assert not planned(two_layers, dtype).notes
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    assert ["VLLM_FLOAT32_MATMUL_PRECISION=high" in note for note in planned(two_layers, dtype).notes] == [True] * labelled


def planned(folder: Path, dtype: str | None = None):
    from vlens_cli.driver import boot
    from vlens_cli.families import catalog_for
    from vlens_cli.query import EngineSpec

    config = json.loads((folder / "config.json").read_text())
    spec = EngineSpec(os.path.realpath(folder), folder.name, chunk=CHUNK, dtype=dtype)
    return boot.plan(spec, config, catalog_for(config))
