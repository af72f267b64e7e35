"""An architecture that no family's file names: roles are given to the modules of the live tree by what they are.

Nothing here is trusted. A wrong guess reads a wrong tensor, which the proof at load finds: of such a model it takes
nothing for granted (see `Proof.verdict`). What cannot be told from the tree alone, how blocks carry the stream and
which side their norms are on, is tried: `layouts` gives every way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from vlens_cli.driver import internals
from vlens_cli.errors import StartError
from vlens_cli.families import Catalog, Row, load

# What a block's stream is called among its arguments; the rest of a pair is its `residual`.
STREAM_NAMES = ("hidden_states", "hidden_state", "x", "hidden", "inputs")
NORMS = {1: ("ln1",), 2: ("ln1", "ln2"), 4: ("ln1", "ln1_post", "ln2", "ln2_post")}
AFTER = {2: ("ln1_post", "ln2_post")}
UNROTATED = {"blocks.{i}.attn.hook_rot_q": "q", "blocks.{i}.attn.hook_rot_k": "k"}
NO_MODULE = "no file describes this architecture, and no module of its blocks was found that is this one's"


@dataclass(frozen=True)
class Layout:
    """One reading of a live tree: a catalog over it, and the points that it does not have -> the reason."""

    catalog: Catalog
    absent: dict[str, str]


def layouts(model: torch.nn.Module, catalog: Catalog) -> list[Layout]:
    """How the points of a catalog may lie in a live tree, the likeliest first; the proof at load says which is right.

    For a family with a file there is one: of its layouts the one that most of its modules are found for.
    Raises StartError where an unknown architecture has no blocks with attention.
    """
    if not catalog.spec.structural:
        there = dict(model.named_modules(remove_duplicate=False))
        specs = [catalog.spec, *map(load, catalog.spec.layouts)]
        missing = [sum(path.replace("{i}", "0") not in there for path in spec.modules.values()) for spec in specs]
        best = specs[missing.index(min(missing))]
        return [Layout(catalog if best is catalog.spec else catalog.over(best), {})]
    tree = _Tree(model, catalog)
    return [tree.layout(first, after, parallel) for parallel, after, first in product((False, True), (False, True), (False, True))
            if not (after and len(tree.norms) not in AFTER)]


class _Tree:
    """The modules of one live model, by role."""

    def __init__(self, model: torch.nn.Module, catalog: Catalog) -> None:
        self._catalog = catalog
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._of_backend = type(model).__name__.startswith("Transformers")
        self._blocks = self._find_blocks()
        self.norms: list[str] = []
        self._roles = {**dict(self._ends()), **dict(self._block_roles())}

    def layout(self, first: bool, after: bool, parallel: bool) -> Layout:
        """`first`: blocks return the whole stream first, and not as the sum of what they return; `after`: both norms
        follow a sublayer; `parallel`: there is no stream between attention and MLP."""
        names = (AFTER if after else NORMS).get(len(self.norms), ())
        roles = {**self._roles, **dict(zip(names, self.norms, strict=False))}
        lacking = {"blocks.{i}.hook_resid_mid"} if parallel else set()
        rows = [row for row in map(lambda row: self._placed(row, roles), self._catalog.spec.rows) if row and row.hook not in lacking]
        hooks = {row.hook for row in rows}
        rows = [self._read(row, first)._replace(of=tuple(_attended(hook, hooks) for hook in row.of)) for row in rows]
        spec = self._catalog.spec._replace(rows=tuple(rows), modules=roles, norm=self._norm_kind(roles), batch_axis=self._of_backend,
                       rotation="tables" if self._of_backend else "engine")
        found = Catalog(spec, self._catalog.dims, self._catalog._config)
        return Layout(found, {name: NO_MODULE for name in self._catalog.names if name not in found.points})

    def _placed(self, row: Row, roles: dict[str, str]) -> Row | None:
        """A row over the role that this tree has for it; None where it has none."""
        if row.hook in UNROTATED and "rotary" not in roles:
            return None
        if row.module in roles:
            return row
        return row._replace(module=row.otherwise, split=(), part=0) if row.otherwise in roles else None

    def _read(self, row: Row, first: bool) -> Row:
        """A row of the stream, as this tree's blocks and norms carry it."""
        ends = ("hook_resid_pre", "hook_resid_post")
        if row.module == "block" and row.hook.endswith(ends):
            names = inspect.signature(self._modules[self._blocks[0]].forward).parameters
            stream = [name for name in STREAM_NAMES if name in names][:1]
            rest = [name for name in ("residual",) if name in names and not first]
            return row._replace(inputs=tuple(stream + rest) if row.inputs else (), outputs=(0, *(() if first else (1,))) if row.outputs else ())
        return row._replace(inputs=(0,)) if first and row.inputs == (0, 1) else row

    def _find_blocks(self) -> list[str]:
        """The paths of the blocks: the one list of as many modules as there are layers that has attention."""
        lists = [path for path, module in self._modules.items()
                 if isinstance(module, torch.nn.ModuleList) and len(module) == self._catalog.n_layers
                 and any(internals.kind(child) == "attention" for child in module.modules())]
        if len(lists) != 1:
            raise StartError(
                f"no hook points are known for this architecture, and its structure is not a decoder's: it has {len(lists)} "
                f"lists of {self._catalog.n_layers} blocks with attention", code="unknown_family",
                hint="`vlens hooks` needs a family's file for such a model",
            )
        return [f"{lists[0]}.{i}" for i in range(self._catalog.n_layers)]

    def _ends(self) -> Iterator[tuple[str, str]]:
        """Roles outside the blocks."""
        outside = [(path, internals.kind(module)) for path, module in self._modules.items()
                   if not path.startswith(tuple(f"{block}." for block in self._blocks))]
        parent = self._blocks[0].rpartition(".")[0].rpartition(".")[0]
        for role, kind in (("embed", "embedding"), ("unembed", "head"), ("logits", "logits"), ("rotary", "rotary")):
            found = [path for path, each in outside if each == kind]
            if len(found) == 1:
                yield role, found[0]
            elif role == "logits":
                raise StartError("no hook points are known for this architecture, and its logits come from no module of the engine's",
                                 code="unknown_family", hint="`vlens hooks` needs a family's file for such a model")
        norms = [path for path, each in outside if each == "norm" and path.rpartition(".")[0] == parent]
        if norms:
            yield "ln_final", norms[-1]

    def _block_roles(self) -> Iterator[tuple[str, str]]:
        """Roles in the blocks, as paths with {i}; where layers differ, by the first that has the role."""
        found: dict[str, str] = {}
        for block in self._blocks:
            for role, path in self._roles_of(block):
                found.setdefault(role, f"{block.rpartition('.')[0]}.{{i}}{path.removeprefix(block)}")
        yield from found.items()

    def _roles_of(self, block: str) -> Iterator[tuple[str, str]]:
        yield "block", block
        children = [f"{block}.{name}" for name, _ in self._modules[block].named_children()]
        parts = {child: [(path, internals.kind(module)) for path, module in self._modules.items()
                         if path == child or path.startswith(f"{child}.")] for child in children}
        norms = [child for child in children if internals.kind(self._modules[child]) == "norm"]
        self.norms = self.norms or [f"{block.rpartition('.')[0]}.{{i}}{path.removeprefix(block)}" for path in norms]
        attending = [child for child, inside in parts.items() if any(kind == "attention" for _, kind in inside)]
        if len(attending) != 1:
            return
        yield "attn", attending[0]
        yield from _attention_roles(attending[0], parts.pop(attending[0]))
        feeding = [child for child, inside in parts.items() if any(kind in ("merged", "linear", "experts") for _, kind in inside)]
        if len(feeding) == 1 and internals.kind(self._modules[feeding[0]]) != "linear":
            yield "mlp", feeding[0]
            yield from _mlp_roles(parts[feeding[0]])

    def _norm_kind(self, roles: dict[str, str]) -> str:
        """The formula of this model's norms, by what one makes of numbers; `rms` where it is none that is known."""
        path = next((roles[role] for role in ("ln1", "ln1_post", "ln_final") if role in roles), None)
        return "rms" if path is None else internals.norm_kind(self._modules[path.replace("{i}", "0")]) or "rms"


