"""TransformerLens' dialect of a forward: batches with masks, declarative interventions, padded results.

Inputs become requests, one a prompt; results are put back where the caller's rows are. Everything that can be refused
is refused here or by the driver's own checks, before the forward.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlens_cli.driver.base import Edit
from vlens_cli.errors import HookError, PromptError, StartError, UsageError
from vlens_cli.families import Catalog


@dataclass(frozen=True)
class Span:
    """One prompt of a batch: its real tokens, and where the first of them is in the caller's row of `width`."""

    ids: tuple[int, ...]
    start: int
    width: int


def spans(input_ids: Any, attention_mask: Any) -> list[Span]:
    """The prompts of token ids [pos], [batch, pos] or a ragged list, without what the mask (of the same shape, 0 at
    padding on the left or the right) leaves out. Raises PromptError, UsageError."""
    prompts = _ragged(input_ids, "token ids")
    if not prompts:
        raise PromptError("the batch is empty")
    if attention_mask is None:
        return [Span(tuple(ids), 0, len(ids)) for ids in prompts]
    masks = _ragged(attention_mask, "the attention mask")
    if [len(mask) for mask in masks] != [len(ids) for ids in prompts]:
        raise _bad_mask(f"has rows of {[len(mask) for mask in masks]} for prompts of {[len(ids) for ids in prompts]} tokens")
    return [_trimmed(ids, mask) for ids, mask in zip(prompts, masks, strict=True)]


def _trimmed(ids: list[int], mask: list[int]) -> Span:
    other = [value for value in mask if value not in (0, 1)]
    if other:
        raise _bad_mask(f"holds a value other than 0 and 1: {other[0]}")
    kept = [n for n, value in enumerate(mask) if value]
    if not kept:
        raise _bad_mask("leaves nothing of a prompt")
    first, last = kept[0], kept[-1]
    if last - first + 1 != len(kept):
        raise _bad_mask(f"has a hole between positions {first} and {last}; padding is on the left or the right")
    return Span(tuple(ids[first : last + 1]), first, len(ids))


def _bad_mask(what: str) -> UsageError:
    return UsageError(f"the attention mask {what}", code="bad_mask")


def _ragged(rows: Any, what: str) -> list[list[int]]:
    """Rows of whole numbers, of one row or several, tensors or lists."""
    rows = rows.tolist() if hasattr(rows, "tolist") else list(rows)
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    rows = [rows] if rows and not any(isinstance(row, list | tuple) for row in rows) else rows
    for row in rows:
        if not isinstance(row, list | tuple) or not all(isinstance(n, numbers.Integral) for n in row):
            raise UsageError(f"{what} are not rows of whole numbers", code="bad_tokens")
    return [[int(n) for n in row] for row in rows]


def put_back(values: Sequence[torch.Tensor], at: Sequence[Span], fill: float, axes: Sequence[int] = (0,)) -> torch.Tensor:
    """[batch, pos, ...]: each prompt's rows at its own place, generated ones behind it, `fill` elsewhere. `axes` are those
    of a value that run along the prompt: of attention patterns [batch, head, query, key] two."""
    width = max(max(span.width, span.start + value.shape[axes[0]]) for span, value in zip(at, values, strict=True))
    shape = [width if axis in axes else size for axis, size in enumerate(values[0].shape)]
    out = values[0].new_full((len(values), *shape), fill)
    for row, value, span in zip(out, values, at, strict=True):
        for axis in axes:
            row = row.narrow(axis, span.start, value.shape[axis])
        row.copy_(value)
    return out


def agreed(ends: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """What follows the unembedding, as every rank that has one says. Raises StartError where they disagree."""
    found = [end for end in ends if end is not None]
    if any((end["softcap"], end["scale"]) != (found[0]["softcap"], found[0]["scale"]) for end in found):
        raise StartError(f"the ranks disagree about the scale or the softcap of the logits: {found}", code="engine_failed")
    return found[0] | {"rebuild_error": max(end["rebuild_error"] for end in found)}


# Interventions

# What each op takes beside pos, head and dim: required keys, then optional ones.
OPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "suppress": ((), ()), "scale": (("factor",), ()), "add": (("value",), ()), "subtract": (("value",), ()),
    "set": (("value",), ()), "project": (("value",), ("factor",)), "noise": (("std",), ("seed",)),
}


def edits(intervene: Mapping[str, Any] | None, catalog: Catalog, canonical: Callable[[str], str], span: Span, fed: int
          ) -> tuple[Edit, ...]:
    """The edits of one prompt of which `fed` tokens are fed, generated ones included, in the order given.

    `intervene` has a spec, or a list of them, a hook name. A spec is a mapping with `op` and, each a whole number or a
    list of them, `pos` (in the caller's coordinates; negative from the prompt's last real token), `head` and `dim`:

        suppress                 0
        scale      factor        x * factor
        add, subtract, set       x + value, x - value, value: a number, or what is selected of one position
        project    value         x + factor * (its projection on the direction `value`); factor -1, the default, takes it out
        noise      std, seed     x + normal noise, another draw for each hook point

    Raises UsageError, HookError.
    """
    found: list[Edit] = []
    for name, given in (intervene or {}).items():
        hook = canonical(name)
        for spec in given if isinstance(given, list | tuple) else [given]:
            found.append(_Spec(name, hook, spec, catalog).edit(span, fed, len(found)))
    return tuple(found)


