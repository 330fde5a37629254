"""What a schedule hands to the judge, and the search along one ordering that both schedules use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from keyhole.disrupt.masked_queries import Asker, Ordering


@dataclass(frozen=True, eq=False)
class Found:
    """A mask for each example (b, units), whether it seemed to flip, and the steps taken."""

    cut: Tensor
    flipped: Tensor
    steps: Tensor


class _Pace(Protocol):
    @property
    def one_at_a_time(self) -> bool: ...


def first_flip(asker: Asker, ordering: Ordering, last: int, pace: _Pace) -> Found:
    """The first of the steps 1…last that flips each example, or the last step's mask.

    Steps are asked in blocks that double, so that an early flip does not pay for all; one block
    serves all examples that are still standing.
    """
    device = ordering.goes.device
    size = asker.question.size
    steps = torch.full((size,), last, device=device)
    flipped = torch.zeros(size, dtype=torch.bool, device=device)
    done, block = 0, 1 if pace.one_at_a_time else max(4, asker.batch // max(1, size))
    while done < last and not bool(flipped.all()):
        block = min(block, last - done)
        left = (~flipped).nonzero().squeeze(1)
        which = left.repeat_interleave(block)
        ask = torch.arange(done + 1, done + block + 1, device=device).repeat(len(left))
        logits = asker.logits(ordering, which, ask)
        hit = asker.question.part(which).flipped(logits).view(len(left), block)
        steps[left] = torch.where(hit.any(1), done + 1 + hit.int().argmax(1), steps[left])
        flipped[left] = hit.any(1)
        done += block
        block = 1 if pace.one_at_a_time else block * 2
    cut = ordering.at(steps, torch.arange(size, device=device))
    return Found(cut, flipped, steps)
