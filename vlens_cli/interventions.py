"""Interventions as people type them: one change of the forward each, parsed without torch.

    expr    := hook sel* ws op ws value               op := '=' | '+=' | '-=' | '*='
    value   := number | [number '*'] what | 'noise(' number ')'
    what    := tensor | 'mean(' tensor ')' | 'proj(' tensor ')' | '@source' sel*
    tensor  := path [':' key] | '"' path '"' [':' key] | '[' number (',' number)* ']'
    key     := bare | '"' text '"'

hook and sel are those of `hooks`. A bare path holds no white space and none of : * ( ) [ ] , @ ' "; others stand in
quotes, and so do keys with white space, parentheses, commas or quotes. White space before the operator is required,
since `*` may end a hook pattern.

`=` sets, `+=` and `-=` add and subtract, `*=` multiplies. `mean` averages the rows of a tensor; `proj(d)` is the part
of the value itself that lies along d; `noise(s)` is normal with standard deviation s; `@source` is the value of the
source run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from vlens_cli import hooks
from vlens_cli.errors import HookError, UsageError
from vlens_cli.hooks import HookRequest, Items, Reader, Selected, quoted

CODE = "edit_grammar"
OPS = ("=", "+=", "-=", "*=")
# Of float32, in which edits are computed.
LARGEST = 3.4028234663852886e38
_NUMBER = r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|inf(?:inity)?\b|nan\b)"
_BARE_PATH = r"""[^\s:*()\[\],@'"][^\s:*()\[\],'"]*"""
_BARE_KEY = r"""[^\s(),'"]+"""


@dataclass(frozen=True)
class File:
    """A tensor of a safetensors file. Key None is the only one, or the one named like the hook."""

    path: str
    key: str | None = None

    def __str__(self) -> str:
        bare = re.fullmatch(_BARE_PATH, self.path) and not re.fullmatch(_NUMBER, self.path)
        path = self.path if bare else quoted(self.path)
        if self.key is None:
            return path
        return f"{path}:{self.key if re.fullmatch(_BARE_KEY, self.key) else quoted(self.key)}"


@dataclass(frozen=True)
class Numbers:
    """One row, written out."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(_number, self.values))}]"


@dataclass(frozen=True)
class Constant:
    """One number for every entry."""

    value: float

    def __str__(self) -> str:
        return _number(self.value)


@dataclass(frozen=True)
class Tensor:
    """`factor` times a tensor, its mean over rows (`how` "mean"), or the projection on it (`how` "proj")."""

    of: File | Numbers
    how: str = ""
    factor: float = 1.0

    def __str__(self) -> str:
        return _times(self.factor) + (f"{self.how}({self.of})" if self.how else str(self.of))


@dataclass(frozen=True)
class Source:
    """`factor` times the source run's value: of the same positions, heads and dims, or of those given."""

    pos: Items | None = None
    head: Items | None = None
    dim: Items | None = None
    factor: float = 1.0

    def __str__(self) -> str:
        return f"{_times(self.factor)}@source{hooks.selectors(pos=self.pos, head=self.head, dim=self.dim)}"


@dataclass(frozen=True)
class Noise:
    """Normal noise of mean 0 and this standard deviation, of its own for every entry."""

    std: float

    def __str__(self) -> str:
        return f"noise({_number(self.std)})"


Value = Constant | Tensor | Source | Noise


@dataclass(frozen=True)
class Intervention:
    """One change of one hook point, or of every one that a pattern means; `str()` parses to an equal one."""

    hook: HookRequest
    op: str
    value: Value

    def __str__(self) -> str:
        return f"{self.hook} {self.op} {self.value}"


def _number(value: float) -> str:
    """Digits that read back to the same float."""
    whole = math.isfinite(value) and value.is_integer() and abs(value) < 1e15 and str(value) != "-0.0"
    return str(int(value)) if whole else repr(value)


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{_number(factor)} * "


# Parsing


def parse(text: str) -> Intervention:
    """One expression. Raises HookError (code `edit_grammar`) that shows it with a caret under the fault."""
    reader = Reader(text, code=CODE)
    reader.take(r"\s*")
    hook = hooks.read_hook(reader)
    op = _read_op(reader)
    begin = reader.at
    value = _read_value(reader)
    reader.take(r"\s*")
    if reader.at < len(text):
        raise _after_value(reader)
    if op == "*=" and (isinstance(value, Noise) or (isinstance(value, Tensor) and value.how == "proj")):
        raise reader.fault("this is added, subtracted or set; it is no factor", begin)
    return Intervention(hook, op, value)


def parse_value(text: str) -> Value:
    """The right side of an expression."""
    reader = Reader(text, code=CODE)
    reader.take(r"\s*")
    value = _read_value(reader)
    reader.take(r"\s*")
    if reader.at < len(text):
        raise _after_value(reader)
    return value


def _read_op(reader: Reader) -> str:
    at = reader.at
    if not reader.take(r"\s+"):
        if reader.at < len(reader.text) and reader.text[at] in "=+-*/":
            raise reader.fault("white space is needed before the operator", hint=_with_spaces(reader.text, at))
        raise reader.fault("expected a space and one of = += -= *=", hint="such as: blocks.5.hook_mlp_out = 0")
    at = reader.at
    op = reader.take(r"[+\-*/|&^%:=<>!~@]+")
    if op not in OPS:
        raise reader.fault(f"there is no operator {op}: one of = += -= *=" if op else "expected one of = += -= *=", at)
    if not reader.take(r"\s+") and reader.at < len(reader.text):
        raise reader.fault("white space is needed after the operator", hint=_with_spaces(reader.text, at))
    return op


def _with_spaces(text: str, at: int) -> str:
    """What was meant, as it is typed: `at` is where the operator stands."""
    found = re.match(r"([+\-*]?=)\s*(.+)", text[at:])
    return f"{text[:at].rstrip()} {found[1]} {found[2]}" if found else ""


def _read_value(reader: Reader) -> Value:
    number = reader.take(rf"{_NUMBER}(?=\s*\*)")
    if number is None:
        number = reader.take(rf"{_NUMBER}(?=\s*\Z)")
        return Constant(float(number)) if number is not None else _read_what(reader)
    reader.take(r"\s*\*\s*")
    at = reader.at
    what = _read_what(reader)
    if isinstance(what, Noise):
        raise reader.fault("noise takes its size itself: noise(3)", at)
    return replace(what, factor=float(number))


def _read_what(reader: Reader) -> Tensor | Source | Noise:
    at = reader.at
    if reader.take("@"):
        if not reader.take(r"source\b"):
            raise reader.fault("only @source begins with @; a path that does stands in quotes", at)
        return Source(**hooks.read_selectors(reader))
    word = reader.take(r"[A-Za-z_]\w*(?=\()")
    if word is None:
        return Tensor(_read_tensor(reader))
    if word not in ("mean", "proj", "noise"):
        raise reader.fault(f"there is no function {word}: one of mean, proj, noise", at)
    reader.take(r"\(\s*")
    what = _read_std(reader) if word == "noise" else Tensor(_read_tensor(reader), word)
    reader.expect(r"\s*\)", "`)`")
    return what


def _read_std(reader: Reader) -> Noise:
    at = reader.at
    std = float(reader.expect(_NUMBER, "a number, the standard deviation"))
    if not (std >= 0 and math.isfinite(std)):
        raise reader.fault("a standard deviation is a finite number from 0", at)
    return Noise(std)


def _read_tensor(reader: Reader) -> File | Numbers:
    if reader.take(r"\[\s*"):
        values = [float(reader.expect(_NUMBER, "a number"))]
        while reader.take(r"\s*,\s*"):
            values.append(float(reader.expect(_NUMBER, "a number")))
        reader.expect(r"\s*\]", "`,` or `]`")
        return Numbers(tuple(values))
    path = _read_path(reader)
    if not reader.take(":"):
        return File(path)
    if quote := reader.take("[\"']"):
        return File(path, hooks.read_quoted(reader, quote))
    return File(path, reader.expect(_BARE_KEY, "the key of a tensor in the file"))


def _read_path(reader: Reader) -> str:
    at = reader.at
    quote = reader.take("[\"']")
    path = hooks.read_quoted(reader, quote) if quote else reader.take(_BARE_PATH)
    if not path:
        raise reader.fault("expected a number, a file such as steer.safetensors:happy, @source, mean(...), proj(...) "
                           "or noise(...)", at)
    if "\0" in path:
        raise reader.fault("a path holds no null character", at)
    return path


def _after_value(reader: Reader) -> HookError:
    if reader.text[reader.at] == ":":
        return reader.fault("a path with a colon stands in quotes")
    if reader.text[reader.at] == "*":
        return reader.fault("a value has one factor, in front of it", hint="FACTOR * FILE:KEY, one factor, in front: "
                            "4 * steer.safetensors:happy")
    return reader.fault("the expression ends before this", hint="one -i for each expression; quote paths with spaces")


# The same as JSON

_PARAMETERS = {"suppress": None, "scale": "factor", **dict.fromkeys(
    ("add", "subtract", "set", "project", "noise", "mean"), "value")}
_SPEC_OPS = {"suppress": "=", "scale": "*=", "add": "+=", "subtract": "-=", "set": "=", "project": "-=", "noise": "+=",
             "mean": "="}
_FACTOR_OPS = ("add", "subtract", "set")


def from_spec(spec: Any) -> Intervention:
    """One entry of a `--spec` file: an expression, or an object with TransformerLens' ops.

    `hook`, `op`, optional `pos`, `head`, `dim` (a number, a list of numbers, or the text inside `[pos=...]`), and what
    the op takes: suppress nothing; scale `factor`; add, subtract, set a `value` (a number, a list, or the right side of
    an expression) and, optional, the `factor` that it is multiplied by; project, mean a `value` that is a list or
    names a tensor; noise its standard deviation as `value`.
    Raises UsageError for anything else: a key that is passed over would change what the edit means.
    """
    if isinstance(spec, str):
        return parse(spec)
    if not isinstance(spec, dict):
        raise _bad_spec(f"neither an object nor an expression: {spec!r}")
    op = spec.get("op")
    if not isinstance(op, str) or op not in _SPEC_OPS:
        raise _bad_spec(f"no op that vlens has: {op!r}", f"one of {', '.join(_SPEC_OPS)}")
    parameter = _PARAMETERS[op]
    needed = {"hook", "op", *filter(None, [parameter])}
    optional = [*(["factor"] if op in _FACTOR_OPS else []), "pos", "head", "dim"]
    unknown = spec.keys() - needed - set(optional)
    if unknown:
        raise _bad_spec(f"a key that {op} does not take: {', '.join(sorted(unknown))}",
                        f"{op} takes {', '.join(sorted(needed))}, and {', '.join(optional)}")
    if missing := needed - spec.keys():
        raise _bad_spec(f"{op} without: {', '.join(sorted(missing))}")
    value = Constant(0.0) if parameter is None else _spec_value(op, spec[parameter])
    if op in _FACTOR_OPS and spec.get("factor") is not None:
        value = _scaled(value, spec["factor"])
    return Intervention(_spec_hook(spec), _SPEC_OPS[op], value)


def _spec_hook(spec: dict[str, Any]) -> HookRequest:
    if not isinstance(spec["hook"], str):
        raise _bad_spec(f"hook is no text: {spec['hook']!r}")
    request = hooks.parse(spec["hook"])
    for axis in ("pos", "head", "dim"):
        if spec.get(axis) is None:
            continue
        if getattr(request, axis) is not None:
            raise _bad_spec(f"{axis} is given twice, in the hook and beside it: {spec['hook']}")
        request = replace(request, **{axis: _spec_items(spec[axis], axis)})
    return request


def _spec_items(given: Any, axis: str) -> Items:
    numbers = given if isinstance(given, list) else [given]
    if isinstance(given, str):
        return hooks.parse_items(given, axis)
    if not numbers or not all(type(number) is int for number in numbers):
        raise _bad_spec(f"{axis} is neither a number, nor a list of numbers, nor a text: {given!r}")
    return tuple(map(hooks.Index, numbers))


def _spec_value(op: str, given: Any) -> Value:
    if isinstance(given, str):
        value = parse_value(given)
    elif isinstance(given, list) and given and all(map(_is_number, given)):
        value = Tensor(Numbers(tuple(map(float, given))))
    elif _is_number(given):
        value = Constant(float(given))
    else:
        raise _bad_spec(f"{op} takes no such value: {given!r}")
    if op == "noise":
        if not isinstance(value, Constant) or not (value.value >= 0 and math.isfinite(value.value)):
            raise _bad_spec(f"noise takes its standard deviation, a number from 0: {given!r}")
        return Noise(value.value)
    if op in ("project", "mean"):
        if not isinstance(value, Tensor) or value.how or value.factor != 1:
            raise _bad_spec(f"{op} takes a list of numbers or names a tensor: {given!r}")
        return replace(value, how="proj" if op == "project" else "mean")
    if op == "scale" and not isinstance(value, Constant):
        raise _bad_spec(f"scale takes a number: {given!r}")
    return value


def _scaled(value: Value, factor: Any) -> Value:
    """A value times the `factor` beside it."""
    if not _is_number(factor):
        raise _bad_spec(f"factor is no number: {factor!r}")
    if isinstance(value, Noise):
        raise _bad_spec(f"noise takes its size itself, and no factor: {value}")
    if isinstance(value, Constant):
        return Constant(value.value * factor)
    if value.factor != 1:
        raise _bad_spec(f"a factor is given twice, in the value and beside it: {value}")
    return replace(value, factor=float(factor))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 10**300)


