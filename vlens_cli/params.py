"""Names of weights as people type them, and where each weight lies in a checkpoint. Light: no torch, no numpy.

    param := name sel*                     `*` in a name stands for anything, dots included
    sel   := '[' [axis '='] items ']'      all of them with an axis, or all without: the n-th is for the n-th axis
    items := as in hook selectors          a segment of a name may be a range of numbers: 3-7, {0,5,10}, -1

A weight has names of three kinds: TransformerLens' (`blocks.0.attn.W_Q`), the checkpoint's
(`model.layers.0.self_attn.q_proj.weight`) and the engine's (`model.layers.0.self_attn.qkv_proj.weight`). They are
different tensors: permuted, split or joined, the numbers are the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from vlens_cli import checkpoint, layout, quantized
from vlens_cli.checkpoint import NAMES, Stored
from vlens_cli.errors import StartError, UsageError
from vlens_cli.families import Catalog, catalog_for, holds, param_rows
from vlens_cli.families.param_rows import ParamRow
from vlens_cli.hooks import Items, Reader, Slice, indices, read_items, read_layers
from vlens_cli.layout import View

LENS, CHECKPOINT, ENGINE = "transformerlens", "checkpoint", "engine"
KIND_WORDS = {LENS: "TransformerLens", CHECKPOINT: "checkpoint", ENGINE: "engine"}
# As JSON they are about 20 bytes each; more belong into a file.
MOST_VALUES = 4_000_000
LIST_HINT = "`vlens param --list` lists the weights of this model"


class ParamRequest(NamedTuple):
    """One weight as typed; `chosen` are selectors by the name or the place of their axis."""

    text: str
    pattern: str
    chosen: tuple[tuple[str | int, Items], ...] = ()


class Param(NamedTuple):
    """One weight of a model under one name.

    kinds    which kinds of name this is: a checkpoint's may be the engine's too
    axes     their names, empty where the tensor is as stored
    tensors  checkpoint tensors that it is read from; more than one are the entries of its first axis
    view     its part of each tensor
    dtype    of the checkpoint, by the safetensors format's name
    select   indices along each axis (None: all)
    tied     it is the value of another weight, which the embeddings share
    """

    name: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    tensors: tuple[str, ...]
    view: View | None
    select: tuple[tuple[int, ...] | None, ...]
    row: ParamRow | None = None
    tied: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the first axis runs over several tensors."""
        return self.view is not None and len(self.view.shape) < len(self.shape)

    @property
    def selected(self) -> dict[str, list[int]]:
        """Axis (its name, or its place) -> the indices that were chosen."""
        chosen = enumerate(zip(self.axes, self.select, strict=True))
        return {axis or str(n): list(indices) for n, (axis, indices) in chosen if indices is not None}

    @property
    def final_shape(self) -> tuple[int, ...]:
        both = zip(self.shape, self.select, strict=True)
        return tuple(size if chosen is None else len(chosen) for size, chosen in both)


# Parsing


def parse(text: str) -> ParamRequest:
    """A weight as typed. Raises HookError with a caret under the fault."""
    reader = Reader(text)
    pattern = reader.expect(r"[^\[\]]+", "the name of a weight").strip()
    chosen: list[tuple[str | int, Items]] = []
    while reader.take(r"\["):
        at = reader.at
        axis = reader.take(r"[a-z]\w*(?==)")
        reader.take("=")
        place = sum(isinstance(key, int) for key, _ in chosen)
        if axis in (key for key, _ in chosen):
            raise reader.fault(f"{axis} is given twice", at)
        items = read_items(reader, axis or "dim")
        reader.expect(r"\]", "`,` or `]`")
        chosen.append((axis or place, items))
    if reader.at < len(text):
        raise reader.fault("this cannot stand after the name of a weight", hint="selectors: [head=3], [0:10]")
    return ParamRequest(text, pattern, tuple(chosen))


# The weights of one model


