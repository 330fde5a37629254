"""What a schedule is given and what it hands to the judge, and the search along one ordering."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.disrupt.budget import Budget
from keyhole.disrupt.masked_queries import MaskedQueries, Ordering
from keyhole.disrupt.rankings import RANKINGS
from keyhole.disrupt.units import Units


@dataclass(frozen=True, eq=False)
class Search:
    """A model's masked answers, the limits, and how units are ranked.

    `loss` is what gradients are taken of; random choices are made of `noise` (b, units).
    """

    queries: MaskedQueries
    limits: Budget
    ranking: str
    loss: str
    noise: Tensor

    def scores(self, units: Units, a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
        """The ranking's scores (b, units) of the examples that `units` are of."""
        return units.each(RANKINGS[self.ranking], a, g, noise)


@dataclass(frozen=True, eq=False)
class Proposal:
    """A mask for each example (b, units), whether it seemed to flip, and the steps taken."""

    cut: Tensor
    flipped: Tensor
    steps: Tensor


def first_flip(queries: MaskedQueries, ordering: Ordering, last: int) -> Proposal:
    """The first of the steps 1…last that flips each example, or the last step's mask.

    Steps are asked in blocks that double, so that an early flip does not pay for all; one block
    serves all examples that are still standing.
    """
    device = ordering.goes.device
    size = queries.question.size
    steps = torch.full((size,), last, device=device)
    flipped = torch.zeros(size, dtype=torch.bool, device=device)
    done, block = 0, 1 if queries.singly else max(4, queries.batch // max(1, size))
    while done < last and not bool(flipped.all()):
        block = min(block, last - done)
        left = (~flipped).nonzero().squeeze(1)
        indices = left.repeat_interleave(block)
        asked = torch.arange(done + 1, done + block + 1, device=device).repeat(len(left))
        logits = queries.logits(ordering, indices, asked)
        hit = queries.question.part(indices).flipped(logits).view(len(left), block)
        steps[left] = torch.where(hit.any(1), done + 1 + hit.int().argmax(1), steps[left])
        flipped[left] = hit.any(1)
        done += block
        block = 1 if queries.singly else block * 2
    cut = ordering.at(steps, torch.arange(size, device=device))
    return Proposal(cut, flipped, steps)
