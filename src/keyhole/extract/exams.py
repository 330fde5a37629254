"""Exams for oracles whose answers are thresholded or inexact, and what a proof about them rests on.

Answers within ±τ and labels that are right are asked for once more in other words: the same
sequence two and three times over, or a token twice as long where only its sign counts, is the same
to a head and another question to whoever blurs the answers or flips the labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.extract.bilinear import batch_rows, scalar
from keyhole.extract.domain import Domain
from keyhole.extract.extraction import Check, Step
from keyhole.extract.gauss_newton import Pairs, SingleTokens
from keyhole.extract.halfspace import signs
from keyhole.extract.judge import LENGTHS, NEARLY, PER_KIND, Exam, Method, verdict
from keyhole.oracle.defences import SignOnly
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import Oracle, ask

_STREAM = 0x4558414D  # keeps these questions apart from every attack's
_COARSEST = 0.1
_CHOICE = 4  # lines drawn for each one used: those with the largest answers at their ends
_HALVINGS = 60


def _draw(size: float, length: int, count: int, dim: int, stream: torch.Generator) -> Tensor:
    return size * torch.randn(count, length, dim, generator=stream, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class SignExam(Exam):
    """Questions near the decision boundary of one model, as many at each of the `levels`.

    Random questions say little about a model whose sign is nearly always right. So each question is
    moved along a line to where the *model* answers ±m for m = 0.1, 0.01, …: an oracle that agrees
    in sign there differs by less than m. The questions come from the model, but the attack never
    sees them, and one bit too far refutes it.
    """

    levels: tuple[float, ...]

    @classmethod
    def near(cls, oracle: Oracle, seed: int, step: Step, finest: float) -> SignExam:
        """`finest` is the last level; each costs 40 queries."""
        decades = max(0, round(math.log10(_COARSEST / finest)))
        levels = (*(_COARSEST / 10**k for k in range(decades)), finest)
        stream = torch.Generator().manual_seed(seed ^ _STREAM)
        sets: list[tuple[Tensor, Tensor]] = []
        sizes = 1 / math.sqrt(oracle.dim), 1.0
        for length in LENGTHS:
            shape = (length, _CHOICE * PER_KIND, oracle.dim)
            lines = [(_draw(size, *shape, stream), _draw(size, *shape, stream)) for size in sizes]
            questions = _near_zero(step.model, lines, levels, stream).flatten(0, 1)
            sets.append((questions, ask(oracle, questions)))
        return cls(tuple(sets), levels=levels)

    def grade(self, model: Oracle) -> Check:
        """For each question the finest level down to which all signs agree; 1 if none does."""
        sign = SignOnly(model)
        bounds = torch.tensor((1.0, *self.levels), dtype=torch.float64)
        errors: list[Tensor] = []
        for questions, answers in self.sets:
            right = (ask(sign, questions) == answers).unflatten(0, (len(self.levels), -1))
            errors.append(bounds[right.long().cumprod(0).sum(0)])
        return self.check(errors)

    def agrees(self, given: Tensor, answers: Tensor, allowed: float) -> bool:
        """The same signs, wherever the model's answer is clear of zero."""
        if bool(((given == 0) | (given == 1)).all()):  # answers of the target itself
            return bool((given == answers).all())
        clear = given.abs() > max(allowed, NEARLY) * given.abs().max()
        return bool(((given > 0) == (answers > 0))[clear].all())

    def verdict(self, check: Check, step: Step, accepted: float) -> tuple[Status, str]:
        # Scores of the longer tokens may be off by guarantee · d, and answers, which are small
        # differences of values, by several times that: then a coarse match is all to expect.
        blur = 0.0 if step.guarantee is None else 10 * step.guarantee * step.model.dim
        if check.worst > _COARSEST and blur > _COARSEST:
            return Status.UNVERIFIED, (
                f"W is only known to ±{step.guarantee:.1e}, too little to be refuted by signs"
            )
        return verdict(check, accepted, _COARSEST if blur > NEARLY else NEARLY)


