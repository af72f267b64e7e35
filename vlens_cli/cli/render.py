"""From a reply's body to text: JSON, or tables. Nothing is cut; tables round to six digits, JSON does not."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vlens_cli.units import counted

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_SHORT = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
# Of no width or ink, and printable all the same by Python's account: joiners, fillers, variation selectors.
_UNSEEN = "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef"
_ESCAPED = re.compile(f"[{_UNSEEN}]")
# What JSON allows raw in a string and a terminal obeys or hides: C1 controls, zero-width and bidi characters.
_UNSAFE_JSON = re.compile("[\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
                          f"{_UNSEEN}]")
# Behind a text that runs from right to left: without it a terminal that turns such texts turns the numbers after them too.
LEFT_TO_RIGHT = "\u200e"
_PIPE_WIDTH = 1_000_000  # wide enough that no table on a pipe is ever folded
_WRAP = 100


# JSON


def to_json(body: Any) -> str:
    """One JSON document: NaN and infinities as strings, floats that round-trip, safe to show on a terminal."""
    tty = sys.stdout is not None and sys.stdout.isatty()
    utf8 = sys.stdout is None or (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    dumps = partial(json.dumps, allow_nan=False, ensure_ascii=not utf8, indent=2 if tty else None)
    try:
        text = dumps(body)
    except ValueError:  # a number that JSON has no word for: rare, and a long body takes its time to walk through
        text = dumps(_plain(body))
    # Most replies are long and hold none of it.
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE_JSON.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else _nonfinite(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _nonfinite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# Text that is safe to show


def visible(text: str) -> str:
    """Text with every character that a terminal obeys or hides written as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() and not _ESCAPED.match(char) else _escape(char) for char in text)


def quoted(text: str) -> str:
    """Token text in quotes, so that its spaces are seen, with escapes that cannot be mistaken for text."""
    shown = visible(text.replace("\\", "\\\\").replace('"', '\\"'))
    if shown.isascii():
        return f'"{shown}"'
    from unicodedata import bidirectional, category

    if category(shown[0])[0] == "M":
        # An accent without its letter would go onto the quote.
        shown = _escape(shown[0]) + shown[1:]
    turned = any(bidirectional(char) in ("R", "AL") for char in shown)
    return f'"{shown}"' + LEFT_TO_RIGHT * turned


def _escape(char: str) -> str:
    code = ord(char)
    wide = f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _SHORT.get(char) or (f"\\x{code:02x}" if code < 0x100 else wide)


def from_here(text: str) -> str:
    """A text without the folder in which the user stands, where a path in it begins with that."""
    try:
        here = os.getcwd().rstrip("/") + "/"
    except OSError:  # the folder is gone
        return text
    return re.sub(rf"(?<![^\s'\"(]){re.escape(here)}", "", text)


def number(value: float | str) -> str:
    """Six significant digits."""
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if math.isfinite(value) else _nonfinite(value)


# Tables


def draw(*parts: Table | Text) -> str:
    """Tables and lines as text: for the terminal's width, or unfolded where standard output is no terminal."""
    from io import StringIO

    from rich.console import Console
    from rich.measure import Measurement

    tty = sys.stdout is not None and sys.stdout.isatty()
    console = Console(file=StringIO(), force_terminal=tty or None, highlight=False)
    wide = console.options.update(max_width=_PIPE_WIDTH)
    for part in parts:
        # Wider than the terminal where words would break: half a number is another number.
        least = Measurement.get(console, wide, part).minimum
        console.width = max(wide.size.width, least) if tty else _PIPE_WIDTH
        console.print(part)
    lines = console.file.getvalue().rstrip("\n").split("\n")
    return "\n".join(lines if tty else map(str.rstrip, lines))


def load() -> None:
    """Import what tables need, for who has time to do it now."""
    import rich.box
    import rich.cells
    import rich.console
    import rich.measure
    import rich.table
    import rich.text  # noqa: F401


