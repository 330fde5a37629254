"""Adam, a baseline: Kingma and Ba 2015, batched over the starts.

The learning rate decays along half a cosine over the steps, because with a constant
rate Adam circles around a solution at about the distance of that rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.solvers.multistart import Iterate, Solver

_BETA1 = 0.9
_BETA2 = 0.999
_EPSILON = 1e-12


@dataclass(frozen=True)
class Adam(Solver[Iterate]):
    """First-order descent with a rate for each entry, from many starts at once."""

    starts: int = 64
    steps: int = 5000
    rate: float = 0.05

    def begin(self, equations: Equations, X: Tensor) -> Iterate:
        zeros = torch.zeros_like(X)
        return Iterate.at(
            equations, X, mean=zeros, square=zeros, age=X.new_zeros(len(X))
        )

    def step(self, equations: Equations, state: Iterate) -> Iterate:
        age = state.memory["age"] + 1
        slope = equations.linearised(state.x).gradient
        mean = _BETA1 * state.memory["mean"] + (1 - _BETA1) * slope
        square = _BETA2 * state.memory["square"] + (1 - _BETA2) * slope.square()
        count = age[:, None, None]
        direction = mean / (1 - _BETA1**count)
        size = (square / (1 - _BETA2**count)).sqrt() + _EPSILON
        rate = 0.5 * self.rate * (1 + torch.cos(math.pi * age / self.steps))
        X = state.x - rate[:, None, None] * direction / size
        memory = {"mean": mean, "square": square, "age": age}
        return Iterate(X, equations.loss(X), torch.zeros_like(state.finished), memory)
