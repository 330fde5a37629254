"""Newton–CG: Levenberg–Marquardt without the matrix, for sizes where nd×nd does not fit.

Steps solve `min_p ‖J p + r‖² + μ‖p‖²` by conjugate gradients on products `J p` and `Jᵀ g` alone
(Hestenes and Stiefel's form for least squares, which never squares the residual's rounding).
Memory is n² numbers a head and a few n×d. A step is solved only as exactly as it deserves: to a
share `min(0.1, √(‖r‖/‖B‖))` of its gradient far away, ever better near the solution, so that
convergence is superlinear (Eisenstat and Walker 1996). Starts that have enough wait, masked, for
the others of their batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.equations import Equations, Linearised
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.race import State, Watch
from keyhole.invert.search import solve, solve_all

_GAVE_UP = 1e12
_LEAST = 1e-16


@dataclass(frozen=True)
class NewtonCG:
    """Matrix-free damped Gauss–Newton, from many starts at once; `inner` bounds the products."""

    starts: int = 16
    steps: int = 200
    seed: int = 0
    solutions: int = 1
    seconds: float | None = None
    device: str = "cpu"
    damping: float = 1e-2
    inner: int = 400

    def __call__(
        self, problem: Problem, *, start: Tensor | None = None, watch: Watch | None = None
    ) -> Inversion:
        return solve(self, problem, start=start, watch=watch)

    def many(self, problems: Sequence[Problem], *, watch: Watch | None = None) -> list[Inversion]:
        return solve_all(self, problems, watch=watch)

    def begin(self, equations: Equations, X: Tensor) -> State:
        r = equations.residuals(X)
        loss = equations.loss_of(r, X)
        alpha = torch.full_like(loss, self.damping)
        return State(X, loss, torch.zeros_like(loss, dtype=torch.bool), {"r": r, "alpha": alpha})

    def step(self, equations: Equations, state: State) -> State:
        X, r, alpha = state.X, state.memory["r"], state.memory["alpha"]
        near = equations.linearised(X)
        relative = state.loss / equations.B.square().sum((-2, -1)).clamp(min=1e-300)
        # The damping is measured by how much J stretches the residual's own direction.
        slope = near.backward(r)
        stretch = slope.square().sum((-2, -1)) / r.square().sum((-2, -1)).clamp(min=1e-300)
        mu = (alpha * relative.clamp(max=1.0) + _LEAST) * stretch
        forcing = relative.pow(0.25).clamp(max=0.1)
        p = least_squares_step(near, r, mu, equations.gamma * X, forcing, self.inner)
        ahead = X + p
        r_ahead = equations.residuals(ahead)
        loss = equations.loss_of(r_ahead, ahead)
        better = loss < state.loss
        wide = better[:, None, None]
        alpha = torch.where(better, (alpha / 5).clamp(min=_LEAST), alpha * 3)
        tiny = p.abs().amax((-2, -1)) <= 1e-15 * X.abs().amax((-2, -1))
        return State(
            torch.where(wide, ahead, X),
            torch.where(better, loss, state.loss),
            (alpha > _GAVE_UP) | (tiny & ~better),
            {"r": torch.where(wide, r_ahead, r), "alpha": alpha},
        )


def least_squares_step(
    near: Linearised, r: Tensor, mu: Tensor, pull: Tensor, forcing: Tensor, inner: int
) -> Tensor:
    """`argmin ‖J p + r‖² + (μ + γ)‖p‖² + 2⟨pull, p⟩`, each row to its own share of the gradient."""
    gamma = near.equations.gamma
    weight = (mu + gamma)[:, None, None]
    p = torch.zeros_like(near.H[:, 0, :, :1]) * near.keys[:, 0]
    left = -r
    gradient = near.backward(left) - pull
    direction = gradient
    size = gradient.square().sum((-2, -1))
    enough = forcing.square() * size
    for _ in range(inner):
        running = size > enough
        if not bool(running.any()):
            break
        image = near.forward(direction)
        curvature = image.square().sum((-2, -1)) + (weight * direction.square()).sum((-2, -1))
        stride = torch.where(running, size / curvature.clamp(min=1e-300), torch.zeros_like(size))
        wide = stride[:, None, None]
        p = p + wide * direction
        left = left - wide * image
        gradient = near.backward(left) - weight * p - pull
        before, size = size, gradient.square().sum((-2, -1))
        turn = size / before.clamp(min=1e-300)
        direction = gradient + turn[:, None, None] * direction
    return p
