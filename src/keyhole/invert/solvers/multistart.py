"""The search from many starts that all solvers share.

Starts advance in batches, as many as memory allows. A start has finished, and leaves its batch,
when it converged, stalled or is out of steps; the search when it has as many solutions as were
asked for.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import DENSE, Equations, Smooth
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import Verdict, distinct, judge
from keyhole.invert.problem import Problem
from keyhole.invert.solvers import starts
from keyhole.invert.solvers.reduce import Reduced, reduce

_EPS = torch.finfo(torch.float64).eps
_PROMISING = 1e-5  # below this relative residual a start is worth polishing
_BATCH_BYTES = {"cpu": 2**26, "cuda": 2**33}


@dataclass(eq=False)
class State:
    """Where each row of a batch stands; `memory` holds what a solver carries along, row by row."""

    X: Tensor
    loss: Tensor
    stalled: Tensor
    memory: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @classmethod
    def at(cls, equations: Equations, X: Tensor, **memory: Tensor) -> Self:
        """The state in which a search from X begins."""
        loss = equations.loss(X)
        return cls(X, loss, torch.zeros_like(loss, dtype=torch.bool), memory)

    def keep(self, rows: Tensor) -> State:
        memory = {name: tensor[rows] for name, tensor in self.memory.items()}
        return State(self.X[rows], self.loss[rows], self.stalled[rows], memory)


@dataclass(eq=False)
class Record:
    """What is known about the problem so far."""

    problem: Problem
    reduced: Reduced
    polish: bool = True
    iterations: int = 0
    solutions: list[Tensor] = field(default_factory=list[Tensor])
    verdict: Verdict | None = None
    best: Tensor | None = None
    best_loss: float = torch.inf
    trace: tuple[tuple[int, float], ...] = ()


class Multistart:
    """One batch after the other: which starts run, and since when."""

    def __init__(
        self, method: Solver, record: Record, start: Tensor | None, progress: Progress, began: float
    ) -> None:
        self.method, self.record, self.progress = method, record, progress
        self.equations = Equations.of(record.reduced.problem, method.device)
        self.scale = float(self.equations.B.abs().max().clamp(min=1e-300))
        self.deadline = None if method.seconds is None else began + method.seconds
        given = None if start is None else start.reshape(-1, *start.shape[-2:])
        self.given = None if given is None else record.reduced.project(given)
        self.total = method.starts if self.given is None else len(self.given)
        self.entered, self.age = 0, torch.empty(0, dtype=torch.long)
        unknowns = self.equations.length * self.equations.dim
        bytes_ = _BATCH_BYTES["cuda" if "cuda" in method.device else "cpu"]
        self.width = max(1, min(4096, bytes_ // (32 * unknowns**2)))

    def run(self) -> bool:
        """True if a person stopped it."""
        stopped = False
        while self.entered < self.total and not (stopped or self._done or self._late()):
            try:
                self._enter(range(self.entered, min(self.total, self.entered + self.width)))
                while len(self.age) and not self._late():
                    self._advance()
            except KeyboardInterrupt:
                stopped = True
            if len(self.age):
                self._remember(torch.ones_like(self.age, dtype=torch.bool))
        return stopped

    @property
    def _done(self) -> bool:
        return len(self.record.solutions) >= self.method.solutions

    def _late(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def _enter(self, numbers: range) -> None:
        if self.given is None:
            X = starts.draw(self.record.reduced.problem, numbers, self.method.seed)
        else:
            X = self.given[numbers.start : numbers.stop]
        self.entered = numbers.stop
        X = self.equations.impose(X.to(self.equations.B.device, torch.float64))
        self.state = self.method.begin(self.equations, X)
        self.age = torch.zeros(len(X), dtype=torch.long)
        self.history = torch.full((len(X), self.method.steps + 1), torch.nan, dtype=torch.float64)
        self.history[:, 0] = self.state.loss.cpu()

    def _advance(self) -> None:
        self.state = self.method.step(self.equations, self.state)
        loss = self.state.loss.cpu()
        # In this order: Ctrl-C between the two must not leave an age without its loss.
        self.history[torch.arange(len(self.age)), self.age + 1] = loss
        self.age += 1
        small = 2 * _EPS * self.scale
        target = self.equations.B[0].numel() * small * small  # small**2 may raise
        over = (loss <= target) | self.state.stalled.cpu() | (self.age >= self.method.steps)
        over |= ~loss.isfinite()
        if over.any():
            self._remember(over)
            self._leave(torch.ones_like(over) if self._done else over)
        self._report()

    def _report(self) -> None:
        """Starts that have ended, of how many, and the least residual norm so far."""
        best = self.record.best_loss
        if len(self.age):
            best = min(best, float(self.state.loss.min()))
        done = self.entered - len(self.age)
        self.progress(done, self.total, f"starts, best {best**0.5:.1e}")

    def _leave(self, over: Tensor) -> None:
        unfinished = ~over
        self.state = self.state.keep(unfinished.to(self.state.X.device))
        self.age, self.history = self.age[unfinished], self.history[unfinished]

    def _remember(self, over: Tensor) -> None:
        """Judge what has finished; keep the best of what has not come through."""
        loss, record = self.state.loss.cpu(), self.record
        near = _PROMISING * self.scale
        for row in over.nonzero().flatten().tolist():
            record.iterations += int(self.age[row])
            value = float(loss[row])
            promising = value <= near * near * self.equations.B[0].numel()
            if not (promising or value < record.best_loss):
                continue
            X = self.state.X[row]
            if promising and record.polish:
                X = polished(self.equations, X)
            X = record.reduced.restore(X).to(record.problem.B.device)
            self._consider(X, value, row)

    def _consider(self, X: Tensor, loss: float, row: int) -> None:
        record, verdict = self.record, judge(self.record.problem, X)
        exact = verdict.status in (Status.RECOVERED, Status.NOT_IDENTIFIABLE)
        if exact:
            before = len(record.solutions)
            record.solutions = distinct([*record.solutions, X])
            if len(record.solutions) == before:
                return
        better = loss < record.best_loss and not record.solutions
        if (exact and record.solutions[0] is X) or (not exact and better):
            record.best, record.verdict = X, verdict
            losses = self.history[row, : int(self.age[row]) + 1].sqrt().tolist()
            record.trace = tuple(enumerate(losses))
        record.best_loss = min(record.best_loss, loss)


_ARMIJO = 1e-4
_STRIDE_HALVINGS = 30
_POLISHING = 4  # Newton steps


def line_search(
    equations: Equations, state: State, p: Tensor, stride: Tensor, promise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Halve each stride along p until the loss falls by a part of what the slope promises (Armijo).

    The inputs and losses then, and which rows moved; the others are as they were.
    """
    X, loss = state.X, state.loss
    taken = torch.zeros_like(state.stalled)
    for _ in range(_STRIDE_HALVINGS):
        trial = state.X + stride[:, None, None] * p
        value = equations.loss(trial)
        good = ~taken & (value <= state.loss + _ARMIJO * stride * promise)
        X = torch.where(good[:, None, None], trial, X)
        loss = torch.where(good, value, loss)
        taken = taken | good
        if bool(taken.all()):
            break
        stride = torch.where(taken, stride, 0.5 * stride)
    return X, loss, taken


