"""How many units may go, and which: the best by score that all limits allow.

Three limits hold at once, for every example:
- a head loses at most `⌊share · its units⌋` (scope "head", the paper's measure), or
- the model at most `⌊share · all its units⌋` (scope "model", ours);
- a row of the softmax keeps at least one key: a softmax over nothing means nothing.

The paper takes at least one unit a head, which breaks the stated share for inputs of ten tokens or
fewer; `least` says how many may be taken in any case, and 0 keeps every promise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.disrupt.units import NEVER, Units


@dataclass(frozen=True, eq=False)
class Budget:
    """What is allowed: units of each head (b, heads), of each row (b, rows), of the model (b,)."""

    heads: Tensor
    rows: Tensor
    total: Tensor

    def part(self, indices: Tensor) -> Budget:
        return Budget(self.heads[indices], self.rows[indices], self.total[indices])

    def scaled(self, share: float) -> Budget:
        """A part of it, rounded up: what may have gone by some point of the way."""
        return Budget(_up(self.heads, share), self.rows, _up(self.total, share))

    def left(self, units: Units, cut: Tensor) -> Budget:
        """What remains when `cut` is gone."""
        return Budget(
            self.heads - units.per_head(cut), self.rows - units.per_row(cut),
            self.total - cut.sum(1),
        )  # fmt: skip


def _up(limit: Tensor, share: float) -> Tensor:
    return (limit.double() * share - 1e-9).ceil().long()


def budget(units: Units, share: float, scope: str, least: int = 0) -> Budget:
    """The limits that `share` means on these units."""
    everything = units.exists.sum(1)
    if scope == "head":
        heads = _down(units.head_units, share).clamp(min=least)
        total = heads.sum(1)
    else:
        heads = units.per_head(units.exists)
        total = _down(everything, share).clamp(min=least)
    return Budget(heads, (units.per_row(units.exists) - 1).clamp(min=0), total)


def _down(count: Tensor, share: float) -> Tensor:
    """⌊share · count⌋; 0.07·100 is 7, whatever floating point makes of it."""
    return (count.double() * share + 1e-9).floor().long()


def choose(
    units: Units, scores: Tensor, allowed: Tensor, limits: Budget, above: float = -torch.inf
) -> Tensor:
    """The order (b, units), int32, in which units go: 0 for the best, NEVER for those that stay.

    Only `allowed` units with scores above `above` go, and no more than the limits admit.
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


def _candidates(units: Units, scores: Tensor, limits: Budget) -> tuple[Tensor, Tensor]:
    """The best of each head, as many as any head may lose: the rest need not be sorted."""
    values: list[Tensor] = []
    index: list[Tensor] = []
    seen = 0
    for place in units.places:
        heads = place.shape[0] * place.shape[1]
        each = scores[:, place.start : place.stop].unflatten(1, (heads, -1))
        limit = torch.minimum(limits.heads[:, seen : seen + heads], limits.total.unsqueeze(1))
        # A row that is full must not hide what other rows of the head still offer.
        most = min(each.shape[2], max(0, int(limit.max())) + place.shape[3])
        # Whole layers score exactly 0 where nothing reads them: the first of them go first, on
        # every device and in every batch. 1e-300 is below any difference of float32 scores.
        ties = torch.arange(each.shape[2], device=scores.device, dtype=torch.float64) * 1e-300
        best, where = (each.double() - ties).topk(most, dim=2)
        offset = torch.arange(heads, device=scores.device).unsqueeze(1) * each.shape[2]
        values.append(best.flatten(1))
        index.append((where + offset + place.start).flatten(1))
        seen += heads
    return torch.cat(values, 1), torch.cat(index, 1)


def _earlier(groups: Tensor, taken: Tensor) -> Tensor:
    """For each entry of a row, how many taken ones of its group stand before it."""
    by = groups.argsort(dim=1, stable=True)
    ordered = groups.gather(1, by)
    count = taken.gather(1, by).long()
    before = count.cumsum(1) - count
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    base = torch.where(fresh, before, 0).cummax(1).values
    return torch.empty_like(before).scatter(1, by, before - base)
