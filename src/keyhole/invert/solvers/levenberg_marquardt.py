"""Levenberg–Marquardt on the residual: the method for most problems.

Minimise `‖r(X)‖²` by steps p with

    (JᵀJ + μI) p = −Jᵀr,        μ = α·‖r‖²/‖B‖²·mean diag(JᵀJ)

*Unmasking Transformers* adds a constant γ that keeps the Hessian definite and moves the
minimiser away from the input (Definition 4.6). Here the damping μ vanishes with the
residual: the steps become Gauss–Newton's, the number of correct digits doubles, and the
limit is an exact input (Yamashita and Fukushima 2001: quadratic under a local error
bound). α decreases after a step that lowers the loss and increases after any other
(core/least_squares.py). The search is on the reduced problem (reduce.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from keyhole.core.least_squares import Options, Point, Search, cholesky, mean, minimize
from keyhole.invert.derivatives.equations import Equations, Smooth
from keyhole.invert.derivatives.hessian import linearizer
from keyhole.invert.solvers.multistart import Solver

# Steps in which a start has to gain a fifth. Measured on 26 problems from 4×6 to 10×10:
# without it as many are solved in 1.5 times as long; with 20, 4 solutions of 10 are lost.
_PATIENCE = 40
_CONVERGED = 4 * torch.finfo(torch.float64).eps  # residual relative to B


@dataclass(frozen=True)
class LevenbergMarquardt(Solver[Search]):
    """Damped Gauss–Newton from many starts at once."""

    starts: int = 256
    steps: int = 400
    damping: float = 1e-2

    def begin(self, equations: Smooth, X: Tensor) -> Search:
        return Search.begin(linearizer(equations), X, self._options(equations))

    def step(self, equations: Equations, state: Search) -> Search:
        del equations
        return state.step()

    def _options(self, equations: Smooth, target: float = 0.0) -> Options:
        share = share_of(equations)

        def scale(point: Point) -> Tensor:
            return share(point).unsqueeze(1) * mean(point)

        return Options(
            max_steps=self.steps,
            solver=partial(cholesky, scale=scale),
            damping=self.damping,
            target=target,
            patience=_PATIENCE,
        )

    def descend(
        self,
        equations: Smooth,
        X: Tensor,
        accuracy: float = _CONVERGED,
    ) -> tuple[Tensor, Tensor]:
        """Search from every row of X. Return the ends, which are not judged, and their losses."""
        deadline = torch.inf
        if self.seconds is not None:
            deadline = time.perf_counter() + self.seconds
        target = equations.B[0].numel() * (accuracy * equations.B.abs().max()) ** 2

        def stop(finished: Tensor, loss: Tensor) -> bool:
            del loss
            return bool(finished.all()) or time.perf_counter() > deadline

        options = self._options(equations, float(target))
        return minimize(linearizer(equations), X, options, stop)


def share_of(equations: Smooth) -> Callable[[Point], Tensor]:
    """Return the function that gives ‖r‖²/‖B‖², at most 1."""
    size = equations.B.square().sum().clamp(min=1e-300)
    return lambda point: (point.loss / size).clamp(max=1.0)
