"""A sweep as a picture: SVG, or a page that holds it. Needs nothing but its own file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from vlens_cli.cli import output
from vlens_cli.cli.render import number, quoted, visible

BLUE, WHITE, RED = (33, 102, 172), (247, 247, 247), (178, 24, 43)
CELL_WIDTH, CELL_HEIGHT, FONT = 54, 20, 11
LETTER = 0.62 * FONT  # about a monospaced character

Colour = tuple[int, int, int]
Value = float | str | None


class Grid(NamedTuple):
    """A sweep's grid without the rows and columns in which no cell was run; one column where one axis was swept."""

    rows: list[str]
    columns: list[str]
    values: list[list[Value]]
    span: float  # the largest change from the base

    def shade(self, value: Value, base: Value) -> float:
        """How far a value is from the base, from -1 to 1; 0 where there is none."""
        change = _change(value, base)
        return 0.0 if change is None or not self.span else change / self.span


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
    return Grid(labels, heads, kept, max(changes, default=0.0))


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
    return f"{what}, patched at {', '.join(sweep['hooks'])}; {ends}"


def value(number_: Value) -> str:
    """Three significant digits."""
    return "" if number_ is None else f"{number_:.3g}" if isinstance(number_, float | int) else number(number_)


def write(body: dict[str, Any], targets: dict[str, Path]) -> None:
    """The pictures of a sweep's reply: kind (`svg`, `html`) -> file, written whole."""
    drawn = svg(body)
    for kind, path in targets.items():
        with output.whole_file(path) as file:
            file.write((drawn if kind == "svg" else page(body, drawn)).encode())
        output.say(f"wrote {output.name_of(path)}")


def svg(body: dict[str, Any]) -> str:
    """The heat map, with a title and a number in every cell."""
    sweep = body["sweep"]
    grid = grid_of(sweep)
    left = 10 + LETTER * max((len(label) for label in grid.rows), default=0)
    # The labels of the columns stand at 45 degrees.
    tilted = LETTER * 0.75 * max((len(label) for label in grid.columns), default=0)
    top = 44 + tilted
    width = max(left + CELL_WIDTH * len(grid.columns) + tilted, LETTER * len(title(sweep)) + 20)
    height = top + CELL_HEIGHT * len(grid.rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" font-size="{FONT}">',
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="18">{_xml(title(sweep))}</text>',
        *_labels(grid, left, top),
        *_cells(grid, sweep, left, top),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _labels(grid: Grid, left: float, top: float) -> Iterator[str]:
    for n, label in enumerate(grid.rows):
        y = top + CELL_HEIGHT * (n + 0.7)
        yield f'<text x="{left - 6:.1f}" y="{y:.1f}" text-anchor="end">{_xml(label)}</text>'
    for n, label in enumerate(grid.columns):
        x, y = left + CELL_WIDTH * (n + 0.5), top - 6
        yield f'<text transform="translate({x:.1f} {y:.1f}) rotate(-45)">{_xml(label)}</text>'


def _cells(grid: Grid, sweep: dict[str, Any], left: float, top: float) -> Iterator[str]:
    for r, row in enumerate(grid.values):
        for c, cell in enumerate(row):
            if cell is not None:
                yield _cell(grid, sweep, r, c, left + CELL_WIDTH * c, top + CELL_HEIGHT * r)


def _cell(grid: Grid, sweep: dict[str, Any], r: int, c: int, x: float, y: float) -> str:
    cell = grid.values[r][c]
    fill = colour(grid.shade(cell, sweep["base"]))
    said = _xml(f"{grid.rows[r]}, {grid.columns[c]}: {cell if isinstance(cell, str) else repr(cell)}")
    return (
        f'<g><title>{said}</title><rect x="{x:.1f}" y="{y:.1f}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" '
        f'fill="rgb{fill}"/><text x="{x + CELL_WIDTH / 2:.1f}" y="{y + CELL_HEIGHT * 0.7:.1f}" text-anchor="middle" '
        f'fill="{ink(fill)}">{_xml(value(cell))}</text></g>'
    )


def page(body: dict[str, Any], drawn: str) -> str:
    """A page with the picture, the prompt, its source, and what was asked."""
    sweep = body["sweep"]
    facts: Sequence[tuple[str, str]] = [
        ("model", f"{body['model']['name']} ({body['model']['family']}, {body['model']['dtype']})"),
        ("prompt", _fed(sweep["tokens"])),
        ("source", _fed(sweep["source_tokens"])),
        *(("edit", edit["expression"]) for edit in body["prompts"][0]["edits"]),
        ("cells", f"{sweep['cells']}, {' by '.join(sweep['axes'])}"),
        ("vlens", body["vlens"]),
    ]
    rows = "".join(f"<tr><th>{_xml(name)}</th><td>{_xml(text)}</td></tr>" for name, text in facts)
    style = ("body{font-family:sans-serif;margin:2em}td{font-family:monospace}"
             "th{text-align:left;padding-right:1em;vertical-align:top}")
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{_xml(title(sweep))}</title>'
            f"<style>{style}</style></head>\n<body>\n{drawn}<table>{rows}</table>\n</body></html>\n")


def _fed(tokens: Sequence[dict[str, Any]]) -> str:
    return " ".join(f"#{token['id']}" if token["text"] is None else quoted(token["text"]) for token in tokens)


def _xml(text: str) -> str:
    return escape(visible(text))
