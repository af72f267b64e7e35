"""What `vlens patch` gives, as tables and heat maps for the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vlens_cli.cli import picture, render
from vlens_cli.cli.render import line, number, quoted, visible

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

SHADES = "░▒▓█"
PLAIN_SHADES = ".:+#"


def patch(body: dict[str, Any]) -> str:
    """The reply of `vlens patch`: for each prompt base against patched, or the heat map of a sweep."""
    model = body["model"]
    parts = [line(visible(f"{model['name']} ({model['family']}, {model['dtype']})"))]
    for place, prompt in enumerate(body["prompts"]):
        parts += [line(), line(render.heading(prompt, place, len(body["prompts"])), "bold")]
        parts += [line(visible(text)) for text in render.fired(prompt)]
        parts += _swept(body["sweep"]) if "sweep" in body else _compared(prompt)
    return render.draw(*parts)


# Base against patched


def _compared(prompt: dict[str, Any]) -> Iterator[Table | Text]:
    runs = [name for name in ("base", "patched", "source") if name in prompt]
    yield line()
    yield line("likeliest after the last prompt token:")
    columns = [column for name in runs for column in ((name, "left"), ("logit", "right"), ("prob", "right"))]
    tops = zip(*(prompt[name]["top"] for name in runs), strict=True)
    yield render.table(columns, ([cell for entry in row for cell in _token(entry)] for row in tops))
    effect = prompt["effect"]
    if effect["targets"]:
        yield line()
        yield _targets(effect, runs)
    yield line()
    if "metric" in effect:
        values = ", ".join(f"{name} {_maybe(effect['metric'][name])}" for name in runs)
        yield line(f"{effect['metric']['name']}: {values}")
    yield line(f"KL(base || patched) after the last prompt token: {number(effect['kl'])} nats")
    if len(prompt["base"]["new_tokens"]) > 1:
        for name in ("base", "patched"):
            yield line(f"{name} continues: {_continuation(prompt[name])}")
            if (end := prompt[name].get("ended")) is not None and end + 1 < len(prompt[name]["new_tokens"]):
                yield line(f"  it ended with {_shown(prompt[name]['new_tokens'][end])}, new token {end + 1} of "
                           f"{len(prompt[name]['new_tokens'])}; what follows was generated all the same")


def _token(entry: dict[str, Any]) -> tuple[str, str, str]:
    return _shown(entry), number(entry["logit"]), number(entry["prob"])


def _shown(entry: dict[str, Any]) -> str:
    return f"#{entry['id']}" if entry["text"] is None else quoted(entry["text"])


def _continuation(run: dict[str, Any]) -> str:
    return " ".join(map(_shown, run["new_tokens"])) if run["text"] is None else quoted(run["text"])


def _targets(effect: dict[str, Any], runs: list[str]) -> Table:
    titles = [*runs, "change", "recovery", *(f"prob {name}" for name in runs), *(f"rank {name}" for name in runs)]
    columns = [("target", "left"), *((title, "right") for title in titles)]
    rows = [
        [_shown(target), *(number(target[name]["logit"]) for name in runs), number(target["change"]),
         _maybe(target["recovery"]), *(number(target[name]["prob"]) for name in runs),
         *(str(target[name]["rank"]) for name in runs)]
        for target in effect["targets"]
    ]  # fmt: skip
    if difference := effect.get("logit_diff"):
        row = ["difference", *(number(difference[name]) for name in runs), number(difference["change"]),
               _maybe(difference["recovery"])]  # fmt: skip
        rows.append(row + [""] * (len(columns) - len(row)))
    return render.table(columns, rows)


def _maybe(value: float | str | None) -> str:
    return "" if value is None else number(value)


# A sweep


def _swept(sweep: dict[str, Any]) -> Iterator[Table | Text]:
    yield line(f"source: {' '.join(map(_shown, sweep['source_tokens']))}")
    yield line()
    yield from heat_map(picture.maps_of({"sweep": sweep})[0], f"how far from the base, + above it, - below it; the largest change "
                        f"is {number(picture.grid_of(sweep).span)}")


def heat_map(one: picture.Map, legend: str) -> Iterator[Table | Text]:
    """A heat map for the terminal: numbers, shades that are read without colour, and colours where there are."""
    shades = SHADES if _utf8() else PLAIN_SHADES
    yield line(one.title)
    yield line(f"{shades} {legend}")
    for block in _blocks(one.grid):
        yield line()
        yield _block(one, block, shades)


def norms(body: dict[str, Any]) -> str:
    """The reply of `vlens capture --map`: for each prompt and kind of hook point its norms, layer by token."""
    model = body["model"]
    parts = [line(visible(f"{model['name']} ({model['family']}, {model['dtype']})"))]
    for place, prompt in enumerate(body["prompts"]):
        parts += [line(), line(render.heading(prompt, place, len(body["prompts"])), "bold")]
        parts += [line(visible(text)) for text in render.fired(prompt)]
        for one in picture.norms(prompt):
            parts += [line(), *heat_map(one, f"from the least, {number(one.base)}, to the largest")]
        for name, hook in prompt["hooks"].items():
            if not hook.get("rows"):
                parts += [line(), line(f"{name}: its statistics were left out beside the file")]
            elif hook["axes"][-1] == "key":
                parts += [line(), *render.attention(name, hook, render.pieces_of(prompt))]
    return render.draw(*parts)


def _blocks(grid: picture.Grid) -> Iterator[picture.Grid]:
    """The grid in blocks of columns that fit the terminal; whole where standard output is none."""
    if not (sys.stdout is not None and sys.stdout.isatty()):
        yield grid
        return
    free = shutil.get_terminal_size().columns - max(map(len, grid.rows))
    widths = [2 + max(len(label), *(len(grid.text(row[c])) + 3 for row in grid.values))
              for c, label in enumerate(grid.columns)]
    begin = used = 0
    for c, width in enumerate(widths):
        if used + width > free and c > begin:
            yield _columns(grid, begin, c)
            begin, used = c, 0
        used += width
    yield _columns(grid, begin, len(widths))


def _columns(grid: picture.Grid, begin: int, end: int) -> picture.Grid:
    return grid._replace(columns=grid.columns[begin:end], values=[row[begin:end] for row in grid.values])


def _block(one: picture.Map, grid: picture.Grid, shades: str) -> Table:
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 1))
    rows = [[Text(label), *(_cell(one, value, shades) for value in row)] for label, row in zip(grid.rows, grid.values, strict=True)]
    for n, label in enumerate(["", *grid.columns]):
        # Rich would cut what is wider than the terminal.
        least = max(cell_len(label), *(row[n].cell_len for row in rows))
        drawn.add_column(Text(label), justify="right" if n else "left", no_wrap=True, min_width=least)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _cell(one: picture.Map, value: picture.Value, shades: str) -> Text:
    """The number and a shade of how far it is from the base, coloured where the terminal has colours."""
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    if value is None:
        return Text("")
    shade = one.shade(value)
    level = min(len(shades), round(abs(shade) * len(shades)))
    mark = shades[level - 1] + ("+" if shade > 0 else "-") if level else "  "
    fill = picture.colour(shade)
    style = Style(color=picture.ink(fill), bgcolor=Color.from_rgb(*fill))
    return Text(f"{one.grid.text(value)} {mark}", style=style)


def _utf8() -> bool:
    return sys.stdout is None or "utf" in (sys.stdout.encoding or "").lower()