class SignMethod(Method):
    """A method that reads signs, to an `accuracy` of every entry."""

    accuracy: float

    @property
    def finest(self) -> float:
        """The finest level of the exam: entries off by `accuracy` add up in an answer."""
        return min(100 * self.accuracy, 1e-2)

    @property
    def accepted(self) -> float:
        return self.finest

    def examine(self, oracle: Oracle, step: Step) -> Exam:
        return SignExam.near(oracle, self.seed, step, self.finest)


def _near_zero(
    model: Oracle,
    lines: list[tuple[Tensor, Tensor]],
    levels: tuple[float, ...],
    stream: torch.Generator,
) -> Tensor:
    """Sequences (levels, questions, n, d) where the model answers ± a level, by bisection.

    Relative to the smaller answer at the ends of the line.
    """
    chosen = [_best(model, *line) for line in lines]
    start, end, size = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    rising = ask(model, start) < 0
    shape = (len(levels), len(size))
    sides = torch.randint(0, 2, shape, generator=stream).double() * 2 - 1
    wanted = sides * torch.tensor(levels, dtype=torch.float64)[:, None] * size
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)

    def at(place: Tensor) -> Tensor:
        return torch.lerp(start, end, place[..., None, None])

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        value = ask(model, at(middle).flatten(0, 1)).reshape(shape)
        before = (value < wanted) == rising
        low, high = torch.where(before, middle, low), torch.where(before, high, middle)
    return at((low + high) / 2)


