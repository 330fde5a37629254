"""The judge: attacks propose a model, and shared code measures it on queries that they did not use.

`settle` runs an attack step by step, turns every failure into a Status, and measures
the model of each step on the same fresh queries, which are sent once. If the last model
passes, it is tried on longer sequences and other norms (domain.py). The true weights
are never used: only tests and benchmarks, which made them, may compare parameters.
`Exam` is for exact scores; exams.py has exams for signs and inexact answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.float64 import TINY, normal, random_stream
from keyhole.core.numerics import LinAlgError
from keyhole.core.text import percent
from keyhole.extract.arithmetic import (
    ALLOWED,
    exact,
    own_error,
    precision_of,
    rounding,
    within_own_error,
)
from keyhole.extract.bilinear import max_abs
from keyhole.extract.domain import (
    CHANGED,
    Domain,
    Explorer,
    Witness,
    within,
    within_reach,
)
from keyhole.extract.extraction import Check, Extraction, Step
from keyhole.oracle.ledger import remembered
from keyhole.oracle.protocol import (
    BudgetExhausted,
    Counted,
    NotFinite,
    Oracle,
    OracleError,
    ask,
)

LENGTHS = (1, 2, 3, 5, 8)
# with a larger relative error, a model is another function, not an approximation
NEARLY = 1e-2
PER_KIND = 4  # queries of each length and norm
# share of the largest answer that is the least size errors are relative to
_TINY_SHARE = 1e-6
_SURE = 4.0  # standard errors by which a fitted model may be off
_COARSEST = 0.05  # of an answer: a less certain model cannot be told from another one
_INFINITE = 1e99  # stands for an infinite error, because JSON has no infinity
_SLACK = 4  # outside the exam, a model may have so many times its worst error in it
JUDGE_STREAM = 0x4A554447  # so that the judge has other queries than any attack


class Method:
    """An attack by queries, as a frozen dataclass of hyperparameters that defines `steps`."""

    seed: int = 0
    tolerance: float = 1e-8

    def __call__(self, oracle: Oracle) -> Extraction:
        return settle(self, oracle)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        """Yield what is known after more and more queries; the last step is judged."""
        raise NotImplementedError

    def expected_queries(self, dim: int) -> int | None:
        """Return how many queries it takes, or None if that is not known in advance."""
        del dim

    @property
    def accepted(self) -> float:
        """The error up to which a model counts as recovered."""
        return self.tolerance

    def examine(self, oracle: Oracle, step: Step) -> Exam:
        """Return fresh queries that suit what the target answers."""
        del step
        return Exam.draw(oracle, self.seed)


@dataclass(frozen=True)
class Exam:
    """Fresh queries with their answers, by which any number of models can be judged.

    This exam is for exact answers. In every set, the tokens of the first half have norm
    about 1, and those of the second half norm about √d. `excused` is the largest error
    with which a model is still an approximation. If the target answers with less than
    float64, `precision` is the relative error of an answer, and `own` has the absolute
    error of each (arithmetic.py).
    """

    sets: tuple[tuple[Tensor, Tensor], ...]
    excused: float = NEARLY
    precision: float = 0.0
    own: tuple[Tensor, ...] = ()

    @property
    def domain(self) -> Domain | None:
        """The lengths and norms that the queries cover; None if nothing outside is to be tried."""
        return Domain.of(*zip(*self.sets, strict=True))

    @classmethod
    def draw(
        cls,
        oracle: Oracle,
        seed: int,
        lengths: tuple[int, ...] = LENGTHS,
        gain: float = 1.0,
    ) -> Exam:
        """Draw sequences of several lengths, with tokens of norm about 1 and about √d.

        With a `gain`, all tokens but the last are so much longer and the last one so
        much shorter, which leaves the attention as it is and makes the answers larger.
        """
        stream = random_stream(seed ^ JUDGE_STREAM)
        sets: list[tuple[Tensor, Tensor]] = []
        for length in lengths:
            shape = (2, PER_KIND, length, oracle.dim)
            sequences = normal(stream, *shape)
            sequences[0] /= math.sqrt(oracle.dim)
            sequences[..., :-1, :] *= gain
            sequences[..., -1, :] *= gain if length == 1 else 1 / gain
            sets.append(within_reach(oracle, sequences.flatten(0, 1)))
        every = torch.cat([answers.flatten() for _, answers in sets])
        return cls(tuple(sets), precision=precision_of(oracle, every))

    def with_own_error(self, oracle: Oracle) -> Exam:
        """Return the exam with the error of its answers measured by equivalent queries."""
        if all(exact(oracle, answers, self.precision) for _, answers in self.sets):
            return self
        own = [own_error(oracle, *each, self.precision) for each in self.sets]
        scales = [scale.repeat_interleave(PER_KIND) for scale in self.scales]
        even = True
        for (_, answers), size in zip(self.sets, scales, strict=True):
            if answers.ndim == 1:
                error = rounding(oracle, answers, self.precision)
                even &= bool((error <= 2 * self.precision * size).all())
        if even:  # no link is near saturation, so the errors differ only by chance
            most = max(
                float((e / size).max()) for e, size in zip(own, scales, strict=True)
            )
            own = [most * size for size in scales]
        return replace(self, own=tuple(own))

    @property
    def scales(self) -> list[Tensor]:
        """The largest answer to tokens of norm about 1 and about √d, (2,) for each set."""
        largest = max(max_abs(answers) for _, answers in self.sets)
        # Answers of one length and norm may all cancel to rounding errors.
        least = max(_TINY_SHARE * largest, TINY)
        return [
            answers.abs().unflatten(0, (2, -1)).flatten(1).amax(1).clamp(min=least)
            for _, answers in self.sets
        ]

    def check(self, errors: list[Tensor]) -> Check:
        """Summarise errors, one for each query."""
        every = torch.cat(errors).clamp(max=_INFINITE)
        queries = sum(len(answers) for _, answers in self.sets)
        return Check(float(every.max()), float(every.mean()), queries)

    def grade(self, model: Oracle) -> Check:
        """Measure errors relative to the largest answer of the same length and norm."""
        errors: list[Tensor] = []
        for (sequences, answers), scale in zip(self.sets, self.scales, strict=True):
            residual = differences(model, sequences, answers)
            residual = residual.unflatten(0, (2, -1)).flatten(1)
            errors.append((residual / scale[:, None]).flatten())
        return self.check(errors)

    def agrees(
        self,
        given: Tensor,
        answers: Tensor,
        allowed: float,
    ) -> bool:
        """Return whether a model's answers equal the target's up to this relative error."""
        return within(given, answers, allowed)

    def explained(
        self,
        step: Step,
        sequences: Tensor,
        answers: Tensor,
    ) -> bool:
        """Return whether proved bounds explain a difference; for exact scores they never do."""
        del step, sequences, answers
        return False

    def verdict(
        self,
        check: Check,
        step: Step,
        accepted: float,
    ) -> tuple[Status, str]:
        """Return status and reason for a step whose errors are `check`."""
        status, reason = verdict(check, accepted, self.excused)
        if not self.own or status is Status.RECOVERED:
            return status, reason
        shares: list[Tensor] = []
        owns: list[Tensor] = []
        explained = True
        for (sequences, answers), scale, own in zip(
            self.sets, self.scales, self.own, strict=True
        ):
            count = len(own)
            scale = scale.repeat_interleave(count // 2)
            residual = differences(step.model, sequences, answers)
            residual = residual.reshape(count, -1).amax(1)
            model = own if step.uncertainty is None else step.uncertainty(sequences)
            allowed = accepted * scale + ALLOWED * own + _SURE * model
            explained &= bool((residual <= allowed).all())
            shares.append((model / scale)[: count // 2])  # tokens of norm about 1
            owns.append(own / scale)
        share = float(torch.cat(shares).quantile(0.9))
        reason += f"; the answers' own error is {float(torch.cat(owns).median()):.1e}"
        if not explained:
            return status, reason
        if share <= _COARSEST:
            return Status.RECOVERED, reason
        ratio = share / _COARSEST
        return Status.UNVERIFIED, (
            f"{reason}; they leave {share:.1e} of an answer open: "
            f"{ratio**2:.0f} times as many queries or "
            f"{math.ceil(math.log10(ratio))} more digits in each would do"
        )


def verdict(
    check: Check,
    accepted: float,
    excused: float = NEARLY,
) -> tuple[Status, str]:
    """Return the status and reason for these errors.

    `excused` is the largest error with which a model still counts as an approximation.
    """
    measured = f"worst error {check.worst:.1e} on {check.queries} fresh queries"
    if check.worst <= accepted:
        return Status.RECOVERED, measured
    return Status.INEXACT if check.worst <= excused else Status.MISMATCH, measured


def differences(
    model: Oracle,
    sequences: Tensor,
    answers: Tensor,
) -> Tensor:
    """Return the model's errors: infinite if it overflows or answers in another shape."""
    try:
        given = ask(model, sequences)
    except OracleError:
        given = answers.new_empty(0)
    if given.shape != answers.shape:
        return torch.full_like(answers, _INFINITE)
    return (given - answers).abs()


