"""Exams for answers that are signs or inexact, and tests of what a proof about them assumes.

A proof assumes that every answer is within ±τ, or that every sign is right. To test
that, queries are repeated in an equivalent form: a sequence repeated two and three
times, or, where only signs count, a token twice as long. A head gives the same answer
to both, and an oracle that changes its answers at random, or by the query, does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from keyhole.core import Status, mismatch
from keyhole.core.float64 import (
    TINY,
    Stream,
    normal,
    ones,
    random_stream,
    tensor,
    zeros,
)
from keyhole.extract.bilinear import batch_rows, lengths, max_abs, scalar
from keyhole.extract.domain import Domain
from keyhole.extract.extraction import Check, Step
from keyhole.extract.gauss_newton import Pairs, SingleTokens
from keyhole.extract.halfspace import signs
from keyhole.extract.judge import (
    LENGTHS,
    NEARLY,
    PER_KIND,
    Exam,
    Method,
    differences,
    verdict,
)
from keyhole.oracle.defences import SignOnly
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import Oracle, OracleError, ask

_STREAM = 0x4558414D  # so that the exam has other queries than any attack
_COARSEST = 0.1  # the first level: a model whose signs are wrong there is refuted
# lines drawn for each one used: those with the largest answers at their ends are used
_CHOICE = 4
_HALVINGS = 60  # of a line


def _draw(
    size: float,
    length: int,
    count: int,
    dim: int,
    stream: Stream,
) -> Tensor:
    """Return random sequences (count, length, dim) of tokens of norm about `size`·√d."""
    return size * normal(stream, count, length, dim)


@dataclass(frozen=True, kw_only=True)
class SignExam(Exam):
    """Queries near the decision boundary of one model, equally many at each of the `levels`.

    Random queries show little about a model whose sign is nearly always right. So each
    query is moved along a line to where the *model* answers ±m, for levels m = 0.1,
    0.01, …, relative to the answers at the ends of the line. An oracle whose answer
    there has another sign differs from the model by more than m: one such query refutes
    the model at that level. The queries depend on the model, but the attack never sees
    them.
    """

    levels: tuple[float, ...]

    @classmethod
    def near(
        cls,
        oracle: Oracle,
        seed: int,
        step: Step,
        finest: float,
    ) -> SignExam:
        """Return the exam with levels from 0.1 to `finest`; each level costs 40 queries."""
        decades = max(0, round(math.log10(_COARSEST / finest)))
        levels = (*(_COARSEST / 10**k for k in range(decades)), finest)
        stream = random_stream(seed ^ _STREAM)
        sets: list[tuple[Tensor, Tensor]] = []
        for length in LENGTHS:
            lines: list[tuple[Tensor, Tensor]] = []
            for size in (1 / math.sqrt(oracle.dim), 1.0):
                shape = (length, _CHOICE * PER_KIND, oracle.dim)
                start = _draw(size, *shape, stream)
                lines.append((start, _draw(size, *shape, stream)))
            try:
                questions = _near_zero(step.model, lines, levels, stream).flatten(0, 1)
            except OracleError as error:  # of the model: the oracle is asked below
                reason = f"the weights found cannot answer: {error}"
                raise mismatch(reason) from error
            sets.append((questions, ask(oracle, questions)))
        return cls(tuple(sets), levels=levels)

    def grade(self, model: Oracle) -> Check:
        """Measure the error on each line: the finest level down to which all signs agree, or 1."""
        sign = SignOnly(model)
        bounds = tensor((1.0, *self.levels))
        errors: list[Tensor] = []
        for questions, answers in self.sets:
            right = differences(sign, questions, answers) == 0
            right = right.unflatten(0, (len(self.levels), -1)).long()
            # levels before the first wrong sign
            agreeing = right.cumprod(0).sum(0)
            errors.append(bounds[agreeing])
        return self.check(errors)

    def agrees(
        self,
        given: Tensor,
        answers: Tensor,
        allowed: float,
    ) -> bool:
        """Return whether the signs agree wherever `given`, the model's answer, is clear of zero."""
        labels = (given == 0) | (given == 1)  # earlier answers of the target itself
        if labels.all():
            return torch.equal(given, answers)
        clear = given.abs() > max(allowed, NEARLY) * max_abs(given)
        return bool(((given > 0) == (answers > 0))[clear].all())

    def verdict(
        self,
        check: Check,
        step: Step,
        accepted: float,
    ) -> tuple[Status, str]:
        # If every entry of W may be off by the guarantee, scores of long tokens may be
        # off by guarantee · d, and answers, which are small differences of values, by
        # several times that.
        possible = 10 * (step.guarantee or 0.0) * step.model.dim
        if check.worst > _COARSEST and possible > _COARSEST:
            return Status.UNVERIFIED, (
                f"W is only known to ±{step.guarantee:.1e}, too little to be refuted by signs"
            )
        return verdict(check, accepted, _COARSEST if possible > NEARLY else NEARLY)


