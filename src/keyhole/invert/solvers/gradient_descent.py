"""Gradient descent with an adaptive step (ours) and with the paper's fixed step.

*Unmasking Transformers*, Section 3.2: `X ← X − t ∇L(X)`. Here each start has its own
step size t. A step that decreases the loss enough (Armijo) is taken and t grows; any
other is rejected and t is halved. `GradientDescentAsPublished` keeps t fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from keyhole.core.errors import expect_number
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.solvers.multistart import Iterate, Solver

_ARMIJO = 1e-4
_STALLED = 1e-14


@dataclass(frozen=True)
class GradientDescent(Solver[Iterate]):
    """Steepest descent from many starts at once."""

    starts: int = 64
    steps: int = 5000
    stride: float = 1e-2

    def begin(self, equations: Equations, X: Tensor) -> Iterate:
        return Iterate.at(equations, X, stride=X.new_full((len(X),), self.stride))

    def step(self, equations: Equations, state: Iterate) -> Iterate:
        stride = state.memory["stride"]
        slope = equations.linearised(state.x).gradient
        ahead = state.x - stride[:, None, None] * slope
        loss = equations.loss(ahead)
        promise = _ARMIJO * stride * slope.square().sum((-2, -1))
        better = loss <= state.loss - promise
        return Iterate(
            torch.where(better[:, None, None], ahead, state.x),
            torch.where(better, loss, state.loss),
            stride < _STALLED,
            {"stride": torch.where(better, 1.5 * stride, 0.5 * stride)},
        )


@dataclass(frozen=True)
class GradientDescentAsPublished(Solver[Iterate]):
    """A fixed step, as published in *Unmasking Transformers*, Section 3.2.

        1. Initialise X.   2. Compute ∇L(X).   3. X ← X − η ∇L(X), and repeat.

    The learning rate η (`rate`) is constant. The paper states no value, and its reason
    for convergence, that L is convex in X, does not hold (bounds.py). So a step may
    increase the loss. If η exceeds 2/λ, where λ is the largest eigenvalue of the
    Hessian at a minimum, the iteration does not converge to that minimum. A start ends
    if its loss overflows. The problem is not reduced first, as for other solvers
    (reduce.py), and the result is not polished. The paper does not say where to start;
    this solver starts like the others (multistart.py).
    """

    as_given: ClassVar[bool] = True

    starts: int = 64
    steps: int = 5000
    rate: float = 1e-2

    def __post_init__(self) -> None:
        expect_number("rate", self.rate, above=0)

    def begin(self, equations: Equations, X: Tensor) -> Iterate:
        loss = equations.loss(X)
        return Iterate(X, loss, ~loss.isfinite())

    def step(self, equations: Equations, state: Iterate) -> Iterate:
        ahead = state.x - self.rate * equations.linearised(state.x).gradient
        loss = equations.loss(ahead)
        finite = loss.isfinite()
        return Iterate(
            torch.where(finite[:, None, None], ahead, state.x),
            torch.where(finite, loss, state.loss),
            ~finite,
        )
