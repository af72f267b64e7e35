"""What vlens knows of an architecture, as data: one TOML file a family, and the catalog of one model.

A family file holds
    like        another family whose entries it starts from; its own entries replace or add
    fresh       tables of which nothing is taken over
    classes     the classes whose live module tree has this shape (vLLM's; a checkpoint's `architectures` name them)
    norm        which formula the norms are: rms, rms_plus_one (the weight is 1 + w) or layer (centred)
    batch_axis  whether tensors are [1, tokens, width], as in models that vLLM runs through its Transformers backend
    rotation    engine: the rotary module turns q and k; tables: it gives (cos, sin), which turn the halves of each head
    differs     how far the engine's own logits are from transformers', and why, where they are
    foreign     config keys that the engine would obey and the architecture does not have
    [defaults]  what the architecture takes a key for that config.json leaves out
    [when]      config key -> the value that this layout needs; a model with another is refused
    [checkpoint]       tensor name -> when a whole checkpoint has it: always, never, maybe, a config key, or !key;
                {i} is the layer, {e} the expert
    prefix      what tensor names may lack ("transformer.")      ignored  ends of names that no engine needs
    structural  true in the one file for architectures that no other names: its modules are found in the live tree
    layouts     other files, each the same rows over another module tree that the architecture has in other versions
                of the engine: the first one that the live tree fits is taken
    [dims]      which config key gives each width, or several of which the first that is there counts; also a number
                (0: models of the family may lack it), or sums and products of these and of widths named before it
                ("4 * d_model", "d_nope + d_rope")
    [modules]   role -> path in the live module tree; {i} is the layer
    [hf]        role -> path in transformers' module tree (within a block where the role is one of a block's), for
                `vlens doctor --check-hf`: independent of [modules], so that one can be checked against the other;
                by_head (q, k and v of a fused projection alternate), head_first (head norms see [head, pos, d_head]) and
                transposed (linear layers keep [in, out]), latent (queries, keys and values are seen where the attention
                gets them, and only parts of them are rotated) are flags; `sinks` is a parameter's path; [hf.outputs] and
                [hf.inputs] give a block's point -> the module whose it is, [hf.norms] a norm -> its module and its output's
                point, where no role says it
    [reads]     name -> list of arguments or outputs, for rows that read the stream
    [[row]]     one hook point each: hook, module (a role), `in` or `out` (what is read, or a name of [reads]) or `of`
                (the hook points of the same layer that it is rebuilt from, or a name of [reads]), axes, meaning; `split`/`part` choose columns of a fused output, which lie head by head where
                `interleaved`; `derive` names a formula over what is read, `factor` (a config key or "sqrt(d_model)")
                and `helper` (a role) are what it needs besides; `absent` is the reason where a layer lacks the module;
                `before` places a row, added or moved, in the order of the forward; `otherwise` is the role that is read, whole,
                where the tree has none of the first; `spread` says that each tensor-parallel rank has a part of what the
                value is formed of, where no axis says so
    [aliases]   other name -> canonical name
    [refused]   name -> the reason it is not given; takes away a row or alias of that name that `like` brought

The weights are in files of their own: see param_rows.py.

Light: no torch, so that the client can check names, layers and heads before any engine starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from vlens_cli.errors import BugError, StartError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "qwen3_moe", "mixtral",
            "gpt2", "opt", "gpt_neox", "olmo2", "starcoder2", "stablelm", "cohere", "granite", "glm4",
            "bloom", "falcon", "gpt_oss", "deepseek_v2")

# What a class is called that predicts the next token; others are of no use to an engine of ours, whatever their layers.
DECODERS = ("ForCausalLM", "LMHeadModel")

# More is a broken config, and naming that many hook points takes for ever.
MOST_LAYERS = 10_000

# Points whose change reaches everything that follows: the engine forms them, or forms the next value from them alone.
EDITABLE = frozenset({
    "hook_embed", "hook_pos_embed", "unembed.hook_out", "ln_final.hook_normalized",
    *(f"blocks.{{i}}.{point}" for point in (
        "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out",
        "ln1.hook_normalized", "ln2.hook_normalized", "ln1_post.hook_normalized", "ln2_post.hook_normalized",
        "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_rot_q", "attn.hook_rot_k", "attn.hook_z",
        "mlp.hook_pre", "mlp.hook_pre_linear", "mlp.hook_post", "mlp.hook_router_logits",
    )),
})  # fmt: skip

_AXIS_DIMS = {"head": "n_heads", "kv_head": "n_kv_heads", "expert": "n_experts", "k": "n_active"}
# Axes as long as a prompt: no config knows their sizes.
TOKEN_AXES = ("pos", "query", "key")


# Named tuples: a dataclass takes a millisecond to make, and every client waits for each.


class Row(NamedTuple):
    """One hook point of a family.

    hook     name with {i} for the layer       module   role in the family's module table
    inputs   arguments read, by name or place  outputs  outputs read, by place (one of the two is empty)
    axes     names of the axes: `pos` first, or `head`, `query`, `key`
    split    axes of the parts of a fused output; `part` which one
    derive   formula over what is read, or ""      factor   what a value is multiplied by on its way, or ""
    of       hook points of the same layer (with {i}) that the value is rebuilt from; nothing is read then
    helper   role of a second module that the formula needs, or ""
    interleaved  each head has all parts of a split, one after the other
    absent   why a layer has no such point, where the module may be missing
    otherwise  role that is read, whole, where the live tree has no module of the first
    spread   each tensor-parallel rank has a part of what the value is formed of
    """

    hook: str
    module: str
    inputs: tuple[str | int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str, ...]
    meaning: str
    split: tuple[str, ...] = ()
    part: int = 0
    derive: str = ""
    interleaved: bool = False
    factor: str = ""
    helper: str = ""
    absent: str = ""
    otherwise: str = ""
    spread: bool = False
    of: tuple[str, ...] = ()

    @property
    def editable(self) -> bool:
        return self.hook in EDITABLE and not self.of

    @property
    def derived(self) -> bool:
        """Whether vlens forms the value (a formula, or a stream summed from a pair) rather than the engine."""
        return bool(self.derive) or len(self.inputs) + len(self.outputs) > 1


class Family(NamedTuple):
    """One family file, with what it inherits."""

    name: str
    classes: tuple[str, ...]
    norm: str
    batch_axis: bool
    rotation: str
    dims: dict[str, tuple[str | int, ...]]
    modules: dict[str, str]
    rows: tuple[Row, ...]
    aliases: dict[str, str]
    refused: dict[str, str]
    foreign: tuple[str, ...]
    defaults: dict[str, Any]
    when: dict[str, Any]
    checkpoint: dict[str, str]
    hf: dict[str, Any]
    prefix: str
    differs: str
    ignored: tuple[str, ...]
    like: str
    structural: bool
    layouts: tuple[str, ...]


class Dims(NamedTuple):
    """Widths of one model; 0 where it has none: `n_experts` and `n_active` (experts a token) of a mixture of experts,
    `d_shared` of the experts that every position has; of latent attention `d_q_latent` and `d_latent` of the rows, and of each
    head's query and key `d_nope` numbers that do not turn, `d_rope` that do, `d_query` together, `d_kv` of its key without
    rotation and its value, `d_kv_row` of the latent row and the key that turns."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_experts: int = 0
    n_active: int = 0
    d_shared: int = 0
    d_q_latent: int = 0
    d_latent: int = 0
    d_nope: int = 0
    d_rope: int = 0
    d_query: int = 0
    d_kv: int = 0
    d_kv_row: int = 0


