"""The judge: attacks propose, shared code decides on queries that the attack did not use.

`settle` runs an attack step by step, turns every way of failing into a Status, and measures the
result (and each step on the way, for the plot of error against queries) on the same fresh
questions. Their answers are asked for once. The truth is never looked at: only tests and
benchmarks, which planted it, may compare parameters. `Exam` is for exact scores; inexact/judge.py
holds those for answers that are inexact or thresholded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.numerics import LinAlgError
from keyhole.core.text import percent
from keyhole.extract.domain import Domain, Scope, Witness, scope, within_reach
from keyhole.extract.extraction import Check, Extraction
from keyhole.extract.step import Step
from keyhole.oracle.counted import Counted
from keyhole.oracle.ledger import remembered
from keyhole.oracle.protocol import BudgetExhausted, NotFinite, Oracle, OracleError, ask

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

    def expected(self, dim: int) -> int | None: ...

    def __call__(self, oracle: Oracle) -> Extraction: ...


class Examination(Protocol):
    """Fresh questions with their answers, to judge any number of models by."""

    @property
    def domain(self) -> Domain:
        """What its questions cover."""
        ...

    def grade(self, model: Oracle) -> Check: ...

    def agrees(self, given: Tensor, answers: Tensor, allowed: float) -> bool:
        """Are a model's answers the target's, but for a relative error?"""
        ...

    def explained(self, step: Step, sequences: Tensor, answers: Tensor) -> bool:
        """Can what is proved of a model's errors have caused all that it is off here?"""
        ...

    def verdict(self, check: Check, step: Step, accepted: float) -> tuple[Status, str]: ...


Examine = Callable[[Oracle, int, Step], Examination]


@dataclass(frozen=True)
class Exam:
    """Questions for an oracle that answers exactly: short tokens first, then as many long ones."""

    papers: tuple[tuple[Tensor, Tensor], ...]
    excused: float = NEARLY  # the largest error with which a model is still an approximation

    @property
    def domain(self) -> Domain:
        return Domain.of(*zip(*self.papers, strict=True))

    @property
    def queries(self) -> int:
        return sum(len(answers) for _, answers in self.papers)

    @classmethod
    def draw(cls, oracle: Oracle, seed: int, lengths: tuple[int, ...] = LENGTHS) -> Exam:
        """Sequences of several lengths, tokens of norm about 1 and about √d."""
        stream = torch.Generator().manual_seed(seed ^ JUDGE_STREAM)
        papers: list[tuple[Tensor, Tensor]] = []
        for length in lengths:
            shape = (2, _PER_KIND, length, oracle.dim)
            sequences = torch.randn(shape, generator=stream, dtype=torch.float64)
            sequences[0] /= math.sqrt(oracle.dim)
            sequences = sequences.flatten(0, 1)
            papers.append(within_reach(oracle, sequences))
        return cls(tuple(papers))

    def grade(self, model: Oracle) -> Check:
        """The worst and mean error, each relative to the largest answer of its kind."""
        errors: list[Tensor] = []
        largest = max(float(answers.abs().max()) for _, answers in self.papers)
        # Where all answers of a kind cancel, rounding is measured by the others.
        least = max(_FAINT * largest, torch.finfo(torch.float64).tiny)
        for sequences, answers in self.papers:
            wrong = _differences(model, sequences, answers).unflatten(0, (2, -1)).flatten(1)
            scale = answers.abs().unflatten(0, (2, -1)).flatten(1).amax(1, keepdim=True)
            errors.append((wrong / scale.clamp(min=least)).clamp(max=_BEYOND).flatten())
        every = torch.cat(errors)
        return Check(float(every.max()), float(every.mean()), self.queries)

    def agrees(self, given: Tensor, answers: Tensor, allowed: float) -> bool:
        return bool((given - answers).abs().max() <= allowed * answers.abs().max())

    def explained(self, step: Step, sequences: Tensor, answers: Tensor) -> bool:  # noqa: ARG002
        return False

    def verdict(self, check: Check, step: Step, accepted: float) -> tuple[Status, str]:  # noqa: ARG002
        return verdict(check, accepted, self.excused)


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


def exact(oracle: Oracle, seed: int, step: Step) -> Examination:  # noqa: ARG001
    """The exam for answers that are what they are."""
    return Exam.draw(oracle, seed)


def settle(
    method: Method,
    oracle: Oracle,
    *,
    examine: Examine = exact,
    accepted: float | None = None,
) -> Extraction:
    """Run an attack and judge what it proposes.

    `accepted` is the error up to which a model counts as recovered: `method.tolerance` unless
    that name means something else there.
    """
    started = time.perf_counter()
    counted = Counted(oracle)
    known = remembered(oracle)
    witness = Witness(counted)
    steps, status, reason = attempt(method, witness)
    queries, free = counted.queries, remembered(oracle) - known
    seconds = time.perf_counter() - started

    last = steps[-1][1] if steps else None
    checks: list[Check] = []
    domain: Domain | None = None
    if status is Status.UNVERIFIED and last:
        try:
            exam = examine(counted, method.seed, last)
        except BudgetExhausted:
            reason = "the budget ended before the result could be checked"
        except (OracleError, InputError) as error:
            status, reason = Status.ORACLE_FAILED, str(error)
        else:
            checks = [exam.grade(step.model) for _, step in steps]
            limit = method.tolerance if accepted is None else accepted
            status, reason = exam.verdict(checks[-1], last, limit)
            if status in (Status.RECOVERED, Status.INEXACT):
                where = _scope(method, witness, exam, last, checks[-1], limit)
                domain = where.domain
                status, reason = where.applied(status, reason)
                if where.differs:
                    last = _unproved(last)  # it is not, everywhere, what the proof takes it for
            last = _confirmed(last, status, counted)
            checks[-1] = replace(
                checks[-1], queries=counted.queries - queries,
                remembered=remembered(oracle) - known - free,
            )  # fmt: skip
    if last and not checks and last.confirm is not None:
        last = _unproved(last)
    return Extraction(
        status=status,
        reason=_explained(status, reason, last),
        method=repr(method),
        model=last.model if last else None,
        queries=queries,
        seconds=seconds,
        check=checks[-1] if checks else None,
        domain=domain,
        remembered=free,
        floor=last.fewest if last else None,
        # What the answers contradict is not known, however much of it there is.
        known=last.share if last and status is not Status.MISMATCH else 0.0,
        trace=tuple((count, check.worst) for (count, _), check in zip(steps, checks, strict=False)),
        guarantee=last.guarantee if last else None,
        guarantee_v=last.guarantee_v if last else None,
        stated=last.stated if last else None,
    )


def _scope(
    method: Method, witness: Witness, exam: Examination, step: Step, check: Check,
    accepted: float,
) -> Scope:  # fmt: skip
    """Try a model that passed further out, and the target's early answers once more."""
    error = max(accepted, 4 * check.worst)
    longest = float(getattr(method, "max_norm", None) or math.inf)
    return scope(
        witness, step.model, method.seed, exam.domain, exam.agrees, error, longest,
        lambda sequences, answers: exam.explained(step, sequences, answers),
    )  # fmt: skip


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


def attempt(method: Method, counted: Witness) -> tuple[list[tuple[int, Step]], Status, str]:
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
    if status is Status.BUDGET:
        if last and last.floor is None:
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
