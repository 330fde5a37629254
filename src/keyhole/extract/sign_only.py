"""One head from the signs of its scores: one bit per query (ours).

After Theorem B.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873,
Appendix B). Signs do not depend on the length of v, so let ‖v‖ = 1. With `x = λ·x_j`
and `δ = (c/λ)·p_i`,

    f([x+δ ; x]) > 0  ⟺  σ(z) > λ²·|vᵀx_j| / (c·vᵀp_i),   z = c·p_iᵀWx_j,  vᵀp_i > 0 > vᵀx_j,

and z does not depend on λ: the choice of λ compares z with any threshold t, λ² =
σ(t)·c·vᵀp_i/|vᵀx_j|.

sign_only_as_published.py has the theorem as it stands. Departures:

- v. The paper averages signs, with O(d/ε²) queries for an error ε of v; since W is read through v,
  an error ε of W takes O(d⁴‖W‖²/ε²) of them. Bisection of the ratios of v's
  coordinates, in a random basis and relative to the largest one, takes O(d·log 1/ε).
- Bases. The paper's unit vectors need every v_i ≠ 0. Here p and x are random orthonormal bases in
  which every element has the same inner product with v.
- Brackets. The paper bisects λ in an interval that a known ‖W‖ ≤ B gives. Here a few entries find
  the scale first, and thresholds halve the probability mass of a Student distribution
  of that scale. So no bound is needed, no level is spent on an empty range, and
  outliers take a few more.
- `accuracy` is promised for every entry of W and of v: the widths of brackets and the error of v
  are carried through to `guarantee`. That costs up to log₂ d bits an entry above the
  lower bound of (d² + d − 1)·log₂(1/ε) queries for entries of size 1. The length of v
  cannot be known.
- Wrong labels. A single one can send a bisection to the wrong half, and its bracket then ends at
  that label. So the judge repeats the queries at both ends of every bracket twice, in
  an equivalent form: a token twice or half as long, and `[a ; a ; b ; b]` or `[b ; a ;
  a ; b]` for `[a ; b]`. If labels are wrong at random or by the query, some differ, and
  nothing is called proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, mismatch
from keyhole.core.errors import expect_number
from keyhole.core.float64 import EPSILON, TINY, Stream, full, random_stream
from keyhole.extract.bilinear import ProbeBasis
from keyhole.extract.exams import SignMethod, labels_again
from keyhole.extract.extraction import Step, setting
from keyhole.extract.halfspace import Ratios, bisect, centre, signs
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import BudgetExhausted, Oracle

_SHARE = 0.15  # share of W's allowed error that the error of v may cause
_SCOUTS = 8
_LEVELS = 3  # of bisection between two steps
_SCALES = 32  # factors of four that are tried for a scale
# times the error of a threshold: so far from it, only a wrong label differs
_BEYOND = 3.0


@dataclass(frozen=True)
class SignOnly(SignMethod):
    """Extraction of one head from signs (Theorem B.1); the model's v has length 1.

    The oracle answers 1.0 if the score is positive and 0.0 if not. The model answers
    with scores, and `oracle.SignOnly(model)` answers like the oracle.
    """

    accuracy: float = setting(1e-6, "bound on the error of every entry of W and v")
    seed: int = 0

    def __post_init__(self) -> None:
        expect_number("accuracy", self.accuracy, least=1e-12, below=1)

    def expected_queries(self, dim: int) -> int:
        bits = math.log2(1 / self.accuracy) + math.log2(dim) + 1
        return math.ceil(dim * dim * bits + dim * (bits + 6))

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        stream = random_stream(self.seed)
        direction = Ratios(oracle, stream)
        # Enough for a W of size 1; for a larger one, v is sharpened again below.
        direction.sharpen(self._needed(d, 1.0))
        forms = _Forms(oracle, direction, stream)
        yield self._step(direction, forms)
        forms.scout(self.accuracy / d)
        direction.sharpen(self._needed(d, forms.largest))
        yield self._step(direction, forms)
        try:
            for level in forms.bisect(self.accuracy):
                if level % _LEVELS == 0:
                    yield self._step(direction, forms)
        except BudgetExhausted:
            yield self._step(direction, forms)
            raise
        yield self._step(direction, forms)

    def _needed(self, d: int, largest: float) -> float:
        """Return how exact v must be for W's sake; the inverse of `_Forms.carried`, for z ≤ 1."""
        gain = 2 * d * (1 + math.e) * max(largest, self.accuracy / d)
        return min(self.accuracy, _SHARE * self.accuracy / gain)

    def _step(self, direction: Ratios, forms: _Forms) -> Step:
        """Return what the brackets show so far."""
        W, error = forms.solve()
        finite = math.isfinite(error)

        def confirm(oracle: Oracle) -> tuple[int, int]:
            return labels_again(oracle, *direction.ends(), *forms.ends())

        return self.step(
            Head(W, direction.v),
            1 - forms.width.log2(),
            guarantee=error if finite else None,
            guarantee_v=direction.error if finite else None,
            assumed="no label is wrong",
            confirm=confirm,
        )


