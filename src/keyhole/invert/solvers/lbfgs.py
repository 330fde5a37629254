"""L-BFGS, a baseline: Nocedal 1980 (core/numerics.py), batched over the starts.

One tensor holds the last `memory` pairs (s, y) of every start. A pair without positive
curvature gets weight 0, which removes it from both loops. The stride is halved until
the loss decreases as the slope predicts (Armijo), for all starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.numerics import two_loops
from keyhole.invert.derivatives.equations import Equations, gradient_of
from keyhole.invert.solvers.multistart import Solver, State, line_search

_CURVED = 1e-14


@dataclass(frozen=True)
class LBFGS(Solver):
    """A quasi-Newton method with limited memory, from many starts at once."""

    starts: int = 64
    steps: int = 2000
    memory: int = 20

    def begin(self, equations: Equations, X: Tensor) -> State:
        slope = gradient_of(equations, X).flatten(1)
        pairs = X.new_zeros(len(X), self.memory, X[0].numel())
        return State.at(
            equations, X, slope=slope, s=pairs, y=pairs, weight=pairs[..., 0]
        )

    def step(self, equations: Equations, state: State) -> State:
        old = state.memory
        slope = old["slope"]
        pairs = list(
            zip(*(old[name].unbind(1) for name in ("s", "y", "weight")), strict=True)
        )
        p = -two_loops(slope, pairs, _scale(old["y"], old["weight"]))
        promise = (slope * p).sum(1)
        uphill = promise >= 0
        p = torch.where(uphill[:, None], -slope, p)
        promise = torch.where(uphill, -slope.square().sum(1), promise)
        # Without pairs the slope has no scale, so the first step has length at most 1.
        fresh = (old["weight"] == 0).all(1)
        stride = torch.where(fresh, 1 / p.norm(dim=1).clamp(min=1), 1.0)
        p = p.reshape(state.X.shape)
        ahead, loss, taken = line_search(equations, state, p, stride, promise)
        slope_ahead = gradient_of(equations, ahead).flatten(1)
        s = (ahead - state.X).flatten(1)
        y = slope_ahead - slope
        curvature = (s * y).sum(1)
        useful = taken & (curvature > _CURVED * s.norm(dim=1) * y.norm(dim=1))
        weight = torch.where(useful, 1 / curvature, torch.zeros_like(curvature))
        memory = {
            "slope": slope_ahead,
            "s": torch.cat([old["s"][:, 1:], s[:, None]], 1),
            "y": torch.cat([old["y"][:, 1:], y[:, None]], 1),
            "weight": torch.cat([old["weight"][:, 1:], weight[:, None]], 1),
        }
        # A failed line search resets the memory. A second failure, along the slope, is
        # a stall.
        memory["weight"] = torch.where(taken[:, None], memory["weight"], 0.0)
        return State(ahead, loss, ~taken & fresh, memory)


def _scale(y: Tensor, weight: Tensor) -> Tensor:
    """Return the size of the inverse Hessian along the newest pair, or 1 if its weight is 0."""
    square = y[:, -1].square().sum(1)
    return torch.where(
        weight[:, -1] > 0,
        1 / (weight[:, -1] * square).clamp(min=1e-300),
        torch.ones_like(square),
    )