class Catalog:
    """The hook points of one model: a family's rows at a model's widths.

    Names are concrete (`blocks.3.hook_resid_post`); `names` has the canonical ones in the order of the forward.
    """

    def __init__(self, family: Family, dims: Dims, config: dict[str, Any]) -> None:
        self.spec = family
        self.dims = dims
        self._config = config
        self.family = family.name
        self.n_layers = dims.n_layers

    def over(self, layout: Family) -> Catalog:
        """The same model's points in another of its family's module trees."""
        return Catalog(layout._replace(name=self.family), self.dims, self._config)

    @cached_property
    def points(self) -> dict[str, tuple[Row, int | None]]:
        """Canonical name -> its row and layer (None outside the blocks), in the order of the forward."""
        block = [row for row in self.spec.rows if "{i}" in row.hook]
        ahead = self.spec.rows[: self.spec.rows.index(block[0])]
        after = [row for row in self.spec.rows if row not in block and row not in ahead]
        found: dict[str, tuple[Row, int | None]] = {row.hook: (row, None) for row in ahead}
        for i in range(self.n_layers):
            found.update({row.hook.replace("{i}", str(i)): (row, i) for row in block})
        found.update({row.hook: (row, None) for row in after})
        return found

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.points)

    @cached_property
    def _aliases(self) -> dict[str, str]:
        last = str(self.n_layers - 1)
        return {alias: name.replace("{last}", last) for alias, name in self.spec.aliases.items()}

    @property
    def refused(self) -> dict[str, str]:
        """Names (with {i} for the layer) that are not given -> the reason."""
        return self.spec.refused

    def canonical(self, name: str) -> str | None:
        """The canonical name of a concrete name or alias of this model; None where it has none."""
        if name in self.points:
            return name
        folded, layer = _fold(name)
        target = self._aliases.get(folded)
        target = target and target.replace("{i}", layer)
        return target if target in self.points else None

    def refusal(self, name: str) -> str | None:
        """Why a concrete name of TransformerLens is not given here; None for any other."""
        return self.spec.refused.get(_fold(name)[0])

    def row(self, name: str) -> Row:
        return self.points[name][0]

    def layer(self, name: str) -> int | None:
        return self.points[name][1]

    def axes(self, name: str) -> tuple[str, ...]:
        return self.row(name).axes

    def token_axis(self, name: str) -> int:
        """The place of the axis that the positions of a capture run along: of the queries, where there are keys too."""
        return self.token_axes(name)[0]

    def token_axes(self, name: str) -> tuple[int, ...]:
        """The places of the axes that run along the prompt."""
        return tuple(place for place, axis in enumerate(self.axes(name)) if axis in TOKEN_AXES)

    def size(self, axis: str) -> int:
        """Length of an axis other than TOKEN_AXES."""
        return 1 if axis == "one" else getattr(self.dims, _AXIS_DIMS.get(axis, axis))

    def factor(self, row: Row) -> float:
        """What a row's value is multiplied by on its way: a number of the config, or sqrt(d_model); else 1."""
        if row.factor == "sqrt(d_model)":
            return self.dims.d_model**0.5
        return float(self._config[row.factor]) if row.factor else 1.0

    def derived(self, name: str) -> bool:
        return self.row(name).derived

    def editable(self, name: str) -> bool:
        return self.row(name).editable

    def sources(self, name: str) -> tuple[str, ...]:
        """The hook points that a rebuilt one is made of; none of any other."""
        row, layer = self.points[name]
        return tuple(source.replace("{i}", str(layer)) for source in row.of)

    def definition(self, name: str) -> str:
        return self.row(name).meaning

    def aliases(self, name: str) -> tuple[str, ...]:
        """Every other concrete name of a canonical name."""
        row, layer = self.points[name]
        # An alias of one layer alone (the last) names that layer.
        found = [*self._aliases_of.get(row.hook, ()), *(self._aliases_of.get(name, ()) if name != row.hook else ())]
        return tuple(alias.replace("{i}", str(layer)) for alias in found)

    @cached_property
    def _aliases_of(self) -> dict[str, list[str]]:
        of: dict[str, list[str]] = {}
        for alias, target in self._aliases.items():
            of.setdefault(target, []).append(alias)
        return of


