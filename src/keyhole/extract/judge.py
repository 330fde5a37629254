"""The judge: attacks propose, shared code decides on queries that the attack did not use.

`settle` runs an attack step by step, turns every way of failing into a Status, and measures the
result (and each step on the way, for the plot of error against queries) on the same fresh
questions. Their answers are asked for once. The truth is never looked at: only tests and
benchmarks, which planted it, may compare parameters. `Exam` is for exact scores, `SignExam` and
`AmplifiedExam` are for answers that are thresholded or inexact.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.numerics import LinAlgError
from keyhole.core.text import percent
from keyhole.extract.arithmetic import (
    ALLOWED,
    EXACT,
    own_error,
    precision_of,
    within_own_error,
)
from keyhole.extract.bilinear import batch_rows, scalar
from keyhole.extract.domain import Domain, Explorer, Scope, Witness, within, within_reach
from keyhole.extract.extraction import Check, Extraction, Step
from keyhole.extract.gauss_newton import Pairs, SingleTokens
from keyhole.extract.halfspace import signs
from keyhole.oracle.defences import SignOnly
from keyhole.oracle.ledger import remembered
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import BudgetExhausted, Counted, NotFinite, Oracle, OracleError, ask

LENGTHS = (1, 2, 3, 5, 8)
NEARLY = 1e-2  # beyond this relative error a model is not an approximation but another function
_PER_KIND = 4
_FAINT = 1e-6
_BEYOND = 1e99  # an infinite error, kept finite so that results can be written as JSON
JUDGE_STREAM = 0x4A554447  # keeps the judge's questions apart from every attack's


class Method(Protocol):
    """An attack by queries: a frozen set of hyperparameters that proposes models step by step."""

    @property
    def seed(self) -> int: ...

    @property
    def tolerance(self) -> float: ...

    def steps(self, oracle: Oracle) -> Iterator[Step]: ...

    def expected_queries(self, dim: int) -> int | None: ...

    def __call__(self, oracle: Oracle) -> Extraction: ...


@dataclass(frozen=True)
class Exam:
    """Fresh questions with their answers, to judge any number of models by.

    This one is for an oracle that answers exactly: in every set short tokens come first, then as
    many long ones. `excused` is the largest error with which a model is still an approximation.
    Where the target computes with less than float64, `precision` is that of an answer and `own` the
    error of these, relative to the largest of their kind (arithmetic.py).
    """

    sets: tuple[tuple[Tensor, Tensor], ...]
    excused: float = NEARLY
    precision: float = 0.0
    own: float = 0.0

    @property
    def domain(self) -> Domain | None:
        """What the questions cover; None where nothing is to be tried beyond them."""
        return Domain.of(*zip(*self.sets, strict=True))

    @property
    def queries(self) -> int:
        return sum(len(answers) for _, answers in self.sets)

    @classmethod
    def draw(cls, oracle: Oracle, seed: int, lengths: tuple[int, ...] = LENGTHS) -> Exam:
        """Sequences of several lengths, tokens of norm about 1 and about √d."""
        stream = torch.Generator().manual_seed(seed ^ JUDGE_STREAM)
        sets: list[tuple[Tensor, Tensor]] = []
        for length in lengths:
            shape = (2, _PER_KIND, length, oracle.dim)
            sequences = torch.randn(shape, generator=stream, dtype=torch.float64)
            sequences[0] /= math.sqrt(oracle.dim)
            sets.append(within_reach(oracle, sequences.flatten(0, 1)))
        precision = precision_of(oracle, torch.cat([answers.flatten() for _, answers in sets]))
        return cls(tuple(sets), precision=precision)

    def with_own_error(self, oracle: Oracle) -> Exam:
        """The exam with the error of its answers measured: every question in three other ways."""
        if self.precision <= EXACT:
            return self
        own = [own_error(oracle, *each, self.precision).unflatten(0, (2, -1)) for each in self.sets]
        shares = [error.amax(1) / scale for error, scale in zip(own, self.scales, strict=True)]
        return replace(self, own=float(torch.stack(shares).max()))

    @property
    def scales(self) -> list[Tensor]:
        """The largest answer to short tokens and to long ones, (2,) for each set."""
        largest = max(float(answers.abs().max()) for _, answers in self.sets)
        # Where all answers of a kind cancel, rounding is measured by the others.
        least = max(_FAINT * largest, torch.finfo(torch.float64).tiny)
        sizes = [answers.abs().unflatten(0, (2, -1)).flatten(1).amax(1) for _, answers in self.sets]
        return [size.clamp(min=least) for size in sizes]

    def check(self, errors: list[Tensor]) -> Check:
        every = torch.cat(errors)
        return Check(float(every.max()), float(every.mean()), self.queries)

    def grade(self, model: Oracle) -> Check:
        """The worst and mean error, each relative to the largest answer of its kind."""
        errors: list[Tensor] = []
        for (sequences, answers), scale in zip(self.sets, self.scales, strict=True):
            wrong = _differences(model, sequences, answers).unflatten(0, (2, -1)).flatten(1)
            errors.append((wrong / scale[:, None]).clamp(max=_BEYOND).flatten())
        return self.check(errors)

    def agrees(self, given: Tensor, answers: Tensor, allowed: float) -> bool:
        """Are a model's answers the target's, but for a relative error?"""
        return within(given, answers, allowed)

    def explained(self, step: Step, sequences: Tensor, answers: Tensor) -> bool:
        """Can what is proved of a model's errors have caused all that it is off by?"""
        del step, sequences, answers
        return False

    def verdict(self, check: Check, step: Step, accepted: float) -> tuple[Status, str]:
        del step
        status, reason = verdict(check, max(accepted, ALLOWED * self.own), self.excused)
        return status, f"{reason}; the answers' own error is {self.own:.1e}" if self.own else reason