class SignMethod(Method):
    """A method that reads signs, and promises an `accuracy` of every entry."""

    accuracy: float

    @property
    def finest(self) -> float:
        """The finest level of the exam: the errors of all entries add up in an answer."""
        return min(100 * self.accuracy, 1e-2)

    @property
    def accepted(self) -> float:
        return self.finest

    def examine(self, oracle: Oracle, step: Step) -> Exam:
        return SignExam.near(oracle, self.seed, step, self.finest)

    def step(self, model: Head, entry_bits: Tensor, **more: Any) -> Step:
        """Return the step with a head of which so many bits of every entry of W are known."""
        d = model.dim
        bits = math.log2(1 / self.accuracy)
        known = (d - 1) * bits + float(entry_bits.clamp(0, bits).sum())
        unknowns = (d * d + d - 1) * bits  # ‖v‖ stays open
        return Step(model, math.ceil(known), math.ceil(unknowns), **more)


def _near_zero(
    model: Oracle,
    lines: list[tuple[Tensor, Tensor]],
    levels: tuple[float, ...],
    stream: Stream,
) -> Tensor:
    """Return sequences (levels, queries, n, d) where the model answers ± a level, by bisection.

    A level is relative to the smaller of the answers at the two ends of the line.
    """
    chosen = [_longest_reach(model, *line) for line in lines]
    start, end, size = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    rising = ask(model, start) < 0
    shape = (len(levels), len(size))
    sides = torch.randint(0, 2, shape, generator=stream).double() * 2 - 1
    wanted = sides * tensor(levels)[:, None] * size
    low = zeros(*shape)
    high = ones(*shape)

    def at(place: Tensor) -> Tensor:
        return torch.lerp(start, end, place[..., None, None])

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        value = ask(model, at(middle).flatten(0, 1)).reshape(shape)
        before = (value < wanted) == rising
        low = torch.where(before, middle, low)
        high = torch.where(before, high, middle)
    return at((low + high) / 2)