def catalog_for(config: dict[str, Any]) -> Catalog:
    """The catalog of the model that a parsed config.json describes.

    Raises StartError where no family knows the architecture, or a width is missing or makes no sense.
    """
    named = config.get("architectures")
    named = [named] if isinstance(named, str) else named
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise _bad_config("config.json names no architecture")
    family = family_of(named)
    config = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    other = [key for key, value in family.when.items() if config.get(key) != value]
    if other:
        raise StartError(
            f"hook points are known for {family.name} with {other[0]} = {family.when[other[0]]}, and config.json has "
            f"{config.get(other[0])}", hint="its layers have another shape than those that this version reads",
            code="unknown_layout",
        )
    foreign = [key for key in family.foreign if config.get(key)]
    if foreign:
        raise StartError(
            f"config.json sets what this architecture does not have, and the engine would obey: {', '.join(foreign)}",
            hint="take it out of config.json if the model was trained without it", code="foreign_config",
        )
    return Catalog(family, _dims(family, config), config)


def check_checkpoint(catalog: Catalog, config: dict[str, Any], found: Iterable[str]) -> None:
    """Whether a checkpoint's tensors are those that the engine reads, all and only. Raises StartError.

    Quantized checkpoints have tensors of their own scheme, and those of a structural family are not known: neither is
    checked.
    """
    if config.get("quantization_config") or catalog.spec.structural:
        return
    config = {**catalog.spec.defaults, **config}
    rules = [(name, when) for pattern, when in catalog.spec.checkpoint.items() for name in _names(pattern, catalog.dims)]
    wanted = {name for name, when in rules if holds(when, config)}
    optional = {name for name, when in rules if when == "maybe"} | {"lm_head.weight"}
    prefix = catalog.spec.prefix
    there = {prefix + name if prefix + name in wanted else name for name in found
             if not name.endswith(catalog.spec.ignored)}
    for names, what in ((wanted - there, "lacks weights that the model has"),
                        (there - wanted - optional, "has weights that the engine does not read")):
        if names:
            first = sorted(names)[0]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise StartError(f"the checkpoint {what}: {first}{more}", code="bad_checkpoint",
                             hint="its values would not be the model's; compare its config.json and weights with the original")


