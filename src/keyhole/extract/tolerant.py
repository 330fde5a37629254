"""One head from answers that are off by up to ±τ, with a proved error of the result (ours).

After Theorem 6.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): if
every answer is within τ of the truth, probes whose α is not near 0 or 1 give W to
accuracy ε for τ polynomial in ε, d, 1/‖W‖ and 1/η, where η is the smallest non-zero
|v_i|:

    v_i = f([e_i]) ± τ;   α = (f([x+δ ; x]) − vᵀx) / vᵀδ;   δᵀWx = logit(α ± error of α).

tolerant_as_published.py has the theorem as it stands. Departures:

- The error is not the theorem's worst case. Each answer gives an interval for one bilinear form
  δᵀWx, and every later step (quotient, logit, linear solve) uses interval arithmetic,
  so `guarantee` follows from the answers. ‖v‖ ≤ 1 is not needed, since v is read first.
  `bound` (‖W‖ ≤ B) and `margin` (η) make intervals narrower. Floating-point rounding
  widens them, to first order.
- Probes are amplified. The error of α is τ/|vᵀδ|, so δ is made t times longer and x t times
  shorter: the logit stays the same, and the error of α is divided by t. So a server
  that rounds its answers is protected only if it also bounds the norm of tokens.
  `max_norm` is that bound, and t the largest that it allows. Without it t =
  τ/`precision`: beyond that, the oracle's floating-point error exceeds τ. v is read
  with t as well.
- Probes have a large component along v (bilinear.py), and each is sent alone as well: vᵀδ is then
  known to τ/‖δ‖, √d times better than from the entries of v. This takes d² + 2d
  queries, and a few that find the scale of the probes.
- `repeats` measures everything again with other probes, and intersects the intervals. This helps
  even if the oracle repeats its error whenever a query is repeated. Estimates are
  averaged; with `refine`, up to 1,200 unknowns are fitted to all answers by least
  squares instead, which reduces random errors. In both cases the result is moved into
  the proved intervals.
- The assumption is tested: the judge sends every query twice more, with the sequence repeated two
  and three times, to which a head gives the same answer. If two answers are more than
  2τ apart, one of them is not within τ, and nothing is called proved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import not_applicable, not_identifiable
from keyhole.core.errors import expect_count, expect_number
from keyhole.core.float64 import EPSILON, identity, random_stream, zeros
from keyhole.extract.bilinear import (
    ProbeBasis,
    ask_scores,
    lengths,
    max_abs,
    normalized,
    random_orthogonal,
)
from keyhole.extract.exams import AmplifiedExam, asked_again
from keyhole.extract.extraction import Step, setting
from keyhole.extract.gauss_newton import Pairs, SingleTokens, refined
from keyhole.extract.intervals import Forms, Interval, weights_named
from keyhole.extract.judge import Exam, Method
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import BudgetExhausted, Oracle

# relative error on fresh queries up to which a model counts as exact
ACCEPTED = 1e-8
# share of `max_norm` that tokens use, so that rounding does not exceed it
_WITHIN = 1 - 1e-12
_MAX_FITTED = 1200  # the most unknowns that are fitted to all answers at once


@dataclass(frozen=True)
class Tolerant(Method):
    """Extraction of one head from answers within ±`tolerance`, with guarantees (Theorem 6.1)."""

    tolerance: float = setting(1e-4, "how far an answer may be off")
    bound: float | None = setting(None, "the norm of W is at most this")
    margin: float | None = setting(None, "no |v_i| lies between 0 and this")
    max_norm: float | None = setting(None, "tokens may not be longer than this")
    precision: float = setting(
        EPSILON,
        "relative precision of the target; 6e-8 for float32",
    )
    repeats: int = setting(
        1, "how often everything is measured, each time with other probes"
    )
    refine: bool = setting(True, "fit all answers by least squares in the end")
    seed: int = 0

    def __post_init__(self) -> None:
        expect_number("tolerance", self.tolerance, least=0)
        for name in ("bound", "margin", "max_norm", "precision"):
            expect_number(name, getattr(self, name), above=0)
        expect_count("repeats", self.repeats)

    @property
    def accepted(self) -> float:
        return ACCEPTED

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        return AmplifiedExam.amplified(
            oracle, self.seed, self.tolerance, self.reach(), self.max_norm
        )

    def expected_queries(self, dim: int) -> int:
        return self.repeats * (dim * dim + 2 * dim)

    @property
    def assumed(self) -> str:
        """What a guarantee rests on: the tolerance, and the other bounds that were stated."""
        stated: list[str] = []
        if self.bound is not None:
            stated.append(f"‖W‖ ≤ {self.bound:g}")
        if self.margin is not None:
            stated.append(f"|v_i| ≥ {self.margin:g} or 0")
        more = f" with {' and '.join(stated)}" if stated else ""
        return f"every answer is within ±{self.tolerance:g} of one head{more}"

    def reach(self, signal: float = 1.0) -> float:
        """Return the norm of the tokens to send; with a larger one, rounding would exceed τ."""
        reach = max(1.0, self.tolerance / (self.precision * signal))
        if self.max_norm is None:
            return reach
        return min(reach, _WITHIN * self.max_norm)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        stream = random_stream(self.seed)
        state = _State(self, d)
        for number in range(self.repeats):
            basis = random_orthogonal(d, stream) if number else identity(d)
            state.read_values(oracle, basis)
            if number == 0:
                yield state.step()
            probes = ProbeBasis.draw(state.v.middle, stream)
            forms = state.forms(oracle, probes, random_orthogonal(d, stream))
            try:
                forms.measure(stream, None if number == 0 else state.W)
            except BudgetExhausted:
                state.add_incomplete(forms, probes)
                yield state.step()
                raise
            state.add(forms, probes)
            # A step fits all answers, which is slow: only after rounds 1, 2, 4, … and
            # the last.
            done = number + 1
            if done.bit_count() == 1 or done == self.repeats:
                yield state.step()


class _State:
    """What all rounds so far have proved (v, W as intervals), and all answers."""

    def __init__(self, method: Tolerant, d: int) -> None:
        self._method = method
        self._answers: list[SingleTokens | Pairs] = []
        self._values: list[Tensor] = []
        self._estimates: list[Tensor] = []
        self._known = 0
        self.v = Interval.unknown(d)
        self.W = Interval.unknown(d, d, bound=method.bound)

    def read_values(self, oracle: Oracle, basis: Tensor) -> None:
        """Read v in an orthonormal basis, with d sequences of one token."""
        along = self._ask_alone(oracle, basis, self._method.reach())
        v = Interval.around(basis.mT @ along.middle, basis.abs().mT @ along.radius)
        self._values.append(v.middle)
        self.v = self.v.meet(v, "v")
        margin = self._method.margin
        if margin is not None:
            zero = self.v.largest < margin
            refuted = zero & ((self.v.low > 0) | (self.v.high < 0))
            if refuted.any():
                value = float(self.v.middle[refuted].abs().min())
                raise not_applicable(
                    f"the margin {margin:g} does not hold: some |v_i| is {value:.1e}"
                )
            self.v = self.v.with_zeros(zero)
        if not ((self.v.low > 0) | (self.v.high < 0)).any():
            raise not_identifiable(
                f"v cannot be distinguished from 0 by answers within ±{self._method.tolerance:g}"
            )

    def forms(
        self,
        oracle: Oracle,
        probes: ProbeBasis,
        X: Tensor,
    ) -> Forms:
        """Send each probe alone for vᵀδ, and return the forms to measure with these probes."""
        deltas = normalized(probes.deltas)
        v = self.v
        method = self._method
        guess = float((deltas @ v.middle).min())
        reach = method.reach(max(guess, method.precision))
        computed = Interval.around(deltas @ v.middle, deltas.abs() @ v.radius)
        signal = computed.meet(self._ask_alone(oracle, deltas, reach), "v")
        if not (signal.low > 0).all():
            raise not_identifiable(
                f"answers within ±{method.tolerance:g} leave vᵀδ without a sign: v is too small"
            )
        return Forms(
            oracle,
            deltas,
            X,
            v,
            signal,
            method.tolerance,
            method.precision,
            reach,
            method.bound,
        )

    def add(self, forms: Forms, probes: ProbeBasis) -> None:
        """Intersect W with what complete forms prove, and keep their estimate and answers."""
        middle, radius = self._solve(forms, probes)
        proved = Interval.around(middle, radius)
        self.W = self.W.meet(proved, weights_named(self._method.bound))
        self._answers.append(forms.asked)
        self._estimates.append(middle)
        self._known = middle.numel()

    def add_incomplete(self, forms: Forms, probes: ProbeBasis) -> None:
        """Estimate W from the complete columns if there is no estimate; this proves nothing."""
        if self._estimates:
            return
        columns = forms.interval.finite.all(0)
        if self._method.bound is None and columns.any():
            forms.interval = forms.interval.with_zeros(~columns)
            self._estimates.append(self._solve(forms, probes)[0])
            self._known = int(columns.sum()) * len(columns)

    def step(self) -> Step:
        """Return the best estimate so far, and what is proved of it."""
        method = self._method
        d = self.v.low.numel()
        unknowns = d * d + d
        v = torch.stack(self._values).mean(0)
        W = zeros(d, d)
        if self._estimates:
            W = torch.stack(self._estimates).mean(0)
        if len(self._estimates) > 1 and method.refine and unknowns <= _MAX_FITTED:
            answers = [
                (
                    part.questions(slice(None)),
                    part.answers,
                    torch.ones_like(part.answers),
                )
                for part in self._answers
            ]
            head = refined(Head(W, v), ("W", "v"), answers)
            W = head.W
            v = head.v
        W = self.W.clamp(W)
        v = self.v.clamp(v)
        proved = bool(self.W.finite.all())
        return Step(
            Head(W, v),
            known=d + self._known,
            unknowns=unknowns,
            guarantee=self.W.furthest(W) if proved else None,
            guarantee_v=self.v.furthest(v) if proved else None,
            assumed=method.assumed,
            confirm=lambda oracle: asked_again(
                oracle, self._answers, method.tolerance, method.precision
            ),
        )

    def _solve(self, forms: Forms, probes: ProbeBasis) -> tuple[Tensor, Tensor]:
        """Return W from the forms, and a bound on the error of each entry."""
        inverse = probes.solve(lengths(probes.deltas).diag())
        W = inverse @ forms.interval.middle @ forms.X
        # To first order: rounding of scores, of their exponentials and of this solve.
        scores = forms.deltas.abs() @ W.abs() @ forms.X.abs().mT
        rounding = (4 * len(W) + 16) * self._method.precision * scores
        return W, inverse.abs() @ (forms.interval.radius + rounding) @ forms.X.abs()

    def _ask_alone(
        self,
        oracle: Oracle,
        tokens: Tensor,
        reach: float,
    ) -> Interval:
        """Return `vᵀx` for unit tokens, each sent as a sequence of its own."""
        scaled = reach * tokens
        answers = ask_scores(oracle, scaled[:, None])
        self._answers.append(SingleTokens(scaled, answers))
        rounding = (2 * len(tokens) + 8) * self._method.precision * max_abs(answers)
        error = (self._method.tolerance + rounding) / reach
        return Interval.around(answers / reach, torch.full_like(answers, error))