class Weights:
    """Every weight of one model by every name. Where its family is not known, or its config is not one of the family's,
    `catalog` is None, for which `reason` is why, and weights have their checkpoint's names only."""

    def __init__(self, stored: Mapping[str, Stored], config: dict[str, Any]) -> None:
        self.stored = stored
        self.config = config
        self.catalog: Catalog | None = None
        self.reason = ""
        try:
            self.catalog = catalog_for(config)
        except StartError as fault:
            self.reason = fault.message

    @property
    def family(self) -> str | None:
        return self.catalog.family if self.catalog else None

    @property
    def n_layers(self) -> int:
        return self.catalog.n_layers if self.catalog else 0

    @cached_property
    def rows(self) -> dict[str, tuple[ParamRow, str]]:
        """TransformerLens' names that this checkpoint has -> row and layer (as text, empty outside the blocks)."""
        found = {name: (row, layer) for name, row, layer in self.possible()
                 if self.tensors_of(row, layer) or self.is_tied(row)}
        return found

    def possible(self) -> Iterator[tuple[str, ParamRow, str]]:
        """All rows of the family by layer, in the order of the forward."""
        rows = list(param_rows.load(self.catalog.family).values()) if self.catalog else []
        block = [row for row in rows if "{i}" in row.name]
        first = rows.index(block[0]) if block else len(rows)
        yield from ((row.name, row, "") for row in rows[:first])
        yield from ((row.name.replace("{i}", str(i)), row, str(i)) for i in range(self.n_layers) for row in block)
        yield from ((row.name, row, "") for row in rows[first:] if row not in block)

    def tensors_of(self, row: ParamRow, layer: str) -> tuple[str, ...]:
        """The checkpoint tensors that a row is read from, in order; empty where the checkpoint has them not."""
        name = row.tensor.replace("{i}", layer)
        if "{e}" not in name:
            found = self._spelt(name)
            return () if found is None or quantized.packed(found, self.stored, self.config) else (found,)
        experts: list[str] = []
        while (each := self._spelt(name.replace("{e}", str(len(experts))))) is not None:
            experts.append(each)
        return tuple(experts)

    def _spelt(self, tensor: str) -> str | None:
        """A tensor as this checkpoint names it, which may leave out the family's prefix."""
        if tensor in self.stored:
            return tensor
        short = tensor.removeprefix(self.catalog.spec.prefix)
        return short if short in self.stored else None

    @cached_property
    def holders(self) -> dict[str, list[str]]:
        """A checkpoint's tensors -> the TransformerLens names whose weights lie in them, tied ones left out."""
        found: dict[str, list[str]] = {}
        for name, (row, layer) in self.rows.items():
            for tensor in () if self.is_tied(row) else self.tensors_of(row, layer):
                found.setdefault(tensor, []).append(name)
        return found

    def is_tied(self, row: ParamRow) -> bool:
        """Whether a weight is another's value in this model: by its config, whatever its checkpoint holds beside."""
        spec = self.catalog.spec
        return bool(row.tied) and not holds(spec.checkpoint.get(row.tensor, "never"), {**spec.defaults, **self.config})

    @cached_property
    def live(self) -> dict[str, list[str]]:
        """The engine's names -> the TransformerLens names whose weights it is made of."""
        found: dict[str, list[str]] = {}
        for name, (row, layer) in self.rows.items():
            if row.module and not self.is_tied(row):
                found.setdefault(self.live_name(row, layer), []).append(name)
        return found

    def live_name(self, row: ParamRow, layer: str) -> str:
        return f"{self.catalog.spec.modules[row.module].replace('{i}', layer)}.{row.attribute}"

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Other names -> the name that they mean."""
        found = {alias.replace("{i}", layer): name for name, (row, layer) in self.rows.items() for alias in row.aliases}
        for row, layer in self.rows.values():
            full, source = row.tensor.replace("{i}", layer), (row, layer)
            if self.is_tied(row):
                source = self.rows[row.tied]
            if "{e}" not in full and full not in self.stored:
                (found[full],) = self.tensors_of(*source)
        return found

    @property
    def tied_names(self) -> set[str]:
        """Checkpoint and engine names of weights that are another's value."""
        return {row.tensor for row, _ in self.rows.values() if self.is_tied(row) and row.tensor not in self.stored}

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Every name, aliases left out -> its kinds."""
        found = {name: (LENS,) for name in self.rows}
        found |= {name: (CHECKPOINT, ENGINE) if self._is_as_live(name) else (CHECKPOINT,) for name in self.stored}
        return found | {name: (ENGINE,) for name in self.live if name not in found and name not in self.aliases}

    def _is_as_live(self, tensor: str) -> bool:
        """Whether the engine has a tensor of this name in the same form."""
        rows = [self.rows[name][0] for name in self.live.get(tensor, ())]
        return bool(rows) and all(row.layout == row.live for row in rows)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Lengths of the axes that the config gives; those of others follow from the tensors."""
        found = {}
        for axis in {axis for row, _ in self.rows.values() for axis in row.axes}:
            with suppress(AttributeError):
                found[axis] = self.catalog.size(axis)
        keys = param_rows.sizes(self.catalog.family) if self.catalog else {}
        return found | {axis: self.config[key] for axis, key in keys.items() if type(self.config.get(key)) is int}

    # One weight

    def named(self, name: str) -> Param:
        """A weight by any name that is there, under that name."""
        found = self.param(self.aliases.get(name, name))
        return found._replace(name=name, tied=found.tied or name in self.tied_names)

    def param(self, name: str) -> Param:
        """A weight by one of `names`. Raises StartError where the checkpoint's shapes are not the config's."""
        if name in self.rows:
            return self._lens(name)
        if name in self.stored:
            stored = self.stored[name]
            return self._param(name, ("",) * len(stored.shape), stored.shape, stored.dtype, (name,),
                               layout.whole(stored.shape))
        return self._live(name)

    def _lens(self, name: str) -> Param:
        row, layer = self.rows[name]
        source, source_layer = self.rows[row.tied] if self.is_tied(row) else (row, layer)
        tensors = self.tensors_of(source, source_layer)
        axes = row.axes[1:] if "{e}" in source.tensor else row.axes
        views = {self._view(tensor, source.layout).ordered(axes) for tensor in tensors}
        dtypes = {self.stored[tensor].dtype for tensor in tensors}
        if len(views) > 1 or len(dtypes) > 1:
            raise _contradiction(f"{tensors[0]} and its siblings", ValueError("they differ in shape or type"))
        (view,) = views
        shape = (len(tensors), *view.shape) if "{e}" in source.tensor else view.shape
        found = self._param(name, row.axes, shape, dtypes.pop(), tensors, view)
        return found._replace(row=row, tied=source is not row)

    def _view(self, tensor: str, text: str) -> View:
        try:
            return layout.view(text, self.stored[tensor].shape, self.sizes)
        except ValueError as fault:
            raise _contradiction(tensor, fault) from fault

    def _live(self, name: str) -> Param:
        parts = [self._lens(part) for part in self.live[name]]
        sizes = {axis: size for part in parts for axis, size in zip(part.axes, part.shape, strict=True)}
        shape = layout.sized(parts[0].row.live, self.sizes | sizes)
        tensors = tuple(dict.fromkeys(tensor for part in parts for tensor in part.tensors))
        return self._param(name, ("",) * len(shape), shape, parts[0].dtype, tensors, None)

    def _param(self, name: str, axes: tuple[str, ...], shape: tuple[int, ...], dtype: str, tensors: tuple[str, ...],
               view: View | None) -> Param:
        return Param(name, self.names[name], axes, shape, dtype, tensors, view, (None,) * len(shape))

    def other_names(self, name: str) -> tuple[str, ...]:
        """The other names of the same numbers, which may give them permuted."""
        return tuple(other for other in self._alike[self._group(name)] if other != name)

    @cached_property
    def _alike(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in (*self.names, *self.aliases):
            found.setdefault(self._group(name), []).append(name)
        return found

    def _group(self, name: str) -> str:
        """One name that stands for all of the same numbers."""
        name = self.aliases.get(name, name)
        if name in self.rows:
            row = self.rows[name][0]
            return row.tied if self.is_tied(row) else name
        holders = self.holders.get(name, ())
        row = self.rows[holders[0]][0] if len(holders) == 1 else None
        return name if row is None or "{e}" in row.tensor or "+" in row.layout else holders[0]


def _contradiction(tensor: str, fault: ValueError) -> StartError:
    return StartError(f"the checkpoint's {tensor} is not what the config says: {fault}", code="bad_checkpoint",
                      hint="compare its config.json and weights with the original")


# The weights of a folder


def of_folder(folder: Path, config: dict[str, Any]) -> Weights | None:
    """The weights of a model's folder; None where they are not safetensors. Raises StartError for a broken file."""
    stored = checkpoint.tensors(folder)
    return None if stored is None else Weights(stored, config)


def of_model(folder: str) -> Weights:
    """The weights of a model's folder, for who has torch: pickled ones are listed by it."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    found = of_folder(Path(folder), config)
    if found is None:
        from vlens_cli.reader import pickled

        found = of_pickled(pickled.listed(folder), config)
    return found


def of_pickled(tensors: Mapping[str, Sequence[Any]], config: dict[str, Any]) -> Weights:
    """The weights of pickled files: tensor name -> (file, dtype, shape)."""
    stored = {name: Stored(Path(file), dtype, tuple(shape), key=name) for name, (file, dtype, shape) in tensors.items()}
    return Weights(stored, config)


# What is said of a weight, and how to read it


def entry(param: Param, weights: Weights, source: str | None = None, raw: bool = False) -> dict[str, Any]:
    """What a list or a reply says of a weight: `axes` are empty where it is as stored, `selected` holds the indices of
    the axes that were cut, `aliases` other names of the same numbers, which may give them permuted, `tied_to` the
    weight that a tied one is the value of."""
    scale = _scale(param, weights) if source == CHECKPOINT and not raw else None
    return {
        "name": param.name, "kinds": list(param.kinds), "aliases": list(weights.other_names(param.name)),
        "axes": list(param.axes) if any(param.axes) else [], "shape": list(param.final_shape),
        "dtype": "float32" if scale else NAMES.get(param.dtype, param.dtype),
        **({"source": source} if source else {}),
        "tensors": list(param.tensors), "tied": param.tied,
        **({"tied_to": f"{param.row.tied}{', transposed' * _transposed(param, weights)}"}
           if param.tied and param.row else {}),
        "files": list(dict.fromkeys(weights.stored[tensor].file.name for tensor in param.tensors)),
        **({"selected": param.selected} if param.selected else {}),
        **({"dequantized": scale.words} if scale else {}),
    }


def reading(param: Param, weights: Weights, raw: bool = False) -> dict[str, Any]:
    """Where the numbers of a weight are, for `reader.answer.mapped`. Raises UsageError where no checkpoint has them, or
    has them quantized by a scheme that is not undone (`raw`: as they are stored)."""
    if param.view is None:
        raise UsageError(f"{param.name} is the engine's own, and the checkpoint has it in parts: "
                         + ", ".join(param.tensors), code="not_in_checkpoint",
                         hint="--from engine, or ask for the parts")
    scale = None if raw else _scale(param, weights)
    if param.dtype not in NAMES or param.dtype == "C64":
        raise UsageError(f"vlens does not read numbers of this type: {param.dtype}", code="unknown_dtype")
    pieces = [_piece(weights.stored[tensor], param.view) for tensor in param.tensors]
    found = {"name": param.name, "dtype": param.dtype, "pieces": pieces, "stacked": param.stacked,
             "select": param.select}
    if scale is not None:
        stored = weights.stored[scale.tensor]
        found["scale"] = {"dtype": stored.dtype, "piece": _piece(stored, layout.whole(stored.shape)),
                          "block": scale.block, "shape": weights.stored[param.tensors[0]].shape}
    return found


def _scale(param: Param, weights: Weights) -> quantized.Scale | None:
    scales = [quantized.scale_of(tensor, weights.stored, weights.config) for tensor in param.tensors]
    if any(scales) and len(scales) > 1:
        raise UsageError(f"{param.name} is made of quantized tensors: {param.tensors[0]} and its siblings",
                         hint="ask for them one by one, by their checkpoint names", code="quantized")
    return scales[0]


def _piece(stored: Stored, view: View) -> dict[str, Any]:
    return {"file": str(stored.file), "key": stored.key, "begin": stored.begin, "end": stored.end,
            "offset": view.offset, "shape": view.shape, "strides": view.strides}


def notes(found: Sequence[Param], weights: Weights) -> tuple[str, ...]:
    """What a user must know of these weights, a line each."""
    lines = [f"{param.name} is {param.row.tied if param.row else param.tensors[0]}"
             f"{', transposed' if _transposed(param, weights) else ''}: this model's embeddings are tied"
              for param in found if param.tied]
    unused = {row.tensor for row, _ in weights.rows.values() if weights.is_tied(row)} & weights.stored.keys()
    lines += [f"the model does not use {param.name}: its embeddings are tied"
              for param in found if param.name in unused]
    if weights.catalog and weights.catalog.spec.norm == "rms_plus_one" and any(
            "ln" in param.name or "norm" in param.name for param in found):
        lines.append("norms of this family multiply by 1 + weight; the weight is given as it is stored")
    if any("kv_head" in param.axes for param in found):
        dims = weights.catalog.dims
        if dims.n_kv_heads < dims.n_heads:
            lines.append(f"keys and values have {dims.n_kv_heads} heads, each of which serves "
                         f"{dims.n_heads // dims.n_kv_heads} query heads; TransformerLens repeats them")
    return tuple(dict.fromkeys(lines))


def _transposed(param: Param, weights: Weights) -> bool:
    """Whether a tied weight has the axes of the one that it is the value of in the other order."""
    return bool(param.tied and param.row) and param.axes == weights.rows[param.row.tied][0].axes[::-1]


def metadata(model: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], version: str, vllm: str | None = None
             ) -> dict[str, Any]:
    """What the file of `-o` says of its tensors; each value becomes a JSON text."""
    fields = ("axes", "aliases", "dtype", "source", "tensors", "tied", "selected", "dequantized")
    return {
        **model, **{field: {entry["name"]: entry[field] for entry in entries if field in entry} for field in fields},
        "vlens_version": version, "vllm_version": vllm,
    }


def check_values(found: Sequence[Param]) -> None:
    """Refuse to print more numbers than anybody reads. Raises UsageError."""
    count = sum(math.prod(param.final_shape) for param in found)
    if count > MOST_VALUES:
        raise UsageError(f"--values of {count} numbers", code="too_large",
                         hint="-o FILE.safetensors takes any number, and a selector such as [0:10] chooses; "
                         f"{MOST_VALUES} are printed at most")


def requested(texts: Iterable[str], weights: Weights) -> tuple[ParamRequest, ...]:
    """What was typed, parsed; a tensor's own name is taken as it is, for it may hold brackets. Raises HookError."""
    return tuple(ParamRequest(text, text) if text in weights.stored else parse(text) for text in texts)


def of_other(requests: Sequence[ParamRequest], found: Sequence[Param], weights: Weights, model: str) -> list[Param]:
    """The weights of the same names in another model, in the order of `found`. Raises UsageError, which names it."""
    try:
        theirs = {param.name: param for param in resolve(requests, weights)}
    except UsageError as fault:
        fault.message = f"in {model}: {fault.message}"
        raise
    if missing := [param.name for param in found if param.name not in theirs]:
        raise UsageError(f"in {model}: there is no {missing[0]}", code="unknown_param")
    return [theirs[param.name] for param in found]


# From what was typed to weights


def resolve(requests: Iterable[ParamRequest], weights: Weights) -> tuple[Param, ...]:
    """The weights of all requests, in the order asked, each once. Raises UsageError and StartError."""
    found: dict[str, Param] = {}
    for request in requests:
        for name in expand(request, weights):
            one = _selected(weights.named(name), request)
            if found.setdefault(name, one) != one:
                raise UsageError(f"{name} is asked for twice, with different selectors", code="param_twice",
                                 hint="put both into one selector, such as [0,3], or run two commands")
    return tuple(found.values())


def expand(request: ParamRequest, weights: Weights) -> tuple[str, ...]:
    """The names that a request means; aliases are kept, for results are keyed by the name that was asked.

    Every number that is written out must exist; for `*` one hit is enough. Raises UsageError.
    """
    every = {**weights.names, **weights.aliases}
    if request.pattern in every:
        return (request.pattern,)
    found: dict[str, None] = {}
    highest = max((int(n) for name in every for n in re.findall(r"\d+", name)), default=0)
    for glob in _globs(request.pattern, weights.n_layers, highest):
        hits = [glob] if glob in every else [name for name in weights.names if "*" in glob and _matches(glob, name)]
        if not hits:
            raise _no_such(glob, request, weights)
        found |= dict.fromkeys(hits)
    return tuple(found)


def one(name: str, weights: Weights) -> Param:
    """The whole weight that a name means. Raises UsageError, also where it means several."""
    found = expand(ParamRequest(name, name), weights)
    if len(found) > 1:
        raise UsageError(f"this means {len(found)} weights: {name}", hint="one name each", code="many_params")
    return weights.named(found[0])


def matching(pattern: str, weights: Weights) -> list[str]:
    """Names for a list: those that the pattern matches. Raises UsageError where none does."""
    return list(expand(ParamRequest(pattern, pattern), weights))


def _matches(glob: str, name: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, glob.split("*"))), name) is not None