def holds(when: str, config: dict[str, Any]) -> bool:
    """Whether a tensor of the `[checkpoint]` table is there, by its condition."""
    if when in ("always", "never", "maybe"):
        return when == "always"
    return not config.get(when[1:]) if when.startswith("!") else bool(config.get(when))


def _names(pattern: str, dims: Dims) -> list[str]:
    """The tensors of a pattern, over layers {i} and experts {e}."""
    layers = range(dims.n_layers) if "{i}" in pattern else range(1)
    experts = range(dims.n_experts) if "{e}" in pattern else range(1)
    return [pattern.replace("{i}", str(i)).replace("{e}", str(e)) for i in layers for e in experts]


def family_of(architectures: list[str]) -> Family:
    """The family of the first architecture named that any family knows; the structural one for another decoder.

    Files that do not hold the name are not parsed: there are many, and each command looks for one.
    """
    for architecture in architectures:
        for name in FAMILIES:
            if f'"{architecture}"' in _text(name) and architecture in (family := load(name)).classes:
                return family
    if any(each.endswith(DECODERS) for each in architectures):
        return load("structural")
    known = ", ".join(c for name in FAMILIES for c in load(name).classes)
    raise StartError(
        f"no hook points are known for this architecture: {', '.join(architectures) or 'none named in config.json'}",
        hint=f"this version of vlens reads {known}",
        code="unknown_family",
    )