Examine = Callable[[Oracle, Step], Exam]


def _differences(model: Oracle, sequences: Tensor, answers: Tensor) -> Tensor:
    """How far a model is off; infinitely, if it overflows or answers in another shape."""
    try:
        given = ask(model, sequences)
    except OracleError:
        given = answers.new_empty(0)
    if given.shape != answers.shape:
        return torch.full_like(answers, _BEYOND)
    return (given - answers).abs()


def judge(oracle: Oracle, model: Oracle, seed: int = 0) -> Check:
    """Compare a model with an oracle on fresh random queries."""
    return Exam.draw(oracle, seed).grade(model)


def settle(
    method: Method, oracle: Oracle, *, examine: Examine | None = None, accepted: float | None = None
) -> Extraction:
    """Run an attack and judge what it proposes, by `Exam` unless `examine` draws another exam.

    `accepted` is the error up to which a model counts as recovered: `method.tolerance` unless
    that name means something else there.
    """
    started = time.perf_counter()
    counted = Counted(oracle)
    before = remembered(oracle)
    witness = Witness(counted)
    steps, status, reason = _attempt(method, witness)
    found = Extraction(
        status, reason, repr(method), model=None, queries=counted.queries,
        seconds=time.perf_counter() - started, remembered=remembered(oracle) - before,
    )  # fmt: skip
    if not steps:
        return replace(found, reason=_explained(status, reason, None))
    last = steps[-1][1]
    if status is Status.UNVERIFIED:
        limit = method.tolerance if accepted is None else accepted
        try:
            exam = examine(counted, last) if examine else Exam.draw(counted, method.seed)
        except BudgetExhausted:
            reason = "the budget ended before the result could be checked"
            found = replace(found, reason=reason)
        except (OracleError, InputError) as error:
            found = replace(found, status=Status.ORACLE_FAILED, reason=str(error))
        except Unsuccessful as end:
            found = replace(found, status=end.status, reason=end.reason)
        else:
            found, last = _examined(found, method, witness, exam, steps, limit)
    check = found.check
    if check is not None:
        asked = counted.queries - found.queries
        free = remembered(oracle) - before - found.remembered
        check = replace(check, queries=asked, remembered=free)
    elif last.confirm is not None:
        last = _unproved(last)
    return replace(
        found, reason=_explained(found.status, found.reason, last), check=check, model=last.model,
        lower_bound=last.lower_bound, layer=last.layer,
        # What the answers contradict is not known, however much of it there is.
        known=0.0 if found.status is Status.MISMATCH else last.share,
        guarantee=last.guarantee, guarantee_v=last.guarantee_v, stated=last.stated,
    )  # fmt: skip


def _examined(
    found: Extraction, method: Method, witness: Witness, exam: Exam,
    steps: list[tuple[int, Step]], limit: float,
) -> tuple[Extraction, Step]:  # fmt: skip
    """The extraction judged by an exam, and its last step with what of its proof still holds."""
    checks = [exam.grade(step.model) for _, step in steps]
    check, (_, last) = checks[-1], steps[-1]
    status, reason = exam.verdict(check, last, limit)
    if status is Status.INEXACT:
        with suppress(BudgetExhausted, OracleError, InputError):
            exam = exam.with_own_error(witness.inner)
            status, reason = exam.verdict(check, last, limit)
    domain: Domain | None = None
    if status in (Status.RECOVERED, Status.INEXACT) and exam.domain is not None:
        where = _scope(method, witness, exam, exam.domain, last, max(limit, 4 * check.worst))
        domain = where.domain
        status, reason = where.applied(status, reason)
        if where.differs:
            last = _unproved(last)  # it is not, everywhere, what the proof takes it for
    trace = tuple((queries, each.worst) for (queries, _), each in zip(steps, checks, strict=True))
    found = replace(found, status=status, reason=reason, check=check, domain=domain, trace=trace)
    return found, _confirmed(last, status, witness.inner)