_NUMBERS = re.compile(r"\{[^{}]*\}|-?\d+-\d+|-\d+")


def _globs(pattern: str, n_layers: int, highest: int) -> Iterator[str]:
    """The pattern with its ranges of numbers written out; negative ones count from the last layer. No name has a number
    above `highest`."""
    choices = []
    for segment in re.split(r"\.(?![^{]*\})", pattern):
        if not _NUMBERS.fullmatch(segment):
            choices.append([segment])
            continue
        ranges = read_layers(Reader(segment)) or ()
        ends = [(low + n_layers * (low < 0), high + n_layers * (high < 0)) for low, high in ranges]
        # One that no name has is enough to say so.
        ends = [(low, max(low, min(high, highest + 1)) if low <= high else high) for low, high in ends]
        numbers = dict.fromkeys(str(n) for low, high in ends for n in range(low, high + 1))
        if not numbers:
            raise UsageError(f"these numbers run backwards: {segment}", code="hook_grammar")
        choices.append(list(numbers))
    return (".".join(segments) for segments in product(*choices))


def _selected(param: Param, request: ParamRequest) -> Param:
    chosen: dict[int, tuple[int, ...]] = {}
    _check_brackets(param, request)
    for key, items in request.chosen:
        place = key if isinstance(key, int) else _place(key, param)
        if place >= len(param.shape) or place in chosen:
            raise UsageError(f"{param.name} has {len(param.shape)} axes, and one bracket for each: {request.text}",
                             hint=_axes_hint(param), code="bad_selector")
        chosen[place] = indices(items, param.shape[place], *_axis_words(param, place))
    return param._replace(select=tuple(chosen.get(n) for n in range(len(param.shape))))


