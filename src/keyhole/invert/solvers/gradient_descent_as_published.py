"""Gradient descent with a fixed step, as published in *Unmasking Transformers*, Section 3.2.

    1. Initialise X.   2. Compute ∇L(X).   3. X ← X − η ∇L(X), and again.

The learning rate η (`rate`) is one number for the whole run; the paper names none, and its reason
for convergence, that L is convex in X, does not hold (bounds.py). So nothing sees to it that a step
goes down: above 2/λ, λ the greatest eigenvalue of the Hessian at a minimum, it does not converge
there, and where the loss overflows the start ends. L is the loss itself: V is not taken out before,
as for other solvers (reduce.py), and no Newton step follows for the last digits. Where to start is
left open by the paper: at inputs of your own, or as our solvers do (starts.py).
gradient_descent.py is ours and adapts its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import expect_number
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.loss import gradient_of
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.multistart import State
from keyhole.invert.solvers.solver import Solver, solve, solve_all


@dataclass(frozen=True)
class GradientDescentAsPublished(Solver):
    """`X ← X − rate·∇L(X)`, `steps` times, from many starts at once."""

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