def _scope(
    method: Method, witness: Witness, exam: Exam, known: Domain, step: Step, error: float
) -> Scope:
    """Try a model that passed further out, and the target's early answers once more."""

    def steady(sequences: Tensor, given: Tensor, answers: Tensor, error: float) -> bool:
        return exam.agrees(given, answers, error) or within_own_error(
            witness.inner, sequences, given, answers, exam.precision
        )

    def same(sequences: Tensor, given: Tensor, answers: Tensor, error: float) -> bool:
        return (
            exam.agrees(given, answers, error)
            or exam.explained(step, sequences, answers)
            # The model inherits the answers' errors, and far out they weigh more.
            or within_own_error(
                witness.inner, sequences, given, answers, exam.precision, 4 * ALLOWED
            )
        )

    changed = witness.contradicted(steady, error)
    max_norm = float(getattr(method, "max_norm", None) or math.inf)
    explorer = Explorer(witness.inner, step.model, same, error, method.seed, max_norm)
    return Scope(*explorer.explore(known), changed, len(witness.kept))


def _unproved(step: Step, why: str = "") -> Step:
    remark = "; ".join(part for part in (step.remark, why) if part)
    return replace(step, guarantee=None, guarantee_v=None, remark=remark)


def _confirmed(step: Step, status: Status, oracle: Oracle) -> Step:
    """The step, without its guarantee where what that rests on does not hold."""
    if step.guarantee is None or status in (Status.MISMATCH, Status.WITHIN):
        return _unproved(step)
    if step.confirm is None:
        return step
    try:
        against, asked = step.confirm(oracle)
    except BudgetExhausted:
        return _unproved(step, "not proved: the budget ended before the proof could be checked")
    except (OracleError, InputError, Unsuccessful) as error:
        return _unproved(step, f"not proved: {error}")
    if not against:
        return step
    return _unproved(
        step, f"not proved: {against} of {asked} answers contradict that {step.assumed}"
    )


def _attempt(method: Method, counted: Witness) -> tuple[list[tuple[int, Step]], Status, str]:
    """What an attack proposes after how many queries, and how it ended."""
    steps: list[tuple[int, Step]] = []
    try:
        for step in method.steps(counted):
            steps.append((counted.queries, step))
    except BudgetExhausted:
        return steps, Status.BUDGET, f"stopped after {counted.queries:,} queries"
    except NotFinite:
        reason = "no weights fit the answers: the next question would not be finite"
        return steps, Status.MISMATCH, reason
    except (OracleError, InputError) as error:  # a target may also find its questions unfit
        return steps, Status.ORACLE_FAILED, str(error)
    except Unsuccessful as end:
        return steps, end.status, end.reason
    except LinAlgError as error:  # from answers that overflow or make no sense
        return steps, Status.MISMATCH, f"no weights fit the answers: {error}"
    return steps, Status.UNVERIFIED, ""


def verdict(check: Check, accepted: float, excused: float = NEARLY) -> tuple[Status, str]:
    """`excused`: the largest error with which a model still counts as an approximation."""
    measured = f"worst error {check.worst:.1e} on {check.queries} fresh queries"
    if check.worst <= accepted:
        return Status.RECOVERED, measured
    if check.worst <= excused:
        return Status.INEXACT, measured
    return Status.MISMATCH, measured


def _explained(status: Status, reason: str, last: Step | None) -> str:
    """The reason, with what is known besides."""
    if last and last.layer:
        return f"{reason}; {last.layer}"
    if status is Status.BUDGET:
        if last and last.unknowns is None:
            return f"{reason}; how many unknowns there are is not known yet"
        share = f"{percent(last.share)} of the unknowns are" if last else "nothing is"
        return f"{reason}; {share} known"
    known = (Status.RECOVERED, Status.WITHIN, Status.INEXACT)
    if last is None or status not in (*known, Status.UNVERIFIED):
        return reason
    if last.remark:
        reason = f"{reason}; {last.remark}"
    if status in known and last.guarantee is not None and last.guarantee_v is not None:
        reason += f"; W is within {last.guarantee:.1e} and v within {last.guarantee_v:.1e}, proved"
        reason += f" if {last.assumed}" if last.assumed else ""
    return reason


# Exams for oracles whose answers are thresholded or inexact.

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
            shape = (length, _CHOICE * _PER_KIND, oracle.dim)
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
    best = size.argsort(descending=True)[:_PER_KIND]
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
                sequences = _draw(size, length, _PER_KIND, oracle.dim, stream)
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


# What a proof rests on, asked once more in other words: answers within ±τ, labels that are right.
#
# The same sequence two and three times over, or a token twice as long where only its sign counts,
# is the same to a head and another question to whoever blurs the answers or flips the labels.

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