def _axis_words(param: Param, place: int) -> tuple[str, str]:
    """What an index of an axis is called in an error, and where it is."""
    if param.axes[place]:
        return param.axes[place], param.name
    what = ("row", "column")[place] if len(param.shape) == 2 else "place"
    return what, f"axis {place} of {param.name}"


def _check_brackets(param: Param, request: ParamRequest) -> None:
    """Raises UsageError where brackets may be meant in two ways."""
    by_place = [items for key, items in request.chosen if isinstance(key, int)]
    if 0 < len(by_place) < len(request.chosen):
        named = [_place(key, param) for key, _ in request.chosen if isinstance(key, str)]
        left = [place for place in range(len(param.shape)) if place not in named]
        axes = [param.axes[left.pop(0) if left else -1] if isinstance(key, int) else key for key, _ in request.chosen]
        fits = len(set(axes)) == len(axes)
        typed = "".join(_bracket(f"{axis}=", items) for axis, (_, items) in zip(axes, request.chosen, strict=True))
        raise UsageError(f"brackets are all named or all in the order of the axes: {request.text}", code="bad_selector",
                         hint=f"{param.name}{typed}" if fits else _axes_hint(param))
    for n, items in enumerate(by_place):
        if len(param.shape) > 1 and len(items) > 1 and any(isinstance(item, Slice) for item in items):
            each = "".join(_bracket("", (item,)) for item in items)
            hint = f"a bracket for each axis: {param.name}{each}" if n == 0 and len(items) <= len(param.shape) else ""
            if axis := n < len(param.axes) and param.axes[n]:
                hint += f"{'; ' if hint else ''}entries of one axis: {param.name}{_bracket(f'{axis}=', items)}"
            raise UsageError(f"a list with a range in it may be one axis or several: {request.text}",
                             hint=hint or "list its entries one by one", code="bad_selector")


