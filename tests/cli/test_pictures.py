"""Heat maps and histograms: what they hold, as SVG, as a page in a browser, and in the terminal."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from rich.style import Style

from vlens_cli.cli import effects, picture
from vlens_cli.errors import QueryError

MODEL = {"name": "tiny", "family": "llama", "dtype": "float32"}
TOKENS = [{"pos": n, "id": n, "text": text, "piece": text} for n, text in enumerate(("<b>", " \x1b[31m", "\u202eא"))]
SVG = "{http://www.w3.org/2000/svg}"


def row(pos: int, norm: float | str, **more) -> dict:
    return {"pos": pos, "norm": norm, "mean": 0.0, "std": 1.0, "min": 0.0, "max": 1.0, "top": [], **more}


def hook(*rows: dict, axes=("pos", "d_model")) -> dict:
    return {"shape": [len(rows), 8], "dtype": "float32", "axes": list(axes), "derived": False,
            "positions": [one["pos"] for one in rows], "rows": list(rows)}


def capture(**hooks: dict) -> dict:
    return {"command": "capture", "vlens": "0.1.0", "model": MODEL,
            "prompts": [{"text": "x", "chunks": 1, "tokens": TOKENS, "hooks": {name.replace("__", "."): one for name, one in hooks.items()}}]}


NORMS = capture(blocks__0__hook_resid_post=hook(row(0, 1.5), row(2, 2.0)), blocks__1__hook_resid_post=hook(row(0, 2.5), row(1, "NaN")),
                hook_embed=hook(row(0, 1.0)))
PATTERN = capture(blocks__1__attn__hook_pattern={
    "shape": [1, 2, 3], "dtype": "float32", "axes": ["head", "query", "key"], "derived": True, "positions": [1, 2], "heads": [3],
    "rows": [{"head": 3, "pos": 1, "values": [0.25, 0.75, 0.0], "percent": [25, 75, 0], "entropy": 0.5, "top": []},
             {"head": 3, "pos": 2, "values": [0.125, 0.5, 0.375], "percent": [12, 50, 38], "entropy": 0.9, "top": []}]})
PLACE = {"id": 1, "text": " Paris", "logit": 9.0, "prob": 0.5}
LENS = {"command": "logits", "vlens": "0.1.0", "model": MODEL, "prompts": [{
    "text": "x", "tokens": TOKENS, "positions": [], "lens": [
        {"hook": f"blocks.{i}.hook_resid_post", "layer": i, "positions": [
            {"pos": 2, "top": [PLACE | {"prob": 0.25 + i / 2}], "targets": [PLACE | {"text": " Rome", "prob": i / 4, "rank": 3}]}]}
        for i in (0, 1)]}]}
PARAM = {"command": "param", "vlens": "0.1.0", "model": MODEL | {"dtype": None}, "params": [
    {"name": "blocks.0.attn.W_Q", "histogram": {"edges": [-1.0, 0.0, 2.5], "counts": [3, 12]}}, {"name": "ids"}]}


def said(body: dict) -> list[str]:
    return [title.text for title in ET.fromstring(picture.svg(body)).iter(f"{SVG}title")]


def test_norms_are_layer_by_token():
    stream, embed = picture.maps_of(NORMS)
    assert stream.grid.rows == ["layer 0", "layer 1"] and stream.grid.columns == ['0 "<b>"', r'1 " \x1b[31m"', '2 "\\u202eא"\u200e']
    assert stream.grid.values == [[1.5, None, 2.0], [2.5, "NaN", None]] and not stream.log
    assert [stream.shade(value) for value in (1.5, 2.5, 2.0)] == [0, 1, 0.5]
    assert embed.grid.rows == ["hook_embed"] and embed.shade(1.0) == 0
    assert said(NORMS) == ['layer 0, 0 "<b>": 1.5', 'layer 0, 2 "\\u202eא"\u200e: 2.0', 'layer 1, 0 "<b>": 2.5', r'layer 1, 1 " \x1b[31m": NaN',
                           'hook_embed, 0 "<b>": 1.0']


def test_a_few_large_norms_do_not_hide_the_others():
    (one,) = picture.maps_of(capture(hook_embed=hook(row(0, 1000.0), row(1, 10.0), row(2, 1.0))))
    assert one.log and "logarithm" in one.title
    assert [round(one.shade(value), 6) for value in (1000.0, 10.0, 1.0)] == [1, round(1 / 3, 6), 0]


def test_patterns_are_exact_and_leave_the_future_out():
    (one,) = picture.maps_of(PATTERN)
    assert "head 3" in one.title and one.grid.values == [[0.25, 0.75, None], [0.125, 0.5, 0.375]]
    del (rows := PATTERN["prompts"][0]["hooks"]["blocks.1.attn.hook_pattern"]["rows"])[0]["values"]
    try:
        assert picture.maps_of(PATTERN)[0].grid.values[0] == [0.25, 0.75, None]
    finally:
        rows[0]["values"] = [0.25, 0.75, 0.0]


def test_the_lens_shows_tokens_coloured_by_probability():
    likeliest, target = picture.maps_of(LENS)
    assert likeliest.texts == [['" Paris"'], ['" Paris"']] and likeliest.grid.values == [[0.25], [0.75]]
    assert likeliest.shade(0.75) == 0.75 and '" Rome"' in target.title and target.grid.values == [[0.0], [0.25]]
    assert said(LENS)[1] == 'blocks.1.hook_resid_post, 2 "\\u202eא"\u200e: " Paris", 0.75'


def test_histograms_are_bars():
    assert said(PARAM) == ["-1 to 0: 3", "0 to 2.5: 12"]
    bars = [float(bar.get("height")) for bar in ET.fromstring(picture.svg(PARAM)).iter(f"{SVG}rect") if bar.get("fill") == f"rgb{picture.BLUE}"]
    assert bars == [pytest.approx(picture.BAR_HEIGHT / 4), picture.BAR_HEIGHT]


def test_a_reply_without_pictures_is_an_error():
    with pytest.raises(QueryError, match="nothing to draw"):
        picture.svg(capture())


@pytest.mark.parametrize("body", [NORMS, PATTERN, LENS, PARAM])
def test_a_page_needs_nothing_from_elsewhere(body):
    text = picture.page(body, picture.svg(body))
    assert re.findall(r"https?://[^\"']+", text) == ["http://www.w3.org/2000/svg"]
    assert "\x1b" not in text and "\u202e" not in text and "<b>" not in text


# In a browser


@pytest.mark.parametrize(("body", "nth", "shown"), [
    (NORMS, 2, 'layer 1, 0 "<b>": 2.5'), (PATTERN, 1, 'layer'), (LENS, 0, "Paris"), (PARAM, 1, "0 to 2.5: 12"),
])
def test_the_page_says_what_the_mouse_is_on(tmp_path, body, nth, shown):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no browser is installed: apt-get install chromium")
    if body is PATTERN:
        shown = said(body)[nth]
    move = f"""<script>
        const cell = document.querySelectorAll("svg g")[{nth}], box = cell.getBoundingClientRect();
        const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height - 2);
        at.dispatchEvent(new MouseEvent("mousemove", {{bubbles: true, clientX: box.x, clientY: box.y}}));
        const found = document.createElement("pre");
        found.id = "found";
        found.textContent = (getComputedStyle(said).display === "none" ? "hidden" : "shown") + "|" + said.textContent + "|END";
        document.body.append(found);
    </script></body>"""
    page = tmp_path / "page.html"
    page.write_text(picture.page(body, picture.svg(body)).replace("</body>", move))
    done = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom",
                           page.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'id="found">(\w+)\|(.*?)\|END', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    seen = found[2].replace("&lt;", "<").replace("&gt;", ">")
    assert found[1] == "shown" and shown in seen


# In the terminal


class Terminal:
    encoding = "utf-8"
    isatty = staticmethod(lambda: True)
    write = flush = staticmethod(lambda *text: None)


@pytest.fixture
def shown(monkeypatch):
    """shown(body, **environment): the norms as a terminal gets them."""

    def draw(body: dict, **environment: str) -> str:
        # A style keeps the codes of the first terminal that it was drawn for; a process has one.
        Style._add.cache_clear()
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", **environment}.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Terminal())
            return effects.norms(body)

    return draw


def test_a_map_in_the_colours_that_the_terminal_has(shown):
    assert f"48;2;{';'.join(map(str, picture.RED))}m" in shown(NORMS, COLORTERM="truecolor")
    of_256 = shown(NORMS, COLORTERM="")
    assert "48;5;" in of_256 and "48;2;" not in of_256
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        text = shown(NORMS, **plain)
        assert not re.search(r"\x1b\[[0-9;]*(3|4)8;", text) and "2.5 █+" in text and "NaN" in text


def test_a_narrow_terminal_gets_blocks_and_every_number(shown):
    text = shown(NORMS, COLUMNS="30", NO_COLOR="1")
    assert text.count("layer 1") == 3 and all(number in text for number in ("1.5", "2 ", "2.5 █+", "NaN"))


def test_a_map_in_place_of_tables(shell):
    done = shell.fake("capture", "--hook", "blocks.*.hook_resid_post", "--map", "--table", "hello")
    assert "norm of blocks.{i}.hook_resid_post" in done.stdout and "layer 3" in done.stdout and "largest |value|" not in done.stdout


def test_a_map_leaves_no_hook_out(shell):
    done = shell.fake("capture", "--hook", "blocks.1.attn.hook_pattern", "--hook", "hook_embed", "--map", "--table", "hello")
    assert "norm of hook_embed" in done.stdout and "blocks.1.attn.hook_pattern  [head 4" in done.stdout and "head 3" in done.stdout
    large = capture(hook_embed={key: value for key, value in hook(row(0, 1.0)).items() if key != "rows"})
    assert "hook_embed: its statistics were left out beside the file" in effects.norms(large)


def test_pictures_of_a_capture_leave_the_reply_as_it_is(shell):
    asked = ("capture", "--hook", "blocks.1.attn.hook_pattern", "--json", "hello")
    drawn = shell.fake(*asked[:-1], "--svg", "a.svg", "--html", "a.html", "hello")
    assert drawn.stdout == shell.fake(*asked).stdout and "wrote a.svg" in drawn.stderr and "wrote a.html" in drawn.stderr
    cells = ET.parse(shell.folder / "a.svg").getroot().findall(f".//{SVG}title")
    assert cells[0].text.endswith(": 1.0") and len(cells) == 4 * (1 + 2 + 3)


def sweep_of(*rows: list, base: float = 0.0, source: float = 1.0) -> dict:
    return {"axes": ["layer", "pos"], "grid": list(rows), "metric": "recovery", "base": base, "source": source, "hooks": ["hook_embed"],
            "targets": [PLACE, PLACE], "tokens": TOKENS[:2], "source_tokens": TOKENS[:2], "cells": 4}


def test_what_is_nothing_beside_the_others_is_shown_with_their_digits():
    body = {"command": "patch", "vlens": "0.1.0", "model": MODEL, "sweep": sweep_of([5e-7, 0.00134], [0.0, -0.7], source=0.7)}
    (one,) = picture.maps_of(body)
    assert [[one.text(r, c) for c in (0, 1)] for r in (0, 1)] == [["0.000", "0.00134"], ["0", "-0.7"]]
    assert "layer 0, " in said(body)[0] and said(body)[0].endswith(": 5e-07")
    table = "".join(part.plain if hasattr(part, "plain") else effects.render.draw(part) for part in effects.heat_map(one, ""))
    assert "5e-07" not in table and "0.00134" in table


def test_small_numbers_among_small_ones_are_numbers():
    (one,) = picture.maps_of({"sweep": sweep_of([5e-7, 1e-6], base=0.0, source=2e-6)})
    assert [one.text(0, c) for c in (0, 1)] == ["5e-07", "1e-06"]
    (one,) = picture.maps_of({"sweep": sweep_of([5e-7, 150.0], base=20.0, source=-1200.0)})
    assert [one.text(0, c) for c in (0, 1)] == ["0", "150"]
