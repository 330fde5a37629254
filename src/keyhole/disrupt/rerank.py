"""Stronger at the same budget: rank by the effect of removal, again and again, and swap.

ALGORITHMS.md IV.2. Each round takes the gradient under the mask so far, because gradients change
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

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from keyhole.disrupt.budget import Budget, choose
from keyhole.disrupt.masked_queries import NEVER, Asker, Ordering, fixed
from keyhole.disrupt.prefix_search import Found
from keyhole.disrupt.rankings import SIGNED, score, worth_of_cut
from keyhole.disrupt.units import Units

_RELUCTANCE = (0.0, 0.5, 2.0, 8.0)  # in units of a cut unit's mean worth
_BLUR = 0.5  # standard deviation of the logarithm of a restart's random factors
_EXCESS = 4.0  # times the budget: where a walk from above starts
_MEMORY = 0.5  # of earlier worths in the swaps' ranking: the last gradient alone oscillates


class Settings(Protocol):
    """What this schedule reads of the method's hyperparameters."""

    @property
    def ranking(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    @property
    def rounds(self) -> int: ...
    @property
    def prefixes(self) -> int: ...
    @property
    def refine(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    @property
    def seed(self) -> int: ...


def rerank(settings: Settings, asker: Asker, limits: Budget, noise: Tensor) -> Found:
    """Attack every example of the asker; random choices are made of `noise` (b, units)."""
    best: Found | None = None
    for attempt in range(1 + settings.restarts):
        standing = None if best is None else ~best.flipped
        if standing is not None and not bool(standing.any()):
            break
        walk = _Walk(settings, asker, limits, noise, attempt, standing)
        if attempt % 2 == 0:
            for number in range(settings.rounds):
                walk.grow((number + 1) / settings.rounds)
        else:
            walk.descend()
        for _ in range(settings.refine):
            walk.swap()
        best = walk.found() if best is None else _better(best, walk.found())
    if best is None:
        raise AssertionError("there is always a first attempt")
    return best


def _better(old: Found, new: Found) -> Found:
    take = new.flipped & ~old.flipped
    return Found(
        torch.where(take.unsqueeze(1), new.cut, old.cut), old.flipped | new.flipped,
        torch.where(take, new.steps, old.steps),
    )  # fmt: skip


class _Walk:
    """One way from no mask to a full budget, for all examples that still stand."""

    def __init__(
        self, settings: Settings, asker: Asker, limits: Budget, noise: Tensor, attempt: int,
        standing: Tensor | None,
    ) -> None:  # fmt: skip
        self.settings, self.asker, self.limits, self.noise = settings, asker, limits, noise
        self.attempt = attempt
        units = asker.units
        self.cut = torch.zeros_like(units.free)
        size, device = len(self.cut), self.cut.device
        self.flipped = torch.zeros(size, dtype=torch.bool, device=device)
        self.active = torch.ones_like(self.flipped) if standing is None else standing.clone()
        self.least = torch.full((size,), torch.inf, device=device)
        self.lowest = self.cut.clone()
        self.clean: Tensor | None = None
        self.worth: Tensor | None = None

    def found(self) -> Found:
        return Found(self.lowest, self.flipped, self.lowest.sum(1))

    def grow(self, share: float) -> None:
        """One ranking; its prefixes; the smallest that flips, or else the one to go on from."""
        which = self._standing()
        if not len(which):
            return
        units, cut = self.asker.units.part(which), self.cut[which]
        a, g = self._slopes(which)
        scores = self._blurred(self._scores(units, a, g, which), which)
        above = 0.0 if self.settings.ranking in SIGNED else -torch.inf
        left = self.limits.part(which).scaled(share).left(units, cut)
        order = choose(units, scores, units.free & ~cut, left, above)
        goes = torch.where(cut, -1, order)
        steps = _points((order < NEVER).sum(1), self.settings.prefixes)
        self._follow(which, goes, steps)

    def _follow(self, which: Tensor, goes: Tensor, steps: Tensor) -> None:
        """Ask for the steps (b, p) of an ordering and move there."""
        ordering = Ordering(goes)
        margins, flips = self._ask(ordering, which, steps)
        hit = flips.any(1)
        first = flips.int().argmax(1)
        # Without a flip the whole round is spent: a smaller margin on the way was luck, mostly.
        last = steps.gather(1, torch.where(hit, first, steps.shape[1] - 1)[:, None]).squeeze(1)
        before = steps.gather(1, (first - 1).clamp(min=0)[:, None]).squeeze(1)
        low = torch.where(first > 0, before, 0)
        last = self._narrow(ordering, which, hit, low, last)
        rows = torch.arange(len(which), device=which.device)
        self.cut[which] = ordering.at(last, rows)
        best = steps.gather(1, margins.argmin(1, keepdim=True)).squeeze(1)
        lowest = ordering.at(torch.where(hit, last, best), rows)
        self._settle(which, hit, margins.amin(1), lowest)

    def _narrow(
        self, ordering: Ordering, which: Tensor, hit: Tensor, low: Tensor, high: Tensor
    ) -> Tensor:
        """The first flip among all steps between one that held and one that flipped."""
        gap = int(((high - low - 1) * hit).max()) if len(hit) else 0
        if gap < 1:
            return high
        rows = (hit & (high - low > 1)).nonzero().squeeze(1)
        steps = low[rows, None] + torch.arange(1, gap + 1, device=low.device)
        steps = steps.minimum(high[rows, None])
        part = Ordering(ordering.goes[rows])
        _, flips = self._ask(part, which[rows], steps)
        known = torch.cat([steps, high[rows, None]], 1)
        flips = torch.cat([flips, torch.ones_like(flips[:, :1])], 1)
        high = high.clone()
        high[rows] = known.gather(1, flips.int().argmax(1, keepdim=True)).squeeze(1)
        return high

    def swap(self) -> None:
        """The best set within the whole budget by what units are worth under the present mask."""
        which = self._standing()
        if not len(which):
            return
        units, cut = self.asker.units.part(which), self.cut[which]
        worth = self._worth(units, which)
        if self.worth is None:
            self.worth = torch.zeros_like(self.noise)
            self.worth[which] = worth
        worth = _MEMORY * self.worth[which] + (1 - _MEMORY) * worth
        self.worth[which] = worth
        mean = (worth * cut).sum(1, keepdim=True).abs() / cut.sum(1, keepdim=True).clamp(min=1)
        limits = self.limits.part(which)
        sets = torch.stack(
            [
                choose(units, worth + cut * (reluctance * mean), units.free, limits, 0.0) < NEVER
                for reluctance in _RELUCTANCE
            ],
            1,
        )
        self._jump(which, sets)

    def descend(self) -> None:
        """From far above the budget down to it, re-ranking what is cut; nothing is asked."""
        for number in range(self.settings.rounds):
            which = self._standing()
            if not len(which):
                return
            units = self.asker.units.part(which)
            excess = _EXCESS ** (1 - number / self.settings.rounds)
            limits = self.limits.part(which).scaled(excess)
            order = choose(units, self._worth(units, which), units.free, limits, 0.0)
            self.cut[which] = order < NEVER

    def _worth(self, units: Units, which: Tensor) -> Tensor:
        """What each unit is worth as a cut: to be made, or to be kept."""
        a, g = self._slopes(which)
        clean = a if self.clean is None else self.clean[which]
        back = units.each(worth_of_cut, a, g, clean)
        worth = torch.where(self.cut[which], back, self._scores(units, a, g, which))
        return self._blurred(worth, which)

    def _jump(self, which: Tensor, sets: Tensor) -> None:
        """Ask for every set (b, s, units), and go where the margin is smallest."""
        margins: list[Tensor] = []
        flips: list[Tensor] = []
        zero = torch.zeros_like(which).unsqueeze(1)
        for number in range(sets.shape[1]):
            margin, flip = self._ask(fixed(sets[:, number]), which, zero)
            margins.append(margin)
            flips.append(flip)
        margin, flip = torch.cat(margins, 1), torch.cat(flips, 1)
        # A flip with the smallest margin: any that flips is below zero.
        chosen = margin.argmin(1)
        rows = torch.arange(len(which), device=which.device)
        self.cut[which] = sets[rows, chosen]
        self._settle(which, flip[rows, chosen], margin[rows, chosen], sets[rows, chosen])

    def _settle(self, which: Tensor, hit: Tensor, margin: Tensor, cut: Tensor) -> None:
        better = hit | (margin < self.least[which])
        chosen = which[better]
        self.least[chosen] = margin[better]
        self.lowest[chosen] = cut[better]
        self.flipped[which[hit]] = True
        self.active[which[hit]] = False

    def _standing(self) -> Tensor:
        return self.active.nonzero().squeeze(1)

    def _slopes(self, which: Tensor) -> tuple[Tensor, Tensor]:
        a, g, _ = self.asker.slopes(self.cut[which], which, self.settings.loss, self.attempt // 2)
        if self.clean is None:
            self.clean = torch.zeros_like(self.noise)
            self.clean[which] = a
        return a, g

    def _scores(self, units: Units, a: Tensor, g: Tensor, which: Tensor) -> Tensor:
        return units.each(partial(score, self.settings.ranking), a, g, self.noise[which])

    def _blurred(self, scores: Tensor, which: Tensor) -> Tensor:
        """Restarts see the ranking through noise; the first two walks see it as it is."""
        if self.attempt < 2:
            return scores
        uniform = (self.noise[which] + 0.618034 * self.attempt) % 1
        normal = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
        return scores * (normal * _BLUR).exp()

    def _ask(self, ordering: Ordering, which: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Margins and flips (b, p) of examples `which` at steps (b, p)."""
        asker, (size, count) = self.asker, steps.shape
        rows = torch.arange(size, device=which.device).repeat_interleave(count)
        logits = asker.logits(ordering, which.repeat_interleave(count), steps.flatten(), rows)
        question = asker.question.part(which.repeat_interleave(count))
        return question.margin(logits).view(size, count), question.flipped(logits).view(size, count)


def _points(lengths: Tensor, most: int) -> Tensor:
    """At most so many steps (b, p) from 1 to each length, evenly spread, ending with the whole."""
    count = max(1, min(most, int(lengths.max())))
    fractions = torch.arange(1, count + 1, device=lengths.device, dtype=torch.float64) / count
    return (lengths.unsqueeze(1) * fractions - 1e-9).ceil().long().clamp(min=1)
