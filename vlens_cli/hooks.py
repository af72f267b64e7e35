"""Hook names as people type them: parse, expand over a model's catalog, resolve to heads, columns and positions.

    hook  := ['blocks.' layers '.'] segment ('.' segment)*      `*` may stand in the last segment
    layers := '*' | range | '{' range (',' range)* '}'          range := int | int '-' int (both ends included)
    sel   := '[' ('pos' | 'head' | 'dim') '=' items ']'         each at most once
    items := item (',' item)*
    item  := int | [int] ':' [int] | string ['#' n] | 'prompt' | 'generated'      the last two kinds for pos only

Strings stand in single or double quotes, with the escapes \\n \\t \\\\ \\" \\'. Negative numbers count from the end.
What does not exist is refused, never clamped or skipped: a narrower answer than the one asked for looks right and is
not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from vlens_cli.errors import HookError, UsageError, VlensError

LIST_HINT = "`vlens hooks` lists the hook points of this model"


class HookCatalog(Protocol):
    """What this module needs of `families.Catalog`."""

    n_layers: int

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def refused(self) -> dict[str, str]: ...
    def canonical(self, name: str) -> str | None: ...
    def refusal(self, name: str) -> str | None: ...
    def axes(self, name: str) -> tuple[str, ...]: ...
    def size(self, axis: str) -> int: ...
    def aliases(self, name: str) -> tuple[str, ...]: ...


# What a selector holds. Named tuples: a dataclass takes a millisecond to make, and a client waits for each.


class Index(NamedTuple):
    value: int

    def __str__(self) -> str:
        return str(self.value)


class Slice(NamedTuple):
    """`start:stop`, stop excluded; None is an open end."""

    start: int | None
    stop: int | None

    def __str__(self) -> str:
        return ":".join("" if end is None else str(end) for end in (self.start, self.stop))


class Text(NamedTuple):
    """The tokens that cover the `nth` occurrence of a text, from 1; None where it must occur once."""

    text: str
    nth: int | None = None

    def __str__(self) -> str:
        return quoted(self.text) + (f"#{self.nth}" if self.nth else "")


class Part(NamedTuple):
    """`prompt` or `generated`."""

    name: str

    def __str__(self) -> str:
        return self.name


Item = Index | Slice | Text | Part
Items = tuple[Item, ...]


def selectors(**chosen: Items | None) -> str:
    """Selectors in brackets, as they parse."""
    return "".join(f"[{axis}={','.join(map(str, items))}]" for axis, items in chosen.items() if items)


@dataclass(frozen=True)
class HookRequest:
    """One hook as typed; `str()` prints it in one spelling, which parses to an equal request."""

    text: str = field(compare=False)
    pattern: str
    pos: Items | None = None
    head: Items | None = None
    dim: Items | None = None

    def __str__(self) -> str:
        return self.pattern + selectors(pos=self.pos, head=self.head, dim=self.dim)


class Selected(NamedTuple):
    """One hook point to read; None selects everything.

    Positions stay items, for they need the tokens: `pos` (of the queries, in attention patterns and scores), and `key`,
    which is what [dim=...] means where the last axis is the keys.
    """

    name: str
    pos: Items | None = None
    head: tuple[int, ...] | None = None
    dim: tuple[int, ...] | None = None
    key: Items | None = None


# Parsing

_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'"}
_INT = r"-?[0-9]{1,15}"  # longer than any index, and short of Python's limit for int()


def quoted(text: str) -> str:
    """A text in double quotes, as it parses."""
    escaped = text.translate({ord(char): f"\\{letter}" for letter, char in _ESCAPES.items() if char != "'"})
    return f'"{escaped}"'


class Reader:
    """A place in a text that is being parsed; its faults show the text with a caret under the place."""

    def __init__(self, text: str, at: int = 0, code: str = "hook_grammar") -> None:
        self.text = text
        self.at = at
        self._code = code

    def take(self, pattern: str) -> str | None:
        """What the pattern matches here, and go past it; None where it does not."""
        found = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def expect(self, pattern: str, what: str) -> str:
        taken = self.take(pattern)
        if taken is None:
            raise self.fault(f"expected {what}")
        return taken

    def number(self) -> int | None:
        taken = self.take(_INT)
        return None if taken is None else int(taken)

    def fault(self, message: str, at: int | None = None, hint: str = "") -> HookError:
        at = self.at if at is None else at
        flat = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in self.text)
        return HookError(f"{message}\n  {flat}\n  {' ' * at}^", hint=hint, code=self._code)


class _Name(NamedTuple):
    """`blocks.SLOT.TAIL`, or TAIL alone with an empty slot. `ranges` None is every layer."""

    slot: str
    ranges: tuple[tuple[int, int], ...] | None
    tail: str


def parse(text: str) -> HookRequest:
    """A hook as typed: pattern and selectors. Raises HookError with a caret under the fault."""
    reader = Reader(text)
    request = read_hook(reader)
    if reader.at < len(text):
        raise _junk(reader)
    return request


def parse_items(text: str, axis: str) -> Items:
    """What may stand inside `[axis=...]`, as the flags `--pos`, `--head` and `--dim` give it."""
    reader = Reader(text)
    items = read_items(reader, axis)
    if reader.at < len(text):
        raise reader.fault(f"expected `,` or the end of {axis}")
    return items


def read_hook(reader: Reader) -> HookRequest:
    """The hook that starts at the reader's place; the reader stands after it, on whatever follows."""
    start = reader.at
    _read_name(reader)
    pattern = reader.text[start : reader.at]
    chosen = read_selectors(reader)
    return HookRequest(reader.text[start : reader.at], pattern, **chosen)


