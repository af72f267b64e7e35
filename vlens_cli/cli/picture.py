"""What a reply holds as pictures: heat maps and histograms, as SVG, or a page that holds them. Needs nothing but its own
file: the page opens without a network, and its only script shows what the mouse is on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from vlens_cli.cli import output
from vlens_cli.cli.render import number, pieces_of, quoted, visible
from vlens_cli.errors import QueryError
from vlens_cli.hooks import fold

BLUE, WHITE, RED = (33, 102, 172), (247, 247, 247), (178, 24, 43)
CELL_WIDTH, CELL_HEIGHT, FONT = 54, 20, 11
BAR_WIDTH, BAR_HEIGHT = 14, 120
# From this ratio of the largest value to the smallest on, a linear scale shows the largest alone.
LOG_RATIO = 30.0
# What is smaller than this share of a sweep's largest value is shown as nothing: it is rounding, or of no effect.
NOTHING = 1e-4
LETTER = 0.62 * FONT  # about a monospaced character

Colour = tuple[int, int, int]
Value = float | str | None


class Grid(NamedTuple):
    """A sweep's grid without the rows and columns in which no cell was run; one column where one axis was swept."""

    rows: list[str]
    columns: list[str]
    values: list[list[Value]]
    span: float  # the largest change from the base
    scale: float = 0.0  # the largest of what the values are compared with, by absolute value; 0 where each stands for itself

    def shade(self, value: Value, base: Value) -> float:
        """How far a value is from the base, from -1 to 1; 0 where there is none."""
        change = _change(value, base)
        return 0.0 if change is None or not self.span else change / self.span

    def text(self, number_: Value) -> str:
        return value(number_, self.scale)


def grid_of(sweep: dict[str, Any]) -> Grid:
    """What is drawn of the `sweep` of a reply."""
    axes, values = sweep["axes"], sweep["grid"]
    if len(axes) == 1:
        values = [[value] for value in values]
    keep_rows = [n for n, row in enumerate(values) if any(value is not None for value in row)]
    keep_columns = [n for n in range(len(values[0])) if any(row[n] is not None for row in values)]
    labels = [_label(axes[0], n, sweep) for n in keep_rows]
    heads = [_label(axes[1], n, sweep) if len(axes) > 1 else sweep["metric"] for n in keep_columns]
    kept = [[values[r][c] for c in keep_columns] for r in keep_rows]
    changes = [abs(change) for row in kept for value in row if (change := _change(value, sweep["base"])) is not None]
    compared = (*(value for row in kept for value in row), sweep["base"], sweep["source"])
    sizes = [abs(value) for value in compared if isinstance(value, float | int) and math.isfinite(value)]
    return Grid(labels, heads, kept, max(changes, default=0.0), max(sizes, default=0.0))


def _change(value: Value, base: Value) -> float | None:
    """None where a value is missing or not finite (which JSON has as a text)."""
    if not isinstance(value, float | int) or not isinstance(base, float | int):
        return None
    change = value - base
    return change if math.isfinite(change) else None


def _label(axis: str, n: int, sweep: dict[str, Any]) -> str:
    if axis == "head":
        return f"{' or '.join(sweep.get('head_axes', ['head'])).replace('_', ' ')} {n}"
    if axis != "pos":
        return f"{axis} {n}"
    text = sweep["tokens"][n]["text"]
    return f"{n} {quoted(text)}" if text is not None else f"{n} #{sweep['tokens'][n]['id']}"


def colour(shade: float) -> Colour:
    """Blue below the base, red above, white at it."""
    end = RED if shade > 0 else BLUE
    return tuple(round(w + (e - w) * min(1.0, abs(shade))) for w, e in zip(WHITE, end, strict=True))


def ink(background: Colour) -> str:
    """Black or white, whichever is read on a background (ITU-R BT.601 luma)."""
    red, green, blue = background
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def title(sweep: dict[str, Any]) -> str:
    """What the numbers are, in a line."""
    targets = [quoted(t["text"]) if t["text"] is not None else f"#{t['id']}" for t in sweep["targets"]]
    what = {"prob": f"probability of {targets[0]}", "logit_diff": f"logit of {' minus '.join(targets[:2])}",
            "recovery": f"recovery of the logit of {' minus '.join(targets[:2])}"}[sweep["metric"]]
    ends = ", ".join(f"{run} {value(sweep[run])}" for run in ("base", "source"))
    return f"{what}, patched at {visible(', '.join(sweep['hooks']))}; {ends}"