def _attended(hook: str, hooks: set[str]) -> str:
    """What the kernel's queries or keys are, in a tree without rotation."""
    if hook in hooks or hook not in UNROTATED:
        return hook
    normed = f"blocks.{{i}}.attn.hook_{UNROTATED[hook]}_normed"
    return normed if normed in hooks else normed.removesuffix("_normed")


def _attention_roles(attn: str, inside: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The kernel and the projections, where there is one of each; norms of queries and keys by their names."""
    for role, wanted in (("attention", "attention"), ("qkv", "qkv"), ("o", "linear"), ("rotary", "rotary")):
        found = [path for path, kind in inside if kind == wanted]
        if len(found) == 1:
            yield role, found[0]
    for path, kind in inside:
        name = path.rpartition(".")[2]
        if kind == "norm" and name[0] in "qk" and path.rpartition(".")[0] == attn:
            yield f"{name[0]}_norm", path


def _mlp_roles(inside: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """One fused projection, or one alone, then an activation, then the one back."""
    by_kind = {wanted: [path for path, kind in inside if kind == wanted] for wanted in ("merged", "linear", "act", "experts")}
    merged, linear, act, experts = by_kind.values()
    if experts or len(act) != 1:
        return
    if len(merged) == 1 and len(linear) == 1:
        yield from (("gate_up", merged[0]), ("act", act[0]), ("down", linear[0]))
    elif not merged and len(linear) == 2:
        yield from (("up", linear[0]), ("act", act[0]), ("down", linear[1]))
