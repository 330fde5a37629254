"""Newton–CG: Levenberg–Marquardt without the matrix, for sizes where nd×nd does not fit.

Steps solve `min_p ‖J p + r‖² + μ‖p‖²` by conjugate gradients on products `J p` and `Jᵀ g` alone
(Hestenes and Stiefel's form for least squares, which never squares the residual's rounding).
Memory is n² numbers a head and a few n×d. A step is solved only as exactly as it deserves: to a
share `min(0.1, √(‖r‖/‖B‖))` of its gradient far away, ever better near the solution, so that
convergence is superlinear (Eisenstat and Walker 1996). Starts that have enough wait, masked, for
the others of their batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import Equations, Linearised
from keyhole.invert.solvers.levenberg_marquardt import LEAST, damped_start, damped_step
from keyhole.invert.solvers.multistart import Solver, State


@dataclass(frozen=True)
class NewtonCG(Solver):
    """Matrix-free damped Gauss–Newton, from many starts at once; `inner` bounds the products."""

    starts: int = 16
    steps: int = 200
    damping: float = 1e-2
    inner: int = 400

    def begin(self, equations: Equations, X: Tensor) -> State:
        return damped_start(equations, X, self.damping)

    def step(self, equations: Equations, state: State) -> State:
        X, r, alpha = state.X, state.memory["r"], state.memory["alpha"]
        near = equations.linearised(X)
        relative = state.loss / equations.B.square().sum((-2, -1)).clamp(min=1e-300)
        # The damping is measured by how much J stretches the residual's own direction.
        slope = near.backward(r)
        stretch = slope.square().sum((-2, -1)) / r.square().sum((-2, -1)).clamp(min=1e-300)
        mu = (alpha * relative.clamp(max=1.0) + LEAST) * stretch
        forcing = relative.pow(0.25).clamp(max=0.1)
        p = least_squares_step(near, r, mu, equations.gamma * X, forcing, self.inner)
        return damped_step(equations, state, p)


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
