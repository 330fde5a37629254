"""The search from many starts that all solvers share.

Starts advance in batches, as large as memory allows. A start ends, and leaves its
batch, when it has converged, stalled or used up its steps. The search ends when it has
found as many solutions as were asked for, or when all starts have ended.

Unless the caller gives the starts, the first ones follow from the problem's structure:
the output, which is near the input of a residual stream or of a head that mostly
attends to itself, and the mean field, which is exact for small scores. The others are
Gaussian, and small, because Levenberg–Marquardt succeeds more often from small inputs
than from inputs of full size. With a residual connection, Gaussians of the output's
size around the output find more inputs.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.float64 import full, normal, random_stream
from keyhole.core.least_squares import NEWTON, minimize
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import DENSE, Equations
from keyhole.invert.derivatives.hessian import linearizer
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import SOLVED, Verdict, distinct, judge
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.continuation import warmed
from keyhole.invert.solvers.mean_field import mean_field
from keyhole.invert.solvers.reduce import Reduced, reduce

_EPS = torch.finfo(torch.float64).eps
_PROMISING = 1e-5  # a start whose relative residual is smaller is polished
_POLISHING = 4  # Newton steps
_BATCH_BYTES = {"cpu": 2**26, "cuda": 2**33}


class State(Protocol):
    """A batch of starts: where they are, their losses, and which of them have finished."""

    @property
    def x(self) -> Tensor: ...

    @property
    def loss(self) -> Tensor: ...

    @property
    def finished(self) -> Tensor: ...

    def keep(self, chosen: Tensor) -> Self: ...


@dataclass(frozen=True, eq=False)
class Iterate:
    """A state with further tensors of the solver in `memory`, by row."""

    x: Tensor
    loss: Tensor
    finished: Tensor
    memory: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @classmethod
    def at(cls, equations: Equations, X: Tensor, **memory: Tensor) -> Self:
        """The state in which a search from X begins."""
        loss = equations.loss(X)
        return cls(X, loss, torch.zeros_like(loss, dtype=torch.bool), memory)

    def keep(self, chosen: Tensor) -> Self:
        memory = {name: tensor[chosen] for name, tensor in self.memory.items()}
        return replace(
            self,
            x=self.x[chosen],
            loss=self.loss[chosen],
            finished=self.finished[chosen],
            memory=memory,
        )


AnyState = TypeVar("AnyState", bound=State)


class Multistart:
    """One search: advances batches of starts and judges each start that has ended.

    `age` counts the steps that each start of the batch has taken, and `history` holds
    its losses.
    """

    def __init__(
        self,
        method: Solver[Any],
        problem: Problem,
        start: Tensor | None,
        progress: Progress,
        began: float,
    ) -> None:
        self.method = method
        self.problem = problem
        self.progress = progress
        self.began = began
        self.reduced = Reduced(problem) if method.as_given else reduce(problem)
        self.equations = Equations.of(self.reduced.problem, method.device)
        self.scale = float(self.equations.B.abs().max().clamp(min=1e-300))
        self.deadline = began + (
            torch.inf if method.seconds is None else method.seconds
        )
        given = None if start is None else start.reshape(-1, *start.shape[-2:])
        self.given = None if given is None else self.reduced.project(given)
        self.total = method.starts if self.given is None else len(self.given)
        self.entered, self.age = 0, torch.empty(0, dtype=torch.long)
        unknowns = self.equations.length * self.equations.dim
        bytes_ = _BATCH_BYTES["cuda" if "cuda" in method.device else "cpu"]
        self.width = max(1, min(4096, bytes_ // (32 * unknowns**2)))
        self.iterations = 0
        self.solutions: list[Tensor] = []
        self.best: Tensor | None = None
        self.verdict: Verdict | None = None  # on the best input
        self.trace: tuple[tuple[int, float], ...] = ()
        self.best_loss = torch.inf

    def run(self) -> Inversion:
        interrupted = False
        while self.entered < self.total and not (
            interrupted or self._done or self._late
        ):
            try:
                self._enter(
                    range(self.entered, min(self.total, self.entered + self.width))
                )
                while len(self.age) and not self._late:
                    self._advance()
            except KeyboardInterrupt:
                interrupted = True
            if len(self.age):
                self._remember(torch.ones_like(self.age, dtype=torch.bool))
        return self._result(interrupted)

    @property
    def _done(self) -> bool:
        return len(self.solutions) >= self.method.solutions

    @property
    def _late(self) -> bool:
        return time.perf_counter() > self.deadline

    def _enter(self, numbers: range) -> None:
        """Begin the batch of the starts with these numbers."""
        if self.given is None:
            X = draw(self.reduced.problem, numbers, self.method.seed)
        else:
            X = self.given[numbers.start : numbers.stop]
        self.entered = numbers.stop
        X = self.equations.impose(X.to(self.equations.B.device, torch.float64))
        self.state: State = self.method.begin(self.equations, X)
        self.age = torch.zeros(len(X), dtype=torch.long)
        self.history = full(torch.nan, len(X), self.method.steps + 1)
        self.history[:, 0] = self.state.loss.cpu()

    def _advance(self) -> None:
        """Take one step with every start of the batch."""
        self.state = self.method.step(self.equations, self.state)
        loss = self.state.loss.cpu()
        # In this order, so that Ctrl-C between the two lines leaves no age without its
        # loss.
        self.history[torch.arange(len(self.age)), self.age + 1] = loss
        self.age += 1
        small = 2 * _EPS * self.scale
        target = self.equations.B[0].numel() * small * small  # small**2 may raise
        over = self.state.finished.cpu() | (self.age >= self.method.steps)
        over |= (loss <= target) | ~loss.isfinite()
        if over.any():
            self._remember(over)
            left = torch.zeros_like(over) if self._done else ~over
            self.state = self.state.keep(left.to(self.state.x.device))
            self.age = self.age[left]
            self.history = self.history[left]
        best = self.best_loss
        if len(self.age):
            best = min(best, float(self.state.loss.min()))
        done = self.entered - len(self.age)
        self.progress(done, self.total, f"starts, best {best**0.5:.1e}")

    def _remember(self, over: Tensor) -> None:
        """Judge those of the ended starts that are promising or better than all before."""
        loss = self.state.loss.cpu()
        near = _PROMISING * self.scale
        for row in over.nonzero().flatten().tolist():
            self.iterations += int(self.age[row])
            value = float(loss[row])
            promising = value <= near * near * self.equations.B[0].numel()
            if not (promising or value < self.best_loss):
                continue
            X = self.state.x[row].view(self.equations.length, -1)
            if promising and not self.method.as_given:
                X = polished(self.equations, X)
            X = self.reduced.restore(X).to(self.problem.B.device)
            self._consider(X, value, row)

    def _consider(
        self,
        X: Tensor,
        loss: float,
        row: int,
    ) -> None:
        """Keep X if it is a new solution, or the best so far while there is no solution."""
        verdict = judge(self.problem, X)
        exact = verdict.status in SOLVED
        if exact:
            before = len(self.solutions)
            self.solutions = distinct([*self.solutions, X])
            if len(self.solutions) == before:
                return
        better = loss < self.best_loss and not self.solutions
        if (exact and self.solutions[0] is X) or (not exact and better):
            self.best = X
            self.verdict = verdict
            losses = self.history[row, : int(self.age[row]) + 1].sqrt().tolist()
            self.trace = tuple(enumerate(losses))
        self.best_loss = min(self.best_loss, loss)

    def _result(self, interrupted: bool) -> Inversion:
        verdict = self.verdict
        reason = self._reason()
        status = Status.UNSOLVED if verdict is None else verdict.status
        if interrupted and status in (Status.UNSOLVED, Status.INEXACT):
            status = Status.INTERRUPTED
            reason = f"stopped; {reason}"
        return Inversion(
            status=status,
            reason=reason,
            method=repr(self.method),
            X=self.best,
            residual=None if verdict is None else verdict.residual,
            iterations=self.iterations,
            seconds=time.perf_counter() - self.began,
            starts=self.entered,
            solutions=tuple(self.solutions),
            condition=None if verdict is None else verdict.condition,
            trace=self.trace,
        )

    def _reason(self) -> str:
        tried = f"{self.entered} start{'s' if self.entered != 1 else ''}"
        if self.verdict is None:
            return f"no start gave a result ({tried})"
        if self.solutions:
            several = f"; {len(self.solutions)} different inputs have this output"
            return self.verdict.reason + (several if len(self.solutions) > 1 else "")
        return f"best {self.verdict.reason} after {tried} of at most {self.method.steps} steps"


_SMALL = 0.2  # standard deviation of Gaussian starts without a residual connection


def draw(
    problem: Problem,
    numbers: range,
    seed: int,
) -> Tensor:
    """The starts with these numbers, (R,n,d). A number gives the same start in any batch."""
    return torch.stack([_start(problem, number, seed) for number in numbers])


def _start(
    problem: Problem,
    number: int,
    seed: int,
) -> Tensor:
    shape = (problem.length, problem.dim)
    if number == 0 and problem.outputs == problem.dim:
        return problem.unbiased
    affordable = problem.length * problem.dim <= DENSE
    if number == 1 and affordable and (guess := mean_field(problem)) is not None:
        return warmed(problem, guess)
    stream = random_stream(hash((seed, 0, number)) & 0x7FFFFFFF)
    noise = normal(stream, *shape).to(problem.B.device)
    if problem.residual:
        return problem.B + problem.B.square().mean().sqrt() * noise
    return _SMALL * noise


def polished(equations: Equations, X: Tensor) -> Tensor:
    """Improve the last digits of X by Newton steps while each of them lowers the residual."""
    if X.numel() > DENSE:
        return X
    options = replace(NEWTON, max_steps=_POLISHING)
    return minimize(linearizer(equations), X.unsqueeze(0), options)[0][0]


class Solve(Protocol):
    """A method that inverts a problem, as the registry's entries construct it."""

    def __call__(
        self, problem: Problem, *, progress: Progress = silent
    ) -> Inversion: ...


