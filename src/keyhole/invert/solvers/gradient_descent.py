"""Gradient descent with a step that adapts: ours, beside Section 3.2 of *Unmasking Transformers*.

`X ← X − t ∇L(X)`, each start with a stride t of its own: a step that lowers the loss as its slope
promises (Armijo) is taken and t grows, any other is not taken and t is halved. The paper's step is
fixed: gradient_descent_as_published.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.loss import gradient_of
from keyhole.invert.solvers.multistart import State
from keyhole.invert.solvers.solver import Solver

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