def read_selectors(reader: Reader) -> dict[str, Items]:
    """The selectors in brackets at the reader's place, by axis."""
    chosen: dict[str, Items] = {}
    while reader.take(r"\["):
        at = reader.at
        axis = reader.expect(r"pos|head|dim", "pos, head or dim")
        if axis in chosen:
            raise reader.fault(f"{axis} is given twice", at)
        reader.expect(r"=", f"`=` after {axis}")
        chosen[axis] = read_items(reader, axis)
        reader.expect(r"\]", "`,` or `]`")
    return chosen


def looks_like_hook(text: str) -> bool:
    """Whether a prompt is more likely a hook name: bash makes two words of blocks.{0,5}.hook_resid_post."""
    try:
        name = _read_name(Reader(parse(text).pattern))
    except VlensError:
        return False
    return bool(name.slot) or "hook_" in name.tail


def _read_name(reader: Reader) -> _Name:
    start, slot, ranges = reader.at, "", ()
    if reader.take(r"blocks\."):
        start = reader.at
        ranges = read_layers(reader)
        slot = reader.text[start : reader.at]
        reader.expect(r"\.", "`.` and the rest of a hook name after the layer")
    tail = reader.expect(r"(?:[A-Za-z0-9_]+\.)*[A-Za-z0-9_*]+", "a hook name")
    return _Name(slot, ranges, tail)


def read_layers(reader: Reader) -> tuple[tuple[int, int], ...] | None:
    """The layers at the reader's place, as ranges with both ends included; None for `*`."""
    if reader.take(r"\*"):
        return None
    if not reader.take(r"\{"):
        return (_read_range(reader),)
    ranges = [_read_range(reader)]
    while reader.take(r",\s*"):
        ranges.append(_read_range(reader))
    reader.expect(r"\}", "`,` or `}`")
    return tuple(ranges)


def _read_range(reader: Reader) -> tuple[int, int]:
    first = reader.number()
    if first is None:
        raise reader.fault("expected a layer: 3, -1, 3-7, {0,5,10} or *")
    if not reader.take(r"-"):
        return first, first
    last = reader.number()
    if last is None:
        raise reader.fault("expected the last layer of a range")
    return first, last


def read_items(reader: Reader, axis: str) -> Items:
    """What stands inside `[axis=...]`, at the reader's place."""
    items = [_read_item(reader, axis)]
    while reader.take(r"\s*,\s*"):
        items.append(_read_item(reader, axis))
    return tuple(items)


