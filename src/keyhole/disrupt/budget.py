"""The budget of an attack: how many units may be cut, and which are the best within the limits.

Two limits hold for every example:
- With scope "head" (the paper's measure) each head loses at most `⌊share · its units⌋`. With scope
  "model" (ours) the model loses at most `⌊share · all its units⌋`.
- Each row of the softmax keeps at least one key.

The paper cuts at least one unit in each head, which exceeds the stated share for inputs
of up to ten tokens. `least` is the number that may be cut in any case; with 0 the share
is never exceeded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.disrupt.units import NEVER, Units


@dataclass(frozen=True, eq=False)
class Budget:
    """The units that may be cut of each head (b, heads), each row (b, rows) and the model (b,)."""

    heads: Tensor
    rows: Tensor
    total: Tensor

    def part(self, indices: Tensor) -> Budget:
        return Budget(self.heads[indices], self.rows[indices], self.total[indices])

    def scaled(self, share: float) -> Budget:
        """Return a share of the budget, rounded up, for the early rounds of a search."""
        return Budget(_up(self.heads, share), self.rows, _up(self.total, share))

    def left(self, units: Units, cut: Tensor) -> Budget:
        """Return what remains of the budget after `cut`."""
        return Budget(
            self.heads - units.per_head(cut),
            self.rows - units.per_row(cut),
            self.total - cut.sum(1),
        )


def _up(limit: Tensor, share: float) -> Tensor:
    return (limit.double() * share - 1e-9).ceil().long()


def budget(
    units: Units,
    share: float,
    scope: str,
    least: int = 0,
) -> Budget:
    """Return the limits that `share` sets on these units."""
    everything = units.exists.sum(1)
    if scope == "head":
        heads = _down(units.head_units, share).clamp(min=least)
        total = heads.sum(1)
    else:
        heads = units.per_head(units.exists)
        total = _down(everything, share).clamp(min=least)
    return Budget(heads, (units.per_row(units.exists) - 1).clamp(min=0), total)


def _down(count: Tensor, share: float) -> Tensor:
    """⌊share · count⌋, corrected for rounding: 0.07·100 is 7."""
    return (count.double() * share + 1e-9).floor().long()


def choose(
    units: Units,
    scores: Tensor,
    allowed: Tensor,
    limits: Budget,
    above: float = -torch.inf,
) -> Tensor:
    """Return the order (b, units), int32, in which to cut: 0 for the best unit, NEVER for none.

    Only `allowed` units with scores above `above` are cut, and no more than the limits
    admit.
    """
    values, index = _candidates(units, scores.masked_fill(~allowed, -torch.inf), limits)
    values, by = values.sort(dim=1, descending=True, stable=True)
    index = index.gather(1, by)
    taken = (values > above) & (values > -torch.inf)
    for group, limit in ((units.head_of, limits.heads), (units.row_of, limits.rows)):
        groups = group[index]
        taken &= _earlier(groups, taken) < limit.gather(1, groups)
    place = taken.cumsum(1) - 1
    taken &= place < limits.total.unsqueeze(1)
    order = torch.full(scores.shape, NEVER, dtype=torch.int32, device=scores.device)
    ranks = torch.where(taken, place, NEVER).to(torch.int32)
    return order.scatter(1, index, ranks)


def _candidates(
    units: Units,
    scores: Tensor,
    limits: Budget,
) -> tuple[Tensor, Tensor]:
    """Return the best scores of each head and their units, as many as any head may lose."""
    values: list[Tensor] = []
    index: list[Tensor] = []
    seen = 0
    for place in units.places:
        heads = place.shape[0] * place.shape[1]
        each = scores[:, place.start : place.stop].unflatten(1, (heads, -1))
        limit = torch.minimum(
            limits.heads[:, seen : seen + heads], limits.total.unsqueeze(1)
        )
        # More than the limit, because a row that may lose no more units hides those of
        # other rows.
        most = min(each.shape[2], max(0, int(limit.max())) + place.shape[3])
        # Layers without an effect score exactly 0. Ties go to the first units, on every
        # device and in every batch; 1e-300 is below any difference of float32 scores.
        ties = (
            torch.arange(each.shape[2], device=scores.device, dtype=torch.float64)
            * 1e-300
        )
        best, where = (each.double() - ties).topk(most, dim=2)
        offset = torch.arange(heads, device=scores.device).unsqueeze(1) * each.shape[2]
        values.append(best.flatten(1))
        index.append((where + offset + place.start).flatten(1))
        seen += heads
    return torch.cat(values, 1), torch.cat(index, 1)


def _earlier(groups: Tensor, taken: Tensor) -> Tensor:
    """For each entry of a row, count the taken entries of its group that precede it."""
    by = groups.argsort(dim=1, stable=True)
    ordered = groups.gather(1, by)
    count = taken.gather(1, by).long()
    before = count.cumsum(1) - count
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    base = torch.where(fresh, before, 0).cummax(1).values
    return torch.empty_like(before).scatter(1, by, before - base)