def value(number_: Value, scale: float = 0.0) -> str:
    """Three significant digits; of what is nothing beside `scale`, the digits that a number of that size has."""
    if number_ is None or isinstance(number_, str) or not math.isfinite(number_):
        return "" if number_ is None else number(number_)
    if 0 < abs(number_) < NOTHING * scale:
        return f"{0:.{max(0, 2 - math.floor(math.log10(scale)))}f}" if scale >= NOTHING else "0"
    return f"{number_:.3g}"


class Map(NamedTuple):
    """A heat map: what its cells are, their values, and what they are coloured by.

    base   the value that is white; on a scale from the least value it is that
    texts  what stands in the cells where that is not the value
    log    coloured by the logarithm
    """

    title: str
    grid: Grid
    base: Value
    texts: list[list[str]] | None = None
    log: bool = False

    def shade(self, value: Value) -> float:
        return self.grid.shade(_scaled(value, self.log), _scaled(self.base, self.log))

    def text(self, r: int, c: int) -> str:
        return self.texts[r][c] if self.texts else self.grid.text(self.grid.values[r][c])


class Bars(NamedTuple):
    """A histogram: the ends of its bins, and how many values are in each."""

    title: str
    edges: list[float]
    counts: list[int]


def _scaled(value: Value, log: bool) -> Value:
    return math.log(value) if log and isinstance(value, float | int) and value > 0 else value


def maps_of(body: dict[str, Any]) -> list[Map]:
    """The heat maps of a reply of `capture`, `logits` or `patch`."""
    if "sweep" in body:
        return [Map(title(body["sweep"]), grid_of(body["sweep"]), body["sweep"]["base"])]
    many = len(body.get("prompts", ())) > 1
    return [one._replace(title=f"prompt {n}: {one.title}" if many else one.title)
            for n, prompt in enumerate(body.get("prompts", ())) for one in (*norms(prompt), *_patterns(prompt), *_lenses(prompt))]


def norms(prompt: dict[str, Any]) -> Iterator[Map]:
    """For each kind of hook point that was captured: its norm, layer by token."""
    pieces = pieces_of(prompt)
    kinds: dict[str, dict[str, dict[int, float]]] = {}
    for name, hook in prompt.get("hooks", {}).items():
        if hook["axes"][-1] != "key" and hook.get("rows"):
            kinds.setdefault(fold(name), {})[name] = {row["pos"]: row["norm"] for row in hook["rows"]}
    for kind, points in kinds.items():
        places = sorted({pos for found in points.values() for pos in found})
        labels = [f"layer {name.split('.')[1]}" if kind != name else name for name in points]
        yield _sequential(f"norm of {kind}", labels, [_place(pos, pieces) for pos in places],
                          [[found.get(pos) for pos in places] for found in points.values()])


def _patterns(prompt: dict[str, Any]) -> Iterator[Map]:
    """For each head of a pattern, or of scores: query by key."""
    pieces = pieces_of(prompt)
    for name, hook in prompt.get("hooks", {}).items():
        if hook["axes"][-1] != "key":
            continue
        keys = hook.get("dims") or range(hook["shape"][2])
        for head in dict.fromkeys(row["head"] for row in hook.get("rows", ())):
            rows = [row for row in hook["rows"] if row["head"] == head and ("values" in row or "percent" in row)]
            cells = [row.get("values") or [percent / 100 for percent in row["percent"]] for row in rows]
            # Keys behind the query are masked: a score there is the dtype's lowest number.
            cells = [[None if key > row["pos"] else cell for key, cell in zip(keys, one, strict=True)]
                     for row, one in zip(rows, cells, strict=True)]
            if rows:
                yield _sequential(f"{name}, head {head}: query (down) by key (across)", [_place(row["pos"], pieces) for row in rows],
                                  [_place(key, pieces) for key in keys], cells, may_log=False)


def _lenses(prompt: dict[str, Any]) -> Iterator[Map]:
    """The lens: for the likeliest token, and for each target, probability by hook point and position."""
    points = prompt.get("lens", [])
    if not points or not points[0]["positions"]:
        return
    pieces, first = pieces_of(prompt), points[0]["positions"]
    columns, rows = [_place(row["pos"], pieces) for row in first], [one["hook"] for one in points]
    shown = [("likeliest token", lambda row: row["top"][0], True)] if first[0]["top"] else []
    shown += [(_token(t), lambda row, n=n: row["targets"][n], False) for n, t in enumerate(first[0].get("targets", ()))]
    for what, of, named in shown:
        cells = [[of(row) for row in one["positions"]] for one in points]
        probs = [[cell["prob"] for cell in row] for row in cells]
        texts = [[_token(cell) for cell in row] for row in cells] if named else None
        yield Map(f"lens: probability of {what if not named else 'the ' + what}", Grid(rows, columns, probs, 1.0), 0.0, texts)


