"""Theorem 6.1 as published: one head from answers within ±τ, by unit probes and d² + d queries.

*Provably Learning Attention with Queries* (arXiv 2601.16873), Section 6. A head scores
a sequence X with last token x by f(X) = Σ_i softmax_i(xᵀW x_i)·vᵀx_i. Known in advance:
‖W‖ ≤ B, and η: every
|v_i| is 0 or at least η. Of two tokens b·e_j + a·u and b·e_j, the first gets the weight α =
σ(ab·uᵀWe_j). With a = ½, b = 1/B and the unit vectors,

    v̂_i = f([e_i]) ± τ, and 0 where |v̂_i| < η/2                                  d queries
    α̂ = (f([b·e_j + a·u ; b·e_j]) − b·v̂_j) / (a·v̂ᵀu),   u = e_i, or e_i + e_k where v_i = 0
    uᵀWe_j = 2B·logit(clip(α̂))                                                    d² queries

where k is the index of the largest |v̂_k|. W_ij is uᵀWe_j itself, or less Ŵ_kj where
v_i = 0. Since
|ab·W_ij| ≤ ½ (for sums 1/√2, as ‖e_i + e_k‖ = √2), α̂ is clipped to σ(±½) or σ(±1/√2), and the slope
of the logit there is κ = 2 + 2·cosh(1/√2) at most (Lemma A.1). With |v̂ᵀu| ≥ η/2 the
steps of the proof add up to

    |α̂ − α| ≤ (τ + bτ + aτ)·2/(aη),   |Ŵ_ij − W_ij| ≤ 2·2B·κ·|α̂ − α| = 2κ(12B + 8)·τ/η =: ε/d,

including a factor of two for the entries that are a difference; then ‖Ŵ − W‖_F ≤ ε, and
‖v̂ − v‖ ≤ √d·τ ≤ ε:

    τ(ε, B, η, d) = ε / max(2κ·d·(12B + 8)/η, √d).

This is `tolerance_for`, and `accuracy_for` is its inverse. ε is known in advance, and
every result states it (`stated`). `guarantee` is reported as well: it follows from the
answers by intervals, entry by entry, and is never larger than ε/d, apart from rounding.
tolerant.py is our version, with no B and no η, longer probes and far smaller errors.

Where the paper writes O(·), the constants here are those of its own steps. ‖W‖ may be
any norm that bounds |uᵀWx|, in the paper and here. The paper does not mention that τ <
η/2 is needed to tell zeros of v; for ε ≤ 1 that follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core import mismatch, not_applicable, not_identifiable
from keyhole.core.errors import InputError, expect_number
from keyhole.core.float64 import EPSILON, full, identity
from keyhole.extract.bilinear import ask_scores, in_batches, max_abs
from keyhole.extract.exams import AmplifiedExam, asked_again
from keyhole.extract.extraction import Statement, Step
from keyhole.extract.gauss_newton import Pairs, SingleTokens
from keyhole.extract.intervals import Interval
from keyhole.extract.judge import Exam, Method
from keyhole.extract.tolerant import ACCEPTED
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import BudgetExhausted, Oracle

_DELTA = 0.5  # a: how much of u is added to a token
# bounds on |ab·uᵀWe_j| for u = e_i and u = e_i + e_k
_SINGLE = 0.5
_SUM = math.sqrt(0.5)
_SLOPE = 2 + 2 * math.cosh(_SUM)  # κ: the largest slope of the logit at these α


def accuracy_for(
    tolerance: float,
    bound: float,
    margin: float,
    dim: int,
) -> float:
    """Return ε, the accuracy that the theorem states for answers within ±τ."""
    return tolerance * max(2 * _SLOPE * dim * (12 * bound + 8) / margin, math.sqrt(dim))


def tolerance_for(
    accuracy: float,
    bound: float,
    margin: float,
    dim: int,
) -> float:
    """Return τ(ε, B, η, d), how exact answers must be for the theorem to state ε."""
    return accuracy / accuracy_for(1.0, bound, margin, dim)


@dataclass(frozen=True)
class TolerantAsPublished(Method):
    """Extraction of one head from answers within ±`tolerance`, as Theorem 6.1 does it."""

    tolerance: float = field(metadata={"help": "how far an answer may be off"})
    bound: float = field(metadata={"help": "B: the norm of W is at most this"})
    margin: float = field(metadata={"help": "η: every |v_i| is 0 or at least this"})
    seed: int = 0

    def __post_init__(self) -> None:
        expect_number("tolerance", self.tolerance, least=0)
        expect_number("bound", self.bound, above=0)
        expect_number("margin", self.margin, above=0)
        if not self.tolerance < self.margin / 2:
            raise InputError(
                f"answers must be exact to less than half the margin, ±{self.margin / 2:g}, for "
                f"zeros of v to be recognised: got ±{self.tolerance:g}"
            )

    @property
    def accepted(self) -> float:
        return ACCEPTED

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        return AmplifiedExam.amplified(
            oracle, self.seed, self.tolerance, reach=1.0, max_norm=None
        )

    def expected_queries(self, dim: int) -> int:
        return dim * dim + dim

    def stated(self, dim: int) -> Statement:
        return Statement(
            "Theorem 6.1",
            accuracy_for(self.tolerance, self.bound, self.margin, dim),
            self.expected_queries(dim),
            f"answers are within ±{self.tolerance:g}, ‖W‖ ≤ {self.bound:g} and "
            f"|v_i| ≥ {self.margin:g} or 0",
        )

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        tokens = identity(d)
        alone = SingleTokens(tokens, ask_scores(oracle, tokens[:, None]))
        zero = self._zeros(alone.answers)
        v = alone.answers.masked_fill(zero, 0.0)
        if zero.all():
            raise not_identifiable(
                f"v = 0: no answer is above half the margin {self.margin}"
            )
        probes = _Probes(self, v)
        yield self._step(v, probes, [alone])
        try:
            probes.ask(oracle)
        except BudgetExhausted:
            yield self._step(v, probes, [alone])
            raise
        yield self._step(v, probes, [alone, probes.asked])

    def _zeros(self, v: Tensor) -> Tensor:
        """Return which entries are 0; raise Unsuccessful if one is between 0 and the margin."""
        rounding = 8 * EPSILON * max_abs(v)
        size = v.abs()
        between = size[
            (size > self.tolerance + rounding)
            & (size < self.margin - self.tolerance - rounding)
        ]
        if len(between):
            raise not_applicable(
                f"the margin {self.margin:g} does not hold: some |v_i| is "
                f"{float(between.min()):.1e}"
            )
        return size < self.margin / 2

    def _step(
        self,
        v: Tensor,
        probes: _Probes,
        asked: list[SingleTokens | Pairs],
    ) -> Step:
        W, interval = probes.solve()
        d = len(v)
        complete = bool(W.isfinite().all())
        return Step(
            Head(W.nan_to_num(0.0), v),
            known=d + int(W.isfinite().sum()),
            unknowns=d * d + d,
            guarantee=interval.furthest(W) if complete else None,
            guarantee_v=self.tolerance + EPSILON if complete else None,
            assumed=f"every answer is within ±{self.tolerance:g} of one head with ‖W‖ ≤ "
            f"{self.bound:g} and |v_i| ≥ {self.margin:g} or 0",
            confirm=lambda oracle: asked_again(oracle, asked, self.tolerance, EPSILON),
            stated=self.stated(d),
        )


class _Probes:
    """The d² probes of length two; answers that are still missing are NaN."""

    def __init__(self, method: TolerantAsPublished, v: Tensor) -> None:
        self._method = method
        self._v = v
        d = len(v)
        self._pivot = int(v.abs().argmax())
        self._sums = v == 0
        tokens = identity(d)
        u = tokens + self._sums[:, None] * tokens[self._pivot]
        index = torch.arange(d * d)
        self.asked = Pairs(
            u,
            tokens,
            index // d,
            index % d,
            full(1 / method.bound, d * d),
            full(_DELTA, d * d),
            full(math.nan, d * d),
        )

    def ask(self, oracle: Oracle) -> None:
        count = len(self.asked.answers)
        for rows, answers in in_batches(oracle, count, self.asked.questions):
            self.asked.answers[rows] = answers

    def solve(self) -> tuple[Tensor, Interval]:
        """Return Ŵ as in the theorem, and the interval that the answers prove."""
        alpha, error = self._gates()
        is_sum = self._sums[:, None]
        reach = torch.where(is_sum, _SUM, _SINGLE).double()
        low = torch.sigmoid(-reach)
        high = torch.sigmoid(reach)
        if ((alpha - error > high) | (alpha + error < low)).any():
            raise mismatch(
                f"the answers leave the range that one head with ‖W‖ ≤ {self._method.bound:g} "
                f"allows within ±{self._method.tolerance:g}"
            )
        forms, least, most = (
            self._method.bound / _DELTA * torch.logit(gate.clamp(low, high))
            for gate in (alpha, alpha - error, alpha + error)
        )
        k = self._pivot
        W = torch.where(is_sum, forms - forms[k], forms)
        rounding = 16 * EPSILON * self._method.bound
        lower = torch.where(is_sum, least - most[k], least) - rounding
        upper = torch.where(is_sum, most - least[k], most) + rounding
        return W, Interval(lower, upper)

    def _gates(self) -> tuple[Tensor, Tensor]:
        """Return α̂ and a bound on its error, entry (i, j) for u_i and e_j."""
        v = self._v
        d = len(self._v)
        b = 1 / self._method.bound
        tau = self._method.tolerance
        radius = torch.where(v == 0, 0.0, tau)  # zeros of v are known exactly
        signal = _DELTA * (self.asked.deltas @ v)[:, None]
        answers = self.asked.answers.view(d, d)
        alpha = (answers - b * v) / signal
        noise = tau + b * radius + _DELTA * tau
        rounding = (d + 16) * EPSILON * (answers.abs() + b * v.abs() + signal.abs())
        return alpha, (noise + rounding) / signal.abs()
