"""The proof at load: one short forward, and every point checked against the ones around it.

Vendors change a module tree between versions, and a row that reads the wrong tensor gives plausible numbers. So
each layer's values must satisfy the identities that define them (DESIGN: hook points); a point that fails one is
refused by name. Every check is written as `got` against `want`, in fp32, over the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass

import torch

from vlens_cli.driver import attention, internals
from vlens_cli.driver.base import Want
from vlens_cli.driver.locate import Locator, Point, rebuilt_from_refused

PROOF_TOKENS = 12

# Relative error that rounding explains: a few units in the last place of sums of a few thousand terms.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

SUM = "_out = resid_"
SUMMED = ("hook_attn_out", "hook_mlp_out", "hook_resid_mid", "hook_resid_post")

# Points that are set together in one forward of the proof of writes: of two neighbours in the forward, one only.
WRITTEN_TOGETHER = (
    ("hook_embed", "hook_pos_embed", "hook_q", "hook_k", "hook_resid_mid", "hook_pre", "hook_pre_linear",
     "hook_mlp_out"),
    ("hook_resid_pre", "hook_rot_q", "hook_rot_k", "hook_v", "hook_attn_out", "hook_post", "hook_router_logits"),
    ("hook_resid_post", "hook_z", "unembed.hook_out"),
    ("hook_normalized",),
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One identity: the points that it proves, what was found and what the identity says.

    `weak`: it holds of whatever one module is given and gives, and does not say what this is in the model.
    """

    points: tuple[str, ...]
    law: str
    got: torch.Tensor
    want: torch.Tensor
    weak: bool = False

    def tells(self, point: str) -> bool:
        """Whether it says what the point is in the model: of what is added to the stream, and of what it is added to, only
        a sum does."""
        return SUM in self.law if point.endswith(SUMMED) else not self.weak

    def error(self) -> float:
        """Norm of the difference over the norm of what the law says; infinite for a shape or value that is off."""
        if self.got.shape != self.want.shape:
            return float("inf")
        got, want = self.got.double(), self.want.double()
        error = float((got - want).norm() / want.norm().clamp_min(1e-30))
        return error if error == error else float("inf")