def judge(
    oracle: Oracle,
    model: Oracle,
    seed: int = 0,
) -> Check:
    """Compare a model with an oracle on fresh random queries."""
    return Exam.draw(oracle, seed).grade(model)


def settle(method: Method, oracle: Oracle) -> Extraction:
    """Run an attack, and judge the model it proposes by the method's exam."""
    started = time.perf_counter()
    counted = Counted(oracle)
    before = remembered(oracle)
    witness = Witness(counted)
    steps, status, reason = _attempt(method, witness)
    found = Extraction(
        status,
        reason,
        repr(method),
        model=None,
        queries=counted.queries,
        seconds=time.perf_counter() - started,
        remembered=remembered(oracle) - before,
    )
    if not steps:
        return replace(found, reason=_full_reason(status, reason, None))
    last = steps[-1][1]
    if status is Status.UNVERIFIED:
        found, last = _examine(found, method, witness, steps)
    check = found.check
    if check is not None:
        check = replace(
            check,
            queries=counted.queries - found.queries,
            remembered=remembered(oracle) - before - found.remembered,
        )
    elif last.confirm is not None:  # nobody has tested what its proof assumes
        last = _without_proof(last)
    return replace(
        found,
        reason=_full_reason(found.status, found.reason, last),
        check=check,
        model=last.model,
        lower_bound=last.lower_bound,
        layer=last.layer,
        # If answers contradict the model, none of it counts as known.
        known=0.0 if found.status is Status.MISMATCH else last.share,
        guarantee=last.guarantee,
        guarantee_v=last.guarantee_v,
        stated=last.stated,
    )


