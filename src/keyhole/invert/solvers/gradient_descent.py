"""Gradient descent with a step that adapts: ours, and the fixed step of the paper.

`X ← X − t ∇L(X)`, each start with a stride t of its own: a step that lowers the loss as its slope
promises (Armijo) is taken and t grows, any other is not taken and t is halved. The paper's step is
fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import expect_number
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import Equations, gradient_of
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.multistart import Solver, State, solve, solve_all

_ARMIJO = 1e-4
_STUCK = 1e-14


@dataclass(frozen=True)
class GradientDescent(Solver):
    """Steepest descent from many starts at once."""

    starts: int = 64
    steps: int = 5000
    stride: float = 1e-2

    def begin(self, equations: Equations, X: Tensor) -> State:
        loss = equations.loss(X)
        stride = torch.full_like(loss, self.stride)
        return State(X, loss, torch.zeros_like(loss, dtype=torch.bool), {"stride": stride})

    def step(self, equations: Equations, state: State) -> State:
        stride = state.memory["stride"]
        slope = gradient_of(equations, state.X)
        ahead = state.X - stride[:, None, None] * slope
        loss = equations.loss(ahead)
        promise = _ARMIJO * stride * slope.square().sum((-2, -1))
        better = loss <= state.loss - promise
        return State(
            torch.where(better[:, None, None], ahead, state.X),
            torch.where(better, loss, state.loss),
            stride < _STUCK,
            {"stride": torch.where(better, 1.5 * stride, 0.5 * stride)},
        )


@dataclass(frozen=True)
class GradientDescentAsPublished(Solver):
    """A fixed step, as published in *Unmasking Transformers*, Section 3.2.

        1. Initialise X.   2. Compute ∇L(X).   3. X ← X − η ∇L(X), and again.

    The learning rate η (`rate`) is one number for the whole run; the paper names none, and its
    reason for convergence, that L is convex in X, does not hold (bounds.py). So nothing sees to
    it that a step goes down: above 2/λ, λ the greatest eigenvalue of the Hessian at a minimum, it
    does not converge there, and where the loss overflows the start ends. L is the loss itself: V
    is not taken out before, as for other solvers (reduce.py), and no Newton step follows for the
    last digits. Where to start is left open by the paper: at inputs of your own, or as our
    solvers do (starts.py).
    """

    starts: int = 64
    steps: int = 5000
    rate: float = 1e-2

    def __post_init__(self) -> None:
        expect_number("rate", self.rate, above=0)

    def __call__(
        self, problem: Problem, *, start: Tensor | None = None, progress: Progress = silent
    ) -> Inversion:
        return solve(self, problem, start=start, progress=progress, as_given=True)

    def many(self, problems: Sequence[Problem], *, progress: Progress = silent) -> list[Inversion]:
        return solve_all(self, problems, progress=progress, as_given=True)

    def begin(self, equations: Equations, X: Tensor) -> State:
        loss = equations.loss(X)
        return State(X, loss, ~loss.isfinite())

    def step(self, equations: Equations, state: State) -> State:
        ahead = state.X - self.rate * gradient_of(equations, state.X)
        loss = equations.loss(ahead)
        finite = loss.isfinite()
        return State(
            torch.where(finite[:, None, None], ahead, state.X),
            torch.where(finite, loss, state.loss),
            ~finite,
        )
