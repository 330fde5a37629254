"""What surrounds a search from many starts: problems are made simpler, results are written out.

A solver is `begin` and `step` on a batch of inputs (multistart.py); which problems can share one,
what a person's Ctrl-C leaves, and what a result says is decided here, once for all solvers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import Equations, kind
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.multistart import Method, Multistart, Record, State
from keyhole.invert.structure.reduce import Reduced, reduce


class Solve(Protocol):
    """Any method that inverts a problem: the registry's entries make these."""

    def __call__(self, problem: Problem, *, progress: Progress = silent) -> Inversion: ...


@dataclass(frozen=True)
class Solver(ABC):
    """What all solvers from many starts share; `solutions` different inputs end the search."""

    starts: int = 64
    steps: int = 400
    seed: int = 0
    solutions: int = 1
    seconds: float | None = None
    device: str = "cpu"

    @abstractmethod
    def begin(self, equations: Equations, X: Tensor) -> State: ...

    @abstractmethod
    def step(self, equations: Equations, state: State) -> State: ...

    def __call__(
        self, problem: Problem, *, start: Tensor | None = None, progress: Progress = silent
    ) -> Inversion:
        return solve(self, problem, start=start, progress=progress)

    def many(self, problems: Sequence[Problem], *, progress: Progress = silent) -> list[Inversion]:
        return solve_all(self, problems, progress=progress)


def solve(
    method: Method,
    problem: Problem,
    *,
    start: Tensor | None = None,
    progress: Progress = silent,
    as_given: bool = False,
) -> Inversion:
    """Search one problem; `start` (n×d or R×n×d) takes the place of the method's own starts."""
    return solve_all(method, [problem], start=start, progress=progress, as_given=as_given)[0]


def solve_all(
    method: Method,
    problems: Sequence[Problem],
    *,
    start: Tensor | None = None,
    progress: Progress = silent,
    as_given: bool = False,
) -> list[Inversion]:
    """Search problems together; those that reduce to one shape share their batches.

    `as_given` is for methods that follow a paper: nothing but their own steps on the loss itself,
    neither made simpler before nor polished after.
    """
    began = time.perf_counter()
    if start is not None and len(problems) > 1:
        raise InputError(f"expected starts for one problem, got {len(problems)} problems")
    ended: dict[int, Inversion] = {}
    groups: dict[str, list[int]] = {}
    records: dict[int, Record] = {}
    for number, problem in enumerate(problems):
        try:
            records[number] = _prepared(problem, start, as_given)
        except Unsuccessful as end:
            ended[number] = _unsolved(method, end.status, end.reason, began)
        else:
            groups.setdefault(kind(records[number].reduced.problem), []).append(number)
    interrupted = False
    for group in groups.values():
        if not interrupted:
            batch = [records[number] for number in group]
            interrupted = Multistart(method, batch, start, progress, began).run()
        for number in group:
            ended[number] = _inversion(method, records[number], interrupted, began)
    return [ended[number] for number in range(len(problems))]


def _prepared(problem: Problem, start: Tensor | None, as_given: bool) -> Record:
    if problem.fault:
        raise Unsuccessful(Status.NOT_APPLICABLE, problem.fault)
    if start is not None and start.shape[-2:] != (problem.length, problem.dim):
        raise InputError(
            f"expected starts of shape n×d = {problem.length}×{problem.dim}, "
            f"got {'×'.join(map(str, start.shape))}"
        )
    return Record(problem, Reduced(problem) if as_given else reduce(problem), polish=not as_given)


def _inversion(method: Method, record: Record, interrupted: bool, began: float) -> Inversion:
    verdict, X = record.verdict, record.best
    status = Status.UNSOLVED if verdict is None else verdict.status
    reason = _reason(record, method)
    if interrupted and status in (Status.UNSOLVED, Status.INEXACT):
        status, reason = Status.INTERRUPTED, f"stopped; {reason}"
    return Inversion(
        status=status,
        reason=reason,
        method=repr(method),
        X=X,
        residual=None if verdict is None else verdict.residual,
        iterations=record.iterations,
        seconds=time.perf_counter() - began,
        starts=record.starts,
        solutions=tuple(record.solutions),
        condition=None if verdict is None else verdict.condition,
        trace=record.trace,
    )


def _reason(record: Record, method: Method) -> str:
    tried = f"{record.starts} start{'s' if record.starts != 1 else ''}"
    if record.verdict is None:
        return f"no start led anywhere ({tried})"
    if record.solutions:
        several = f"; {len(record.solutions)} different inputs have this output"
        return record.verdict.reason + (several if len(record.solutions) > 1 else "")
    return f"best {record.verdict.reason} after {tried} of at most {method.steps} steps"


def _unsolved(method: Method, status: Status, reason: str, began: float) -> Inversion:
    return Inversion(
        status=status,
        reason=reason,
        method=repr(method),
        X=None,
        residual=None,
        iterations=0,
        seconds=time.perf_counter() - began,
    )