def table(columns: Iterable[tuple[str, str]], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Rows of text under (title, kind) columns: `left` and `right` keep their lines, the one `fold` gives way. A cell
    that is a Text keeps its style."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD if _utf8() else box.ASCII2, pad_edge=False, show_edge=False, collapse_padding=True)
    rows = list(rows)
    for place, (title, kind) in enumerate(columns):
        cells = [title, *(str(row[place]) for row in rows)]
        least = max(cell_len(part) for cell in cells for part in (cell.split() if kind == "fold" else cell.split("\n")))
        side = "right" if kind == "right" else "left"
        drawn.add_column(Text(title), justify=side, overflow="fold", no_wrap=kind != "fold", min_width=least)
    for row in rows:
        # Text, because a str is parsed as markup.
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return drawn


def _utf8() -> bool:
    return sys.stdout is None or "utf" in (sys.stdout.encoding or "").lower()


def line(text: str = "", style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, overflow="fold")


# What `capture` gives


def capture(body: dict[str, Any]) -> str:
    """The reply of `vlens capture`: for each prompt its text, and for each hook a table with a row a position."""
    model = body["model"]
    parts = [line(visible(f"{model['name']} ({model['family']}, {model['dtype']})"))]
    for place, prompt in enumerate(body["prompts"]):
        parts += [line(), line(heading(prompt, place, len(body["prompts"])), "bold")]
        parts += [line(visible(text)) for text in fired(prompt)]
        pieces = pieces_of(prompt)
        for name, hook in prompt["hooks"].items():
            parts += [line(), line(_title(name, hook), "bold")]
            # Left out beside a large file.
            rows = hook.get("rows", [])
            if rows and hook["axes"][-1] == "key":
                parts += _attention_tables(hook, pieces)
            elif rows:
                parts += [_hook_table(hook, pieces)]
            parts += [line(text) for row in rows if "values" in row for text in _values(row, hook)]
    return draw(*parts)


def collected(body: dict[str, Any]) -> str:
    """What went into a folder."""
    model = body["model"]
    rows = [(shard["file"], f"{shard['prompts'][0]} to {shard['prompts'][1] - 1}", f"{shard['bytes']:,}")
            for shard in body["shards"]]
    resumed = f", {body['n_resumed']:,} of them there before" if body["n_resumed"] else ""
    skipped = f", {len(body['skipped']):,} left out" if body["skipped"] else ""
    return draw(line(visible(f"{model['name']} ({model['family']}, {model['dtype']})")),
                line(f"{body['n_prompts']:,} prompts of {body['n_tokens']:,} tokens{resumed}{skipped}", "bold"), line(),
                table([("file", "left"), ("prompts", "right"), ("bytes", "right")], rows))


def fired(prompt: dict[str, Any]) -> list[str]:
    """A line for each intervention, over all of its hook points: how often it was applied. Files of this folder, which the
    engine knows by their whole path, are named as they were typed."""
    counts: dict[str, list[int]] = {}
    for edit in prompt.get("edits", ()):
        counts.setdefault(from_here(edit["expression"]), []).append(edit["fired"])
    return [f"{expression}  ({_times(found)})" for expression, found in counts.items()]


def _times(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    forwards = counted(least, "forward") if least == most else f"{least} to {most} forwards"
    return f"applied in {forwards}" + (f", at {len(counts)} hook points" if len(counts) > 1 else "")


def pieces_of(prompt: dict[str, Any]) -> dict[int, str]:
    """Each position's token, quoted; its id where the model has no tokenizer."""
    return {t["pos"]: f"#{t['id']}" if t["text"] is None else quoted(t["text"]) for t in prompt["tokens"]}


def heading(prompt: dict[str, Any], place: int, n_prompts: int) -> str:
    which = f"prompt {place}: " if n_prompts > 1 else ""
    text = "token ids" if prompt["text"] is None else quoted(prompt["text"])
    chunks = f", in {prompt['chunks']} chunks" if prompt.get("chunks", 1) > 1 else ""
    return f"{which}{text}, {counted(len(prompt['tokens']), 'token')}{chunks}"


def _title(name: str, hook: dict[str, Any]) -> str:
    shape = ", ".join(f"{axis} {size}" for axis, size in zip(hook["axes"], hook["shape"], strict=True))
    chosen = "".join(f"[{axis}={_ranges(hook[key])}]" for key, axis in (("heads", "head"), ("dims", "dim")) if key in hook)
    return f"{name}{chosen}  [{shape}] {hook['dtype']}" + ("  (derived)" if hook["derived"] else "")


def _hook_table(hook: dict[str, Any], pieces: dict[int, str]) -> Table:
    numbers = ("norm", "mean", "std", "min", "max")
    by_head = any("head" in top for row in hook["rows"] for top in row["top"])
    largest = f"largest |value| ({'head.dim' if by_head else 'dim'}: value)"
    if hook["axes"][-1] == "d_vocab":
        largest = "largest (token: logit)"
    columns = [("pos", "right"), ("token", "left"), *((name, "right") for name in numbers), (largest, "fold")]
    rows = [
        (str(row["pos"]), pieces.get(row["pos"], ""), *(number(row[name]) for name in numbers), _top(row["top"]))
        for row in hook["rows"]
    ]
    return table(columns, rows)


def _top(entries: list[dict[str, Any]]) -> str:
    def place(entry: dict[str, Any]) -> str:
        head = f"{entry['head']}." if "head" in entry else ""
        return f"{head}{entry['dim']}" + (f" {quoted(entry['text'])}" if entry.get("text") is not None else "")

    return ", ".join(f"{place(entry)}: {number(entry['value'])}" for entry in entries)


# Shares of attention, in percent, from which each mark is drawn; and what a terminal with colours draws it in.
_SHADES = ((0, "·", ".", "grey50"), (1, "░", ":", "#4a6fe3"), (10, "▒", "+", "#21a585"), (33, "▓", "#", "#b5c934"),
           (66, "█", "@", "#fde725"))


def attention(name: str, hook: dict[str, Any], pieces: dict[int, str]) -> list[Table | Text]:
    """Scores or patterns of one hook point, with their title."""
    return [line(_title(name, hook), "bold"), *_attention_tables(hook, pieces)]


def _attention_tables(hook: dict[str, Any], pieces: dict[int, str]) -> list[Table | Text]:
    """Scores or patterns: for each head a row a query position; of patterns with a heat map over the keys."""
    rows = hook["rows"]
    columns = [("pos", "right"), ("token", "left")]
    columns += [(name, "right") for name in ("min", "max", "entropy") if name in rows[0]]
    columns += [("largest (key: value)", "fold")]
    mapped = "percent" in rows[0]
    keys = hook.get("dims") or range(hook["shape"][2])
    parts: list[Table | Text] = [line(_legend(keys))] if mapped else []
    if "entropy" in rows[0] and not mapped:
        parts.append(line("too many keys for a heat map; [dim=...] chooses some"))
    if mapped:
        columns.insert(2, ("keys", "left"))
    for head in dict.fromkeys(row["head"] for row in rows):
        cells = [_attention_cells(row, keys, pieces) for row in rows if row["head"] == head]
        parts += [line(f"head {head}"), table(columns, cells)]
    return parts


def _attention_cells(row: dict[str, Any], keys: Sequence[int], pieces: dict[int, str]) -> list[str | Text]:
    numbers = [number(row[name]) for name in ("min", "max", "entropy") if name in row]
    largest = ", ".join(f"{one['key']} {pieces.get(one['key'], '')}: {number(one['value'])}" for one in row["top"])
    drawn = [_heat(row, keys)] if "percent" in row else []
    return [str(row["pos"]), pieces.get(row["pos"], ""), *drawn, *numbers, largest]


def _heat(row: dict[str, Any], keys: Sequence[int]) -> Text:
    """A mark for each key, nothing for those after the query."""
    from rich.text import Text

    drawn = Text()
    for key, percent in zip(keys, row["percent"], strict=True):
        _, mark, plain, style = [shade for shade in _SHADES if percent >= shade[0]][-1]
        drawn.append(" " if key > row["pos"] else mark if _utf8() else plain, style)
    return drawn


def _legend(keys: Sequence[int]) -> str:
    marks = [mark if _utf8() else plain for _, mark, plain, _ in _SHADES]
    until = [shade[0] for shade in _SHADES[1:]]
    shares = [f"{mark} below {end}%" for mark, end in zip(marks, until, strict=False)]
    which = f"{keys[0]} to {keys[-1]}" if len(keys) == keys[-1] - keys[0] + 1 else ", ".join(map(str, keys))
    return f"keys {which}, left to right: {', '.join(shares)}, {marks[-1]} more"


def _values(row: dict[str, Any], hook: dict[str, Any]) -> list[str]:
    """Every value of one position, wrapped; a line for each head."""
    values = row["values"]
    if hook["axes"][-1] == "key":
        return wrapped(f"head {row['head']}, pos {row['pos']}:", values)
    if values and isinstance(values[0], list):
        heads = hook.get("heads") or range(len(values))
        return [text for head, one in zip(heads, values, strict=True) for text in
                wrapped(f"pos {row['pos']}, head {head}:", one)]  # fmt: skip
    return wrapped(f"pos {row['pos']}:", values)


def wrapped(label: str, values: list[float]) -> list[str]:
    import textwrap

    return textwrap.wrap(" ".join([label, *map(number, values)]), _WRAP, subsequent_indent="  ", break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


# What `hooks` gives


def hooks(body: dict[str, Any], rows: Iterable[Sequence[str]], with_aliases: bool) -> str:
    """The catalog of a model; `rows` are its hook points, folded over layers or not."""
    model = body["model"]
    layers = f"layers 0 to {model['n_layers'] - 1}"
    columns = [("name", "left"), ("layers", "left"), ("shape", "left"), ("formed by", "left"), ("editable", "left"),
               ("meaning", "fold")]
    parts = [
        line(visible(f"{model['name']} ({model['family']}, {layers})"), "bold"),
        *([line(visible(model["differs"]))] if model.get("differs") else []),
        line(),
        table(columns + [("aliases", "left")] * with_aliases, rows),
    ]
    if body["refused"]:
        refused = [(entry["name"], entry["reason"]) for entry in body["refused"]]
        parts += [line(), line("not given", "bold"), table([("name", "left"), ("reason", "fold")], refused)]
    for proof in body["engines"]:
        parts += [line(), *_proof(proof)]
    return draw(*parts)


def _proof(proof: dict[str, Any]) -> list[Table | Text]:
    """What an engine has proved at load, in a line, and a row for each point that it refuses or does not edit."""
    heading = f"the engine of pid {proof['pid']} ({proof['dtype']}): {len(proof['passed'])} hook points passed the proof at load"
    rows = [*proof["refused"].items(), *((name, f"not editable: {why}") for name, why in proof["not_editable"].items())]
    return [line(heading, "bold"), *([table([("name", "left"), ("reason", "fold")], rows)] if rows else [])]


# What `doctor` gives


def findings(body: dict[str, Any]) -> str:
    """The report of `vlens doctor`: a row a finding, then what mends those that need it."""
    styles = {"ok": "", "note": "yellow", "problem": "bold red"}
    rows = [(one["what"], line(one["state"], styles[one["state"]]), visible(one["found"])) for one in body["findings"]]
    parts = [table([("what", "left"), ("", "left"), ("found", "fold")], rows), line()]
    for one in body["findings"]:
        if one["mend"]:
            parts.append(line(f"{one['what']}: {visible(one['mend'])}"))
    return draw(*parts, line("vlens can answer" if body["ok"] else "vlens cannot answer: see the problems", "bold"))


def compared(body: dict[str, Any]) -> str:
    """The report of `vlens doctor --check-hf`: the largest error of each hook point over its layers."""
    model = body["model"]
    rows = [(one["name"], "" if one["layer"] is None else str(one["layer"]), f"{one['error']:.1e}",
             line("" if one["ok"] else "too large", "bold red")) for one in body["points"]]
    columns = [("hook point", "left"), ("worst layer", "right"), ("relative error", "right"), ("", "left")]
    parts = [line(visible(f"{model['name']} ({model['family']}, {model['dtype']}) against transformers (float32), "
                          f"{len(body['tokens'])} tokens"), "bold"), line(), table(columns, rows)]
    if body["uncompared"]:
        parts += [line(), line(f"not compared: {', '.join(body['uncompared'])}")]
    worst = max((one["error"] for one in body["points"]), default=0.0)
    parts += [line(), line(f"largest {worst:.1e}, limit {body['tolerance']:.0e}", "bold")]
    return draw(*parts)


def engines(described: Sequence[dict[str, Any]]) -> str:
    """`vlens engine status` as a table."""
    columns = [("pid", "right"), ("model", "fold"), ("state", "left"), ("memory", "right"), ("time left", "right")]
    rows = [
        (str(one["pid"]), visible(one["model"]), _doing(one), _memory(one), _left(one))
        for one in described
    ]
    return draw(table(columns, rows))


def _doing(one: dict[str, Any]) -> str:
    doing = f": {one['doing']}, for {one['doing_for_s']:.0f} s" if one.get("doing") else ""
    waiting = f", {one['waiting']} waiting" if one.get("waiting") else ""
    return f"{'asleep' if one.get('asleep') else one['state']}{doing}{waiting}"


def _memory(one: dict[str, Any]) -> str:
    """What the process holds, and what a compiled engine keeps on its device for captures and edits."""
    buffers = one.get("buffer_bytes")
    return f"{one['rss_bytes'] / 1e9:.2f} GB" + (f", buffers {buffers / 1e9:.2f} GB" if buffers else "")


def _left(one: dict[str, Any]) -> str:
    left = one["idle_left_s"]
    return "" if left is None else f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"


# What `param` gives


def params(body: dict[str, Any]) -> str:
    """The reply of `vlens param`: weights of one shape, type and source in one table, with a row each."""
    model = body["model"]
    parts = [line(visible(f"{model['name']} ({model['family'] or 'a family without names of its own'})"))]
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in body["params"]:
        groups.setdefault(_weight_title(entry), []).append(entry)
    for title, entries in groups.items():
        parts += [line(), line(title, "bold"), _weight_table(entries)]
        below = [text for entry in entries for text in _weight_lines(entry, body.get("compare"))]
        parts += [line("\n".join(below))] if below else []
    return draw(*parts)


def param_list(body: dict[str, Any], rows: Iterable[Sequence[str]]) -> str:
    """The reply of `vlens param --list`."""
    model = body["model"]
    columns = [("name", "left"), ("layers", "right"), ("kind of name", "left"), ("shape", "left"), ("dtype", "left"),
               ("in", "fold")]
    return draw(line(visible(f"{model['name']} ({model['family'] or 'a family without names of its own'})"), "bold"),
                line(), table(columns, [[visible(cell) for cell in row] for row in rows]))  # fmt: skip


def axes(entry: dict[str, Any]) -> str:
    """`[head 9, d_model 576]`, or `[576, 576]` of a tensor whose axes have no names."""
    named = entry["axes"] or [""] * len(entry["shape"])
    sized = (f"{axis} {size}".strip() for axis, size in zip(named, entry["shape"], strict=True))
    return f"[{', '.join(sized)}]"


def _weight_title(entry: dict[str, Any]) -> str:
    chosen = "".join(f"[{'' if axis.isdigit() else f'{axis}='}{_ranges(indices)}]"
                     for axis, indices in entry.get("selected", {}).items())
    how = f", dequantized ({entry['dequantized']})" if "dequantized" in entry else ""
    return visible(f"{axes(entry)} {entry['dtype']}, from the {entry['source']}{how}" + (f"  {chosen}" if chosen else ""))


def _ranges(indices: Sequence[int]) -> str:
    """`0:10,12` of indices, as it is typed in brackets."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1]:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return ",".join(str(first) if last == first + 1 else f"{first}:{last}" for first, last in runs)


def _weight_table(entries: list[dict[str, Any]]) -> Table:
    numbers = ("norm", "mean", "std", "min", "max")
    columns = [("name", "left"), *((name, "right") for name in numbers), ("zeros", "right"), ("min to max", "left")]
    rows = [
        (visible(e["name"]), *(number(e[name]) if name in e else "" for name in numbers),
         f"{100 * e['sparsity']:.3g}%" if "sparsity" in e else "", _histogram_line(e.get("histogram")))
        for e in entries
    ]
    return table(columns, rows)


def _histogram_line(histogram: dict[str, Any] | None) -> str:
    """Counts as bars, the highest for the most; a count that is not zero shows."""
    if not histogram:
        return ""
    utf8 = sys.stdout is None or "utf" in (sys.stdout.encoding or "").lower()
    bars = " ▁▂▃▄▅▆▇█" if utf8 else " .:-=+*#@"
    most = max(histogram["counts"])
    return "".join(bars[math.ceil(count / most * (len(bars) - 1))] for count in histogram["counts"])


def _weight_lines(entry: dict[str, Any], other: str | None) -> list[str]:
    """What stands under the table: singular values, the comparison, every value."""
    name, lines = visible(entry["name"]), []
    if entry.get("nonfinite"):
        lines.append(f"{name}: {entry['nonfinite']} of {entry['count']} numbers are NaN or infinite")
    if "compare" in entry:
        c = entry["compare"]
        lines.append(f"{name} against {visible(other or '')}: norm of the difference {number(c['difference_norm'])} "
                     f"(relative {number(c['relative'])}), cosine {number(c['cosine'])}")
    for where, values in _leaves(entry.get("singular_values", [])):
        lines += wrapped(f"{name}{where} singular values:", values)
    for where, values in _leaves(entry.get("values", [])):
        lines += wrapped(f"{name}{where}:", values)
    return lines


def _leaves(nested: Any, where: tuple[int, ...] = ()) -> Iterator[tuple[str, list[Any]]]:
    """The innermost lists of a nested one, each with its indices in brackets."""
    if not isinstance(nested, list):
        yield f"[{', '.join(map(str, where))}]" if where else "", [nested]
    elif nested and isinstance(nested[0], list):
        for place, each in enumerate(nested):
            yield from _leaves(each, (*where, place))
    elif nested:
        yield f"[{', '.join(map(str, where))}]" if where else "", nested
