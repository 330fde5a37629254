"""Theorem B.1 as published: one head from signs, by an average for v and bisection for W.

*Provably Learning Attention with Queries* (arXiv 2601.16873), Appendix B. Known in
advance: ‖W‖ ≤ B, ‖v‖ = 1 (signs do not show its length) and every |v_i| ≥ η. First v is
an average of m signs,

    v̂ = mean of sign(vᵀx)·x / E|x_1|,   x uniform on the sphere.

Then each W_ij is bisected. With unit vectors e_i and e_j, and c = ∓1/B so that
c·v̂_i·v̂_j < 0,

    f([λe_j + (c/λ)e_i ; λe_j]) changes its sign at  λ² = σ(z)·|v_i| / (B·|v_j|),  z = c·W_ij,

and |z| ≤ 1 puts that λ between λ_min = √(σ(−1)η/B) and λ_max = √(σ(1)/(ηB)). The middle
of the last bracket is λ̂. Then σ(ẑ) = λ̂²·B·r̂, cut to [σ(−1), σ(1)], with r̂ =
|v̂_j|/|v̂_i| cut to [η, 1/η], and Ŵ_ij = ẑ/c. With κ the largest slope of the logit
between σ(±1), errors of ε_v in each entry of v̂ and of ε_λ in λ̂ leave

    |Ŵ_ij − W_ij| ≤ Bκ·( (B/η)·2λ_max·ε_λ + σ(1)·2u/(1 − u) ),   u = ε_v/η.

Half of ε/d for each gives ε_λ and ε_v, and with them the number of queries:

    m + d²·⌈log₂((λ_max − λ_min)/2ε_λ)⌉,   m = 2·ln(2d/p) / (E|x_1|·ε_v)²   (Hoeffding),

for ‖Ŵ − W‖_F ≤ ε and ‖v̂ − v‖ ≤ ε except with probability p. `stated` says that before
the first query. `guarantee` bounds the errors of single entries of W by their last
brackets. The constants are those of the proof's own steps, for which the paper writes
O(·). sign_only.py is our version, with no B, no η, no failure probability and far fewer
queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core import not_applicable, not_identifiable
from keyhole.core.errors import InputError, expect_number
from keyhole.core.float64 import EPSILON, Stream, full, identity, random_stream, zeros
from keyhole.core.text import percent
from keyhole.extract.bilinear import lengths, normalized, random_units
from keyhole.extract.exams import SignMethod, labels_again
from keyhole.extract.extraction import Extraction, Statement, Step, setting
from keyhole.extract.halfspace import bisect, centre, signs
from keyhole.extract.intervals import Interval
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import BudgetExhausted, Oracle

_LOW, _HIGH = (1 / (1 + math.exp(-z)) for z in (-1.0, 1.0))  # σ(±1)
_SLOPE = 1 / (_LOW * _HIGH)  # κ, of the logit between them
# The error on fresh queries up to which a model counts as recovered. An `accuracy` that
# a budget allows leaves a larger one, and the result is inexact, with the errors that
# are proved.
_ACCEPTED = 1e-6
# relative to λ: repeated queries are so far outside a bracket, for rounding
_ASIDE = 1e-9
CHANCE = 0.01  # the probability that an average of signs is further off than promised
_MAX_SAMPLES = 10**10  # would take hours, even with a target in memory
_SAMPLES_AT_ONCE = 1 << 14


def mean_length(d: int) -> float:
    """Return `E|x_1|` for x uniform on the sphere: `E[sign(vᵀx)·x]` is that times v/‖v‖."""
    return math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi)


def _average(
    oracle: Oracle,
    stream: Stream,
    count: int,
) -> Tensor:
    """Return the paper's v̂ from `count` signs, with an error of the same size in every entry."""
    d = oracle.dim
    if count > _MAX_SAMPLES:
        raise not_applicable(
            f"averaging would take {count:.1e} queries for this accuracy: bisect, or ask less"
        )
    total = zeros(d)
    for rows in range(count, 0, -_SAMPLES_AT_ONCE):
        x = random_units(min(rows, _SAMPLES_AT_ONCE), d, stream)
        total += (signs(oracle, x[:, None]).double() * 2 - 1) @ x
    v = total / (count * mean_length(d))
    if lengths(v) < 0.5:  # it is about 1 for a halfspace
        raise not_identifiable("the signs of single tokens favour no direction: v = 0?")
    return v


