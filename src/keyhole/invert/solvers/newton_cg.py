"""Newton–CG: Levenberg–Marquardt without the matrix, for sizes where nd×nd does not fit.

Each step solves

    min_p ‖J p + r‖² + μ‖p‖²

by conjugate gradients on the products `J p` and `Jᵀ g` alone (Hestenes and Stiefel's
form for least squares, which does not square the residual's rounding errors). It needs
n² numbers of memory for each head and a few n×d. The gradient of the step's problem is
reduced to the share `min(0.1, √(‖r‖/‖B‖))`, which decreases near the solution, so
convergence is superlinear (Eisenstat and Walker 1996). Starts that are accurate enough
wait, masked, for the others of their batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.solvers.levenberg_marquardt import LEAST, damped_start, damped_step
from keyhole.invert.solvers.multistart import Solver, State

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NewtonCG(Solver):
    """Matrix-free damped Gauss–Newton from many starts; `inner` bounds the products of a step."""

    starts: int = 16
    steps: int = 200
    damping: float = 1e-2
    inner: int = 400

    def begin(self, equations: Equations, X: Tensor) -> State:
        return damped_start(equations, X, self.damping)

    def step(self, equations: Equations, state: State) -> State:
        X = state.X
        r = state.memory["r"]
        alpha = state.memory["alpha"]
        near = equations.linearised(X)
        relative = state.loss / equations.B.square().sum((-2, -1)).clamp(min=1e-300)
        # The damping is relative to how much Jᵀ stretches the residual.
        slope = near.backward(r)
        stretch = slope.square().sum((-2, -1)) / r.square().sum((-2, -1)).clamp(
            min=1e-300
        )
        mu = (alpha * relative.clamp(max=1.0) + LEAST) * stretch
        forcing = relative.pow(0.25).clamp(max=0.1)
        p = conjugate_gradients(
            near.forward,
            near.backward,
            -r,
            mu + equations.gamma,
            equations.gamma * X,
            forcing,
            self.inner,
        )
        return damped_step(equations, state, p)


def conjugate_gradients(
    forward: Product,
    backward: Product,
    right: Tensor,
    weight: Tensor,
    pull: Tensor,
    forcing: Tensor,
    rounds: int,
) -> Tensor:
    """`argmin ‖J p − right‖² + weight ‖p‖² + 2⟨pull, p⟩` for each row of a batch.

    `forward` and `backward` are the products with J and Jᵀ. A row ends when its
    gradient is at most `forcing` of what it was at p = 0.
    """
    weight = weight[:, None, None]
    left = right
    gradient = backward(left) - pull
    p = torch.zeros_like(gradient)
    direction = gradient
    size = gradient.square().sum((-2, -1))
    enough = forcing.square() * size
    for _ in range(rounds):
        running = size > enough
        if not bool(running.any()):
            break
        image = forward(direction)
        curvature = image.square().sum((-2, -1)) + (weight * direction.square()).sum(
            (-2, -1)
        )
        stride = torch.where(
            running, size / curvature.clamp(min=1e-300), torch.zeros_like(size)
        )
        wide = stride[:, None, None]
        p = p + wide * direction
        left = left - wide * image
        gradient = backward(left) - weight * p - pull
        before = size
        size = gradient.square().sum((-2, -1))
        turn = size / before.clamp(min=1e-300)
        direction = gradient + turn[:, None, None] * direction
    return p