def _attempt(
    method: Method, witness: Witness
) -> tuple[list[tuple[int, Step]], Status, str]:
    """Return each step with the queries spent so far, the status, and its reason."""
    steps: list[tuple[int, Step]] = []
    try:
        for step in method.steps(witness):
            steps.append((witness.queries, step))
    except BudgetExhausted:
        return steps, Status.BUDGET, f"stopped after {witness.queries:,} queries"
    except NotFinite:
        reason = "no weights fit the answers: the next query would not be finite"
        return steps, Status.MISMATCH, reason
    except (OracleError, InputError) as error:
        # An oracle may refuse a query as wrong input.
        return steps, Status.ORACLE_FAILED, str(error)
    except Unsuccessful as end:
        return steps, end.status, end.reason
    except LinAlgError as error:  # from answers that overflow or make no sense
        return steps, Status.MISMATCH, f"no weights fit the answers: {error}"
    return steps, Status.UNVERIFIED, ""


def _examine(
    found: Extraction,
    method: Method,
    witness: Witness,
    steps: list[tuple[int, Step]],
) -> tuple[Extraction, Step]:
    """Return the extraction with its verdict, and the last step, without a refuted proof."""
    _, last = steps[-1]
    try:
        exam = method.examine(witness.inner, last)
    except BudgetExhausted:
        reason = "the budget ended before the result could be checked"
        return replace(found, reason=reason), last
    except (OracleError, InputError) as error:
        return replace(found, status=Status.ORACLE_FAILED, reason=str(error)), last
    except Unsuccessful as end:
        return replace(found, status=end.status, reason=end.reason), last
    checks = [exam.grade(step.model) for _, step in steps]
    check = checks[-1]
    limit = method.accepted
    status, reason = exam.verdict(check, last, limit)
    fitted = status is Status.MISMATCH and last.uncertainty is not None
    if status is Status.INEXACT or fitted:
        with suppress(BudgetExhausted, OracleError, InputError):
            exam = exam.with_own_error(witness.inner)
            status, reason = exam.verdict(check, last, limit)
    domain: Domain | None = None
    if status in (Status.RECOVERED, Status.INEXACT) and exam.domain is not None:
        error = max(limit, _SLACK * check.worst)
        changed = witness.contradicted(exam.agrees, error, exam.precision)
        domain, differs = _explore(method, witness, exam, exam.domain, last, error)
        reason = f"{reason}, tried on {domain}"
        if changed:
            status = Status.MISMATCH
            reason = (
                f"when repeated, {changed} of {len(witness.kept)} queries {CHANGED}"
            )
        elif differs:
            reason += "; beyond that the target answers differently"
            if status is Status.RECOVERED:
                status = Status.WITHIN
        if differs:
            last = _without_proof(last)  # the target is not what the proof assumes
    queries = [spent for spent, _ in steps]
    worst = [each.worst for each in checks]
    found = replace(
        found,
        status=status,
        reason=reason,
        check=check,
        domain=domain,
        trace=tuple(zip(queries, worst, strict=True)),
    )
    return found, _confirmed(last, status, witness.inner)


