"""The numbers of interventions: tensors read from files and checked, fitted to what is selected, drawn as noise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vlens_cli.driver.base import Captured, Edit, Want
from vlens_cli.driver.edits import Place, Step
from vlens_cli.errors import PathError, UsageError
from vlens_cli.families import Catalog
from vlens_cli.interventions import Constant, File, Noise, Numbers, Tensor

MOST_KEYS_SHOWN = 100


class Values:
    """Makes the edits of steps. A tensor is read once."""

    def __init__(self, catalog: Catalog, seed: int, allow_nan: bool, dtype: torch.dtype) -> None:
        """`dtype` is the engine's, in which values are written."""
        self._catalog = catalog
        self._dtype = dtype
        self._seed = seed
        self._allow_nan = allow_nan
        self._read: dict[tuple[str, str], torch.Tensor] = {}

    def edit(self, step: Step, place: Place, n_tokens: int) -> Edit:
        """The edit of one step in a prompt of which `n_tokens` are fed; where it reads a source, without its value.

        Raises UsageError or PathError for a tensor that is not there, not finite, or does not fit.
        """
        edit = self._edit(step, place, n_tokens)
        self._check_fits(step, edit.keep, torch.float32)
        self._check_fits(step, edit.value, self._dtype)
        return edit

    def _check_fits(self, step: Step, part: float | torch.Tensor | None, dtype: torch.dtype) -> None:
        """Refuse what is finite as it was given and is not where it is used."""
        if part is None or self._allow_nan:
            return
        if not torch.as_tensor(part, dtype=torch.float64).to(dtype).isfinite().all():
            raise UsageError(f"{step.one.value} holds numbers that are too large for {str(dtype).removeprefix('torch.')}, whose "
                             f"largest is {torch.finfo(dtype).max:.4g}", hint="--allow-nan takes them, as infinities",
                             code="not_finite")

    def _edit(self, step: Step, place: Place, n_tokens: int) -> Edit:
        edit = Edit(step.hook.name, place.positions, step.hook.head, step.hook.dim)
        op, value = step.one.op, step.one.value
        match value:
            case Constant(number):
                return by_op(edit, op, number)
            case Noise(std):
                return by_op(edit, op, self._noise(step, place.positions, std))
            case Tensor(how="proj"):
                along = -value.factor if op == "-=" else value.factor
                direction = _direction(step, self._tensor(step, value))
                return replace(edit, keep=0.0 if op == "=" else 1.0, direction=direction, along=along)
            case Tensor(how="mean"):
                return by_op(edit, op, _times(_mean(step, self._tensor(step, value)), value.factor))
            case Tensor():
                rows = _as_rows(step, self._tensor(step, value))
                if len(rows) > 1:
                    edit = replace(edit, positions=_of_each(step, place, len(rows), n_tokens))
                return by_op(edit, op, _times(rows if len(rows) > 1 else rows[0], value.factor))
        return edit

    def _tensor(self, step: Step, value: Tensor) -> torch.Tensor:
        """In fp32, finite unless it need not be."""
        if isinstance(value.of, Numbers):
            return torch.tensor(value.of.values)
        path = value.of.path
        with _opened(path) as file:
            key = self._key(file, value.of, step)
            if (path, key) not in self._read:
                self._read[path, key] = self._checked(file.get_tensor(key), f"{path}:{key}")
        return self._read[path, key]

    def _key(self, file: Any, of: File, step: Step) -> str:
        """The tensor meant: as named, or the only one, or the one named like the hook."""
        keys, hook = list(file.keys()), step.hook.name
        if of.key in keys:
            return of.key
        if of.key is not None:
            raise UsageError(f"{of.path} has no tensor {of.key}; {_listed(keys)}", code="no_key")
        if len(keys) == 1:
            return keys[0]
        named = [name for name in (hook, *self._catalog.aliases(hook)) if name in keys]
        if len(named) == 1:
            return named[0]
        found = f"several are named like {hook}" if named else f"none is named {hook}"
        raise UsageError(f"{of.path} has {len(keys)} tensors, and {found}; {_listed(keys)}", code="no_key",
                         hint=_fitting(file, keys, of.path, step) if keys else "")

    def _checked(self, t: torch.Tensor, what: str) -> torch.Tensor:
        if t.is_complex() or t.dtype == torch.bool:
            dtype = str(t.dtype).removeprefix("torch.")
            raise UsageError(f"{what} holds {dtype} values, not numbers", code="bad_value")
        given, t = t, t.float()
        broken = (~t.isfinite()).nonzero()
        if len(broken) and not self._allow_nan:
            first = broken[0].tolist()
            why = "too large for float32" if given[tuple(first)].double().isfinite() else "not finite"
            raise UsageError(f"{what} holds {len(broken)} values that are {why}, the first at {first}",
                             hint="--allow-nan takes them", code="not_finite")
        return t

    def _noise(self, step: Step, positions: tuple[int, ...], std: float) -> torch.Tensor:
        """Normal noise [positions, ...]. A row depends on the seed, the hook point, its position and which noise of
        that point it is, and on nothing else: selecting fewer rows, heads or dims gives the same numbers there."""
        shape = [self._catalog.size(axis) for axis in self._catalog.axes(step.hook.name)[1:]]
        rows = [_normal(f"{self._seed}/{step.hook.name}/{step.nth}/{p}", shape) for p in positions]
        return std * cut(torch.stack(rows), Want(None, step.hook.head, step.hook.dim))


