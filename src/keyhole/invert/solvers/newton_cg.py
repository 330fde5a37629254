"""Newton–CG: Levenberg–Marquardt without the matrix, for sizes where nd×nd does not fit.

Each step solves

    min_p ‖J p + r‖² + μ‖p‖²

by conjugate gradients on the products `J p` and `Jᵀ g` alone (core/least_squares.py).
It needs n² numbers of memory for each head and a few n×d. The gradient of the step's
problem is reduced to the share `min(0.1, √(‖r‖/‖B‖))`, which decreases near the
solution, so convergence is superlinear (Eisenstat and Walker 1996). Starts that are
accurate enough wait, masked, for the others of their batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from keyhole.core.least_squares import (
    Damped,
    Options,
    Point,
    Search,
    Solve,
    conjugate_gradients,
)
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian import linearizer
from keyhole.invert.solvers.levenberg_marquardt import share_of
from keyhole.invert.solvers.multistart import Solver


@dataclass(frozen=True)
class NewtonCG(Solver[Search]):
    """Matrix-free damped Gauss–Newton from many starts; `inner` bounds the products of a step."""

    starts: int = 16
    steps: int = 200
    damping: float = 1e-2
    inner: int = 400

    def begin(self, equations: Equations, X: Tensor) -> Search:
        share = share_of(equations)

        def solver(point: Point) -> Damped:
            # The damping is relative to how much Jᵀ stretches the residual.
            slope = point.backward(point.residuals).square().sum(1)
            stretch = share(point) * slope / point.loss.clamp(min=1e-300)
            rtol = share(point).pow(0.25).clamp(max=0.1)

            def damped(damping: Tensor) -> Solve:
                return lambda r: conjugate_gradients(
                    point.forward,
                    point.backward,
                    r,
                    weight=damping * stretch,
                    rtol=rtol,
                    max_steps=self.inner,
                )

            return damped

        options = Options(solver=solver, damping=self.damping)
        return Search.begin(linearizer(equations), X, options)

    def step(self, equations: Equations, state: Search) -> Search:
        del equations
        return state.step()