class Proof:
    """Checks of one model, from the captured values of one forward of a few tokens.

    points  every located point;  values  canonical name -> [pos, ...] for those that are read, and not rebuilt
    logits  the engine's own, last position, if known;  tokens  the ids that were fed, at positions from 0, if known
    """

    def __init__(self, locator: Locator, points: dict[str, Point], values: dict[str, torch.Tensor],
                 logits: torch.Tensor | None = None, tokens: Sequence[int] = ()) -> None:
        self._locator = locator
        self._points = points
        self._values = values
        self._logits = logits
        self._tokens = tokens
        self._spec = locator.catalog.spec
        self._dims = locator.catalog.dims
        self._layers = self._dims.n_layers
        self._order = {name: n for n, name in enumerate(locator.catalog.names)}
        self._changed: AbstractSet[str] | None = None

    def verdict(self) -> dict[str, str]:
        """Points that an identity contradicts, or that none speaks about -> the reason.

        Where an identity fails, the blame falls on those of its points that no other identity confirms; where all
        are confirmed elsewhere, on all of them. What confirms a point must not rest on one that is blamed: two rows that
        read the same wrong layer agree with each other.

        Where no file describes the architecture nothing is taken on trust: an identity that fails refuses all of its
        points, and a point needs one that holds and says what it is.
        """
        checks = [(check, _fault(check)) for check in self._checks()]
        if self._spec.structural:
            failed = {p: fault for check, fault in checks if fault for p in check.points}
            return self._with_rebuilt(failed, {p for check, fault in checks if not fault for p in check.points if check.tells(p)})
        found = [(check.points, fault) for check, fault in checks]
        failed: dict[str, str] = {}
        while True:
            confirmed = {p for points, fault in found if not fault and not failed.keys() & set(points) for p in points}
            blamed = {p: fault for points, fault in found if fault
                      for p in [p for p in points if p not in confirmed] or points}
            if blamed.keys() <= failed.keys():
                break
            failed = {**blamed, **failed}
        return self._with_rebuilt(failed, {point for points, _ in found for point in points})

    def _with_rebuilt(self, failed: dict[str, str], spoken_of: set[str]) -> dict[str, str]:
        """What failed, what no identity speaks of, and what is rebuilt from those -> the reason."""
        silent = self._points.keys() - spoken_of
        refused = {**dict.fromkeys(silent, "the proof at load says nothing about it"), **failed}
        for name, point in self._points.items():
            for source in point.of:
                if source in refused or source not in self._points:
                    refused[name] = rebuilt_from_refused(source)
        return refused

    def written(self, changed: AbstractSet[str]) -> set[str]:
        """Of the points that were changed in this forward, those whose change the points after them obey.

        An identity speaks about the changed ones among its points where the last of them, in the order of the forward,
        was left alone.
        """
        self._changed = changed
        obeyed: dict[str, bool] = {}
        for check in self._checks():
            if self._matters(*check.points):
                for point in changed & set(check.points):
                    obeyed[point] = obeyed.get(point, True) and not _fault(check)
        return {point for point, well in obeyed.items() if well}

    def _matters(self, *points: str) -> bool:
        """Whether an identity over these points is asked for: what is not need not be computed."""
        if self._changed is None:
            return True
        return not self._changed.isdisjoint(points) and max(points, key=self._order.__getitem__) not in self._changed

    def _checks(self) -> Iterator[Check]:
        yield from self._guarded("", self._ends())
        for i in range(self._layers):
            for part in (self._stream, self._norms, self._attention, self._mlp):
                yield from self._guarded(f"blocks.{i}.", part(i))

    def _guarded(self, within: str, checks: Iterator[Check]) -> Iterator[Check]:
        """The same; modules that no file describes may take other arguments, which contradicts all points beside them."""
        try:
            yield from checks
        except Exception as fault:
            if not self._spec.structural:
                raise
            points = tuple(name for name in self._points if name.startswith(within or ("hook_", "ln_final", "unembed")))
            yield Check(points, f"a module's own forward ({type(fault).__name__}: {fault})", torch.ones(1), torch.ones(0))

    def _at(self, *names: str) -> list[torch.Tensor] | None:
        """The values of several points; None where one was not located (it is refused already)."""
        return [self._values[n] for n in names] if all(n in self._values for n in names) else None

    def _first(self, *names: str) -> str:
        """The first of several points that this family has; where it has none, one that nothing is found of."""
        return next((n for n in names if n in self._locator.catalog.points), names[-1])

    def _has(self, name: str) -> bool:
        return name in self._locator.catalog.points

    def _check(self, law: str, got: str, want: Callable[..., torch.Tensor], *of: str, weak: bool = False) -> Iterator[Check]:
        """The identity got = want(of); nothing where one of them was not located: it is refused already."""
        found = self._at(got, *of)
        if found is None or not self._matters(got, *of):
            return
        try:
            wanted = want(*found[1:])
        except RuntimeError:  # torch's word for widths that do not fit
            wanted = found[0].new_empty(0)
        fits = found[0].numel() == wanted.numel()
        # Weights of experts are float32 whatever they are made of: what rounding explains, the coarsest dtype says.
        coarsest = max((t.dtype for t in found if t.is_floating_point()), key=lambda dtype: torch.finfo(dtype).eps,
                       default=torch.float32)
        yield Check((got, *of), law, (found[0].reshape(wanted.shape) if fits else found[0]).to(coarsest), wanted.to(coarsest), weak)

    def _ends(self) -> Iterator[Check]:
        first, last = "blocks.0.hook_resid_pre", f"blocks.{self._layers - 1}.hook_resid_post"
        yield from self._embedding("hook_embed", "embed", self._tokens)
        yield from self._embedding("hook_pos_embed", "pos_embed", range(len(self._tokens)))
        if self._has("hook_pos_embed"):
            yield from self._check("embed + pos_embed = resid_pre[0]", first, torch.add, "hook_embed", "hook_pos_embed")
        elif self._has("embed_ln.hook_out"):
            yield from self._norm("embed_ln", "embed_ln", None, "hook_embed")
            yield from self._check("embed_ln.hook_out = resid_pre[0]", "embed_ln.hook_out", lambda x: x, first)
        else:
            yield from self._check("hook_embed = resid_pre[0]", "hook_embed", lambda x: x, first)
        yield from self._norm("ln_final", "ln_final", None, last)
        found = self._at("unembed.hook_out")
        if found is not None and self._logits is not None:
            law = "the unembedding of ln_final.hook_out = the engine's logits"
            yield Check(("unembed.hook_out", "ln_final.hook_out"), law, found[0][-1:], self._logits)

    def _embedding(self, name: str, role: str, ids: Sequence[int]) -> Iterator[Check]:
        """The engine's own embedding of the fed ids, times the family's factor."""
        if name in self._values and ids:
            factor = self._locator.catalog.factor(self._locator.catalog.row(name))
            at = torch.tensor(list(ids), device=self._values[name].device)
            yield from self._check(f"{name} = the embedding of what was fed", name,
                                   lambda: self._locator.module(role)(at) * factor)

    def _stream(self, i: int) -> Iterator[Check]:
        pre, mid, post, attn, mlp = (
            f"blocks.{i}.hook_{p}" for p in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
        )
        if self._has(mid):
            yield from self._check("resid_pre + attn_out = resid_mid", mid, torch.add, pre, attn)
            yield from self._check("resid_mid + mlp_out = resid_post", post, torch.add, mid, mlp)
        else:
            yield from self._check("resid_pre + attn_out + mlp_out = resid_post", post, lambda x, a, m: x + a + m,
                                   pre, attn, mlp)
        if i + 1 < self._layers:
            after = f"blocks.{i + 1}.hook_resid_pre"
            yield from self._check("resid_post[i] = resid_pre[i+1]", post, lambda x: x, after)
        for out in ("attn", "mlp"):
            yield from self._unfollowed(i, out)
            yield from self._multiplied(f"blocks.{i}.hook_{out}_out", f"blocks.{i}.{out}.hook_out")

    def _unfollowed(self, i: int, out: str) -> Iterator[Check]:
        """Where a family's file does not say whether a norm follows a sublayer, and none does."""
        own, found = f"blocks.{i}.{out}.hook_out", self._at(f"blocks.{i}.{out}.hook_out", f"blocks.{i}.hook_{out}_out")
        if self._spec.structural and found is not None and f"ln{1 if out == 'attn' else 2}_post" not in self._spec.modules:
            yield Check((own,), "without a norm after it, a sublayer's output = what is added", *found)

    def _multiplied(self, added: str, own: str) -> Iterator[Check]:
        """Where a residual multiplier follows a sublayer."""
        catalog = self._locator.catalog
        if self._has(own) and catalog.row(added).factor:
            factor = catalog.factor(catalog.row(added))
            yield from self._check(f"{catalog.row(added).factor} times the sublayer's own output = what is added", added,
                                   lambda x: x * factor, own)

    def _norms(self, i: int) -> Iterator[Check]:
        b = f"blocks.{i}"
        pre = f"{b}.hook_resid_pre"
        yield from self._norm(f"{b}.ln1", "ln1", i, pre)
        yield from self._norm(f"{b}.ln2", "ln2", i, self._first(f"{b}.hook_resid_mid", pre))
        yield from self._norm(f"{b}.ln1_post", "ln1_post", i, f"{b}.attn.hook_out", f"{b}.hook_attn_out")
        yield from self._norm(f"{b}.ln2_post", "ln2_post", i, f"{b}.mlp.hook_out", f"{b}.hook_mlp_out")

    def _norm(self, name: str, role: str, layer: int | None, source: str, out: str = "") -> Iterator[Check]:
        """normalized * scale is the (centred) input, and the norm's own forward of the input is its output."""
        if role not in self._spec.modules or f"{name}.hook_scale" not in self._points:
            return
        out = out or f"{name}.hook_out"
        scale, normalized = f"{name}.hook_scale", f"{name}.hook_normalized"
        module, kind = self._locator.module(role, layer), self._spec.norm
        yield from self._check(f"{name}: normalized * scale = its input", normalized,
                               lambda x, s: self._centred(x) / s, source, scale, weak=True)
        yield from self._check(f"{name}: out = the norm of its input", out, lambda x: _first_of(module(x.clone())), source)
        yield from self._check(f"{name}: out = normalized * weight", out,
                               lambda x, *_: internals.norm_affine(module, x, kind), *self._with_scale(normalized, scale))

    def _with_scale(self, normalized: str, scale: str) -> tuple[str, ...]:
        """Where no file says which formula a norm is, only its output tells whether the divisor is the right one."""
        return (normalized, scale) if self._spec.structural else (normalized,)

    def _centred(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True) if self._spec.norm == "layer" else x

    def _attention(self, i: int) -> Iterator[Check]:
        b = f"blocks.{i}.attn"
        yield from self._latent(i) if "latent" in self._spec.modules else self._heads(i)
        yield from self._check("the output projection of z = the output of attention",
                               self._first(f"{b}.hook_out", f"blocks.{i}.hook_attn_out"),
                               lambda x: self._project("o", i, x.flatten(1)), f"{b}.hook_z", weak=True)
        yield from self._results(i)

    def _heads(self, i: int) -> Iterator[Check]:
        """Queries, keys and values of each head, up to z."""
        b = f"blocks.{i}.attn"
        q, k, v = f"{b}.hook_q", f"{b}.hook_k", f"{b}.hook_v"
        rot_q, rot_k = f"{b}.hook_rot_q", f"{b}.hook_rot_k"
        yield from self._projection("qkv", i, self._first(f"blocks.{i}.ln1.hook_out", f"blocks.{i}.hook_resid_pre"),
                                    (q, k, v))
        yield from self._head_norms(i)
        if self._has(rot_q):
            before = self._first(f"{b}.hook_q_normed", q), self._first(f"{b}.hook_k_normed", k)
            yield from self._rotation(i, before, (rot_q, rot_k))
        yield from self._tables(i)

    def _latent(self, i: int) -> Iterator[Check]:
        """Latent attention, up to z: of queries that are latent too, in one projection with keys and values, or not."""
        b, source = f"blocks.{i}.attn", f"blocks.{i}.ln1.hook_out"
        row, cut = f"{b}.kv_a_proj_with_mqa.hook_out", f"{b}.kv_a_layernorm.hook_in"
        if self._locator.has("qkv_a", i):
            queries = f"{b}.q_b_proj.hook_out"
            yield from self._projection("qkv_a", i, source, (f"{b}.q_a_proj.hook_out", row))
            yield from self._norm(f"{b}.q_a_layernorm", "q_a_norm", i, f"{b}.q_a_proj.hook_out", f"{b}.hook_q_latent")
            yield from self._projection("q_b", i, f"{b}.hook_q_latent", (queries,))
        else:
            queries = f"{b}.q_proj.hook_out"
            yield from self._projection("kv_a", i, source, (row,))
            yield from self._projection("q", i, source, (queries,))
        yield from self._check("the latent row = the first columns of what it is projected with", cut,
                               lambda x: x[:, : self._dims.d_latent], row)
        yield from self._norm(f"{b}.kv_a_layernorm", "kv_a_norm", i, cut, f"{b}.hook_kv_latent")
        yield from self._latent_rotation(i, queries, row)
        yield from self._latent_tables(i)

    def _latent_rotation(self, i: int, queries: str, row: str) -> Iterator[Check]:
        b, still, turning = f"blocks.{i}.attn", self._dims.d_nope, self._dims.d_rope
        q, rot_q, rot_k = f"{b}.hook_q", f"{b}.hook_rot_q", f"{b}.hook_rot_k"
        yield from self._check("rot_q = the last part of q", rot_q, lambda x: x[..., still:], q)
        found = self._at(queries, row, q, rot_k)
        if found is not None:
            before, beside, after, key = found
            turned, turned_key = self._locator.module("rotary", i)(
                torch.arange(len(before), device=before.device), before[..., still:].clone(), beside[:, None, -turning:].clone())
            whole = torch.cat([before[..., :still], turned], dim=-1)
            yield Check((q, queries), "q = the queries, each with its last part rotated", after, whole)
            yield Check((rot_k, row), "rot_k = the rotation of the last columns beside the latent row", key, turned_key.view(key.shape))

    def _latent_tables(self, i: int) -> Iterator[Check]:
        """Keys, values, scores and pattern as they are rebuilt, against the z that the engine's kernel made of the same rows."""
        b = f"blocks.{i}.attn"
        z, k, v, projected = f"{b}.hook_z", f"{b}.hook_k", f"{b}.hook_v", f"{b}.kv_b_proj.hook_out"
        scores, pattern = f"{b}.hook_attn_scores", f"{b}.hook_pattern"
        sources = (f"{b}.hook_q", f"{b}.hook_kv_latent", f"{b}.hook_rot_k")
        found = self._at(z, *sources)
        if found is None or not self._matters(z, *sources) or not self._points.keys() >= {k, v, projected, scores, pattern}:
            return
        at, heads = torch.arange(len(found[0]), device=found[0].device), torch.arange(found[0].shape[1])
        scoring = internals.Scoring(internals.latent_scale(self._locator.module("latent", i)))
        made = {name: self._rebuilt(name).to(at.device) for name in (k, v, projected, scores, pattern)}
        by_keys = attention.scores(found[1], made[k], heads, at, scoring)
        for name, what, table in (
            (pattern, "the pattern", made[pattern]),
            (scores, "the softmax of the scores", attention.pattern(made[scores].float(), heads, scoring)),
            (k, "the softmax of q and the keys", attention.pattern(by_keys, heads, scoring)),
        ):
            yield Check((z, name, v, *sources), f"{what}, times v = z", found[0], attention.attended(table, made[v]).to(found[0].dtype))
        yield Check((projected, k, v), "the projection of the latent row = each head's key without rotation, and its value",
                    made[projected], torch.cat([made[k][..., : self._dims.d_nope], made[v]], -1))

    def _rebuilt(self, name: str) -> torch.Tensor:
        point = self._points[name]
        return attention.rebuild(point, Want(), [(self._values[of], tuple(range(len(self._values[of])))) for of in point.of])[0]

    def _tables(self, i: int) -> Iterator[Check]:
        """Scores and pattern as they are rebuilt, but in fp32, against the z that the engine's kernel made of the same rows."""
        b = f"blocks.{i}.attn"
        for name in (f"{b}.hook_attn_scores", f"{b}.hook_pattern"):
            point = self._points.get(name)
            found = None if point is None else self._at(f"{b}.hook_z", f"{b}.hook_v", *point.of)
            if found is None or not self._matters(f"{b}.hook_z", f"{b}.hook_v", *point.of):
                continue
            if self._changed is not None and name.endswith("hook_attn_scores") and f"{b}.hook_pattern" in self._points:
                continue  # The pattern says the same of what was changed.
            z, v, *sources = found
            table, _ = attention.rebuild(point, Want(), [(t.float(), tuple(range(len(t)))) for t in sources])
            table, what = table.to(z.device), "the pattern"
            if name.endswith("hook_attn_scores"):
                what = "the softmax of the scores"
                table = attention.pattern(table, torch.arange(len(table)), point.ranks.scoring(point.module))
            law = f"{what} of {' and '.join(source.rsplit('.hook_', 1)[1] for source in point.of)}, times v = z"
            yield Check((f"{b}.hook_z", name, *point.of, f"{b}.hook_v"), law, z, attention.attended(table, v).to(z.dtype))

    def _results(self, i: int) -> Iterator[Check]:
        """The heads' parts, summed, are what the whole projection makes of z, less its bias."""
        point = self._points.get(f"blocks.{i}.attn.hook_result") if self._changed is None else None
        found = None if point is None else self._at(f"blocks.{i}.attn.hook_z", *point.of)
        if found is not None:
            z, *sources = found
            parts, _ = attention.rebuild(point, Want(), [(t, tuple(range(len(t)))) for t in sources])
            whole, nothing = self._project("o", i, z.flatten(1)), self._project("o", i, torch.zeros_like(z[:1]).flatten(1))
            yield Check((point.name, *point.of), "hook_result, summed over heads = the output projection of z, without bias",
                        parts.to(z.device).sum(1), whole - nothing)

    def _rotation(self, i: int, before: tuple[str, str], after: tuple[str, str]) -> Iterator[Check]:
        found = self._at(*before, *after)
        if found is None:
            return
        q, k = found[:2]
        try:
            rotated = self._rotated(i, q, k, found[2])
        except (LookupError, TypeError) as fault:
            if not self._spec.structural:
                raise
            yield Check((*before, *after), f"the rotation ({fault})", q, q[:0])
            return
        for source, name, got, want in zip(before, after, found[2:], rotated, strict=True):
            law = f"{name.rsplit('.', 1)[1]} = the rotation of {source.rsplit('.', 1)[1]}"
            yield Check((name, source), law, got, want.reshape(got.shape))

    def _rotated(self, i: int, q: torch.Tensor, k: torch.Tensor, rot_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys after this layer's rotation, which tables leave two ways to do: the one that gives `rot_q`."""
        positions = torch.arange(q.shape[0], device=q.device)
        module = self._locator.module("rotary", i)
        if self._spec.rotation == "tables":
            tables = module(q.flatten(1)[None], position_ids=positions[None])
            turn = min((turn_halves, turn_pairs), key=lambda turn: float((turn(q, *tables) - rot_q).norm()))
            return turn(q, *tables), turn(k, *tables)
        return module(positions, q.flatten(1).clone(), k.flatten(1).clone())

    def _head_norms(self, i: int) -> Iterator[Check]:
        for role, part in (("q_norm", "q"), ("k_norm", "k")):
            name = f"blocks.{i}.attn.hook_{part}"
            if role in self._spec.modules and f"{name}_normed" in self._points:
                module = self._locator.module(role, i)
                yield from self._check(f"{part}_normed = the norm of {part}", f"{name}_normed",
                                       lambda x, m=module: _first_of(m(_as_normed(m, x).clone())), name)
                norm, kind = f"blocks.{i}.attn.{role}", self._spec.norm
                yield from self._check(f"{role}: normalized * scale = its input", f"{norm}.hook_normalized",
                                       lambda x, s, m=module: self._centred(_as_normed(m, x)) / s, name, f"{norm}.hook_scale",
                                       weak=True)
                yield from self._check(f"{part}_normed = normalized * weight", f"{name}_normed",
                                       lambda x, *_, m=module: internals.norm_affine(m, _as_normed(m, x), kind),
                                       *self._with_scale(f"{norm}.hook_normalized", f"{norm}.hook_scale"))

    def _mlp(self, i: int) -> Iterator[Check]:
        b = f"blocks.{i}"
        source = self._first(f"{b}.ln2.hook_out", f"{b}.hook_resid_mid", f"{b}.ln1.hook_out")
        yield from self._one_mlp(i, f"{b}.mlp", "", source, self._first(f"{b}.mlp.hook_out", f"{b}.hook_mlp_out"))
        if "shared" in self._spec.modules:
            shared = f"{b}.mlp.shared_experts"
            yield from self._one_mlp(i, shared, "shared_", source, f"{shared}.hook_out")
        yield from self._experts(i, source)

    def _one_mlp(self, i: int, name: str, roles: str, source: str, out: str) -> Iterator[Check]:
        """An MLP with or without a linear branch; `roles` is what the names of its modules' roles begin with."""
        pre, linear, post = (f"{name}.hook_{p}" for p in ("pre", "pre_linear", "post"))
        if self._has(linear):
            yield from self._projection(f"{roles}gate_up", i, source, (pre, linear))
            yield from self._check("act(pre) * pre_linear = post", post,
                                   lambda x, y: self._locator.module(f"{roles}act", i)(torch.cat([x, y], -1)), pre, linear)
            yield from self._check("post is linear in pre_linear", post,
                                   lambda x, y: self._locator.module(f"{roles}act", i)(torch.cat([x, 2 * y], -1)) / 2, pre, linear)
        else:
            yield from self._projection(f"{roles}up", i, source, (pre,))
            yield from self._check("act(pre) = post", post, lambda x: self._locator.module(f"{roles}act", i)(x.clone()), pre)
        yield from self._check("the down projection of post = the output of the MLP", out,
                               lambda x: self._project(f"{roles}down", i, x), post, weak=True)

    def _experts(self, i: int, source: str) -> Iterator[Check]:
        logits, weights, indices = (f"blocks.{i}.mlp.hook_{p}" for p in ("router_logits", "expert_weights", "expert_indices"))
        yield from self._check("router_logits = the router's projection", logits,
                               lambda x: self._project("router", i, x), source)
        k, shared = self._dims.n_active, f"blocks.{i}.mlp.shared_experts.hook_out"
        more = (shared,) if shared in self._values else ()
        yield from self._check(f"the experts that router_logits choose{', and the shared ones' * len(more)} = mlp_out",
                               f"blocks.{i}.hook_mlp_out", lambda x, of, *also: self._chosen(i, x, of) + sum(also),
                               source, logits, *more)
        yield from self._check("the chosen experts have the largest router logits", logits,
                               lambda x, chosen: _chosen_first(x, chosen, k), logits, indices)
        yield from self._check("expert_weights are in proportion to the softmax of router_logits", weights,
                               lambda x, chosen, given: _shares(x, chosen, given), logits, indices, weights)

    def _chosen(self, i: int, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """What the experts that the router's logits choose make of x."""
        return self._locator.ranks.sum(internals.experts(self._locator.module("experts", i), x, logits))

    def _projection(self, role: str, layer: int, source: str, parts: tuple[str, ...]) -> Iterator[Check]:
        """A fused projection's columns, part by part: a wrong part does not blame the others."""
        found = self._at(source, *parts)
        if found is None or not any(self._matters(part, source) for part in parts):
            return
        product = self._project(role, layer, found[0])
        widths = [t[0].numel() for t in found[1:]]
        if product.shape[1] != sum(widths):
            yield Check(parts, f"the widths of {role} = those of its parts", product, product[:, :0])
            return
        if self._locator.catalog.row(parts[0]).interleaved:
            wanted = [part.flatten(1) for part in product.unflatten(1, (-1, len(parts), found[1].shape[-1])).unbind(2)]
        else:
            wanted = product.split(widths, dim=1)
        for name, got, want in zip(parts, found[1:], wanted, strict=True):
            yield Check((name, source), f"{name.rsplit('.', 1)[1]} = its part of the {role} projection", got.flatten(1), want, weak=True)

    def _project(self, role: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        return self._locator.ranks.linear(self._locator.module(role, layer), x)


def _first_of(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _as_normed(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Queries or keys as their norm sees them: head by head, or all heads at once."""
    return x.flatten(1) if norm.weight.shape == (x[0].numel(),) else x


def _chosen_first(logits: torch.Tensor, chosen: torch.Tensor, k: int) -> torch.Tensor:
    """The router logits, with those of the chosen experts put where the k largest are: the same if they are these."""
    out = logits.clone()
    return out.scatter(1, logits.topk(k).indices, logits.gather(1, chosen.long()))


def _shares(logits: torch.Tensor, chosen: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """What the weights are if they share their sum as the softmax says."""
    shares = logits.float().softmax(-1).gather(1, chosen.long())
    return (shares / shares.sum(-1, keepdim=True) * given.float().sum(-1, keepdim=True)).to(given.dtype)


def turn_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [pos, head, d_head] with the first width of cos and sin [1, pos, width] turned: pairs (j, j + width / 2), Su et
    al. 2021 in the halves' arrangement of GPT-NeoX."""
    cos, sin = cos[0][:, None], sin[0][:, None]
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1).to(x.dtype)


def turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same of pairs (2j, 2j + 1), the arrangement of RoFormer; tables of either arrangement hold the same angles."""
    width = cos.shape[-1]
    if not torch.equal(cos[..., 0::2], cos[..., 1::2]):
        cos, sin = (t[..., : width // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    cos, sin = cos[0][:, None], sin[0][:, None]
    turned, rest = x.split([width, x.shape[-1] - width], dim=-1)
    other = torch.stack([-turned[..., 1::2], turned[..., 0::2]], dim=-1).flatten(-2)
    return torch.cat([turned * cos + other * sin, rest], -1).to(x.dtype)


def _fault(check: Check) -> str:
    """Why a check fails, or nothing."""
    limit, error = TOLERANCE.get(check.got.dtype, TOLERANCE[torch.float32]), check.error()
    if error <= limit:
        return ""
    return f"failed the proof at load: {check.law} is off by {error:.1e} (limit {limit:.0e})"