@dataclass(frozen=True)
class Plan:
    """What the theorem needs, known in advance: errors of v̂ and λ̂, brackets, queries."""

    values_error: float  # ε_v
    scale_error: float  # ε_λ
    least: float  # λ_min
    most: float  # λ_max
    samples: int
    levels: int

    @classmethod
    def of(
        cls,
        accuracy: float,
        bound: float,
        margin: float,
        dim: int,
    ) -> Plan:
        """Compute the plan from the theorem's ε, B, η and d."""
        # what either term of the bound may be
        half = accuracy / dim / 2 / (bound * _SLOPE)
        u = half / (2 * _HIGH + half)
        values_error = min(margin * u, accuracy / math.sqrt(dim))
        least = math.sqrt(_LOW * margin / bound)
        most = math.sqrt(_HIGH / (margin * bound))
        scale_error = half * margin / (2 * bound * most)
        levels = max(0, math.ceil(math.log2((most - least) / (2 * scale_error))))
        deviation = mean_length(dim) * values_error
        samples = math.ceil(2 * math.log(2 * dim / CHANCE) / deviation**2)
        return cls(values_error, scale_error, least, most, samples, levels)

    def queries(self, dim: int) -> int:
        return self.samples + dim * dim * self.levels


@dataclass(frozen=True)
class SignOnlyAsPublished(SignMethod):
    """Extraction of one head from signs, as Theorem B.1 does it; its v has length about 1."""

    bound: float = field(metadata={"help": "B: the norm of W is at most this"})
    margin: float = field(
        metadata={"help": "η: every |v_i| is at least this, for v of length 1"}
    )
    accuracy: float = setting(0.1, "ε: bound on the norms of the errors of W and v")
    seed: int = 0

    def __post_init__(self) -> None:
        expect_number("bound", self.bound, above=0)
        expect_number("margin", self.margin, above=0, most=1)
        expect_number("accuracy", self.accuracy, above=0, below=1)

    def __call__(self, oracle: Oracle) -> Extraction:
        most = 1 / math.sqrt(oracle.dim)
        if self.margin > most * (1 + 1e-9):
            raise InputError(
                f"the margin must not exceed 1/√d = {most:.3g}, since ‖v‖ = 1: got {self.margin}"
            )
        return super().__call__(oracle)

    @property
    def accepted(self) -> float:
        return _ACCEPTED

    def plan(self, dim: int) -> Plan:
        return Plan.of(self.accuracy, self.bound, self.margin, dim)

    def expected_queries(self, dim: int) -> int:
        return self.plan(dim).queries(dim)

    def stated(self, dim: int) -> Statement:
        return Statement(
            "Theorem B.1",
            self.accuracy,
            self.expected_queries(dim),
            f"no label is wrong, ‖W‖ ≤ {self.bound:g}, every |v_i| ≥ {self.margin:g} of ‖v‖ = 1 "
            f"and the average is not among the {percent(CHANCE)} furthest off",
        )

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        plan = self.plan(oracle.dim)
        stream = random_stream(self.seed)
        v = _average(oracle, stream, plan.samples)
        least = float(v.abs().min())
        if least < self.margin - plan.values_error:
            raise not_applicable(
                f"the margin {self.margin:g} does not hold: some |v_i| is about {least:.1e} of ‖v‖"
            )
        entries = _Entries(self, oracle, v, plan)
        yield self._step(entries)
        try:
            entries.narrow()
        except BudgetExhausted:
            yield self._step(entries)
            raise
        yield self._step(entries)

    def _step(self, entries: _Entries) -> Step:
        """Return what the brackets show so far."""
        W, interval = entries.solve()
        v = entries.v
        stated = self.stated(len(v))

        def confirm(oracle: Oracle) -> tuple[int, int]:
            # No single label decides v̂, so only those of ±v̂ are repeated.
            unit = normalized(v)
            tokens = torch.stack([unit, -unit])
            positive = torch.tensor([True, False])
            return labels_again(oracle, tokens, positive, *entries.ends())

        return self.step(
            Head(W, v),
            -entries.relative_width.log2(),
            guarantee=interval.furthest(W),
            guarantee_v=entries.plan.values_error,
            assumed=stated.provided,
            confirm=confirm,
            stated=stated,
        )


