"""Several ranks, in processes of their own: whatever one rank answers, they answer too."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from compare import assert_close, logit_error, of_prompt, reference, relative_error
from engines import capture
from safetensors.torch import load
from test_numbers import SHORT, spread
from test_weights import check_bits
from test_writes import cases_of, run_cases
from vlens_cli import families
from vlens_cli.driver import boot
from vlens_cli.driver.base import LOGITS, Request, Want
from vlens_cli.driver.session import Session
from vlens_cli.errors import QueryError, StartError, UsageError
from vlens_cli.query import EngineSpec, Interventions, LogitsQuery, PatchQuery, Prompt

LIMIT = 1e-5
PROMPTS = [SHORT, spread(40, 512)]
EDITED = SHORT[:8] + [5, 6]
TP, PP, BOTH = {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}


def name_of(ranks: dict[str, int]) -> str:
    return " ".join(f"{key}{value}" for key, value in ranks.items()) or "one"


def session(engines, folder: Path, **ranks: int) -> Session:
    config = json.loads((folder / "config.json").read_text())
    one = Session(EngineSpec(model=os.path.realpath(folder), name=folder.name, **ranks), config)
    one.driver = lambda progress: engines.open(folder, **ranks)
    return one


def answers(engines, folder: Path, **ranks: int) -> dict[str, torch.Tensor]:
    """Numbers of every kind that an engine gives, by what they are."""
    driver = engines.open(folder, **ranks)
    found = {f"{p}: {name}": value for p, got in enumerate(capture(driver, PROMPTS)) for name, value in got.items()}
    cases = cases_of(driver, (0, 3), torch.Generator().manual_seed(1), EDITED)
    for n, result in enumerate(run_cases(driver, EDITED, cases)):
        found |= {f"edit {n}: {name}": got.value for name, got in result.captured.items()}
    request = Request(tuple(SHORT), {LOGITS: Want(), "blocks.2.hook_resid_post": Want()}, max_new_tokens=4)
    (result,) = driver.run([request])
    found |= {f"generated: {name}": got.value for name, got in result.captured.items()}
    return found | asked(session(engines, folder, **ranks))


def asked(one: Session) -> dict[str, torch.Tensor]:
    """The same of commands: lens, attribution, a sweep."""
    into, prompt = io.BytesIO(), Prompt(tokens=tuple(SHORT))
    query = LogitsQuery((prompt,), lens=("blocks.*.hook_resid_post",), attribution=True, diff=("#5", "#9"), loss=True)
    body = one.answer(query, lambda text: None, into).body
    found = {f"logits {name}": value for name, value in load(into.getvalue()).items()}
    found["loss"] = torch.tensor(body["prompts"][0]["loss"]["per_token"][1:])
    edits, axes = Interventions((), (Prompt(tokens=tuple(EDITED)),)), ("layer", "pos")
    body = one.answer(PatchQuery((prompt,), edits, hooks=("blocks.*.hook_resid_post",), sweep=axes, targets=("#5", "#9")),
                      lambda text: None, None).body
    return found | {"sweep": torch.tensor(body["sweep"]["grid"])}


def differences(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> list[str]:
    assert want.keys() == got.keys()
    errors = {what: logit_error(got[what], value) if LOGITS in what else relative_error(got[what], value)
              for what, value in want.items() if what != "sweep"}
    # The difference of two logits is known as well as logits are.
    errors["sweep"] = float((got["sweep"] - want["sweep"]).abs().max() / want[f"0: {LOGITS}"].abs().max())
    return [f"{what}: {error:.1e}" for what, error in errors.items() if not error <= LIMIT]


@pytest.mark.parametrize("ranks", [TP, PP], ids=name_of)
def test_ranks_answer_as_one_does(engines, tiny, ranks):
    folder = tiny("llama")
    want = answers(engines, folder)
    assert differences(want, answers(engines, folder, **ranks)) == []
    driver = engines.open(folder, **ranks)
    assert driver.non_fireable_hook_points == {}
    for p, got in enumerate(capture(driver, PROMPTS)):
        assert_close(got, of_prompt(reference(folder, PROMPTS), p))
    assert check_bits(driver, folder)["checkpoint"] > 30


def test_a_kv_head_that_every_rank_holds_is_taken_once(engines, tiny):
    folder = tiny("llama", "one_kv")
    want = answers(engines, folder)
    assert differences(want, answers(engines, folder, **TP)) == []
    driver = engines.open(folder, **TP)
    assert driver.catalog.dims.n_kv_heads == 1 and driver.non_fireable_hook_points == {}
    check_bits(driver, folder)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [TP, PP], ids=name_of)
@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name != "llama"])
def test_every_family_on_ranks(engines, tiny, family, ranks):
    folder = tiny(family)
    want = answers(engines, folder)
    alone = engines.open(folder).non_fireable_hook_points
    assert differences(want, answers(engines, folder, **ranks)) == []
    assert engines.open(folder, **ranks).non_fireable_hook_points == alone
    check_bits(engines.open(folder, **ranks), folder)


@pytest.mark.slow
def test_both_kinds_of_ranks_at_once(engines, tiny):
    folder = tiny("llama")
    want = answers(engines, folder)
    assert differences(want, answers(engines, folder, **BOTH)) == []
    check_bits(engines.open(folder, **BOTH), folder)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("worker, told", [
    pytest.param("OtherReplica", r"blocks\.1\.ln2\.hook_out is off by .* on tensor-parallel rank 1", marks=SLOW),
    ("MissingPart", r"rank \d reads blocks\.1\.attn\.hook_\w where rank \d reads blocks\.1\.attn\.hook_\w"),
    pytest.param("MissingReplica", r"blocks\.2\.hook_mlp_out never fired on tensor-parallel rank 1", marks=SLOW),
    pytest.param("Reversed", r"blocks\.0\.attn\.hook_\w+ is joined in another order than that of its ranks", marks=SLOW),
    pytest.param("OtherShards", r"blocks\.0\.attn\.W_Q, joined over the ranks, is not the checkpoint's", marks=SLOW),
])
def test_a_rank_that_is_not_as_expected_is_an_error_at_the_start(engines, tiny, monkeypatch, worker, told):
    monkeypatch.setattr("vlens_cli.driver.boot.WORKER", f"faulty_workers.{worker}")
    engines.close()
    with pytest.raises(StartError, match=told):
        engines.open(tiny("llama"), chunk=512, **TP)


@pytest.mark.slow
def test_a_tap_that_fails_on_one_rank_fails_the_query_and_the_next_is_answered(engines, tiny, monkeypatch):
    monkeypatch.setattr("vlens_cli.driver.boot.WORKER", "faulty_workers.FailsAtSeven")
    engines.close()
    driver = engines.open(tiny("llama"), chunk=256, **TP)
    names = ["blocks.1.hook_resid_post", "unembed.hook_out"]
    with pytest.raises(QueryError, match="LookupError: seven"):
        capture(driver, [SHORT[:7]], names)
    (got,) = capture(driver, [SHORT[:6]], names)
    assert got["unembed.hook_out"].shape == (6, 512)
    engines.close()


def test_what_a_rank_on_another_machine_gives_comes_through_rank_0(engines, tiny):
    folder = tiny("llama")
    (want,) = capture(engines.open(folder, **PP), [SHORT])
    workers = engines.open(folder, **PP)._workers
    assert (workers._told, workers._relayed) == (False, ())
    workers._told, workers._relayed = True, (1,)
    (got,) = capture(engines.open(folder, **PP), [SHORT])
    workers._told, workers._relayed = False, ()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_processors_that_ranks_were_given_are_not_those_of_the_next_engine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    bound = []
    for ranks in (2, 8, 1):
        boot.prepare(ranks=ranks)
        bound.append(os.environ.get("VLLM_CPU_OMP_THREADS_BIND"))
    assert bound == ["0,1|2,5", "nobind", None]


def test_ranks_that_a_model_cannot_be_spread_over_are_refused_before_any_starts(tiny):
    folder = tiny("llama")
    for ranks, told in [({"tp": 3}, "does not divide this model's 4 query heads"), ({"pp": 9}, "more than this model's 4 layers"),
                        ({"tp": 2, "compile_hooks": ("hook_embed",)}, "compiled mode runs on one rank")]:
        with pytest.raises(UsageError, match=told):
            Session(EngineSpec(str(folder), "llama", **ranks), json.loads((folder / "config.json").read_text()))


def test_ray_that_is_not_installed_is_said_before_any_starts(tiny, monkeypatch):
    folder = tiny("llama")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="needs the package ray, which is not installed") as told:
        Session(EngineSpec(str(folder), "llama", tp=2, executor="ray"), json.loads((folder / "config.json").read_text()))
    assert told.value.code == "no_ray" and "--executor mp" in told.value.hint


def test_a_query_that_fails_leaves_ranks_that_answer_the_next(engines, tiny):
    driver = engines.open(tiny("llama"), **PP)
    (want,) = capture(driver, [SHORT])
    take = driver._workers.call
    driver._workers.call = lambda method, *args: take("vlens_no_such" if method == "vlens_take" else method, *args)
    with pytest.raises(QueryError, match="a rank of the engine failed: AttributeError"):
        capture(driver, [SHORT])
    driver._workers.call = take
    (got,) = capture(driver, [SHORT])
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert {tuple(stage.values()) for stage in driver._workers.call("vlens_state")} == {(0, 0)}