def _token(token: dict[str, Any]) -> str:
    return f"#{token['id']}" if token["text"] is None else quoted(token["text"])


def _place(pos: int, pieces: dict[int, str]) -> str:
    return f"{pos} {pieces.get(pos, '')}".rstrip()


def _sequential(name: str, rows: list[str], columns: list[str], values: list[list[Value]], may_log: bool = True) -> Map:
    """Coloured from the least value to the largest, by their logarithms where a few are much larger."""
    finite = [v for row in values for v in row if isinstance(v, float | int) and math.isfinite(v)] or [0.0]
    least, most = min(finite), max(finite)
    log = may_log and least > 0 and most / least > LOG_RATIO
    span = math.log(most / least) if log else most - least
    return Map(name + (", coloured by its logarithm" if log else ""), Grid(rows, columns, values, span), least, None, log)


def bars_of(body: dict[str, Any]) -> list[Bars]:
    """The histograms of a reply of `param`."""
    found = [(entry["name"], entry.get("histogram")) for entry in body.get("params", ())]
    return [Bars(f"{visible(name)}: values", one["edges"], one["counts"]) for name, one in found if one]


def write(body: dict[str, Any], targets: dict[str, Path]) -> None:
    """The pictures of a reply: kind (`svg`, `html`) -> file, written whole. Raises QueryError where it holds none."""
    drawn = svg(body)
    for kind, path in targets.items():
        with output.whole_file(path) as file:
            file.write((drawn if kind == "svg" else page(body, drawn)).encode())
        output.say(f"wrote {output.name_of(path)}")


