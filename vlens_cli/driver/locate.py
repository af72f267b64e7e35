"""Family rows -> live modules: where each hook point is read in the model that the engine built.

A miss is never fatal to the engine: the point is refused by name, with the reason, and the others stay.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vlens_cli.driver import internals
from vlens_cli.driver.ranks import ALONE, Ranks
from vlens_cli.families import TOKEN_AXES, Catalog, Row

# Axes that tensor parallelism spreads over the ranks.
SPREAD_AXES = ("head", "kv_head", "d_mlp", "d_shared")
# Sublayer -> the linear layer that its output comes from.
PROJECTIONS = {"attn": "o", "mlp": "down", "shared": "shared_down"}
ELSEWHERE = "another pipeline stage has this layer"

# Roles that points are rebuilt with, and what tells (LookupError) that a live module cannot be used so.
REBUILDS = {"attention": internals.attention_scoring, "latent": internals.latent_scale, "kv_b": internals.check_live}


@dataclass(frozen=True)
class Point:
    """One located hook point: which module's call is read, which tensors, which columns of them.

    `raw_width` is the width of the tensors that a formula is of, where that is known.

    `shape` are the sizes of its axes but for those along the prompt; norm and factor are what its formula needs of the
    family and the config; `helper` is its second module. `of` names the points that a rebuilt one is made of: nothing is
    read for itself then, and `module` is the one whose formula rebuilds it.

    Of a point that is `spread` over tensor-parallel ranks the module's tensors are this rank's part; of `replicas`
    neighbouring ranks that hold the same heads the first counts. Of an `addend` each rank has one of those that the value
    is the sum of. `kv_group` is how many query heads a kv head serves.
    """

    name: str
    row: Row
    layer: int | None
    module: torch.nn.Module
    columns: slice | None
    shape: tuple[int, ...]
    norm: str = "rms"
    factor: float = 1.0
    helper: torch.nn.Module | None = None
    batch_axis: bool = False
    of: tuple[str, ...] = ()
    raw_width: int = 0
    ranks: Ranks = ALONE
    spread: bool = False
    addend: bool = False
    replicas: int = 1
    kv_group: int = 1

    @property
    def places(self) -> list[tuple[int, str]]:
        """Where in a call each input is: its place among the arguments, and its name."""
        return [(key, self._parameters[key] if key < len(self._parameters) else "") if isinstance(key, int)
                else (self._parameters.index(key), key) for key in self.row.inputs]

    @property
    def on_input(self) -> bool:
        return bool(self.row.inputs)

    @cached_property
    def _parameters(self) -> list[str]:
        return list(inspect.signature(self.module.forward).parameters)

    def source(self, name: str) -> str:
        """The name under which rows of the point `name` are kept that this one is rebuilt from."""
        return f"{self.name} < {name}"

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> list[torch.Tensor]:
        """The tensors whose sum is the value, [tokens, width] each, as views: nothing is copied yet."""
        if self.on_input:
            found = [self._argument(key, args, kwargs) for key in self.row.inputs]
        else:
            outputs = output if isinstance(output, tuple) else (output,)
            found = [outputs[place] for place in self.row.outputs if place < len(outputs)]
        tensors = [self._part(_flat(t[0] if self.batch_axis and t.ndim > 2 else t)) for t in found if t is not None]
        if not tensors:
            raise LookupError(f"{self.name}: nothing to read in this call")
        return tensors

    def _part(self, t: torch.Tensor) -> torch.Tensor:
        if self.row.interleaved:
            heads = self.shape[0] * self.replicas // self.ranks.tp if self.spread else self.shape[0]
            return t.unflatten(1, (heads, -1))[:, :, self.columns]
        return t if self.columns is None else t[:, self.columns]

    def whole(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What `tensors` gave, of all ranks: every one of them must ask."""
        if self.addend:
            return [self.ranks.sum(t.clone()) for t in tensors]
        return [self.ranks.joined(t, self.replicas) for t in tensors] if self.spread else tensors

    def give_back(self, tensors: list[torch.Tensor], whole: list[torch.Tensor]) -> None:
        """Put this rank's part of what was `whole` where `tensors` are views of: every rank must. Of a sum, the first rank
        gets the rows that are not what they were, and the others nothing there."""
        for t, all_of in zip(tensors, whole, strict=True):
            if self.spread:
                t.copy_(self.ranks.part(all_of, self.replicas))
            elif self.addend:
                changed = (self.ranks.sum(t.clone()) != all_of).any(dim=1, keepdim=True)
                t.copy_(torch.where(changed, all_of if self.ranks.at == 0 else torch.zeros_like(t), t))

    def shaped(self, t: torch.Tensor) -> torch.Tensor:
        """[rows, width] as a view [rows, *shape]; already so where each head has all parts of a fused output."""
        return t if t.shape[1:] == self.shape else t.unflatten(-1, self.shape)

    def _argument(self, key: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        if isinstance(key, int):
            return args[key] if key < len(args) else None
        if key in kwargs:
            return kwargs[key]
        place = self._parameters.index(key)
        return args[place] if place < len(args) else None


def _flat(t: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, d_head] -> [tokens, width], as q and k norms see it."""
    return t.flatten(1) if t.ndim > 2 else t


class Locator:
    """Finds the rows of one catalog in one live model."""

    def __init__(self, model: torch.nn.Module, catalog: Catalog, ranks: Ranks = ALONE) -> None:
        self.catalog = catalog
        self.ranks = ranks
        # Duplicates too: layers may share one rotary module.
        self._modules = dict(model.named_modules(remove_duplicate=False))

    def module(self, role: str, layer: int | None = None) -> torch.nn.Module:
        """The live module of a role; LookupError where the tree has none."""
        path = self.catalog.spec.modules.get(role, role)
        return self.at(path if layer is None else path.replace("{i}", str(layer)))

    def at(self, path: str) -> torch.nn.Module:
        """The live module of a path; LookupError where the tree has none."""
        if path not in self._modules:
            # A stage keeps one module in the place of a layer that is not its own.
            within = (path.rsplit(".", n)[0] for n in range(1, path.count(".") + 1))
            if any(above in self._modules and internals.is_elsewhere(self._modules[above]) for above in within):
                raise LookupError(ELSEWHERE)
            raise LookupError(f"the engine's model has no module: {path}")
        if internals.is_elsewhere(self._modules[path]):
            raise LookupError(ELSEWHERE)
        return self._modules[path]

    def has(self, role: str, layer: int | None = None) -> bool:
        """Whether the live tree has a module of a role, in a layer."""
        path = self.catalog.spec.modules.get(role)
        return path is not None and path.replace("{i}", str(layer)) in self._modules

    def points(self) -> tuple[dict[str, Point], dict[str, str]]:
        """(located points, refused names -> reason)."""
        found: dict[str, Point] = {}
        refused: dict[str, str] = {}
        seen: dict[tuple[str, int], str] = {}
        for name, (row, layer) in self.catalog.points.items():
            try:
                point = self._point(name, row, layer)
                first = seen.setdefault((row.hook, id(point.module)), name)
                if first != name and not point.of:
                    raise LookupError(f"the engine has one module for this point and {first}: their rows would mix")
                missing = [source for source in point.of if source not in found]
                if missing:
                    raise LookupError(rebuilt_from_refused(missing[0]))
                found[name] = point
            except LookupError as miss:
                refused[name] = str(miss)
        return found, refused

    def _point(self, name: str, row: Row, layer: int | None) -> Point:
        if layer is None and not self._has_end(row):
            raise LookupError(ELSEWHERE)
        whole = row.otherwise in self.catalog.spec.modules and not self.has(row.module, layer)
        try:
            module = self.module(row.otherwise if whole else row.module, layer)
        except LookupError as miss:
            elsewhere = str(miss) == ELSEWHERE
            raise LookupError(ELSEWHERE if elsewhere else row.absent or str(miss)) from miss
        helper = self.module(row.helper, layer) if row.helper else None
        for role, found in ((row.module, module), (row.helper, helper)):
            if row.of and role in REBUILDS:
                REBUILDS[role](found)
        spec = self.catalog.spec
        if spec.structural and layer is not None and not {"head", "kv_head"}.isdisjoint(row.axes):
            self._check_heads(layer)
        return Point(
            name, row, layer, module, None if whole else self._columns(row, layer),
            shape=tuple(self.catalog.size(axis) for axis in row.axes if axis not in TOKEN_AXES), norm=spec.norm,
            factor=self.catalog.factor(row), helper=helper, batch_axis=spec.batch_axis, of=self.catalog.sources(name),
            raw_width=self.catalog.dims.n_experts if row.derive.startswith("expert") else self.catalog.dims.d_model,
            ranks=self.ranks, spread=self.ranks.tp > 1 and not row.of and (
                row.spread or not set(SPREAD_AXES).isdisjoint(row.axes)),
            addend=self.ranks.tp > 1 and self._is_unreduced(row, layer),
            replicas=self._replicas if "kv_head" in row.axes else 1,
            kv_group=max(1, self.catalog.dims.n_heads // self.catalog.dims.n_kv_heads),
        )

    def _is_unreduced(self, row: Row, layer: int | None) -> bool:
        """Whether a sublayer's output is what its projection gives on each rank, and the block sums it."""
        role = PROJECTIONS.get(row.module, row.module)
        return bool(row.outputs) and self.has(role, layer) and internals.cut(self.module(role, layer)).unreduced

    def _has_end(self, row: Row) -> bool:
        """Whether a point outside the blocks is in this pipeline stage: those ahead of them are in the first. Modules do not
        tell, since the last stage has a tied embedding too."""
        rows = self.catalog.spec.rows
        ahead = rows.index(row) < min(n for n, one in enumerate(rows) if "{i}" in one.hook)
        return self.ranks.stage == (0 if ahead else self.ranks.pp - 1)

    def _columns(self, row: Row, layer: int | None) -> slice | None:
        if not row.split:
            return None
        widths = [self._width(axis, row.interleaved) for axis in row.split]
        start = sum(widths[: row.part])
        return slice(start, start + widths[row.part])

    def _width(self, axis: str, of_a_head: bool) -> int:
        """How many columns a part of a fused output has on this rank, or one head's share of it."""
        if of_a_head:
            return self.catalog.dims.d_head if axis in ("head", "kv_head") else self.catalog.size(axis)
        per = self.catalog.dims.d_head if axis in ("head", "kv_head") else 1
        over = self.ranks.tp // (self._replicas if axis == "kv_head" else 1) if axis in SPREAD_AXES else 1
        return self.catalog.size(axis) * per // over

    @property
    def _replicas(self) -> int:
        """How many neighbouring ranks hold the same kv heads."""
        return max(1, self.ranks.tp // self.catalog.dims.n_kv_heads)

    def check_heads(self) -> None:
        """The engine's own head counts and width must be the catalog's; LookupError where they differ."""
        if "attention" not in self.catalog.spec.modules:
            return  # latent attention: its kernel sees no heads of the model's
        for layer in self.layers():
            self._check_heads(layer)

    def layers(self) -> list[int]:
        """The layers of this pipeline stage."""
        return [i for i in range(self.catalog.n_layers) if not self._is_elsewhere("block", i)]

    def _is_elsewhere(self, role: str, layer: int | None) -> bool:
        try:
            self.module(role, layer)
        except LookupError as miss:
            return str(miss) == ELSEWHERE
        return False

    def of_last_stage(self, role: str) -> torch.nn.Module | None:
        """The module of a role behind the blocks; None where that is another stage's, though some models have one of their own
        in every stage."""
        return self.module(role) if self.ranks.stage == self.ranks.pp - 1 else None

    def _check_heads(self, layer: int) -> None:
        dims = self.catalog.dims
        tp = self.ranks.tp
        want = (dims.n_heads // tp, dims.n_kv_heads * self._replicas // tp, dims.d_head)
        got = internals.attention_heads(self.module("attention", layer))
        if got != want:
            raise LookupError(f"layer {layer} has (heads, kv heads, width) {got} on a rank, its config says {want}")


def rebuilt_from_refused(source: str) -> str:
    return f"it is rebuilt from {source}, which is refused"