def _read_item(reader: Reader, axis: str) -> Item:
    at = reader.at
    if quote := reader.take("[\"']"):
        if axis != "pos":
            raise reader.fault(f"{axis} takes numbers and ranges; a text selects positions", at)
        return _read_text(reader, quote)
    if word := reader.take(r"(?:prompt|generated)\b"):
        if axis != "pos":
            raise reader.fault(f"{axis} takes numbers and ranges", at)
        return Part(word)
    start = reader.number()
    if reader.take(":"):
        return Slice(start, reader.number())
    if start is None:
        kinds = "a number, a range such as 3:6" + (', a text such as "Eiffel"' if axis == "pos" else "")
        here = reader.at
        hint = "one pair of brackets each: [head=3][pos=-1]" if reader.take(r"(?:pos|head|dim)\s*=") else ""
        if axis == "pos" and not hint:
            hint = _quotes_hint(reader)
        raise reader.fault(f"expected {kinds}", here, hint=hint)
    return Index(start)


def _quotes_hint(reader: Reader) -> str:
    """How the text at the reader's place is typed, empty where none stands there: the shell has taken its quotes."""
    import shlex

    in_brackets = "[" in reader.text[: reader.at]
    text = (reader.take(r"[^\]#]*") or "").strip()
    if not (text.isprintable() and re.search(r"[^\W\d]", text)):
        return ""
    typed = f"'...[pos={quoted(text)}]'" if in_brackets else f"--pos {shlex.quote(quoted(text))}"
    return f"quotes must survive the shell: {typed}"


def _read_text(reader: Reader, quote: str) -> Text:
    opened = reader.at - 1
    text = read_quoted(reader, quote)
    if not text:
        raise reader.fault("an empty text selects nothing", opened)
    if not reader.take("#"):
        return Text(text)
    at = reader.at
    nth = reader.number()
    if nth is None or nth < 1:
        raise reader.fault("expected the number of the occurrence, from 1", at)
    return Text(text, nth)


def read_quoted(reader: Reader, quote: str) -> str:
    """The text up to the closing quote; the reader stands after the opening one."""
    opened = reader.at - 1
    body = reader.take(rf"(?:[^\\{quote}]|\\.)*")
    if not reader.take(quote):
        raise reader.fault("this quote is not closed", opened)
    for escape in re.finditer(r"\\(.)", body or "", re.DOTALL):
        if escape[1] not in _ESCAPES:
            raise reader.fault(r"this is not an escape; \n \t \\ \" and \' are", opened + 1 + escape.start())
    return re.sub(r"\\(.)", lambda escape: _ESCAPES[escape[1]], body or "", flags=re.DOTALL)


def _junk(reader: Reader) -> HookError:
    if reader.at and reader.text[reader.at - 1] == "*":
        return reader.fault("`*` stands for the layer, or in the last part of a name", reader.at - 1)
    hint = "give `--hook` once for each name" if reader.text[reader.at] == "{" else ""
    return reader.fault("this cannot stand in a hook name", hint=hint)


# A pattern over a catalog


def expand(request: HookRequest, catalog: HookCatalog) -> tuple[str, ...]:
    """The canonical names that a request means, in the order of the forward.

    Every layer that is written out must have the hook; for `*` one layer is enough. A `*` in the last segment
    matches canonical names, and aliases where no canonical name matches.
    Raises HookError: unknown (with near matches), refused (with the reason), or a layer that does not exist.
    """
    name = _read_name(Reader(request.pattern))
    stems = [f"blocks.{i}." for i in _layers(name, catalog.n_layers)] if name.slot else [""]
    hits = {stem + name.tail: _hits(stem + name.tail, catalog) for stem in stems}
    missing = [concrete for concrete, found in hits.items() if not found]
    if missing and (name.ranges is not None or len(missing) == len(hits)):
        raise _no_such(request.pattern, name, missing[0], catalog)
    wanted = {hook for found in hits.values() for hook in found}
    return tuple(hook for hook in catalog.names if hook in wanted)


def _layers(name: _Name, n_layers: int) -> Iterable[int]:
    if name.ranges is None:
        return range(n_layers)
    return dict.fromkeys(i for ends in name.ranges for i in _range(ends, n_layers))


def _range(ends: tuple[int, int], n_layers: int) -> range:
    first, last = (end + n_layers if end < 0 else end for end in ends)
    for end, typed in zip((first, last), ends, strict=True):
        if not 0 <= end < n_layers:
            raise HookError(
                f"there is no layer {typed}: this model has layers 0 to {n_layers - 1}", code="layer_out_of_range"
            )
    if first > last:
        raise HookError(f"layers {ends[0]}-{ends[1]} run backwards", hint=f"write {last}-{first}", code="hook_grammar")
    return range(first, last + 1)


