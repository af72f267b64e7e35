"""The custom op's body on a processor: what kernel.py does, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vlens_cli.driver.graph import programs
from vlens_cli.driver.graph.tables import GRANULE

if TYPE_CHECKING:
    from vlens_cli.driver.graph.tables import Site, Tables


def run(tables: Tables, site: int, x: torch.Tensor, residual: torch.Tensor | None) -> None:
    """x and residual are [tokens, width of the tensor]."""
    where, what = tables.table[site, :, : len(x)]
    copied, changed = (where >= 0).nonzero()[:, 0], (what >= 0).nonzero()[:, 0]
    if not len(copied) and not len(changed):
        return
    at = tables.sites[site]
    x, residual = (None if t is None else t[:, at.columns :][:, : at.segments * at.width] for t in (x, residual))
    # What is kept of an edited row is the value itself, not what the engine's tensor gives back over the factor.
    formed = None if at.factor == 1 else x * at.factor
    for program in what[changed].unique().tolist():
        _change(tables, at, program, (what == program).nonzero()[:, 0], x, residual, formed)
    if len(copied):
        kept = _kept(at, (x if formed is None else formed)[copied], None if residual is None else residual[copied])
        flat = tables.rows.view(x.dtype)
        starts = where[copied].long() * (GRANULE // x.element_size())
        flat[starts[:, None] + torch.arange(kept.shape[1])] = kept
    tables.counts[site] += torch.tensor([len(copied), len(changed)])


def _kept(site: Site, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    if residual is None:
        return x
    return torch.cat([x, residual], dim=1) if site.raw else x + residual


def _change(tables: Tables, site: Site, program: int, rows: torch.Tensor, x: torch.Tensor,
            residual: torch.Tensor | None, formed: torch.Tensor | None) -> None:
    before = (x if formed is None else formed)[rows].float()
    if residual is not None:
        before = before + residual[rows].float()
    after = before.view(-1, site.segments, site.width)
    touched = torch.zeros(site.segments, site.width, dtype=torch.bool)
    for step in programs.steps(tables.words, tables.floats, program, (site.segments, site.width)):
        new = step.changed(after).to(x.dtype).float()
        mask = torch.ones_like(touched) if step.mask is None else step.mask > 0
        after, touched = torch.where(mask, new, after), touched | mask
    touched, after = touched.view(-1), after.view(len(rows), -1)
    if formed is not None:
        formed[rows] = after.to(x.dtype)
        # What an edit has left alone keeps its bits.
        touched, after = touched & (after != before), after / site.factor
    x[rows] = torch.where(touched, after.to(x.dtype), x[rows])
    if residual is not None:
        residual[rows] = torch.where(touched, 0, residual[rows])