@dataclass(frozen=True)
class Solver(ABC, Generic[AnyState]):
    """A search from many starts: `begin` and `step` act on a batch of inputs.

    The search ends after `solutions` different inputs. With `as_given`, a method takes
    its own steps on the original problem, as a paper says: the problem is not reduced,
    nor the result polished.
    """

    as_given: ClassVar[bool] = False

    starts: int = 64
    steps: int = 400
    seed: int = 0
    solutions: int = 1
    seconds: float | None = None
    device: str = "cpu"

    @abstractmethod
    def begin(self, equations: Equations, X: Tensor) -> AnyState: ...

    @abstractmethod
    def step(self, equations: Equations, state: AnyState) -> AnyState: ...

    def __call__(
        self,
        problem: Problem,
        *,
        start: Tensor | None = None,
        progress: Progress = silent,
    ) -> Inversion:
        """Search one problem; `start` (n×d or R×n×d) replaces the method's own starts."""
        began = time.perf_counter()
        if problem.fault:
            return Inversion(Status.NOT_APPLICABLE, problem.fault, repr(self))
        if start is not None and start.shape[-2:] != (problem.length, problem.dim):
            raise InputError(
                f"expected starts of shape n×d = {problem.length}×{problem.dim}, "
                f"got {'×'.join(map(str, start.shape))}"
            )
        try:
            return Multistart(self, problem, start, progress, began).run()
        except Unsuccessful as end:
            seconds = time.perf_counter() - began
            return Inversion(end.status, end.reason, repr(self), seconds=seconds)
