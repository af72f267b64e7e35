"""Edits against transformers with hooks that do the same, and what an edit must leave alone."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from compare import REFERENCES, logit_error, relative_error
from safetensors.torch import load_file, save_file
from test_numbers import mended
from vlens_cli import families
from vlens_cli.driver.base import LOGITS, Edit, Request, Want
from vlens_cli.errors import UsageError

PROMPT = [3, 17, 256, 99, 4, 500, 31, 8, 77, 120]
POST = "blocks.1.hook_resid_post"


def width(driver, name: str) -> list[int]:
    return [driver.catalog.size(axis) for axis in driver.catalog.axes(name)[1:]]


def cases_of(driver, layers, generator, tokens) -> list[tuple[Edit, ...]]:
    """Every operation at every editable point of some layers, on parts of the value and on all of it. Noise is as large
    as the values there: much more makes a model so chaotic that float32 itself is far off."""
    found: list[tuple[Edit, ...]] = []
    (own,) = driver.run([Request(tuple(tokens), dict.fromkeys(driver.supported_hook_points, Want()))])
    names = [n for n in driver.supported_hook_points if driver.catalog.editable(n) and driver.catalog.layer(n) in (None, *layers)]
    # Where only a part of each head turns, transformers has no tensor of the whole that its forward goes on with.
    partly = driver.catalog.family in ("stablelm", "glm4")
    for name in (n for n in names if not (partly and "hook_rot_" in n)):
        shape = width(driver, name)
        some = tuple(range(0, shape[-1], 3))
        heads = (shape[0] - 1,) if len(shape) > 1 else None
        row = [1, len(some)] if heads else [len(some)]

        rms = own.captured[name].value.square().mean().sqrt()

        def noise(*size, scale=rms):
            return scale * torch.randn(size, generator=generator)

        found += [
            (Edit(name, (2, 5, 9), heads, some, keep=0.0, value=noise(3, *row)),),
            (Edit(name, None, keep=1.0, value=noise(*shape, scale=0.3 * rms)),),
            (Edit(name, (4,), heads, None, keep=-0.5),),
            (Edit(name, None, None, None, direction=noise(shape[-1]), along=-1.0),
             Edit(name, (7,), None, some, keep=2.0, value=0.25)),
        ]
    return found


def by_transformers(folder, tokens, cases, work: Path, fp64: bool) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {"none": torch.zeros(1)}

    def part(value, key):
        if isinstance(value, torch.Tensor):
            tensors[key] = value.contiguous()
            return key
        return value

    written = [[{f.name: part(getattr(edit, f.name), f"{n}/{m}/{f.name}") for f in fields(edit)}
                for m, edit in enumerate(case)] for n, case in enumerate(cases)]
    save_file(tensors, work / "edits.safetensors")
    REFERENCES.ask("edits", folder=str(folder), tokens=tokens, edits=str(work / "edits.safetensors"), cases=written,
                   out=str(work / "out.safetensors"), fp64=fp64)
    return load_file(work / "out.safetensors")


def run_cases(driver, tokens, cases):
    requests = [Request(tuple(tokens), dict.fromkeys([LOGITS, *(e.name for e in case)], Want()), edits=case) for case in cases]
    return driver.run(requests)


def check_cases(driver, folder, layers, work, tokens=PROMPT, fp64=False) -> None:
    """Within 1e-5; logits also within four times what float32 itself costs the reference, where that is known."""
    cases = cases_of(driver, layers, torch.Generator().manual_seed(1), tokens)
    want = by_transformers(folder, tokens, cases, work, fp64)
    faults = []
    for n, (case, result) in enumerate(zip(cases, run_cases(driver, tokens, cases), strict=True)):
        allowed = max(1e-5, 4 * logit_error(want[f"logits/{n}"], want[f"exact/{n}"])) if fp64 else 1e-5
        errors = {"logits": logit_error(result.captured[LOGITS].value, want[f"logits/{n}"]),
                  **{e.name: relative_error(result.captured[e.name].value, want[f"got/{n}/{e.name}"]) for e in case}}
        faults += [f"{case[0].name} case {n % 4}: {what} {error:.1e}" for what, error in errors.items() if not error <= (allowed if what == "logits" else 1e-5)]
    assert not faults, f"{len(faults)} of {len(cases)}:\n" + "\n".join(faults[:30])


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_operation_at_every_editable_point_equals_transformers(engines, tiny, family, tmp_path):
    folder = tiny(family)
    with mended(engines, folder, family) as driver:
        assert not [n for n in driver.supported_hook_points if driver.catalog.editable(n) and n in driver.non_editable_hook_points]
        check_cases(driver, folder, (0, 3), tmp_path)


def test_every_operation_at_every_editable_point_of_the_demo_model(engines, demo_model, tmp_path):
    driver = engines.open(demo_model)
    assert not [n for n in driver.non_editable_hook_points if driver.catalog.editable(n)]
    text = [504, 414, 46682, 18669, 314, 3807, 281, 260, 2240, 282]
    check_cases(driver, demo_model, (0, 29), tmp_path, text, fp64=True)


def plain(driver, names=(LOGITS, POST), tokens=PROMPT, **more) -> Request:
    return Request(tuple(tokens), dict.fromkeys(names, Want()), **more)


def same(one, other) -> bool:
    return one.new_tokens == other.new_tokens and all(
        torch.equal(one.captured[name].value, other.captured[name].value) for name in one.captured)


def test_an_edit_that_changes_nothing_fires_and_leaves_every_bit(engines, tiny):
    driver = engines.open(tiny("llama"))
    (want,) = driver.run([plain(driver)])
    names = [n for n in driver.supported_hook_points if driver.catalog.editable(n) and driver.catalog.layer(n) in (None, 1)]
    for edit in (Edit("", keep=1.0), Edit("", value=0.0)):
        requests = [plain(driver, edits=(Edit(n, keep=edit.keep, value=edit.value),)) for n in names]
        for name, got in zip(names, driver.run(requests), strict=True):
            assert got.fired == (1,) and same(got, want), name


def test_a_run_patched_with_its_own_values_is_itself(engines, tiny):
    driver = engines.open(tiny("llama"))
    names = [n for n in driver.supported_hook_points if driver.catalog.editable(n) and driver.catalog.layer(n) in (None, 2)]
    (own,) = driver.run([plain(driver, driver.supported_hook_points)])
    places = (1, 4, 9)
    requests = [plain(driver, edits=(Edit(n, places, keep=0.0, value=own.captured[n].value[list(places)]),)) for n in names]
    for name, got in zip(names, driver.run(requests), strict=True):
        assert logit_error(got.captured[LOGITS].value, own.captured[LOGITS].value) < 1e-5, name


def test_rows_heads_and_columns_that_are_not_selected_keep_their_bits_at_that_point(engines, tiny):
    driver = engines.open(tiny("llama"))
    for name in ("blocks.1.hook_resid_post", "blocks.1.attn.hook_z", "blocks.1.attn.hook_q", "blocks.1.ln2.hook_normalized",
                 "blocks.1.hook_resid_mid"):
        heads = (1,) if len(width(driver, name)) > 1 else None
        edit = Edit(name, (4, 6), heads, (0, 7), keep=3.0, value=1.0)
        before, after = (r.captured[name].value for r in driver.run(
            [plain(driver, [name]), plain(driver, [name], edits=(edit,))]))
        touched = torch.zeros_like(before, dtype=torch.bool)
        index = [[4, 6], *([[1]] if heads else []), [0, 7]]
        touched[torch.meshgrid(*map(torch.tensor, index), indexing="ij")] = True
        assert torch.equal(after[~touched], before[~touched]), name
        assert torch.allclose(after[touched], 3 * before[touched] + 1, rtol=1e-6), name


def test_another_request_of_the_batch_is_bitwise_what_it_is_without_the_edit(engines, tiny):
    driver = engines.open(tiny("llama"))
    edits = (Edit(POST, None, value=torch.ones(128)), Edit("blocks.0.attn.hook_z", (3,), (1,), keep=0.0))
    other = [200, 3, 17, 44, 90]
    for first in (True, False):
        def batch(edits):
            both = [plain(driver, tokens=other, max_new_tokens=20, edits=edits), plain(driver, max_new_tokens=20)]
            return driver.run(both if first else both[::-1])

        changed, untouched = batch(edits), batch(())
        mine, theirs = (1, 0) if first else (0, 1)
        assert same(changed[mine], untouched[mine])
        assert not same(changed[theirs], untouched[theirs])
        (alone,) = driver.run([plain(driver, max_new_tokens=20)])
        assert logit_error(changed[mine].captured[LOGITS].value, alone.captured[LOGITS].value) < 1e-5


def test_after_an_edited_run_the_same_prompt_is_bitwise_unchanged(engines, tiny):
    driver = engines.open(tiny("llama"))
    (before,) = driver.run([plain(driver)])
    driver.run([plain(driver, edits=(Edit("blocks.0.attn.hook_k", keep=-1.0), Edit("hook_embed", keep=2.0)))])
    (after,) = driver.run([plain(driver)])
    assert same(before, after)
    assert driver._call("vlens_state") == {"requests": 0, "hooks": 0}


def test_rows_go_to_their_positions_in_whatever_order_these_are_given(engines, tiny):
    driver = engines.open(tiny("llama"))
    order, value = (2, 4, 3, 5), torch.arange(4.0)[:, None].expand(4, 128)
    (got,) = driver.run([plain(driver, edits=(Edit(POST, order, keep=0.0, value=value),))])
    assert torch.equal(got.captured[POST].value[list(order)], value)


def test_a_later_set_wins_and_the_order_counts(engines, tiny):
    driver = engines.open(tiny("llama"))
    one, two = torch.ones(128), torch.arange(128.0)
    (got,) = driver.run([plain(driver, edits=(Edit(POST, (3,), keep=0.0, value=one), Edit(POST, (3,), keep=0.0, value=two),
                                              Edit(POST, (3,), keep=2.0)))])
    assert torch.equal(got.captured[POST].value[3], 2 * two)


@pytest.mark.parametrize("edit, said", [
    (Edit(POST, (10,)), "positions 0 to 9"),
    (Edit("blocks.0.attn.hook_k", None, (2,)), "heads 0 to 1"),
    (Edit(POST, None, None, (128,)), "dims 0 to 127"),
    (Edit(POST, None, (0,)), "no heads"),
    (Edit(POST, (1, 2), value=torch.ones(100)), r"\[128\].*\[100\]"),
    (Edit(POST, (1, 2), value=torch.ones(3, 128)), r"\[2, 128\].*\[3, 128\]"),
    (Edit(POST, direction=torch.ones(64), along=1.0), "128 numbers"),
    (Edit(POST, None, value=torch.ones(1, 128)), r"\[10, 128\].*\[1, 128\]"),
    (Edit(POST, (3, 3), value=torch.ones(2, 128)), "twice at one position"),
    (Edit("blocks.0.ln1.hook_scale", keep=0.0), "cannot be edited"),
])  # fmt: skip
def test_what_cannot_be_applied_as_meant_is_refused_before_the_forward(engines, tiny, edit, said):
    driver = engines.open(tiny("llama"))
    with pytest.raises(UsageError, match=said):
        driver.run([plain(driver, edits=(edit,))])


def test_a_write_that_does_not_reach_what_follows_is_found_at_load(engines, tiny, monkeypatch):
    from vlens_cli.driver import writes

    driver = engines.open(tiny("llama"))
    real = writes.write

    def elsewhere(edit, tensors, rows, at):
        """A copy is written: what the engine goes on with is as it was."""
        lost = edit.name.endswith(("hook_z", "hook_resid_post"))
        real(edit, [t.clone() for t in tensors] if lost else tensors, rows, at)

    monkeypatch.setattr(writes, "write", elsewhere)
    found = driver._prove_writes()
    wrong = {n for n in found if driver.catalog.editable(n)}
    assert wrong == {f"blocks.{i}.{p}" for i in range(4) for p in ("attn.hook_z", "hook_resid_post")}


@pytest.mark.parametrize("chunk", [None, 16])
def test_an_edit_reaches_every_chunk_and_every_generated_token(engines, tiny, chunk):
    driver = engines.open(tiny("llama"), chunk=chunk)
    prompt = [(7 * n) % 500 + 5 for n in range(50)]
    steps = 4 if chunk else 1
    edits = (Edit(POST, None, value=torch.full((128,), 0.5)), Edit(POST, (0,), value=0.25), Edit(POST, (49, 50), keep=0.5))
    (got,) = driver.run([plain(driver, tokens=prompt, max_new_tokens=20, edits=edits)])
    assert got.fired == (steps + 19, 1, 2) and got.chunks == steps + 19
    # The same edits in one prefill of prompt and generated tokens together.
    fed = [*prompt, *got.new_tokens[:-1]]
    (whole,) = driver.run([plain(driver, tokens=fed, edits=edits)])
    assert relative_error(got.captured[POST].value, whole.captured[POST].value) < 1e-5
    assert whole.captured[LOGITS].value[49:].argmax(-1).tolist() == list(got.new_tokens)


def test_what_is_set_is_captured_bit_by_bit_in_bfloat16_with_outliers(engines, tiny):
    driver = engines.open(tiny("llama"), dtype="bfloat16")
    value = torch.randn(2, 128, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    value[0, 5], value[1, 100] = 1e3, -1e3
    for name in ("blocks.1.hook_resid_post", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_mid", "blocks.1.hook_mlp_out"):
        (got,) = driver.run([plain(driver, [name], edits=(Edit(name, (2, 5), keep=0.0, value=value),))])
        assert torch.equal(got.captured[name].value[[2, 5]], value), name