def with_source(edit: Edit, step: Step, place: Place, captured: Captured) -> Edit:
    """The edit with what the source run has where `place` says, in the engine's own dtype."""
    rows = {position: row for row, position in enumerate(captured.positions)}
    value = cut(captured.value[[rows[position] for position in place.source.positions]], place.source)
    return by_op(edit, step.one.op, _times(value, step.one.value.factor))


def cut(t: torch.Tensor, want: Want) -> torch.Tensor:
    """The heads and dims of [rows, (head,) dim] that are wanted."""
    t = t if want.heads is None else t[:, list(want.heads)]
    return t if want.dims is None else t[..., list(want.dims)]


def by_op(edit: Edit, op: str, value: float | torch.Tensor) -> Edit:
    """`edit` with a value set, added, subtracted or multiplied by."""
    match op:
        case "=":
            return replace(edit, keep=0.0, value=value)
        case "*=":
            return replace(edit, keep=value)
    return replace(edit, value=-value if op == "-=" else value)


def _times(t: torch.Tensor, factor: float) -> torch.Tensor:
    # What is not scaled stays in its own dtype, bit for bit.
    return t if factor == 1 else t.float() * factor


# Files


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as fault:
        raise PathError(f"this is not a safetensors file: {path}: {fault}",
                        hint="safetensors.torch.save_file({'NAME': tensor}, FILE) writes one, safetensors.numpy.save_file of arrays") from fault
    except OSError as fault:
        raise PathError(f"this file cannot be read, {fault.strerror or fault}: {path}") from fault


def _fitting(file: Any, keys: Sequence[str], path: str, step: Step) -> str:
    """The hint that names the first tensors as wide as what is selected."""
    width = step.row[-1]
    found = [key for key in keys if file.get_slice(key).get_shape()[-1:] == [width]]
    if not found:
        return f"none of them is {width} wide, as {step.where} is"
    more = "" if len(found) <= 3 else f"; {len(found)} of them are {width} wide"
    return f"say which: {' or '.join(str(File(path, key)) for key in found[:3])}{more}"


def _listed(keys: Sequence[str]) -> str:
    if not keys:
        return "it has none"
    more = f" and {len(keys) - MOST_KEYS_SHOWN} more" if len(keys) > MOST_KEYS_SHOWN else ""
    return f"its tensors are {', '.join(keys[:MOST_KEYS_SHOWN])}{more}"


# Shapes


def _as_rows(step: Step, t: torch.Tensor) -> torch.Tensor:
    """[rows, (heads,) dims] of a tensor: a number, one row (of one head: for every head), or rows."""
    row = step.row
    while t.ndim > len(row) + 1 and len(t) == 1:
        t = t[0]
    if t.ndim == 0 or t.shape == row[-1:] or t.shape == row:
        return t.expand(1, *row)
    if t.ndim == len(row) + 1 and t.shape[1:] == row and len(t):
        return t
    if len(row) == 2 and row[0] == 1 and t.ndim == 2 and t.shape[1] == row[1] and len(t):
        return t.unsqueeze(1)
    if t.shape[-1] != row[-1]:
        raise _wrong_width(step, t.shape[-1])
    raise _wrong_shape(step, t)


def _of_each(step: Step, place: Place, n_rows: int, n_tokens: int) -> tuple[int, ...]:
    """The positions that rows of their own belong to."""
    n_selected = n_tokens if place.positions is None else len(place.positions)
    if n_rows != n_selected:
        raise UsageError(f"{step.where} selects {n_selected} positions, and {step.one.value} has {n_rows} rows",
                         hint="positions of prompt and generated tokens: [pos=prompt], [pos=generated], [pos=3:6]",
                         code="wrong_rows")
    return tuple(range(n_tokens)) if place.positions is None else place.positions


def _mean(step: Step, t: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor's rows, taken in fp64."""
    if len(step.row) == 2 and t.ndim == 2 and step.row[0] > 1:
        raise UsageError(f"the rows of {step.one.value}, of shape {list(t.shape)}, may be positions or heads",
                         hint=f"a tensor [rows, {step.row[0]}, {step.row[1]}] says which", code="wrong_width")
    return _as_rows(step, t).double().mean(0).float()


def _direction(step: Step, t: torch.Tensor) -> torch.Tensor:
    """The unit vector [dims] along a tensor; projecting on the one is projecting on the other."""
    while t.ndim > 1 and len(t) == 1:
        t = t[0]
    if t.ndim != 1:
        raise _wrong_shape(step, t)
    if len(t) != step.row[-1]:
        raise _wrong_width(step, len(t))
    length = t.double().norm()
    if not (length > 0 and length.isfinite()):
        raise UsageError(f"{step.one.value} has no direction: its length is {length.item()}", code="bad_value")
    return (t.double() / length).float()


def _wrong_width(step: Step, found: int) -> UsageError:
    return UsageError(f"the width of {step.where} is {step.row[-1]}, and that of {step.one.value} is {found}",
                      code="wrong_width")


def _wrong_shape(step: Step, t: torch.Tensor) -> UsageError:
    return UsageError(f"{step.where} takes {list(step.row)} numbers a position, and the shape of {step.one.value} is "
                      f"{list(t.shape)}", code="wrong_width")


def _normal(seed: str, shape: Sequence[int]) -> torch.Tensor:
    digest = hashlib.sha256(seed.encode()).digest()
    return torch.randn(*shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1))