def _hits(concrete: str, catalog: HookCatalog) -> tuple[str, ...]:
    if "*" not in concrete:
        found = catalog.canonical(concrete)
        return () if found is None else (found,)
    matches = _matcher(concrete)
    direct = tuple(name for name in catalog.names if matches(name))
    return direct or tuple(name for name in catalog.names if any(map(matches, catalog.aliases(name))))


def _matcher(glob: str) -> Callable[[str], object]:
    return re.compile(re.escape(glob).replace(r"\*", r"\w*")).fullmatch


def _no_such(pattern: str, name: _Name, concrete: str, catalog: HookCatalog) -> HookError:
    for refused, reason in _refusals(concrete, catalog):
        shown = refused if "*" in name.tail else pattern
        return HookError(f"{shown} is not given: {reason}", hint=LIST_HINT, code="hook_refused")
    near = _near(name, catalog)
    verb = "matches" if "*" in pattern else "is named"
    return HookError(
        f"no hook point of this model {verb}: {pattern}",
        hint=f"did you mean {' or '.join(near)}? {LIST_HINT}" if near else LIST_HINT,
    )


def _refusals(concrete: str, catalog: HookCatalog) -> Iterator[tuple[str, str]]:
    if "*" not in concrete:
        reason = catalog.refusal(concrete)
        yield from () if reason is None else ((concrete, reason),)
        return
    matches = _matcher(fold(concrete))
    yield from ((name, reason) for name, reason in catalog.refused.items() if matches(name))


def _near(name: _Name, catalog: HookCatalog) -> list[str]:
    """Up to three names like the one typed, in the same spelling of the layer."""
    from difflib import get_close_matches

    canonical = list(dict.fromkeys(fold(known) for known in catalog.names))
    aliases = dict.fromkeys(fold(alias) for known in catalog.names for alias in catalog.aliases(known))
    asked = ("blocks.{i}." if name.slot else "") + name.tail
    last = name.tail.rpartition(".")[2]
    same = [known for known in canonical if known.rpartition(".")[2] in (last, f"hook_{last}")]
    close = get_close_matches(asked, [*canonical, *aliases], n=3, cutoff=0.7)
    found = dict.fromkeys([*same, *close])
    return [known.replace("{i}", name.slot or "0") for known in found][:3]


def fold(name: str) -> str:
    """`blocks.{i}.x` of `blocks.3.x`; a name outside the blocks as it is."""
    return re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)


# Requests with their selectors


def resolve(
    requests: Iterable[HookRequest],
    catalog: HookCatalog,
    pos: str | None = None,
    head: str | None = None,
    dim: str | None = None,
    *,
    as_typed: bool = False,
) -> tuple[Selected, ...]:
    """The hook points of all requests, in the order asked, each once; heads and dims ascending, or `as_typed`.

    `pos`, `head` and `dim` are the texts of the flags; each applies to the hooks that carry no such selector
    themselves. A head selector, from a flag or in brackets, on a hook point without heads is refused, also where the
    name comes from a pattern: leaving it out silently would give whole rows to someone who asked for one head.
    """
    flags = {"pos": pos, "head": head, "dim": dim}
    defaults = {axis: None if text is None else parse_items(text, axis) for axis, text in flags.items()}
    chosen: dict[str, Selected] = {}
    for request in requests:
        for name in expand(request, catalog):
            one = _selected(name, request, defaults, catalog, as_typed)
            if chosen.setdefault(name, one) != one:
                raise UsageError(
                    f"{name} is asked for twice, with different selectors",
                    hint="put both into one selector, such as [pos=0,3], or run two commands",
                    code="hook_twice",
                )
    return tuple(chosen.values())


def _selected(
    name: str, request: HookRequest, defaults: dict[str, Items | None], catalog: HookCatalog, as_typed: bool
) -> Selected:
    pos, head, dim = (getattr(request, axis) or defaults[axis] for axis in ("pos", "head", "dim"))
    axes = catalog.axes(name)
    heads = None if head is None else _heads(name, head, axes, catalog, as_typed)
    if axes[-1] == "key":
        return Selected(name, pos=pos, head=heads, key=dim)
    dims = None if dim is None else indices(dim, catalog.size(axes[-1]), "dim", name, as_typed=as_typed)
    return Selected(name, pos=pos, head=heads, dim=dims)


