"""The judge: attacks propose, shared code decides on queries that the attack did not use.

`settle` runs an attack step by step, turns every way of failing into a Status, and measures the
result (and each step on the way, for the plot of error against queries) on the same fresh
questions. Their answers are asked for once. The truth is never looked at: only tests and
benchmarks, which planted it, may compare parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from keyhole.errors import InputError
from keyhole.oracle.counted import Counted
from keyhole.oracle.protocol import BudgetExhausted, Oracle, OracleError, ask
from keyhole.oracle.storage import Planted
from keyhole.results import Check, Extraction, Status, Unsuccessful

LENGTHS = (1, 2, 3, 5, 8)
NEARLY = 1e-2  # beyond this relative error a model is not an approximation but another function
_PER_KIND = 4
_BEYOND = 1e99  # an infinite error, kept finite so that results can be written as JSON
_JUDGE_STREAM = 0x4A554447  # keeps the judge's questions apart from every attack's


@dataclass(frozen=True)
class Step:
    """What an attack knows at some point: a model, and the number of unknowns it settles."""

    model: Planted
    known: int
    floor: int


class Method(Protocol):
    """An attack by queries: a frozen set of hyperparameters that proposes models step by step."""

    @property
    def seed(self) -> int: ...

    @property
    def tolerance(self) -> float: ...

    def steps(self, oracle: Oracle) -> Iterator[Step]: ...

    def expected(self, dim: int) -> int | None: ...

    def __call__(self, oracle: Oracle) -> Extraction: ...


@dataclass(frozen=True)
class Exam:
    """Fresh questions with their answers, to judge any number of models by."""

    papers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def queries(self) -> int:
        return sum(len(answers) for _, answers in self.papers)

    @classmethod
    def draw(cls, oracle: Oracle, seed: int, lengths: tuple[int, ...] = LENGTHS) -> Exam:
        """Sequences of several lengths, tokens of norm about 1 and about √d."""
        stream = torch.Generator().manual_seed(seed ^ _JUDGE_STREAM)
        papers: list[tuple[Tensor, Tensor]] = []
        for length in lengths:
            for size in (1 / math.sqrt(oracle.dim), 1.0):
                shape = (_PER_KIND, length, oracle.dim)
                sequences = size * torch.randn(shape, generator=stream, dtype=torch.float64)
                papers.append((sequences, ask(oracle, sequences)))
        return cls(tuple(papers))

    def grade(self, model: Oracle) -> Check:
        """The worst and mean error, each relative to the largest answer of its kind."""
        errors: list[Tensor] = []
        for sequences, answers in self.papers:
            scale = answers.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
            errors.append((_differences(model, sequences, answers) / scale).clamp(max=_BEYOND))
        every = torch.cat(errors)
        return Check(float(every.max()), float(every.mean()), self.queries)


def _differences(model: Oracle, sequences: Tensor, answers: Tensor) -> Tensor:
    """How far a model is off; infinitely, if it overflows or answers in another shape."""
    try:
        given = ask(model, sequences)
    except OracleError:
        given = answers.new_empty(0)
    if given.shape != answers.shape:
        return answers.new_full((1,), _BEYOND)
    return (given - answers).abs().reshape(-1)


def judge(oracle: Oracle, model: Oracle, seed: int = 0) -> Check:
    """Compare a model with an oracle on fresh random queries."""
    return Exam.draw(oracle, seed).grade(model)


def settle(method: Method, oracle: Oracle, lengths: tuple[int, ...] = LENGTHS) -> Extraction:
    """Run an attack and judge what it proposes, on sequences of the lengths that it speaks of."""
    started = time.perf_counter()
    counted = Counted(oracle)
    free = remembered(oracle)
    steps: list[tuple[int, Step]] = []
    status, reason = Status.UNVERIFIED, ""
    try:
        for step in method.steps(counted):
            steps.append((counted.queries, step))
    except BudgetExhausted:
        status, reason = Status.BUDGET, f"stopped after {counted.queries:,} queries"
    except (OracleError, InputError) as error:  # a target may also find its questions unfit
        status, reason = Status.ORACLE_FAILED, str(error)
    except Unsuccessful as end:
        status, reason = end.status, end.reason
    queries, free = counted.queries, remembered(oracle) - free
    seconds = time.perf_counter() - started

    exam: Exam | None = None
    if status is Status.UNVERIFIED:
        try:
            exam = Exam.draw(counted, method.seed, lengths)
        except BudgetExhausted:
            reason = "the budget ended before the result could be checked"
        except (OracleError, InputError) as error:
            status, reason = Status.ORACLE_FAILED, str(error)
    last = steps[-1][1] if steps else None
    check = exam.grade(last.model) if exam and last else None
    if check:
        status, reason = _verdict(check, method.tolerance)
    if status is Status.BUDGET:
        share = f"{last.known / last.floor:.0%} of the unknowns are" if last else "nothing is"
        reason += f"; {share} known"
    return Extraction(
        status=status,
        reason=reason,
        method=repr(method),
        model=last.model if last else None,
        queries=queries,
        seconds=seconds,
        check=check,
        remembered=free,
        floor=last.floor if last else None,
        known=last.known / last.floor if last else 0.0,
        trace=tuple((count, exam.grade(step.model).worst) for count, step in steps) if exam else (),
    )


def _verdict(check: Check, tolerance: float) -> tuple[Status, str]:
    measured = f"worst error {check.worst:.1e} on {check.queries} fresh queries"
    if check.worst <= tolerance:
        return Status.RECOVERED, measured
    if check.worst <= NEARLY:
        return Status.INEXACT, measured
    return Status.MISMATCH, measured


def remembered(oracle: Oracle) -> int:
    """Questions that a ledger somewhere in the stack of wrappers has answered for free."""
    total, layer = 0, oracle
    while layer is not None:
        total += int(getattr(layer, "remembered", 0))
        layer = getattr(layer, "inner", None)
    return total