def _bracket(axis: str, items: Items) -> str:
    return f"[{axis}{','.join(map(str, items))}]"


def _place(axis: str, param: Param) -> int:
    """`head` means kv heads too, as it does for hooks."""
    for name in (axis, f"kv_{axis}"):
        if name in param.axes:
            return param.axes.index(name)
    raise UsageError(f"{param.name} has no axis of this name: {axis}", hint=_axes_hint(param), code="bad_selector")


def _axes_hint(param: Param) -> str:
    if not any(param.axes):
        return f"this tensor is as the checkpoint has it, {list(param.shape)}: [0:10] chooses along its first axis"
    return f"its axes are {', '.join(param.axes)}"


def _no_such(glob: str, request: ParamRequest, weights: Weights) -> UsageError:
    """Known to the family and not in this checkpoint, or near to what is there."""
    for name, row, layer in weights.possible():
        tensor = row.tensor.replace("{i}", layer)
        if glob in (name, tensor) and (packed := quantized.packed(tensor, weights.stored, weights.config)):
            return quantized.refused_as_packed(glob, packed, weights.config)
        if name == glob:
            return UsageError(f"this model has no {glob}: its checkpoint has no {tensor}", code="unknown_param",
                              hint=_near_hint(glob, weights))
    if weights.catalog is None:
        return UsageError(f"no weight of this model is named: {request.pattern}", code="unknown_param",
                          hint=f"here a weight has its checkpoint's name only ({weights.reason}); "
                          + _near_hint(glob, weights))
    layer = re.match(r"blocks\.(-?\d+)\.", glob)
    if layer and not 0 <= int(layer[1]) < weights.n_layers:
        return UsageError(f"there is no layer {layer[1]}: this model has layers 0 to {weights.n_layers - 1}",
                          code="layer_out_of_range")
    verb = "matches" if "*" in glob else "is named"
    shown = glob if glob == request.pattern else f"{glob} (of {request.pattern})"
    return UsageError(f"no weight of this model {verb}: {shown}", hint=_near_hint(glob, weights), code="unknown_param")


