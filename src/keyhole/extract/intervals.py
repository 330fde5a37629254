"""Bilinear forms as intervals, from answers that are off by up to ±τ (Theorem 6.1).

With unit δ and x, lengths g and ξ, and `D = vᵀδ`,

    a = f([ξx + gδ ; ξx]) ± τ,   α = (a − ξ·vᵀx) / (g·D),   δᵀWx = logit(α) / (gξ).

Intervals for a, v and D give an interval for α, cut to [0, 1]; since the logit is
monotone, it gives one for the form. Long δ make α precise (g as large as tokens may
be), and ξ determines where the logit is read. If α has the error e, the largest form
should be at the z that minimises the width of `logit(σ(z) ± e)` over z: 1.5 for small
e, less for larger ones (`best_logit`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, mismatch, not_identifiable
from keyhole.core.float64 import TINY, Stream, full, tensor
from keyhole.extract.bilinear import MAX_REPEATED, in_batches
from keyhole.extract.gauss_newton import Pairs
from keyhole.oracle.protocol import Oracle

_SCOUTS = 8
# the largest form may be so many times the scouts' largest without loss of precision
_MARGIN = 2.0
_FURTHER = 16.0  # factor between the scales that scouts try
_TRIES = 32
_CLEAR = 0.25  # an error of α up to which a gate of ½ can be told from 0 and 1
_NARROWER = 4.0  # a query is repeated if that makes its interval so many times narrower
_SLACK = 1e-9  # relative: rounding, which is only added at the end, is no contradiction


@dataclass(frozen=True)
class Interval:
    """Bounds on every entry of an unknown tensor."""

    low: Tensor
    high: Tensor

    @classmethod
    def unknown(cls, *shape: int, bound: float | None = None) -> Interval:
        high = full(math.inf if bound is None else bound, *shape)
        return cls(-high, high)

    @classmethod
    def around(cls, middle: Tensor, radius: Tensor) -> Interval:
        return cls(middle - radius, middle + radius)

    @property
    def finite(self) -> Tensor:
        return torch.isfinite(self.low) & torch.isfinite(self.high)

    @property
    def middle(self) -> Tensor:
        return torch.where(self.finite, self.low + (self.high - self.low) / 2, 0.0)

    @property
    def radius(self) -> Tensor:
        return (self.high - self.low) / 2

    @property
    def largest(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    def with_zeros(self, where: Tensor) -> Interval:
        """Return the interval with these entries known to be 0."""
        return Interval(
            self.low.masked_fill(where, 0.0), self.high.masked_fill(where, 0.0)
        )

    def clamp(self, values: Tensor) -> Tensor:
        return values.clamp(self.low, self.high)

    def furthest(self, values: Tensor) -> float:
        """Return how far the truth may be from `values`, in any entry."""
        return float(torch.maximum(self.high - values, values - self.low).max())

    def meet(self, other: Interval, what: str) -> Interval:
        """Return the intersection; raise Unsuccessful if it is empty."""
        low = self.low.maximum(other.low)
        high = self.high.minimum(other.high)
        allowed = _SLACK * torch.maximum(low.abs(), high.abs())
        if (low - high > allowed).any():
            raise mismatch(
                f"two measurements of {what} contradict each other: not one head, or not within ±τ"
            )
        return Interval(torch.minimum(low, high), torch.maximum(low, high))


@dataclass
class Forms:
    """Measures all `δ_iᵀ W x_j` as `interval[i, j]`, for δ and x that are rows of length one."""

    oracle: Oracle
    deltas: Tensor
    X: Tensor
    v: Interval
    signal: Interval
    tolerance: float
    precision: float
    reach: float
    bound: float | None

    def __post_init__(self) -> None:
        shape = (len(self.deltas), len(self.X))
        self.interval = Interval.unknown(*shape, bound=self.bound)
        self._asked: list[Pairs] = []
        self._v_x = self.X @ self.v.middle
        self._noise_x = self.X.abs() @ self.v.radius
        computed = self.deltas.abs() @ self.v.largest
        self._rounding = (len(self.X) + 8) * self.precision * computed
        noise = self.tolerance / self.reach + self.signal.radius / 2 + self._rounding
        # approximate error of α, and the logit of a form that it leaves most exact
        self._error = float((noise / self.signal.low).max())
        self._logit = best_logit(self._error)

    def measure(self, stream: Stream, W: Interval | None) -> None:
        """Query every form once, at a scale from scouts or, if there is one, from W's interval."""
        rows = torch.arange(self.interval.low.numel())
        count = len(rows)
        if W is None:
            scouts = torch.randperm(count, generator=stream)[:_SCOUTS]
            sizes = full(self._scout(scouts), count)
            rows = rows[~torch.isin(rows, scouts)]
        else:
            sizes = self._foreseen(W).flatten()
        self._ask(rows, self._short(sizes[rows]))
        self._repeat()
        unbounded = int((~self.interval.finite).sum())
        if unbounded:
            raise not_identifiable(
                f"±{self.tolerance:g} leaves {unbounded} of {count} forms of W without "
                "any bound: allow longer tokens, or state a bound on W"
            )

    @property
    def asked(self) -> Pairs:
        """All queries so far, for a fit to them."""
        return Pairs.joined(self._asked)

    def _short(self, sizes: Tensor) -> Tensor:
        """Return ξ for forms of these sizes, at most a third of the reach since ξ shortens g."""
        return (self._logit / (self.reach * sizes)).clamp(max=self.reach / 3)

    def _scout(self, rows: Tensor) -> float:
        """Return the size of the largest of a few forms, with a margin for the others."""
        limit = self.reach / 3
        xi = float(self._short(tensor(1.0 if self.bound is None else self.bound)))
        size = math.inf
        for _ in range(_TRIES):
            self._ask(rows, full(xi, len(rows)))
            size = float(self.interval.largest.view(-1)[rows].max())
            if not math.isfinite(size):
                xi /= _FURTHER
            elif self.reach * xi * size < self._logit / _FURTHER and xi < limit:
                xi = min(xi * _FURTHER, limit)
            else:
                break
        if math.isfinite(size):
            return _MARGIN * max(size, TINY)
        if self._error < _CLEAR:
            raise Unsuccessful(
                Status.SATURATED, "the gates are at 0 or 1 at every scale"
            )
        raise not_identifiable(f"±{self.tolerance:g} leaves W without any bound")

    def _foreseen(self, W: Interval) -> Tensor:
        """Return the sizes of forms as W's interval predicts them, at least 1/16 of the largest."""
        radius = self.deltas.abs() @ W.radius @ self.X.abs().mT
        radius = radius.clamp(max=float(W.radius.max()))
        sizes = (self.deltas @ W.middle @ self.X.mT).abs() + radius
        return sizes.clamp(min=float(sizes.max()) / _FURTHER)

    def _repeat(self) -> None:
        """Measure again, each at a scale of its own, the forms whose scale was very unsuitable."""
        sizes = self.interval.largest.view(-1)
        radius = self.interval.radius.view(-1)
        finite = sizes.isfinite()
        usual = float(sizes[finite].max()) if finite.any() else 1.0
        sizes = torch.where(finite, sizes, _FURTHER * usual).clamp(min=usual / _FURTHER)
        slope = 2 + 2 * math.cosh(self._logit)
        xi = self._short(sizes.clamp(min=usual))
        possible = self._error * slope / (self.reach * xi)
        rows = (radius > _NARROWER * possible).nonzero()[:, 0]
        if 0 < len(rows) <= 16 + MAX_REPEATED * len(sizes):
            self._ask(rows, self._short(sizes[rows]))

    def _ask(self, indices: Tensor, xi: Tensor) -> None:
        i = indices // len(self.X)
        j = indices % len(self.X)
        g = self.reach - xi
        pairs = Pairs(self.deltas, self.X, i, j, xi, g, torch.empty_like(xi))
        for part, answers in in_batches(self.oracle, len(indices), pairs.questions):
            self._note(indices[part], xi[part], g[part], answers)

    def _note(
        self,
        rows: Tensor,
        xi: Tensor,
        g: Tensor,
        answers: Tensor,
    ) -> None:
        """Narrow the intervals of these forms by the answers."""
        i = rows // len(self.X)
        j = rows % len(self.X)
        self._asked.append(Pairs(self.deltas, self.X, i, j, xi, g, answers))
        signal = self.signal
        alpha = (answers - xi * self._v_x[j]) / (g * signal.middle[i])
        noise = self.tolerance + xi * self._noise_x[j] + g * self._rounding[i]
        error = (noise / g + alpha.abs() * signal.radius[i]) / signal.low[i]
        low = alpha - error
        high = alpha + error
        if ((low > 1) | (high < 0)).any():
            raise mismatch("the answers leave the range that a single head allows")
        gap = g * xi
        new = Interval(low.clamp(0, 1).logit() / gap, high.clamp(0, 1).logit() / gap)
        all_low = self.interval.low.view(-1)
        all_high = self.interval.high.view(-1)
        known = Interval(all_low[rows], all_high[rows])
        met = known.meet(new, weights_named(self.bound))
        all_low[rows] = met.low
        all_high[rows] = met.high


def weights_named(bound: float | None) -> str:
    """Return what a contradiction is about: perhaps the stated bound is wrong."""
    return "W" if bound is None else f"W (stated: ‖W‖ ≤ {bound:g})"


def best_logit(error: float) -> float:
    """Return the z at which a form is read most precisely if α is known to ±error."""
    z = torch.linspace(0.02, 3, 150, dtype=torch.float64)
    upper = (torch.sigmoid(z) + error).clamp(0, 1).logit()
    lower = (torch.sigmoid(z) - error).clamp(0, 1).logit()
    width = (upper - lower) / z
    return float(z[width.argmin()])