class _Spec:
    """One spec, being read."""

    def __init__(self, typed: str, hook: str, spec: Any, catalog: Catalog) -> None:
        self._typed, self._hook = typed, hook
        if callable(spec):
            raise self._wrong("is a function, and the model runs where it cannot be called", hint="give a spec: {'op': 'scale', "
                              "'factor': 2.0}")
        if not isinstance(spec, Mapping) or spec.get("op") not in OPS:
            raise self._wrong(f"has no op that is known: {spec!r}", hint=f"ops are {', '.join(OPS)}")
        self._spec = dict(spec)
        needed, optional = OPS[self._spec["op"]]
        missing = [key for key in needed if self._spec.get(key) is None]
        extra = self._spec.keys() - {"op", "pos", "head", "dim", *needed, *optional}
        if missing or extra:
            raise self._wrong(f"lacks {', '.join(missing)}" if missing else f"has keys that are not known: {', '.join(sorted(extra))}")
        sizes = [catalog.size(axis) for axis in catalog.axes(hook)[1:]]
        if self._spec.get("head") is not None and len(sizes) < 2:
            raise self._wrong("selects heads, which this hook point does not have", code="no_heads")
        self._dims = self._indices("dim", sizes[-1])
        self._heads = self._indices("head", sizes[0]) if len(sizes) > 1 else None
        chosen = (self._heads, self._dims) if len(sizes) > 1 else (self._dims,)
        self._row = [size if of is None else len(of) for size, of in zip(sizes, chosen, strict=True)]

    def edit(self, span: Span, fed: int, nth: int) -> Edit:
        positions = self._positions(span, fed)
        of: dict[str, Any] = {"name": self._hook, "positions": positions, "heads": self._heads, "dims": self._dims}
        match self._spec["op"]:
            case "suppress":
                return Edit(**of, keep=0.0)
            case "scale":
                return Edit(**of, keep=self._number("factor"))
            case "add":
                return Edit(**of, value=self._value())
            case "subtract":
                return Edit(**of, value=-self._value())
            case "set":
                return Edit(**of, keep=0.0, value=self._value())
            case "project":
                return Edit(**of, direction=self._direction(), along=self._number("factor", -1.0))
        rows = tuple(range(fed)) if positions is None else positions
        generator = torch.Generator().manual_seed(self._whole("seed", 0) + nth)
        noise = torch.randn([len(rows), *self._row], generator=generator) * self._number("std")
        return Edit(**{**of, "positions": rows}, value=noise)

    def _positions(self, span: Span, fed: int) -> tuple[int, ...] | None:
        """Absolute positions among the fed tokens, each once, in the order given; None for all."""
        asked = self._list("pos")
        if asked is None:
            return None
        end = len(span.ids)
        moved = dict.fromkeys(p - span.start if p >= 0 else p + end for p in asked)
        if not all(0 <= p < fed for p in moved) or not moved:
            raise self._wrong(f"selects positions {asked}, and this prompt has {span.start} to {span.start + fed - 1}",
                              code="pos_out_of_range", of=HookError)
        return tuple(moved)

    def _indices(self, key: str, size: int) -> tuple[int, ...] | None:
        asked = self._list(key)
        if asked is None:
            return None
        found = tuple(dict.fromkeys(n + size if n < 0 else n for n in asked))
        if not all(0 <= n < size for n in found) or not found:
            raise self._wrong(f"selects {key}s {asked}, and there are 0 to {size - 1}", code=f"{key}_out_of_range", of=HookError)
        return found

    def _list(self, key: str) -> list[int] | None:
        asked = self._spec.get(key)
        asked = asked.tolist() if hasattr(asked, "tolist") else asked
        asked = [asked] if isinstance(asked, numbers.Integral) else asked
        if asked is None:
            return None
        if not isinstance(asked, list | tuple) or any(isinstance(n, bool) or not isinstance(n, numbers.Integral) for n in asked):
            raise self._wrong(f"{key} is not a whole number or a list of them: {asked!r}")
        return [int(n) for n in asked]

    def _value(self) -> float | torch.Tensor:
        """A number, or what is selected of one position, which may be flat."""
        value = self._tensor()
        if value.ndim == 0:
            return float(value)
        if list(value.shape) != self._row and value.shape != (math.prod(self._row),):
            raise self._wrong(f"has a value of shape {list(value.shape)} for {self._row}", code="wrong_width")
        return value.reshape(self._row)

    def _direction(self) -> torch.Tensor:
        value = self._tensor()
        if list(value.shape) != self._row[-1:] or not value.any():
            raise self._wrong(f"needs a direction of {self._row[-1]} numbers that are not all 0", code="wrong_width")
        return value

    def _tensor(self) -> torch.Tensor:
        try:
            value = torch.as_tensor(self._spec["value"]).detach().float()
        except (TypeError, ValueError, RuntimeError) as fault:
            raise self._wrong(f"has a value that is no number and no tensor: {type(self._spec['value']).__name__}") from fault
        if not value.isfinite().all():
            raise self._wrong("has a value that is not finite")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        number = self._spec.get(key, default)
        if isinstance(number, bool) or not isinstance(number, numbers.Real) or not math.isfinite(number):
            raise self._wrong(f"{key} is not a finite number: {number!r}")
        return float(number)

    def _whole(self, key: str, default: int) -> int:
        number = self._spec.get(key, default)
        if isinstance(number, bool) or not isinstance(number, numbers.Integral):
            raise self._wrong(f"{key} is not a whole number: {number!r}")
        return int(number)

    def _wrong(self, what: str, *, hint: str = "", code: str = "bad_spec", of: type[UsageError] = UsageError) -> UsageError:
        return of(f"the intervention at {self._typed} {what}", hint=hint, code=code)