class _Forms:
    """Brackets for the forms `p_iᵀ W x_j`, flattened; W = Pᵀ F X since both are orthonormal."""

    def __init__(
        self,
        oracle: Oracle,
        direction: Ratios,
        stream: Stream,
    ) -> None:
        self._oracle = oracle
        self._direction = direction
        self._stream = stream
        self._P = ProbeBasis.draw(direction.v, stream).Q
        self._X = -ProbeBasis.draw(direction.v, stream).Q
        self._high = full(math.inf, oracle.dim**2)
        self._low = -self._high
        # approximate; tokens are scaled so that such forms give z = ±1
        self.largest = 1.0

    @property
    def width(self) -> Tensor:
        return self._high - self._low

    def scout(self, smallest: float) -> None:
        """Find the size of the forms from a few of them, to a factor of four."""
        rows = torch.randperm(len(self._low), generator=self._stream)[:_SCOUTS]
        zero = torch.zeros_like(self._low)
        positive = self._compare(rows, zero)
        sides = zero.index_put((rows,), positive.double() * 2 - 1)

        def reached(rows: Tensor) -> Tensor:
            """Return which forms are not nearer to zero than the scale."""
            return self._compare(rows, sides * self.largest) == (sides[rows] > 0)

        beyond = rows
        for _ in range(_SCALES):
            beyond = beyond[reached(beyond)]
            if not len(beyond):
                break
            self.largest *= 4
        else:
            raise Unsuccessful(
                Status.SATURATED,
                "no input is small enough to leave the attention undecided",
            )
        while self.largest > smallest:
            # A scale that was found too small by 4 may be too large by 2, no more.
            step = 4 if self.largest <= 1 else 2
            self.largest /= step
            if reached(rows).any():
                self.largest *= step
                return

    def bisect(self, accuracy: float) -> Iterator[int]:
        """Halve all brackets until W is known to `accuracy`, one batch per level."""
        spread = float(self._P.abs().sum(0).max() * self._X.abs().sum(0).max())
        prior = self.largest / 3.5  # Student's scale, if the forms are Gaussian

        def narrow() -> Tensor:
            rest = torch.tensor(max(accuracy - self.carried(), accuracy / 2) / spread)
            rounding = 16 * EPSILON * self._high.abs().nan_to_num(posinf=0.0)
            return 2 * torch.maximum(rest, rounding)

        def median(low: Tensor, high: Tensor) -> Tensor:
            mass = (_student(low / prior) + _student(high / prior)) / 2
            rest = (1 - mass * mass).clamp(min=EPSILON).sqrt()
            split = prior * math.sqrt(2) * mass / rest
            narrow_already = high - low < prior / 4
            inside = (split > low) & (split < high) & ~narrow_already
            return torch.where(inside, split, centre(low, high))

        return bisect(self._low, self._high, narrow, median, self._above)

    def shift(self, forms: Tensor) -> Tensor:
        """Return how far an error of v (and rounding) may have moved a threshold at `forms`."""
        relative = 2 * self._relative
        if relative >= 1:
            return torch.full_like(forms, math.inf)
        # logit(σ(t)·ρ) − t, for a ρ that differs from 1 by `relative`
        slope = 1 + torch.exp(forms / self.largest)
        return -math.log1p(-relative) * slope * self.largest

    @property
    def _relative(self) -> float:
        """The largest relative error of any vᵀp or vᵀx, which are all about ±1/√d."""
        v = self._direction.v
        weakest = float(torch.minimum((self._P @ v).min(), (self._X @ v).abs().min()))
        return (self._direction.error + 8 * EPSILON * len(v)) / weakest

    def carried(self) -> float:
        """Return how far an error of v may have moved any entry of W.

        A form moves by g_ij·(a_i + b_j) at most. a and b are the relative errors of
        vᵀp_i and vᵀx_j, with ‖a‖ and ‖b‖ at most `_relative`, since P and X are
        orthonormal; g is the slope of the logit. Entries of W = PᵀFX move by no more
        than the norm of that matrix.
        """
        relative = self._relative
        d = len(self._P)
        if relative >= 0.5:
            return math.inf
        end = torch.where(self._high.isfinite(), self._high, self.largest)
        slopes = (1 + torch.exp((end + self.shift(end)) / self.largest)) * self.largest
        squares = slopes.square().view(d, d)
        norm = math.sqrt(2 * float(squares.sum(0).max() + squares.sum(1).max()))
        return norm * relative / (1 - relative)

    def solve(self) -> tuple[Tensor, float]:
        """Return W from the middles of the brackets, and a bound on the error of its entries."""
        d = len(self._P)
        known = torch.isfinite(self.width)
        middle = torch.where(known, centre(self._low, self._high), 0.0)
        bound = self._P.abs().mT @ (self.width / 2).view(d, d) @ self._X.abs()
        W = self._P.mT @ middle.view(d, d) @ self._X
        return W, float(bound.max()) + self.carried()

    def _compare(self, rows: Tensor, thresholds: Tensor) -> Tensor:
        """Run `_above`, and narrow the brackets with a margin for the error of v."""
        above = self._above(rows, thresholds)
        slack = self.shift(thresholds)
        low = (thresholds - slack).maximum(self._low)
        high = (thresholds + slack).minimum(self._high)
        self._low[rows] = torch.where(above, low[rows], self._low[rows])
        self._high[rows] = torch.where(above, self._high[rows], high[rows])
        if (self._low > self._high).any():
            raise mismatch(
                "the signs contradict each other: above one threshold, not a lower"
            )
        return above

    def ends(self) -> tuple[Tensor, Tensor]:
        """Return pairs of tokens (m, 2, d) at the ends of all brackets, and which are positive."""
        rows = torch.arange(len(self._low))
        slack = _BEYOND * self.shift(self._high)
        below = self._pairs(rows, self._low - slack)
        above = self._pairs(rows, self._high + slack)
        pairs = torch.cat([below, above])
        return pairs, torch.arange(len(pairs)) < len(rows)

    def _above(self, rows: Tensor, thresholds: Tensor) -> Tensor:
        """Return which of the forms are above their thresholds, with one query each."""
        if not thresholds[rows].isfinite().all():
            raise mismatch("the signs of some pairs never change")
        return signs(self._oracle, self._pairs(rows, thresholds))

    def _pairs(self, rows: Tensor, thresholds: Tensor) -> Tensor:
        """Return sequences (rows, 2, d) with a positive score if a form is above its threshold."""
        v = self._direction.v
        d = len(self._P)
        p = self._P[rows // d]
        x = self._X[rows % d]
        c = 1 / self.largest
        gate = torch.sigmoid(thresholds[rows] * c).clamp(min=TINY)
        scale = (gate * c * (p @ v) / -(x @ v)).sqrt()[:, None]
        last = scale * x
        return torch.stack([last + c / scale * p, last], dim=1)


def _student(x: Tensor) -> Tensor:
    """Return 2F − 1 for Student's distribution with two degrees of freedom; ±1 at ±∞."""
    return torch.where(torch.isinf(x), x.sign(), x / (2 + x * x).sqrt())
