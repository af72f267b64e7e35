"""The proof at load finds a wrong row, whatever it is that is wrong, and refuses that point by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import Engines, capture
from test_numbers import SHORT
from vlens_cli import families
from vlens_cli.errors import HookError


def change(monkeypatch, hook: str, **fields: object) -> None:
    """Load the llama family with one row changed, as a wrong TOML file would have it."""
    right = families.load("llama")
    rows = tuple(replace(row, **fields) if row.hook == hook else row for row in right.rows)
    wrong = replace(right, rows=rows)
    assert wrong != right
    monkeypatch.setattr(families, "load", lambda name: wrong if name == "llama" else right)


WRONG = {
    "the first of a pair taken for the stream": ("blocks.{i}.hook_resid_post", {"outputs": (0,)}),
    "the second of a pair taken for the stream": ("blocks.{i}.hook_resid_post", {"outputs": (1,)}),
    "the input stream without its residual": ("blocks.{i}.hook_resid_pre", {"inputs": ("hidden_states",)}),
    "norms swapped": ("blocks.{i}.ln1.hook_out", {"module": "ln2"}),
    "keys and queries swapped": ("blocks.{i}.attn.hook_k", {"split": ("kv_head", "head", "kv_head"), "part": 0}),
    "values read where keys are": ("blocks.{i}.attn.hook_v", {"part": 1}),
    "rotated keys read before rotation": (
        "blocks.{i}.attn.hook_rot_k", {"module": "qkv", "inputs": (), "outputs": (0,), "part": 1,
                                       "split": ("head", "kv_head", "kv_head")}),
    "gate and up swapped": ("blocks.{i}.mlp.hook_pre", {"part": 1}),
    "post read after the down projection's input": ("blocks.{i}.hook_mlp_out", {"module": "attn"}),
    "the scale of another norm": ("blocks.{i}.ln2.hook_scale", {"module": "ln1"}),
    "a pattern of keys that are not rotated": (
        "blocks.{i}.attn.hook_pattern", {"of": ("blocks.{i}.attn.hook_rot_q", "blocks.{i}.attn.hook_k")}),
    "scores taken for the pattern": ("blocks.{i}.attn.hook_pattern", {"derive": "scores"}),
    "results of the queries": ("blocks.{i}.attn.hook_result", {"of": ("blocks.{i}.attn.hook_q",)}),
    "a module that does not exist": ("blocks.{i}.attn.hook_z", {"module": "logits", "inputs": (0,)}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_row_is_refused_by_name(tiny, monkeypatch, what):
    hook, fields = WRONG[what]
    change(monkeypatch, hook, **fields)
    fresh = Engines()
    try:
        driver = fresh.open(tiny("llama"))
        name = hook.replace("{i}", "1")
        assert name in driver.non_fireable_hook_points
        assert name not in driver.supported_hook_points
        with pytest.raises(HookError, match="refused"):
            capture(driver, [SHORT], [name])
        others = {n for n in driver.non_fireable_hook_points if families._fold(n)[0] != hook}
        # Only the stream that a norm divides says what its divisor is, and only z and v what a pattern is.
        alone = ("hook_scale", "hook_attn_scores", "hook_pattern", "hook_result")
        assert {n for n in others if not n.endswith(alone)} == set(), "a point that is right was refused too"
    finally:
        fresh.close()