def _near_hint(glob: str, weights: Weights) -> str:
    near = near_names(glob, [*weights.names, *weights.aliases])
    return f"did you mean {' or '.join(near)}? {LIST_HINT}" if near else LIST_HINT


def near_names(typed: str, names: Sequence[str]) -> list[str]:
    """Up to three names like the one typed, with its own numbers; first those that differ in case alone."""
    from difflib import get_close_matches

    numbers = re.findall(r"(?<=\.)\d+(?=\.)", typed)
    folded = {fold(name): name for name in reversed(names)}
    asked = fold(typed)
    same = [name for name in folded if f".{name}".lower().endswith(f".{asked}".lower())]
    close = list(dict.fromkeys([*same, *get_close_matches(asked, folded, n=3, cutoff=0.6)]))[:3]
    with_numbers = (_with_numbers(each, numbers) for each in close)
    return list(dict.fromkeys(name if name in names else folded[each]
                              for each, name in zip(close, with_numbers, strict=True)))


def fold(name: str) -> str:
    """`blocks.{i}.x` of `blocks.3.x`: every segment that is a number as {i}."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "{i}", name)


def _with_numbers(folded: str, numbers: list[str]) -> str:
    left = iter(numbers)
    return re.sub(r"\{i\}", lambda _: next(left, "0"), folded)