def _heads(name: str, items: Items, axes: tuple[str, ...], catalog: HookCatalog, as_typed: bool) -> tuple[int, ...]:
    axis = next((axis for axis in axes if axis in ("head", "kv_head")), None)
    if axis is None:
        raise HookError(
            f"{name} has no heads; its axes are {', '.join(axes)}",
            hint="put the selector on the hooks that have heads, such as blocks.3.attn.hook_z[head=0]",
            code="no_heads",
        )
    return indices(items, catalog.size(axis), axis.replace("_", " "), name, as_typed=as_typed)


def indices(items: Items, size: int, what: str, where: str = "", *, as_typed: bool = False) -> tuple[int, ...]:
    """Items as indices below `size`, each once: ascending, or `as_typed`, where values are given in that order.

    `what` (head, dim) and `where` (a hook) name them in errors.
    """
    found: list[int] = []
    for item in items:
        if not isinstance(item, Index | Slice):
            raise UsageError(f"{what} takes numbers and ranges: {item}")
        found += _numbers(item, size, size, what, where)
    return _each_once(found, as_typed)


def _each_once(found: list[int], as_typed: bool) -> tuple[int, ...]:
    return tuple(dict.fromkeys(found if as_typed else sorted(found)))


def positions(
    items: Items,
    n_tokens: int,
    spans: Callable[[str], Sequence[tuple[int, int]]],
    *,
    tokens: Sequence[str] = (),
    n_prompt: int | None = None,
    as_typed: bool = False,
) -> tuple[int, ...]:
    """Items as positions of one prompt, each once: ascending, or `as_typed`, where values are given in that order.

    `spans(text)` gives the token range (stop excluded) that covers each occurrence of a text; `tokens` are shown where
    it occurs nowhere. Negative numbers count from the end of the prompt, whose length is `n_prompt` where some of the
    `n_tokens` were generated.
    """
    n_prompt = n_tokens if n_prompt is None else n_prompt
    parts = {"prompt": range(n_prompt), "generated": range(n_prompt, n_tokens)}
    found: list[int] = []
    for item in items:
        match item:
            case Part(name):
                if not parts[name]:
                    raise HookError(f"there are no {name} positions here", code="pos_out_of_range")
                found += parts[name]
            case Text():
                found += range(*_occurrence(item, spans(item.text), tokens))
            case _:
                found += _numbers(item, n_tokens, n_prompt, "position")
    return _each_once(found, as_typed)


def _numbers(item: Index | Slice, size: int, end: int, what: str, where: str = "") -> range:
    """The range that an item selects of `size`; negative numbers count back from `end`."""
    typed = (item.value,) if isinstance(item, Index) else (item.start or 0, size if item.stop is None else item.stop)
    placed = [number + end if number < 0 else number for number in typed]
    limit = size - 1 if isinstance(item, Index) else size
    for number, at in zip(typed, placed, strict=True):
        if not 0 <= at <= limit:
            raise HookError(
                f"there is no {what} {number}{' in ' + where if where else ''}: the {what}s are 0 to {size - 1}",
                code=f"{what.split()[-1].replace('position', 'pos')}_out_of_range",
            )
    if isinstance(item, Index):
        return range(placed[0], placed[0] + 1)
    if placed[0] >= placed[1]:
        raise HookError(f"{what} {item} selects nothing{' in ' + where if where else ''}", code="empty_selection")
    return range(*placed)


def _occurrence(item: Text, found: Sequence[tuple[int, int]], tokens: Sequence[str]) -> tuple[int, int]:
    shown = str(Text(item.text))
    if not found:
        fed = f"; its tokens are {' '.join(str(Text(token)) for token in tokens)}" if tokens else ""
        raise HookError(f"the prompt does not contain {shown}{fed}", code="text_not_found")
    if item.nth is None and len(found) > 1:
        raise HookError(
            f"the prompt contains {shown} {len(found)} times",
            hint=f"say which, from 1: {shown}#1",
            code="text_ambiguous",
        )
    if (item.nth or 1) > len(found):
        raise HookError(f"the prompt contains {shown} only {len(found)} times: {item}", code="text_not_found")
    return found[(item.nth or 1) - 1]