def _bad_spec(message: str, hint: str = "") -> UsageError:
    return UsageError(f"an intervention of --spec is wrong: {message}", hint=hint, code="bad_spec")


# Against a model


def targets(intervention: Intervention, catalog: Any) -> tuple[Selected, ...]:
    """The hook points that one intervention changes, in the order of the forward. Heads and dims stand as they were
    typed: that is the order of the values that are given for them.

    Raises HookError as `hooks.resolve` does, and for a point that cannot be edited, with the reason.
    """
    found = hooks.resolve([intervention.hook], catalog, as_typed=True)
    for selected in found:
        check_editable(catalog, selected.name)
    return found


def check_editable(catalog: Any, name: str) -> None:
    """Raises HookError, with the reason, for a hook point that cannot be edited."""
    if catalog.editable(name):
        return
    reason = ("it is formed beside the forward, and nothing that follows reads it" if catalog.derived(name) else
              "no write to it is proved when an engine starts; the points before and after it can be edited")
    raise HookError(f"{name} cannot be edited: {reason}", code="not_editable",
                    hint="`vlens hooks` says which points can")


def check(interventions: Iterable[Intervention], catalog: Any, *, allow_nan: bool, has_source: bool) -> None:
    """What can be said of interventions without an engine and without their files. Raises UsageError."""
    for one in interventions:
        targets(one, catalog)
        if not allow_nan and not all(abs(number) <= LARGEST for number in _written(one.value)):
            raise UsageError(f"a number that is not finite in float32 is refused: {one}", code="not_finite",
                             hint="--allow-nan takes it")
        if isinstance(one.value, Source) and not has_source:
            raise UsageError(f"@source is the value of a source run, and none is given: {one}", code="no_source",
                             hint='add --source "The Colosseum is in"')


def _written(value: Value) -> tuple[float, ...]:
    """The numbers that an expression writes out."""
    match value:
        case Constant(number) | Noise(number):
            return (number,)
        case Tensor(of=Numbers(numbers), factor=factor):
            return (*numbers, factor)
        case Tensor(factor=factor) | Source(factor=factor):
            return (factor,)
    return ()


def files(interventions: Iterable[Intervention]) -> list[str]:
    """The paths that interventions read, each once."""
    return list(dict.fromkeys(i.value.of.path for i in interventions
                              if isinstance(i.value, Tensor) and isinstance(i.value.of, File)))


def with_paths(one: Intervention, absolute: Callable[[str], str]) -> Intervention:
    """The same, its file named by another path."""
    if not isinstance(one.value, Tensor) or not isinstance(one.value.of, File):
        return one
    of = one.value.of
    return replace(one, value=replace(one.value, of=File(absolute(of.path), of.key)))