class _Entries:
    """A bracket for the λ of every entry (i, j), flattened."""

    def __init__(
        self,
        method: SignOnlyAsPublished,
        oracle: Oracle,
        v: Tensor,
        plan: Plan,
    ) -> None:
        d = len(v)
        self.v = v
        self.plan = plan
        self._bound = method.bound
        self._margin = method.margin
        self._oracle = oracle
        index = torch.arange(d * d)
        self._i = index // d
        self._j = index % d
        self._c = -(v[self._i] * v[self._j]).sign() / method.bound
        self._low = full(plan.least, d * d)
        self._high = full(plan.most, d * d)

    @property
    def relative_width(self) -> Tensor:
        return (self._high - self._low) / (self.plan.most - self.plan.least)

    def narrow(self) -> None:
        """Bisect all brackets, in place, until their centres are within ε_λ."""
        width = 2 * self.plan.scale_error * (1 + 1e-12)
        for _ in bisect(self._low, self._high, lambda: width, centre, self._above):
            pass  # after every level the brackets are narrower

    def _above(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Return which entries change their sign at a larger λ."""
        positive = signs(self._oracle, self._pairs(rows, scales))
        return positive != (self.v[self._j[rows]] > 0)

    def _pairs(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Return sequences `[λe_j + (c/λ)e_i ; λe_j]` for some entries."""
        units = identity(len(self.v))
        scale = scales[rows, None]
        last = scale * units[self._j[rows]]
        delta = self._c[rows, None] / scale * units[self._i[rows]]
        return torch.stack([last + delta, last], 1)

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return pairs of tokens at both ends of every bracket, and which of them are positive."""
        rows = torch.arange(len(self._low))
        low = self._pairs(rows, self._low * (1 - _ASIDE))
        high = self._pairs(rows, self._high * (1 + _ASIDE))
        with_v = self.v[self._j] > 0
        return torch.cat([low, high]), torch.cat([~with_v, with_v])

    def solve(self) -> tuple[Tensor, Interval]:
        """Return Ŵ as in the theorem, and the interval that the brackets prove."""
        ratios = self._ratios()
        scales = (centre(self._low, self._high), self._low, self._high)
        W, first, second = (
            (self._bound * scale.square() * ratio).clamp(_LOW, _HIGH).logit() / self._c
            for scale, ratio in zip(scales, ratios, strict=True)
        )
        shape = (len(self.v), len(self.v))
        rounding = 64 * EPSILON * self._bound
        low = torch.minimum(first, second) - rounding
        high = torch.maximum(first, second) + rounding
        return W.view(shape), Interval(low.view(shape), high.view(shape))

    def _ratios(self) -> list[Tensor]:
        """Return the estimate of |v_j|/|v_i| and its lower and upper bound; 1 where i = j."""
        size = self.v.abs()
        below = (size - self.plan.values_error).clamp(min=self._margin)
        above = (size + self.plan.values_error).clamp(max=1.0)
        i = self._i
        j = self._j
        ratios = (size[j] / size[i], below[j] / above[i], above[j] / below[i])
        limits = (self._margin, 1 / self._margin)
        return [ratio.clamp(*limits).masked_fill(i == j, 1.0) for ratio in ratios]
