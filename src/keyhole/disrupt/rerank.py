"""A stronger schedule at the same budget: rank by the effect of removal, repeatedly, and swap.

Ours. Each round takes the gradient under the current mask, because gradients change
once units are cut. It orders the units by the effect of removing them, and asks for
prefixes of that ordering in one batch. The smallest prefix that flips is kept. In round
t of T at most a share t/T of the budget may be spent, so that later rankings can still
cut units.

Further steps:

- If the budget is spent without a flip, `refine` rounds of **swaps** follow. Cut and uncut units
  are ranked by their present worth, and the best set within the budget replaces the
  mask. Several sets are tried, with more or less preference for the units that are cut
  already. The search continues from the set with the smallest margin.
- **Restarts**: every second walk comes from above. It cuts several times the budget, where the
  model is unsure and its gradients are informative, and then gives back the units of
  least worth until the budget holds. Rankings are randomised in all but the first two
  walks. With more than two classes, each pair of walks aims at another of the most
  likely classes.
- After a flip, the prefixes between the last that did not flip and the first that did are asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core.errors import expect_count
from keyhole.disrupt.budget import choose
from keyhole.disrupt.masked_queries import Ordering, Proposal, Search, fixed
from keyhole.disrupt.rankings import SIGNED, worth_of_cut
from keyhole.disrupt.units import NEVER, Units

# for units already cut, relative to their mean worth
_PREFERENCES = (0.0, 0.5, 2.0, 8.0)
_BLUR = 0.5  # standard deviation of the logarithm of a restart's random factors
_EXCESS = 4.0  # a walk from above starts at this multiple of the budget
# weight of earlier worths in swaps, because the last gradient alone oscillates
_MEMORY = 0.5


@dataclass(frozen=True)
class Rerank:
    """`rounds` of ranking with `prefixes` queries in each, `refine` rounds of swaps, `restarts`."""

    rounds: int = 8
    prefixes: int = 16
    refine: int = 8
    restarts: int = 0
    name: str = field(default="rerank", init=False, repr=False)

    def __post_init__(self) -> None:
        expect_count("rounds", self.rounds, 1)
        expect_count("prefixes", self.prefixes, 1)
        expect_count("refine", self.refine, 0)
        expect_count("restarts", self.restarts, 0)

    def __call__(self, search: Search) -> Proposal:
        best = self._walk(search, 0, torch.zeros_like(search.queries.units.free[:, 0]))
        for attempt in range(1, 1 + self.restarts):
            if best.flipped.all():
                break
            best = _better(best, self._walk(search, attempt, best.flipped))
        return best

    def _walk(
        self,
        search: Search,
        attempt: int,
        done: Tensor,
    ) -> Proposal:
        walk = _Walk(self, search, attempt, done)
        if attempt % 2 == 0:
            for number in range(self.rounds):
                walk.grow((number + 1) / self.rounds)
        else:
            walk.descend()
        for _ in range(self.refine):
            walk.swap()
        return Proposal(walk.lowest, walk.flipped, walk.lowest.sum(1))


def _better(old: Proposal, new: Proposal) -> Proposal:
    take = new.flipped & ~old.flipped
    return Proposal(
        torch.where(take.unsqueeze(1), new.cut, old.cut),
        old.flipped | new.flipped,
        torch.where(take, new.steps, old.steps),
    )


@dataclass(eq=False)
class _Walk:
    """One walk from an empty mask to a full budget, for all examples that are not `done`.

    `lowest` is the mask of the smallest margin so far, which is `least`.
    """

    schedule: Rerank
    search: Search
    attempt: int
    done: Tensor
    clean: Tensor | None = None
    worth: Tensor | None = None

    def __post_init__(self) -> None:
        self.queries = self.search.queries
        self.limits = self.search.limits
        self.noise = self.search.noise
        self.cut = torch.zeros_like(self.queries.units.free)
        self.lowest = self.cut.clone()
        self.flipped = torch.zeros_like(self.done)
        self.least = torch.full_like(self.done, torch.inf, dtype=torch.float64)

    def grow(self, share: float) -> None:
        """Rank the units, ask for prefixes, and extend the mask within a share of the budget."""
        indices = self._remaining()
        if not len(indices):
            return
        units = self.queries.units.part(indices)
        cut = self.cut[indices]
        a, g = self._slopes(indices)
        scores = self._blurred(self._scores(units, a, g, indices), indices)
        above = 0.0 if self.search.ranking in SIGNED else -torch.inf
        left = self.limits.part(indices).scaled(share).left(units, cut)
        order = choose(units, scores, units.free & ~cut, left, above)
        goes = torch.where(cut, -1, order)
        steps = _points((order < NEVER).sum(1), self.schedule.prefixes)
        self._follow(indices, goes, steps)

    def _follow(
        self,
        indices: Tensor,
        goes: Tensor,
        steps: Tensor,
    ) -> None:
        """Ask for the steps (b, p) of an ordering, and move to the first flip or the last step."""
        ordering = Ordering(goes)
        margins, flips = self._ask(ordering, indices, steps)
        hit = flips.any(1)
        first = flips.int().argmax(1)
        rows = torch.arange(len(indices), device=indices.device)
        # Without a flip, go to the end: a smaller margin on the way is mostly chance.
        last = torch.where(hit, steps[rows, first], steps[:, -1])
        low = torch.where(first > 0, steps[rows, first - 1], 0)
        last = self._narrow(ordering, indices, hit, low, last)
        self.cut[indices] = ordering.at(last, rows)
        best = steps[rows, margins.argmin(1)]
        lowest = ordering.at(torch.where(hit, last, best), rows)
        self._settle(indices, hit, margins.amin(1), lowest)

    def _narrow(
        self,
        ordering: Ordering,
        indices: Tensor,
        hit: Tensor,
        low: Tensor,
        high: Tensor,
    ) -> Tensor:
        """Find the first flip between a step `low` that did not flip and a step `high` that did."""
        gap = int(((high - low - 1) * hit).max())
        if gap < 1:
            return high
        rows = (hit & (high - low > 1)).nonzero().squeeze(1)
        steps = low[rows, None] + torch.arange(1, gap + 1, device=low.device)
        steps = steps.minimum(high[rows, None])
        part = Ordering(ordering.goes[rows])
        _, flips = self._ask(part, indices[rows], steps)
        first = torch.where(flips, steps, high[rows, None]).amin(1)
        return high.index_copy(0, rows, first)

    def swap(self) -> None:
        """Replace the mask by the best set within the budget, by the units' present worth."""
        indices = self._remaining()
        if not len(indices):
            return
        units = self.queries.units.part(indices)
        cut = self.cut[indices]
        worth = self._worth(units, indices)
        if self.worth is None:
            self.worth = worth.new_zeros(self.noise.shape)
            self.worth[indices] = worth
        worth = _MEMORY * self.worth[indices] + (1 - _MEMORY) * worth
        self.worth[indices] = worth
        count = cut.sum(1, keepdim=True).clamp(min=1)
        mean = (worth * cut).sum(1, keepdim=True).abs() / count
        limits = self.limits.part(indices)
        sets: list[Tensor] = []
        for preference in _PREFERENCES:
            preferred = worth + cut * (preference * mean)
            sets.append(choose(units, preferred, units.free, limits, 0.0) < NEVER)
        self._jump(indices, torch.stack(sets, 1))

    def descend(self) -> None:
        """Cut several times the budget, and reduce it round by round; no prediction is asked."""
        for number in range(self.schedule.rounds):
            indices = self._remaining()
            if not len(indices):
                return
            units = self.queries.units.part(indices)
            excess = _EXCESS ** (1 - number / self.schedule.rounds)
            limits = self.limits.part(indices).scaled(excess)
            order = choose(units, self._worth(units, indices), units.free, limits, 0.0)
            self.cut[indices] = order < NEVER

    def _worth(self, units: Units, indices: Tensor) -> Tensor:
        """The worth of cutting each unit, or of keeping it cut."""
        a, g = self._slopes(indices)
        clean = a if self.clean is None else self.clean[indices]
        back = units.each(worth_of_cut, a, g, clean)
        worth = torch.where(self.cut[indices], back, self._scores(units, a, g, indices))
        return self._blurred(worth, indices)

    def _jump(self, indices: Tensor, sets: Tensor) -> None:
        """Ask for every set (b, s, units), and move to the one with the smallest margin."""
        zero = torch.zeros_like(indices).unsqueeze(1)
        asked = [self._ask(fixed(cut), indices, zero) for cut in sets.unbind(1)]
        margins = torch.cat([margin for margin, _ in asked], 1)
        flips = torch.cat([flip for _, flip in asked], 1)
        # If any set flips, this one does, because a flip has a negative margin.
        chosen = margins.argmin(1)
        at = (torch.arange(len(indices), device=indices.device), chosen)
        self.cut[indices] = sets[at]
        self._settle(indices, flips[at], margins[at], sets[at])

    def _settle(
        self,
        indices: Tensor,
        hit: Tensor,
        margin: Tensor,
        cut: Tensor,
    ) -> None:
        better = hit | (margin < self.least[indices])
        chosen = indices[better]
        self.least[chosen] = margin[better].double()
        self.lowest[chosen] = cut[better]
        self.flipped[indices[hit]] = True

    def _remaining(self) -> Tensor:
        """The indices of the examples that are not flipped yet."""
        return (~self.done & ~self.flipped).nonzero().squeeze(1)

    def _slopes(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        aim = self.attempt // 2
        a, g = self.queries.slopes(self.cut[indices], indices, self.search.loss, aim)
        if self.clean is None:
            self.clean = a.new_zeros(self.noise.shape)
            self.clean[indices] = a
        return a, g

    def _scores(
        self,
        units: Units,
        a: Tensor,
        g: Tensor,
        indices: Tensor,
    ) -> Tensor:
        return self.search.scores(units, a, g, self.noise[indices])

    def _blurred(self, scores: Tensor, indices: Tensor) -> Tensor:
        """Multiply the scores by random factors, except in the first two walks."""
        if self.attempt < 2:
            return scores
        uniform = (self.noise[indices] + 0.618034 * self.attempt) % 1
        normal = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
        return scores * (normal * _BLUR).exp()

    def _ask(
        self,
        ordering: Ordering,
        indices: Tensor,
        steps: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The margins and flips (b, p) of examples `indices` at steps (b, p)."""
        (size, count) = steps.shape
        rows = torch.arange(size, device=indices.device).repeat_interleave(count)
        logits = self.queries.logits(ordering, indices[rows], steps.flatten(), rows)
        question = self.queries.question.part(indices[rows])
        margins = question.margin(logits).view_as(steps)
        return margins, question.flipped(logits).view_as(steps)


def _points(lengths: Tensor, most: int) -> Tensor:
    """At most `most` evenly spread steps (b, p) from 1 to each length, which is the last step."""
    count = max(1, min(most, int(lengths.max())))
    parts = torch.arange(1, count + 1, device=lengths.device, dtype=torch.float64)
    return (lengths[:, None] * (parts / count) - 1e-9).ceil().long().clamp(min=1)