@cache
def _text(name: str) -> str:
    return (Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8")


@cache
def load(name: str) -> Family:
    """One family, with what it inherits; a file that contradicts itself is a BugError."""
    fields = _fields(name)
    rows = tuple(_row(name, entry, fields) for entry in fields["row"])
    family = Family(
        name=name,
        classes=tuple(fields["classes"]),
        norm=fields["norm"],
        batch_axis=fields.get("batch_axis", False),
        rotation=fields.get("rotation", "engine"),
        dims={dim: tuple(keys) if isinstance(keys, list) else (keys,) for dim, keys in fields["dims"].items()},
        modules=fields["modules"],
        rows=rows,
        aliases=fields["aliases"],
        refused=fields["refused"],
        foreign=tuple(fields["foreign"]),
        defaults=fields.get("defaults", {}),
        when=fields.get("when", {}),
        checkpoint=fields["checkpoint"],
        hf=fields["hf"],
        prefix=fields.get("prefix", ""),
        ignored=tuple(fields["ignored"]),
        differs=fields.get("differs", ""),
        like=fields.get("like", ""),
        structural=fields.get("structural", False),
        layouts=tuple(fields.get("layouts", ())),
    )
    _check(family)
    return family


def own_of(name: str) -> dict[str, Any]:
    """What a family's own file holds."""
    # Its import takes longer than what it reads here.
    import tomllib

    return tomllib.loads(_text(name))


def _fields(name: str) -> dict[str, Any]:
    own = own_of(name)
    if "like" not in own:
        return own
    base = {key: value for key, value in _fields(own["like"]).items()
            if key not in own.get("fresh", ()) and key != "layouts"}
    taken = own.get("refused", {})
    rows = [row for row in base["row"] if row["hook"] not in taken]
    for entry in own.get("row", []):
        at = [row["hook"] for row in rows].index(entry.get("before", entry["hook"]))
        rows.insert(at, entry)
        rows[:] = [row for row in rows if row is entry or row["hook"] != entry["hook"]]
    hooks = {row["hook"] for row in rows}
    aliases = {alias: target for alias, target in {**base["aliases"], **own.get("aliases", {})}.items()
               if alias not in taken and alias not in hooks}
    # The other names of a point that this family lacks are refused as the point is.
    orphans = {alias: taken[target] for alias, target in aliases.items() if target in taken}
    aliases = {alias: target for alias, target in aliases.items() if alias not in orphans}
    refused = {**base["refused"], **orphans, **taken}
    return {
        **base,
        **own,
        "row": rows,
        **{table: {**base.get(table, {}), **own.get(table, {})}
           for table in ("dims", "modules", "hf", "reads", "checkpoint", "defaults", "when")},
        "aliases": aliases,
        "refused": {hook: reason for hook, reason in refused.items() if hook not in hooks and hook not in aliases},
    }


def _row(family: str, entry: dict[str, Any], fields: dict[str, Any]) -> Row:
    roles = [entry["module"], *([entry["helper"]] if "helper" in entry else [])]
    if not all(role in fields["modules"] for role in roles) or sum(key in entry for key in ("in", "out", "of")) != 1:
        raise BugError(f"family {family}: the row of {entry['hook']} needs a known module, and `in`, `out` or `of`")
    inputs, outputs, of = (fields["reads"][read] if isinstance(read, str) else read
                           for read in (entry.get("in", ()), entry.get("out", ()), entry.get("of", ())))
    return Row(
        hook=entry["hook"],
        module=entry["module"],
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        axes=tuple(entry["axes"]),
        meaning=entry["meaning"],
        split=tuple(entry.get("split", ())),
        of=tuple(of),
        **{name: entry[name] for name in ("part", "derive", "interleaved", "factor", "helper", "absent", "otherwise", "spread") if name in entry},
    )


def _check(family: Family) -> None:
    hooks = [row.hook for row in family.rows]
    targets = {target.replace("{last}", "{i}") for target in family.aliases.values()}
    wrong = [f"{h} twice" for h in set(hooks) if hooks.count(h) > 1]
    wrong += [f"alias of unknown {t}" for t in targets - set(hooks)]
    wrong += [f"{row.hook} rebuilt from unknown {h}" for row in family.rows for h in row.of if h not in hooks]
    wrong += [f"{h} both given and refused" for h in family.refused if h in hooks or h in family.aliases]
    if wrong:
        raise BugError(f"family {family.name}: {', '.join(wrong)}")


def _dims(family: Family, config: dict[str, Any]) -> Dims:
    values: dict[str, Any] = {}
    for dim, keys in family.dims.items():
        found = (_width(key, config, values) for key in keys)
        values[dim] = next((value for value in found if value is not None), None)
    values["n_kv_heads"] = values.get("n_kv_heads") or values["n_heads"]
    missing = [family.dims[d][0] for d, v in values.items() if d != "d_head" and not _is_width(v, family.dims[d])]
    if not missing:
        values["d_head"] = values.get("d_head") or values["d_model"] // values["n_heads"]
        missing = [family.dims[d][0] for d, v in values.items() if not _is_width(v, family.dims[d])]
    if missing:
        unknown = f", and no file here describes {config['architectures']}" if family.structural else ""
        raise _bad_config(f"config.json has no usable value of: {', '.join(map(str, missing))}{unknown}")
    if values["n_layers"] > MOST_LAYERS:
        raise _bad_config(f"config.json has {values['n_layers']} layers")
    return Dims(**values)


def _width(key: str | int, config: dict[str, Any], known: dict[str, Any]) -> Any:
    """One alternative of a [dims] entry: a number, a width named before it, a config key, or sums and products of these.
    None where one of them is no width."""
    if isinstance(key, int):
        return key
    for sign, formed in ((" + ", sum), (" * ", math.prod)):
        if sign in key:
            parts = [_width(part, config, known) for part in key.split(sign)]
            return formed(parts) if all(map(_is_width, parts)) else None
    return int(key) if key.isdecimal() else known.get(key, config.get(key))


def _is_width(value: Any, alternatives: tuple[str | int, ...] = ()) -> bool:
    """Whether a config's value can be a width; 0 only where a family's file says so."""
    return type(value) is int and (1 <= value < 10_000_000 or (value == 0 and 0 in alternatives))


def _bad_config(message: str) -> StartError:
    return StartError(message, hint="the folder is not a whole model of a known architecture; compare its config.json with "
                      "the original", code="bad_config")


def _fold(name: str) -> tuple[str, str]:
    """(`blocks.{i}.x`, `3`) of `blocks.3.x`; (name, ``) outside the blocks."""
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return (f"blocks.{{i}}.{found[2]}", found[1]) if found else (name, "")