def polished(equations: Smooth, X: Tensor) -> Tensor:
    """Newton steps by a direct solve, as long as each lowers the residual: the last digits."""
    if X.numel() > DENSE or equations.gamma > 0:
        return X
    X = X.unsqueeze(0)
    size = equations.residuals(X).norm()
    for _ in range(_POLISHING):
        J = equations.jacobian(X)[0]
        r = equations.residuals(X).reshape(-1, 1)
        if J.shape[0] == J.shape[1] and equations.fixed is None:
            step, info = torch.linalg.solve_ex(J, r)
            if int(info):
                break
        else:
            step = torch.linalg.pinv(J, rtol=1e-12) @ r
        ahead = X - step.reshape(X.shape)
        ahead_size = equations.residuals(ahead).norm()
        if not bool(ahead_size < size):
            break
        X, size = ahead, ahead_size
    return X.squeeze(0)


class Solve(Protocol):
    """Any method that inverts a problem: the registry's entries make these."""

    def __call__(self, problem: Problem, *, progress: Progress = silent) -> Inversion: ...


@dataclass(frozen=True)
class Solver(ABC):
    """A search from many starts: `begin` and `step` act on a batch of inputs.

    `solutions` different inputs end the search. `as_given` is for methods that follow a paper:
    nothing but their own steps on the loss itself, neither made simpler before nor polished after.
    """

    as_given: ClassVar[bool] = False

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
        """Search one problem; `start` (n×d or R×n×d) takes the place of the method's own starts."""
        began = time.perf_counter()
        try:
            record = _prepared(problem, start, self.as_given)
        except Unsuccessful as end:
            seconds = time.perf_counter() - began
            return Inversion(end.status, end.reason, repr(self), seconds=seconds)
        search = Multistart(self, record, start, progress, began)
        interrupted = search.run()
        return _inversion(self, record, search.entered, interrupted, began)


def _prepared(problem: Problem, start: Tensor | None, as_given: bool) -> Record:
    if problem.fault:
        raise Unsuccessful(Status.NOT_APPLICABLE, problem.fault)
    if start is not None and start.shape[-2:] != (problem.length, problem.dim):
        raise InputError(
            f"expected starts of shape n×d = {problem.length}×{problem.dim}, "
            f"got {'×'.join(map(str, start.shape))}"
        )
    return Record(problem, Reduced(problem) if as_given else reduce(problem), polish=not as_given)


def _inversion(
    method: Solver, record: Record, started: int, interrupted: bool, began: float
) -> Inversion:
    verdict = record.verdict
    status = Status.UNSOLVED if verdict is None else verdict.status
    reason = _reason(record, started, method.steps)
    if interrupted and status in (Status.UNSOLVED, Status.INEXACT):
        status, reason = Status.INTERRUPTED, f"stopped; {reason}"
    return Inversion(
        status=status,
        reason=reason,
        method=repr(method),
        X=record.best,
        residual=None if verdict is None else verdict.residual,
        iterations=record.iterations,
        seconds=time.perf_counter() - began,
        starts=started,
        solutions=tuple(record.solutions),
        condition=None if verdict is None else verdict.condition,
        trace=record.trace,
    )


def _reason(record: Record, started: int, steps: int) -> str:
    tried = f"{started} start{'s' if started != 1 else ''}"
    if record.verdict is None:
        return f"no start led anywhere ({tried})"
    if record.solutions:
        several = f"; {len(record.solutions)} different inputs have this output"
        return record.verdict.reason + (several if len(record.solutions) > 1 else "")
    return f"best {record.verdict.reason} after {tried} of at most {steps} steps"
