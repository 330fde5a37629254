"""Several changes of a text at once, from what each does alone (ours).

Let v be the vector of a text and Δ_s the difference that a single change s makes to it.
Changes at different places hardly interact, the less the fewer places are wrong: for a
set S of changes

    v(text with all of S)  ≈  v(text) + g·Σ_{s ∈ S} Δ_s,     g = 1 / (1 + ρ·(|S| − 1))

Each change also moves the vector at random, and several at once do so hardly more than
one: hence the overlap ρ. With four tokens of a dozen wrong, ρ is 0.06 for MiniLM and
0.24 for MPNet, for which plain sums mislead. It is measured on the sets that are run
(`overlap`). So after one run of the encoder over single changes, a text that is wrong
in many places can be corrected at once, by the set whose sum is nearest to the
residual:

    min over S of  ‖(goal − v) − g·Σ Δ_s‖²  −  μ·Σ (change of log p)

This is a sparse least squares problem in which every slot takes one change. A beam
search adds one change at a time, and the encoder then runs the sets that it found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.tensors import row_numbers, seeded, squared_norms
from keyhole.recover.embeddings.changes import SingleChanges

# times the width of the beam: so many sets are compared, as some are the same
_MORE = 4
_INFINITE = 1e9


class Sets(NamedTuple):
    """w sets of changes for each of p texts, and the residuals that they leave."""

    changes: Tensor  # (p, w, k), -1 for none
    off: Tensor  # (p, w, d)
    alive: Tensor  # (p, w)

    @classmethod
    def none(cls, off: Tensor) -> Sets:
        """Return the empty set for each of p texts with residuals `off` (p, d)."""
        shape = (len(off), 1)
        changes = off.new_zeros(*shape, 0, dtype=torch.long)
        return cls(changes, off[:, None], off.new_ones(shape, dtype=torch.bool))


class Effects(NamedTuple):
    """What every change does: `moves` (p, N, d) the vector, at a `cost` (p, N), in a slot (N,)."""

    moves: Tensor
    cost: Tensor
    slots: Tensor
    slot_count: int

    @classmethod
    def of(
        cls,
        changes: SingleChanges,
        moves: Tensor,
        likelier: Tensor,
        prior: Tensor,
    ) -> Effects:
        """Make the effects from what each change adds to the vector, and to log p (p, N).

        The latter is weighted by `prior` (p,). Changes that are not allowed get an
        infinite cost.
        """
        cost = (moves * moves).sum(-1) - prior[:, None] * likelier
        cost = cost.where(changes.allowed, _INFINITE)
        return cls(moves, cost, changes.slots, 2 * changes.width + 1)

    def overlap(
        self,
        sets: Tensor,
        did: Tensor,
        ran: Tensor,
    ) -> Tensor:
        """Return ρ (p,) from what sets (p, w, k) did (p, w, d), if `ran`: Σ S·S = Σ g⁻¹·S·did."""
        total = torch.zeros_like(did)
        for change in sets.unbind(2):
            counts = ((change >= 0) & ran)[..., None]
            total += picked(self.moves, change.clamp(min=0)) * counts
        along = (total * did).sum(-1)
        more = (sets >= 0).sum(-1) - 1
        apart = squared_norms(total) - along
        return apart.sum(1) / (more * along).sum(1).clamp(min=1e-9)

    def grown(
        self,
        sets: Sets,
        width: int,
        depth: int,
        count: int,
        overlap: Tensor | None = None,
    ) -> Tensor:
        """Add up to `depth` changes to sets, and return the `count` best (p, count, k), with -1s.

        Sets of one change are left out, as those were run already. By default, ρ (p,)
        is 0.
        """
        if overlap is None:
            overlap = torch.zeros_like(self.cost[:, 0])
        changes = sets.changes
        off = sets.off
        alive = sets.alive
        begun = changes.shape[2]
        # Equal sums of random numbers mean equal sets.
        numbers = self.moves.shape[1:2]
        names = torch.randint(1, 2**40, numbers, generator=seeded(0)).to(off.device)
        keys = names[changes.clamp(min=0)].where(changes >= 0, 0).sum(-1)
        taken = self.slots[changes.clamp(min=0)].where(changes >= 0, self.slot_count)
        used = off.new_zeros((*off.shape[:2], self.slot_count + 1), dtype=torch.bool)
        used = used.scatter(2, taken, True)[..., :-1]
        squares = squared_norms(self.moves)
        extra = self.cost - squares
        size = (changes >= 0).sum(-1)
        # Σ Δ, Σ extra
        total = torch.zeros_like(off)
        costs = torch.zeros_like(off[..., 0])
        results: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(depth):
            g = (1 / (1 + size * overlap[:, None]))[..., None]
            rest = off - g * total
            new = (squared_norms(rest) + costs)[..., None]
            new = new - 2 * g * (rest @ self.moves.mT)
            new += g * g * squares[:, None] + extra[:, None]
            new = new.masked_fill(used[..., self.slots] | ~alive[..., None], _INFINITE)
            most = min(_MORE * width, new[0].numel())
            best = new.flatten(1).topk(most, dim=1, largest=False)
            row = best.indices // new.shape[2]
            change = best.indices % new.shape[2]
            key = keys.gather(1, row) + names[change]
            steps = row_numbers(key[0])
            again = (key[:, :, None] == key[:, None]) & (steps[:, None] > steps)
            again = again.any(-1) | (best.values > _INFINITE / 2)
            order = again.long().argsort(dim=1, stable=True)[:, :width]
            row, change, value, keys, alive = (
                part.gather(1, order)
                for part in (row, change, best.values, key, ~again)
            )
            changes = torch.cat([picked(changes, row), change[..., None]], 2)
            total = picked(total, row) + picked(self.moves, change)
            costs = costs.gather(1, row) + extra.gather(1, change)
            off = picked(off, row)
            size = size.gather(1, row) + 1
            used = picked(used, row).scatter(2, self.slots[change][..., None], True)
            if changes.shape[2] > 1:
                more = begun + depth - changes.shape[2]
                results.append(torch.nn.functional.pad(changes, (0, more), value=-1))
                values.append(value.where(alive, _INFINITE))
        found = torch.cat(results, 1)
        scores = torch.cat(values, 1)
        order = scores.topk(min(count, scores.shape[1]), dim=1, largest=False)
        kept = order.values[..., None] < _INFINITE / 2
        return picked(found, order.indices).where(kept, -1)


def picked(table: Tensor, rows: Tensor) -> Tensor:
    """Return the rows (p, w, c) of a table (p, r, c), by their numbers (p, w)."""
    return table.gather(1, rows[..., None].expand(-1, -1, table.shape[-1]))