def _best(model: Oracle, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lines with the largest answers at both ends, and the smaller of the two.

    The function of one head is odd, so a second end of the same sign is turned around.
    """
    first, last = ask(model, start), ask(model, end)
    end = torch.where((first * last > 0)[:, None, None], -end, end)
    size = torch.minimum(first.abs(), last.abs())
    best = size.argsort(descending=True)[:PER_KIND]
    return start[best], end[best], size[best]


@dataclass(frozen=True, kw_only=True)
class AmplifiedExam(Exam):
    """Questions whose answers are known to ±τ: ordinary ones and amplified ones in turn.

    Answers within ±τ cannot be checked beyond τ. Long keys and a short last token leave the
    attention as it is and make the answers, and with them the precision, larger. Ordinary questions
    are asked too; with their answers off by up to τ they can only refute.
    """

    tolerance: float
    limit: float  # of the length of tokens

    @property
    def domain(self) -> Domain:
        """Of the ordinary questions; the others are as long as they have to be."""
        return Domain.of(*zip(*self.sets[::2], strict=True))

    @classmethod
    def amplified(
        cls, oracle: Oracle, seed: int, tolerance: float, reach: float, max_norm: float | None
    ) -> AmplifiedExam:
        """`reach` is how long an amplified token becomes, `max_norm` how long any may be."""
        stream = torch.Generator().manual_seed(seed ^ _STREAM)
        limit = math.inf if max_norm is None else max_norm * (1 - 1e-12)  # in spite of rounding
        sets: list[tuple[Tensor, Tensor]] = []
        for length in LENGTHS:
            for size, amplified in ((1 / math.sqrt(oracle.dim), False), (1.0, True)):
                sequences = _draw(size, length, PER_KIND, oracle.dim, stream)
                largest = float(torch.linalg.vector_norm(sequences, dim=-1).max())
                gain = reach / largest if amplified else min(1.0, limit / largest)
                sequences[:, :-1] *= gain
                # A single token has no attention to preserve, so it is amplified as it is.
                sequences[:, -1] *= gain if length == 1 else min(1 / gain, limit / largest)
                sets.append((sequences, ask(oracle, sequences)))
        return cls(tuple(sets), tolerance=tolerance, limit=limit)

    def grade(self, model: Oracle) -> Check:
        errors: list[Tensor] = []
        for number, (sequences, answers) in enumerate(self.sets):
            scale = answers.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
            excused = self.tolerance if number % 2 == 0 else 0.0
            wrong = (ask(model, sequences) - answers).abs().reshape(-1) - excused
            errors.append(wrong.clamp(min=0) / scale)
        return self.check(errors)

    def agrees(self, given: Tensor, answers: Tensor, allowed: float) -> bool:
        off = (given - answers).abs() - 2 * self.tolerance
        return bool((off <= max(allowed, NEARLY) * answers.abs().max()).all())

    def verdict(self, check: Check, step: Step, accepted: float) -> tuple[Status, str]:
        model, error = step.model, step.guarantee
        if check.worst <= NEARLY or error is None or not isinstance(model, Head):
            return verdict(check, accepted)
        max_norm = min(self.limit, math.sqrt(model.dim))
        if error >= max(float(model.W.abs().max()) / 2, 1 / max_norm**2):
            return Status.NOT_IDENTIFIABLE, (
                f"±{self.tolerance:g} hides W: nothing narrower than ±{error:.1e} can be proved"
            )
        explained = all(self.explained(step, *each) for each in self.sets)
        return verdict(check, accepted, math.inf if explained else NEARLY)

    def explained(self, step: Step, sequences: Tensor, answers: Tensor) -> bool:
        """Can τ and the proved errors have caused what is wrong?

        An entrywise error e of W moves a score by s ≤ e·‖x_i‖₁‖x_N‖₁ at most, and scores that move
        by s move tanh(s/2) of the attention: that much of the spread of the values, 2·max|vᵀx_i|.
        """
        model, error, error_v = step.model, step.guarantee, step.guarantee_v
        if not isinstance(model, Head) or error is None or error_v is None:
            return False
        sizes = sequences.abs().sum(-1)
        values = (sequences @ model.v).abs().amax(-1)
        scores = error * sizes.amax(-1) * sizes[:, -1]
        if sequences.shape[1] == 1:
            scores = torch.zeros_like(scores)
        moved = 2 * values * torch.tanh(scores / 2)
        allowed = self.tolerance + error_v * sizes.amax(-1) + moved
        small = NEARLY * answers.abs().max()
        return bool(((ask(model, sequences) - answers).abs() <= allowed + small).all())


_COPIES = (2, 3)  # of every token: each keeps its attention
_FACTORS = (0.5, 2.0)  # of a token: its score keeps its sign, without rounding
_ARRANGEMENTS = ([0, 0, 1, 1], [1, 0, 0, 1])  # of a pair: each token keeps its attention


def asked_again(
    oracle: Oracle, asked: Sequence[SingleTokens | Pairs], tolerance: float, precision: float
) -> tuple[int, int]:
    """How many answers are further off than 2τ (and rounding), of how many.

    Two answers more than 2τ apart cannot both be within τ of one truth.
    """
    dim, against, count = oracle.dim, 0, 0
    size = batch_rows(2 * max(_COPIES), dim)
    for part in asked:
        rounding = (4 * dim + 16) * precision * part.answers.abs().max()
        for copies, start in product(_COPIES, range(0, len(part.answers), size)):
            rows = slice(start, start + size)
            again = scalar(ask(oracle, part.questions(rows).repeat(1, copies, 1)))
            off = (again - part.answers[rows]).abs()
            against += int((off > 2 * tolerance + rounding).sum())
            count += len(again)
    return against, count


def labels_again(
    oracle: Oracle, tokens: Tensor, positive: Tensor, pairs: Tensor, above: Tensor
) -> tuple[int, int]:
    """How many labels differ, of how many: of single tokens (m, d) and of pairs (k, 2, d)."""
    single_tokens = [signs(oracle, factor * tokens.unsqueeze(1)) != positive for factor in _FACTORS]
    doubles = [signs(oracle, pairs[:, order]) != above for order in _ARRANGEMENTS]
    differ = torch.cat([*single_tokens, *doubles])
    return int(differ.sum()), len(differ)