def svg(body: dict[str, Any]) -> str:
    """Every picture of a reply, one under the other, each with a title."""
    parts: list[str] = []
    width, height = 0.0, 0.0
    for one in (*maps_of(body), *bars_of(body)):
        drawn, wide, high = _map(one, height) if isinstance(one, Map) else _bars(one, height)
        parts += drawn
        width, height = max(width, wide), height + high
    if not parts:
        raise QueryError("there is nothing to draw in this reply", code="nothing_to_draw",
                         hint="pictures are of norms, patterns, the lens, sweeps and weights; patterns of more than 200 keys, and "
                         "captures of many rows beside a file, have none")
    begin = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
             f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" font-size="{FONT}">')
    return "\n".join([begin, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


Drawn = tuple[list[str], float, float]


def _map(one: Map, down: float) -> Drawn:
    """A heat map that begins `down` from the top: its parts, width and height."""
    grid = one.grid
    left = 10 + LETTER * max((len(label) for label in grid.rows), default=0)
    # The labels of the columns stand at 45 degrees.
    tilted = LETTER * 0.75 * max((len(label) for label in grid.columns), default=0)
    texts = [one.text(r, c) for r in range(len(grid.rows)) for c in range(len(grid.columns))]
    cell = max(CELL_WIDTH, 8 + LETTER * max(map(len, texts), default=0))
    top = down + 44 + tilted
    parts = [f'<text x="8" y="{down + 18:.0f}">{escape(one.title)}</text>', *_labels(grid, left, top, cell), *_cells(one, left, top, cell)]
    width = max(left + cell * len(grid.columns) + tilted, LETTER * len(one.title) + 20)
    return parts, width, 44 + tilted + CELL_HEIGHT * len(grid.rows) + 10


def _labels(grid: Grid, left: float, top: float, cell: float) -> Iterator[str]:
    for n, label in enumerate(grid.rows):
        y = top + CELL_HEIGHT * (n + 0.7)
        yield f'<text x="{left - 6:.1f}" y="{y:.1f}" text-anchor="end">{escape(label)}</text>'
    for n, label in enumerate(grid.columns):
        x, y = left + cell * (n + 0.5), top - 6
        yield f'<text transform="translate({x:.1f} {y:.1f}) rotate(-45)">{escape(label)}</text>'


def _cells(one: Map, left: float, top: float, cell: float) -> Iterator[str]:
    for r, row in enumerate(one.grid.values):
        for c, number_ in enumerate(row):
            if number_ is not None:
                yield _cell(one, r, c, left + cell * c, top + CELL_HEIGHT * r, cell)


def _cell(one: Map, r: int, c: int, x: float, y: float, width: float) -> str:
    shown = one.grid.values[r][c]
    fill = colour(one.shade(shown))
    exact = repr(shown) if isinstance(shown, float | int) and math.isfinite(shown) else number(shown)
    text = f" {one.texts[r][c]}," if one.texts else ""
    said = escape(f"{one.grid.rows[r]}, {one.grid.columns[c]}:{text} {exact}")
    return (
        f'<g><title>{said}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.0f}" height="{CELL_HEIGHT}" '
        f'fill="rgb{fill}"/><text x="{x + width / 2:.1f}" y="{y + CELL_HEIGHT * 0.7:.1f}" text-anchor="middle" '
        f'fill="{ink(fill)}">{escape(one.text(r, c))}</text></g>'
    )


def _bars(one: Bars, down: float) -> Drawn:
    """A histogram that begins `down` from the top: its parts, width and height."""
    most = max(one.counts) or 1
    bottom = down + 34 + BAR_HEIGHT
    parts = [f'<text x="8" y="{down + 18:.0f}">{escape(one.title)}</text>']
    for n, count in enumerate(one.counts):
        high = BAR_HEIGHT * count / most
        said = escape(f"{number(one.edges[n])} to {number(one.edges[n + 1])}: {count}")
        parts.append(f'<g><title>{said}</title><rect x="{10 + BAR_WIDTH * n}" y="{bottom - high:.1f}" width="{BAR_WIDTH - 1}" '
                     f'height="{high:.1f}" fill="rgb{BLUE}"/></g>')
    width = 20 + BAR_WIDTH * len(one.counts)
    parts += [f'<text x="10" y="{bottom + 14:.0f}">{number(one.edges[0])}</text>',
              f'<text x="{width - 10}" y="{bottom + 14:.0f}" text-anchor="end">{number(one.edges[-1])}</text>']
    return parts, max(float(width), LETTER * len(one.title) + 20), 34 + BAR_HEIGHT + 30


# Browsers show a title after a while; this shows it at once, beside the mouse.
SCRIPT = """
const said = document.getElementById("said");
for (const cell of document.querySelectorAll("svg g")) {
  const text = cell.querySelector("title").textContent;
  cell.addEventListener("mousemove", (event) => {
    said.textContent = text;
    said.style.left = event.pageX + 14 + "px";
    said.style.top = event.pageY + 14 + "px";
    said.hidden = false;
  });
  cell.addEventListener("mouseleave", () => { said.hidden = true; });
}
"""
STYLE = ("body{font-family:sans-serif;margin:2em}td{font-family:monospace}th{text-align:left;padding-right:1em;vertical-align:top}"
         "#said{position:absolute;background:#222;color:#fff;padding:2px 6px;font-family:monospace;pointer-events:none}"
         "#said[hidden]{display:none}")


def page(body: dict[str, Any], drawn: str) -> str:
    """A page with the pictures, the prompts, and what was asked."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _facts(body))
    name = title(body["sweep"]) if "sweep" in body else f"vlens {body['command']}"
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
            f"<style>{STYLE}</style></head>\n<body>\n{drawn}<table>{rows}</table>\n<div id=\"said\" hidden></div>\n"
            f"<script>{SCRIPT}</script>\n</body></html>\n")


def _facts(body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, sweep = body["model"], body.get("sweep")
    yield "model", visible(f"{model['name']} ({model['family']}" + (f", {model['dtype']})" if model["dtype"] else ")"))
    if sweep:
        yield from (("prompt", _fed(sweep["tokens"])), ("source", _fed(sweep["source_tokens"])))
    else:
        yield from (("prompt", _fed(prompt["tokens"])) for prompt in body.get("prompts", ()))
    yield from (("edit", visible(edit["expression"])) for prompt in body.get("prompts", ())[:1] for edit in prompt.get("edits", ()))
    if sweep:
        yield "cells", f"{sweep['cells']}, {' by '.join(sweep['axes'])}"
    yield "vlens", body["vlens"]


def _fed(tokens: Sequence[dict[str, Any]]) -> str:
    return " ".join(f"#{token['id']}" if token["text"] is None else quoted(token["text"]) for token in tokens)
