"""The custom op's body on a GPU: one program a token and segment, which leaves at once where the tables say nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vlens_cli.driver.graph.tables import GRANULE

if TYPE_CHECKING:
    from vlens_cli.driver.graph.tables import Tables


@triton.jit
def _tap(x_ptr, r_ptr, x_stride, r_stride, where_ptr, what_ptr, words_ptr, floats_ptr, rows_ptr, counts_ptr, factor,
         SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAIR: tl.constexpr, RAW: tl.constexpr,
         SCALED: tl.constexpr, PER_GRANULE: tl.constexpr):
    token = tl.program_id(0)
    where = tl.load(where_ptr + token)
    what = tl.load(what_ptr + token)
    if (where < 0) & (what < 0):
        return
    segment = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    column = segment * WIDTH + lane
    kind = x_ptr.dtype.element_ty
    x_at = x_ptr + token.to(tl.int64) * x_stride + column
    own = tl.load(x_at, mask=inside, other=0.0)
    value = own.to(tl.float32)
    if PAIR:
        r_at = r_ptr + token.to(tl.int64) * r_stride + column
        rest = tl.load(r_at, mask=inside, other=0.0)
        value += rest.to(tl.float32)
    if SCALED:
        value = (value * factor).to(kind).to(tl.float32)
    before = value
    if what >= 0:
        touched = lane < 0
        for n in range(tl.load(words_ptr + what)):
            at = what + 1 + n * 8
            keep = tl.load(floats_ptr + at)
            add = tl.load(floats_ptr + at + 1)
            along = tl.load(floats_ptr + at + 2)
            square = tl.load(floats_ptr + at + 3)
            keeps = tl.load(words_ptr + at + 4)
            adds = tl.load(words_ptr + at + 5)
            direction = tl.load(words_ptr + at + 6)
            masked = tl.load(words_ptr + at + 7)
            factors = tl.load(floats_ptr + keeps + column, mask=inside & (keeps >= 0), other=0.0)
            # Zero times what is not finite is zero, if a number says so; a row of numbers multiplies.
            new = tl.where(keeps >= 0, value * factors, tl.where(keep == 0.0, 0.0, value * keep))
            added = tl.load(floats_ptr + adds + column, mask=inside & (adds >= 0), other=0.0)
            new = tl.where(adds == -2, new, new + tl.where(adds >= 0, added, add))
            d = tl.load(floats_ptr + direction + column, mask=inside & (direction >= 0), other=0.0)
            share = tl.sum(tl.where(inside & (direction >= 0), value * d, 0.0), axis=0) / square
            new = tl.where(direction >= 0, new + along * share * d, new)
            chosen = tl.load(floats_ptr + masked + column, mask=inside & (masked >= 0), other=1.0) > 0
            value = tl.where(chosen, new.to(kind).to(tl.float32), value)
            touched = touched | chosen
        if SCALED:
            touched = touched & (value != before)
            own = tl.where(touched, (value / factor).to(kind), own)
        else:
            own = tl.where(touched, value.to(kind), own)
        tl.store(x_at, own, mask=inside & touched)
        if PAIR:
            rest = tl.where(touched, 0.0, rest.to(tl.float32)).to(kind)
            tl.store(r_at, rest, mask=inside & touched)
    if where >= 0:
        row = rows_ptr + where.to(tl.int64) * PER_GRANULE + column
        if RAW:
            tl.store(row, own, mask=inside)
            if PAIR:
                tl.store(row + SEGMENTS * WIDTH, rest, mask=inside)
        else:
            tl.store(row, value.to(kind), mask=inside)
    if segment == 0:
        tl.atomic_add(counts_ptr, (where >= 0).to(tl.int32))
        tl.atomic_add(counts_ptr + 1, (what >= 0).to(tl.int32))


def run(tables: Tables, site: int, x: torch.Tensor, residual: torch.Tensor | None) -> None:
    """x and residual are [tokens, width of the tensor]."""
    at = tables.sites[site]
    if x.stride(1) != 1 or residual is not None and (residual.stride(1) != 1 or residual.dtype != x.dtype):
        raise RuntimeError(f"{at.name}: the engine's tensor is not contiguous along a row")
    block = triton.next_power_of_2(at.width)
    second = x if residual is None else residual
    if at.columns:
        x, second = x[:, at.columns :], second[:, at.columns :]
    where, what, rows, counts = tables.of(site, x.dtype)
    _tap[(len(x), at.segments)](
        x, second, x.stride(0), second.stride(0), where, what, tables.words, tables.floats, rows, counts, at.factor,
        SEGMENTS=at.segments, WIDTH=at.width, BLOCK=block, PAIR=residual is not None, RAW=at.raw, SCALED=at.factor != 1,
        PER_GRANULE=GRANULE // x.element_size(), num_warps=8 if block >= 4096 else 4 if block >= 512 else 1,
    )