def _explore(
    method: Method,
    witness: Witness,
    exam: Exam,
    known: Domain,
    step: Step,
    error: float,
) -> tuple[Domain, bool]:
    """Return the domain in which model and target agree, and whether they differ outside it."""

    oracle = witness.inner

    def same(
        sequences: Tensor,
        given: Tensor,
        answers: Tensor,
        error: float,
    ) -> bool:
        if exam.agrees(given, answers, error):
            return True
        if exam.explained(step, sequences, answers):
            return True
        # The model inherits the answers' errors, which count for more in long tokens.
        allowed = _SLACK * ALLOWED
        return within_own_error(
            oracle, sequences, given, answers, exam.precision, allowed
        )

    max_norm = float(getattr(method, "max_norm", None) or math.inf)
    explorer = Explorer(oracle, step.model, same, error, method.seed, max_norm)
    return explorer.explore(known)


def _without_proof(step: Step, why: str = "") -> Step:
    """Return the step without its guarantee, with the reason as a remark."""
    remark = "; ".join(part for part in (step.remark, why) if part)
    return replace(step, guarantee=None, guarantee_v=None, remark=remark)


def _confirmed(
    step: Step,
    status: Status,
    oracle: Oracle,
) -> Step:
    """Return the step, without its guarantee if what that assumes does not hold."""
    if step.guarantee is None or status in (Status.MISMATCH, Status.WITHIN):
        return _without_proof(step)
    if step.confirm is None:
        return step
    try:
        contradictions, count = step.confirm(oracle)
    except BudgetExhausted:
        why = "the budget ended before the proof could be checked"
    except (OracleError, InputError, Unsuccessful) as error:
        why = str(error)
    else:
        if not contradictions:
            return step
        why = f"{contradictions} of {count} answers contradict that {step.assumed}"
    return _without_proof(step, f"not proved: {why}")


def _full_reason(
    status: Status,
    reason: str,
    last: Step | None,
) -> str:
    """Return the reason with what the last step adds: the known share, a remark, a proof."""
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
    proved = last.guarantee is not None and last.guarantee_v is not None
    if status in known and proved:
        reason += f"; W is within {last.guarantee:.1e} and v within {last.guarantee_v:.1e}, proved"
        if last.assumed:
            reason += f" if {last.assumed}"
    return reason
