"""Texts that a terminal obeys, hides or turns, in every command's tables: each is one line as any other, and is seen."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import test_logits_command
import test_patch_command
import test_pictures
from vlens_cli.cli import effects, logits, render
from vlens_cli.reply import METRICS

TOP = {"dim": 1, "value": 0.5, "text": "x"}
LOGITS = test_pictures.capture(unembed__hook_out={
    **test_pictures.hook(test_pictures.row(0, 1.0, top=[TOP]), axes=("pos", "d_vocab"))})
ENGINE = {"pid": 1, "model": "x", "state": "idle", "rss_bytes": 10**9, "idle_left_s": None}
WEIGHT = {"name": "x", "axes": [], "shape": [2], "dtype": "float32", "source": "checkpoint", "norm": 1.0, "mean": 0.0, "std": 1.0, "min": 0.0,
          "max": 1.0, "sparsity": 0.0, "histogram": None, "values": [0.5, 0.25]}
# What draws -> a reply that it draws; every `text`, name and finding in it is exchanged.
DRAWN = {
    "capture": (render.capture, test_pictures.NORMS), "pattern": (render.capture, test_pictures.PATTERN), "logits hook": (render.capture, LOGITS),
    "map": (effects.norms, test_pictures.NORMS), "logits": (logits.table, test_logits_command.BODY),
    "patch": (effects.patch, test_patch_command.COMPARED), "sweep": (effects.patch, test_patch_command.SWEPT),
    "param": (render.params, {"model": {"name": "x", "family": None}, "params": [WEIGHT]}),
    "engine": (lambda body: render.engines(body["engines"]), {"engines": [ENGINE]}),
    "doctor": (render.findings, {"ok": True, "findings": [{"what": "model", "state": "note", "found": "x", "mend": "x"}]}),
}  # fmt: skip
EXCHANGED = ("text", "name", "model", "found", "mend", "expression")
ODD = ("a\nb", "a\tb", "\x1b[31mred\x1b[0m", "\x9b2J", "a\u202eb", "a\u200bb", "\u2066b", "\ufe0f", "\u0301", "\r", "\x00", "\u2028",
       "[bold]x[/bold]", "שלום", "مرحبا 12")


def exchanged(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: text if key in EXCHANGED and isinstance(one, str) and one not in METRICS else exchanged(one, text)
                for key, one in value.items()}
    return [exchanged(one, text) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", ODD, ids=ascii)
@pytest.mark.parametrize("what", DRAWN)
def test_each_text_is_seen_and_drives_nothing(what, text):
    draw, body = DRAWN[what]
    shown, usual = (draw(exchanged(body, one)) for one in (text, "x"))
    assert shown.count("\n") == usual.count("\n")
    # The mark that keeps numbers in their columns behind a text that runs the other way.
    rest = shown.replace(render.LEFT_TO_RIGHT, "").replace("\n", "")
    assert rest.isprintable() and not any(unicodedata.category(char) == "Cf" for char in rest) and "\ufe0f" not in rest
    assert render.visible(text) in shown or render.quoted(text)[:-1] in shown
