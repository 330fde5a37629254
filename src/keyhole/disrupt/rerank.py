"""Stronger at the same budget: rank by the effect of removal, again and again, and swap.

Ours. Each round takes the gradient under the mask so far, because gradients change
once units are gone; orders the units by what their removal does to the loss; and asks for the
prefixes of that ordering in one batch. The smallest that flips is kept. In round t of T a share t/T
of the budget may be gone, so that late rankings still have something to spend.

What goes beyond it:
- When the budget is spent without a flip, **swaps** (`refine` rounds): cut units are ranked against
  the others by what they are worth now, and the best set within the budget replaces the old one, at
  several degrees of reluctance to change. The set with the smallest margin goes on.
- **Restarts**: every second walk comes from above. It cuts several times the budget, where the
  model is no longer sure and its gradients mean something, and gives back what is worth least until
  the budget holds. Rankings of all but the first two walks are blurred at random, and where there
  are more than two classes, each pair of walks aims at the next most likely one.
- After a flip the prefixes between the last that held and the first that flipped are asked too.
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

_RELUCTANCE = (0.0, 0.5, 2.0, 8.0)  # in units of a cut unit's mean worth
_BLUR = 0.5  # standard deviation of the logarithm of a restart's random factors
_EXCESS = 4.0  # times the budget: where a walk from above starts
_MEMORY = 0.5  # of earlier worths in the swaps' ranking: the last gradient alone oscillates


@dataclass(frozen=True)
class Rerank:
    """`rounds` of ranking, `prefixes` asked for in each, `refine` rounds of swaps, `restarts`."""

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
        """Attack every example of the search."""
        best = self._walk(search, 0, None)
        for attempt in range(1, 1 + self.restarts):
            standing = ~best.flipped
            if not bool(standing.any()):
                break
            best = _better(best, self._walk(search, attempt, standing))
        return best

    def _walk(self, search: Search, attempt: int, standing: Tensor | None) -> Proposal:
        walk = _Walk(self, search, attempt, standing)
        if attempt % 2 == 0:
            for number in range(self.rounds):
                walk.grow((number + 1) / self.rounds)
        else:
            walk.descend()
        for _ in range(self.refine):
            walk.swap()
        return walk.proposal()


def _better(old: Proposal, new: Proposal) -> Proposal:
    take = new.flipped & ~old.flipped
    return Proposal(
        torch.where(take.unsqueeze(1), new.cut, old.cut), old.flipped | new.flipped,
        torch.where(take, new.steps, old.steps),
    )  # fmt: skip


class _Walk:
    """One way from no mask to a full budget, for all examples that still stand."""

    def __init__(
        self, schedule: Rerank, search: Search, attempt: int, standing: Tensor | None
    ) -> None:
        self.schedule, self.search, self.attempt = schedule, search, attempt
        self.queries, self.limits, self.noise = search.queries, search.limits, search.noise
        self.cut = torch.zeros_like(self.queries.units.free)
        size, device = len(self.cut), self.cut.device
        self.flipped = torch.zeros(size, dtype=torch.bool, device=device)
        self.active = torch.ones_like(self.flipped) if standing is None else standing.clone()
        self.least = torch.full((size,), torch.inf, dtype=torch.float64, device=device)
        self.lowest = self.cut.clone()
        self.clean: Tensor | None = None
        self.worth: Tensor | None = None

    def proposal(self) -> Proposal:
        return Proposal(self.lowest, self.flipped, self.lowest.sum(1))

    def grow(self, share: float) -> None:
        """One ranking; its prefixes; the smallest that flips, or else the one to go on from."""
        indices = self._standing()
        if not len(indices):
            return
        units, cut = self.queries.units.part(indices), self.cut[indices]
        a, g = self._slopes(indices)
        scores = self._blurred(self._scores(units, a, g, indices), indices)
        above = 0.0 if self.search.ranking in SIGNED else -torch.inf
        left = self.limits.part(indices).scaled(share).left(units, cut)
        order = choose(units, scores, units.free & ~cut, left, above)
        goes = torch.where(cut, -1, order)
        steps = _points((order < NEVER).sum(1), self.schedule.prefixes)
        self._follow(indices, goes, steps)

    def _follow(self, indices: Tensor, goes: Tensor, steps: Tensor) -> None:
        """Ask for the steps (b, p) of an ordering and move there."""
        ordering = Ordering(goes)
        margins, flips = self._ask(ordering, indices, steps)
        hit = flips.any(1)
        first = flips.int().argmax(1)
        # Without a flip the whole round is spent: a smaller margin on the way was mostly chance.
        last = steps.gather(1, torch.where(hit, first, steps.shape[1] - 1)[:, None]).squeeze(1)
        before = steps.gather(1, (first - 1).clamp(min=0)[:, None]).squeeze(1)
        low = torch.where(first > 0, before, 0)
        last = self._narrow(ordering, indices, hit, low, last)
        rows = torch.arange(len(indices), device=indices.device)
        self.cut[indices] = ordering.at(last, rows)
        best = steps.gather(1, margins.argmin(1, keepdim=True)).squeeze(1)
        lowest = ordering.at(torch.where(hit, last, best), rows)
        self._settle(indices, hit, margins.amin(1), lowest)

    def _narrow(
        self, ordering: Ordering, indices: Tensor, hit: Tensor, low: Tensor, high: Tensor
    ) -> Tensor:
        """The first flip among all steps between one that held and one that flipped."""
        gap = int(((high - low - 1) * hit).max()) if len(hit) else 0
        if gap < 1:
            return high
        rows = (hit & (high - low > 1)).nonzero().squeeze(1)
        steps = low[rows, None] + torch.arange(1, gap + 1, device=low.device)
        steps = steps.minimum(high[rows, None])
        part = Ordering(ordering.goes[rows])
        _, flips = self._ask(part, indices[rows], steps)
        known = torch.cat([steps, high[rows, None]], 1)
        flips = torch.cat([flips, torch.ones_like(flips[:, :1])], 1)
        high = high.clone()
        high[rows] = known.gather(1, flips.int().argmax(1, keepdim=True)).squeeze(1)
        return high

    def swap(self) -> None:
        """The best set within the whole budget by what units are worth under the present mask."""
        indices = self._standing()
        if not len(indices):
            return
        units, cut = self.queries.units.part(indices), self.cut[indices]
        worth = self._worth(units, indices)
        if self.worth is None:
            self.worth = worth.new_zeros(self.noise.shape)
            self.worth[indices] = worth
        worth = _MEMORY * self.worth[indices] + (1 - _MEMORY) * worth
        self.worth[indices] = worth
        mean = (worth * cut).sum(1, keepdim=True).abs() / cut.sum(1, keepdim=True).clamp(min=1)
        limits = self.limits.part(indices)
        sets = torch.stack(
            [
                choose(units, worth + cut * (reluctance * mean), units.free, limits, 0.0) < NEVER
                for reluctance in _RELUCTANCE
            ],
            1,
        )
        self._jump(indices, sets)

    def descend(self) -> None:
        """From far above the budget down to it, re-ranking what is cut; nothing is asked."""
        for number in range(self.schedule.rounds):
            indices = self._standing()
            if not len(indices):
                return
            units = self.queries.units.part(indices)
            excess = _EXCESS ** (1 - number / self.schedule.rounds)
            limits = self.limits.part(indices).scaled(excess)
            order = choose(units, self._worth(units, indices), units.free, limits, 0.0)
            self.cut[indices] = order < NEVER

    def _worth(self, units: Units, indices: Tensor) -> Tensor:
        """What each unit is worth as a cut: to be made, or to be kept."""
        a, g = self._slopes(indices)
        clean = a if self.clean is None else self.clean[indices]
        back = units.each(worth_of_cut, a, g, clean)
        worth = torch.where(self.cut[indices], back, self._scores(units, a, g, indices))
        return self._blurred(worth, indices)

    def _jump(self, indices: Tensor, sets: Tensor) -> None:
        """Ask for every set (b, s, units), and go where the margin is smallest."""
        margins: list[Tensor] = []
        flips: list[Tensor] = []
        zero = torch.zeros_like(indices).unsqueeze(1)
        for number in range(sets.shape[1]):
            margin, flip = self._ask(fixed(sets[:, number]), indices, zero)
            margins.append(margin)
            flips.append(flip)
        margin, flip = torch.cat(margins, 1), torch.cat(flips, 1)
        # A flip with the smallest margin: any that flips is below zero.
        chosen = margin.argmin(1)
        rows = torch.arange(len(indices), device=indices.device)
        self.cut[indices] = sets[rows, chosen]
        self._settle(indices, flip[rows, chosen], margin[rows, chosen], sets[rows, chosen])

    def _settle(self, indices: Tensor, hit: Tensor, margin: Tensor, cut: Tensor) -> None:
        better = hit | (margin < self.least[indices])
        chosen = indices[better]
        self.least[chosen] = margin[better].double()
        self.lowest[chosen] = cut[better]
        self.flipped[indices[hit]] = True
        self.active[indices[hit]] = False

    def _standing(self) -> Tensor:
        return self.active.nonzero().squeeze(1)

    def _slopes(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        a, g, _ = self.queries.slopes(
            self.cut[indices], indices, self.search.loss, self.attempt // 2
        )
        if self.clean is None:
            self.clean = a.new_zeros(self.noise.shape)
            self.clean[indices] = a
        return a, g

    def _scores(self, units: Units, a: Tensor, g: Tensor, indices: Tensor) -> Tensor:
        return self.search.scores(units, a, g, self.noise[indices])

    def _blurred(self, scores: Tensor, indices: Tensor) -> Tensor:
        """Restarts see the ranking through noise; the first two walks see it as it is."""
        if self.attempt < 2:
            return scores
        uniform = (self.noise[indices] + 0.618034 * self.attempt) % 1
        normal = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
        return scores * (normal * _BLUR).exp()

    def _ask(self, ordering: Ordering, indices: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Margins and flips (b, p) of examples `indices` at steps (b, p)."""
        queries, (size, count) = self.queries, steps.shape
        rows = torch.arange(size, device=indices.device).repeat_interleave(count)
        logits = queries.logits(ordering, indices.repeat_interleave(count), steps.flatten(), rows)
        question = queries.question.part(indices.repeat_interleave(count))
        return question.margin(logits).view(size, count), question.flipped(logits).view(size, count)


def _points(lengths: Tensor, most: int) -> Tensor:
    """At most so many steps (b, p) from 1 to each length, evenly spread, ending with the whole."""
    count = max(1, min(most, int(lengths.max())))
    fractions = torch.arange(1, count + 1, device=lengths.device, dtype=torch.float64) / count
    return (lengths.unsqueeze(1) * fractions - 1e-9).ceil().long().clamp(min=1)