def _longest_reach(
    model: Oracle,
    start: Tensor,
    end: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the lines whose smaller answer at an end is largest; return their ends and it.

    A head is an odd function, so if both ends have the same sign, one of them is
    negated.
    """
    first = ask(model, start)
    last = ask(model, end)
    end = torch.where((first * last > 0)[:, None, None], -end, end)
    size = torch.minimum(first.abs(), last.abs())
    best = size.argsort(descending=True)[:PER_KIND]
    return start[best], end[best], size[best]


@dataclass(frozen=True, kw_only=True)
class AmplifiedExam(Exam):
    """Queries whose answers are known to ±τ: in `sets`, ordinary and amplified ones take turns.

    Ordinary answers, which may be off by τ, can only refute a model. Amplified queries
    have long keys and a short last token, which leaves the attention as it is and makes
    the answers large next to τ.
    """

    tolerance: float  # τ
    limit: float  # on the norm of a token

    @property
    def domain(self) -> Domain:
        """The domain of the ordinary queries; amplified ones are as long as they have to be."""
        return Domain.of(*zip(*self.sets[::2], strict=True))

    @classmethod
    def amplified(
        cls,
        oracle: Oracle,
        seed: int,
        tolerance: float,
        reach: float,
        max_norm: float | None,
    ) -> AmplifiedExam:
        """Draw the exam; amplified tokens have norm `reach`, and all have at most `max_norm`."""
        stream = random_stream(seed ^ _STREAM)
        limit = math.inf
        if max_norm is not None:
            limit = max_norm * (1 - 1e-12)  # less rounding
        sets: list[tuple[Tensor, Tensor]] = []
        for length in LENGTHS:
            for size, amplified in ((1 / math.sqrt(oracle.dim), False), (1.0, True)):
                sequences = _draw(size, length, PER_KIND, oracle.dim, stream)
                largest = float(lengths(sequences).max())
                gain = reach / largest if amplified else min(1.0, limit / largest)
                sequences[:, :-1] *= gain
                # A single token has no attention to preserve, so it is made longer too.
                if length > 1:
                    gain = min(1 / gain, limit / largest)
                sequences[:, -1] *= gain
                sets.append((sequences, ask(oracle, sequences)))
        return cls(tuple(sets), tolerance=tolerance, limit=limit)

    def grade(self, model: Oracle) -> Check:
        """Measure errors relative to the largest answer of each set; ordinary ones less τ."""
        errors: list[Tensor] = []
        for number, (sequences, answers) in enumerate(self.sets):
            scale = max(max_abs(answers), TINY)
            excused = self.tolerance if number % 2 == 0 else 0.0
            residual = differences(model, sequences, answers).reshape(-1) - excused
            errors.append(residual.clamp(min=0) / scale)
        return self.check(errors)

    def agrees(
        self,
        given: Tensor,
        answers: Tensor,
        allowed: float,
    ) -> bool:
        """Return whether answers differ by no more than 2τ and a share of the largest."""
        residual = (given - answers).abs() - 2 * self.tolerance
        return bool((residual <= max(allowed, NEARLY) * max_abs(answers)).all())

    def verdict(
        self,
        check: Check,
        step: Step,
        accepted: float,
    ) -> tuple[Status, str]:
        """Return status and reason; errors that τ and the proved error of W explain are excused.

        But if the proved error is half of W's largest entry or more, and may change a
        score of the longest tokens by 1, the answers have shown nothing of W.
        """
        model = step.model
        error = step.guarantee
        if check.worst <= NEARLY or error is None or not isinstance(model, Head):
            return verdict(check, accepted)
        max_norm = min(self.limit, math.sqrt(model.dim))
        if error >= max(max_abs(model.W) / 2, 1 / max_norm**2):
            return Status.NOT_IDENTIFIABLE, (
                f"±{self.tolerance:g} hides W: nothing narrower than ±{error:.1e} can be proved"
            )
        explained = all(self.explained(step, *each) for each in self.sets)
        return verdict(check, accepted, math.inf if explained else NEARLY)

    def explained(
        self,
        step: Step,
        sequences: Tensor,
        answers: Tensor,
    ) -> bool:
        """Return whether τ and the proved errors can cause the whole difference.

        An entrywise error e of W changes a score by s ≤ e·‖x_i‖₁‖x_N‖₁ at most. Scores
        that change by s move tanh(s/2) of the attention, and so an answer by up to that
        share of the spread of the values, 2·max|vᵀx_i|.
        """
        model = step.model
        error = step.guarantee
        error_v = step.guarantee_v
        if not isinstance(model, Head) or error is None or error_v is None:
            return False
        sizes = sequences.abs().sum(-1)
        largest = sizes.amax(-1)
        spread = 2 * (sequences @ model.v).abs().amax(-1)
        scores = error * largest * sizes[:, -1]
        if sequences.shape[1] == 1:
            scores = torch.zeros_like(scores)
        change = spread * torch.tanh(scores / 2)
        allowed = self.tolerance + error_v * largest + change
        small = NEARLY * max_abs(answers)
        return bool((differences(model, sequences, answers) <= allowed + small).all())


_COPIES = (2, 3)  # copies of a sequence: each token keeps its attention
_FACTORS = (0.5, 2.0)  # factors on a token: its score keeps its sign, without rounding
# of a pair: each token keeps its attention
_ARRANGEMENTS = ([0, 0, 1, 1], [1, 0, 0, 1])


def asked_again(
    oracle: Oracle,
    asked: Sequence[SingleTokens | Pairs],
    tolerance: float,
    precision: float,
) -> tuple[int, int]:
    """Return how many repeated answers contradict ±τ, and how many were repeated.

    Two answers that are more than 2τ (and rounding) apart cannot both be within τ of
    one truth.
    """
    dim = oracle.dim
    contradictions = 0
    count = 0
    size = batch_rows(2 * max(_COPIES), dim)
    for part in asked:
        rounding = (4 * dim + 16) * precision * max_abs(part.answers)
        for copies, start in product(_COPIES, range(0, len(part.answers), size)):
            rows = slice(start, start + size)
            again = scalar(ask(oracle, part.questions(rows).repeat(1, copies, 1)))
            change = (again - part.answers[rows]).abs()
            contradictions += int((change > 2 * tolerance + rounding).sum())
            count += len(again)
    return contradictions, count


def labels_again(
    oracle: Oracle,
    tokens: Tensor,
    positive: Tensor,
    pairs: Tensor,
    above: Tensor,
) -> tuple[int, int]:
    """Return how many labels of tokens (m, d) and pairs (k, 2, d) change, and of how many."""
    alone = tokens[:, None]
    changed = [signs(oracle, factor * alone) != positive for factor in _FACTORS]
    changed += [signs(oracle, pairs[:, order]) != above for order in _ARRANGEMENTS]
    differ = torch.cat(changed)
    return int(differ.sum()), len(differ)
