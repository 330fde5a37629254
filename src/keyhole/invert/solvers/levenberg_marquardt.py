"""Levenberg–Marquardt on the residual: the method for most problems.

Minimise `‖r(X)‖²` by steps p with

    (JᵀJ + μI) p = −Jᵀr,        μ = α·‖r‖²/‖B‖²·mean diag(JᵀJ)

*Unmasking Transformers* adds a constant γ that keeps the Hessian definite and moves the
minimiser away from the input (Definition 4.6). Here the damping μ vanishes with the
residual: the steps become Gauss–Newton's, the number of correct digits doubles, and the
limit is an exact input (Yamashita and Fukushima 2001: quadratic under a local error
bound). α decreases after a step that lowers the loss and increases after any other. The
search is on the reduced problem (reduce.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import Equations, Smooth, squared_loss
from keyhole.invert.derivatives.hessian import gauss_newton_of
from keyhole.invert.solvers.multistart import Solver, State

_LARGE = 200  # unknowns from which JᵀJ is computed by its structure
_CONVERGED = 4 * torch.finfo(torch.float64).eps  # residual relative to B


@dataclass(frozen=True)
class LevenbergMarquardt(Solver):
    """Damped Gauss–Newton from many starts at once."""

    starts: int = 256
    steps: int = 400
    damping: float = 1e-2

    def begin(self, equations: Smooth, X: Tensor) -> State:
        return damped_start(equations, X, self.damping)

    def step(self, equations: Smooth, state: State) -> State:
        X = state.X
        r = state.memory["r"]
        alpha = state.memory["alpha"]
        normal, slope = _normal_equations(equations, X, r)
        if equations.gamma:
            slope = slope + equations.gamma * X.flatten(1).unsqueeze(-1)
        diagonal = normal.diagonal(dim1=-2, dim2=-1)
        relative = state.loss / equations.B.square().sum((-2, -1)).clamp(min=1e-300)
        mu = (alpha * relative.clamp(max=1.0) + LEAST) * diagonal.mean(
            -1
        ) + equations.gamma
        diagonal += mu.unsqueeze(-1)
        factor, info = torch.linalg.cholesky_ex(normal)
        p = -torch.cholesky_solve(slope, factor).squeeze(-1)
        return damped_step(equations, state, p.reshape(X.shape), info == 0)

    def descend(
        self, equations: Smooth, X: Tensor, accuracy: float = _CONVERGED
    ) -> tuple[Tensor, Tensor]:
        """Search from every row of X. Return the ends, which are not judged, and their losses."""
        if self.seconds is None:
            deadline = torch.inf
        else:
            deadline = time.perf_counter() + self.seconds
        state = self.begin(equations, X)
        rows = torch.arange(len(X), device=X.device)
        X = X.clone()
        loss = state.loss.clone()
        target = equations.B[0].numel() * (accuracy * equations.B.abs().max()) ** 2
        for _ in range(self.steps):
            state = self.step(equations, state)
            X[rows] = state.X
            loss[rows] = state.loss
            over = state.stalled | (state.loss <= target) | ~state.loss.isfinite()
            if over.any():
                state = state.keep(~over)
                rows = rows[~over]
                equations = equations.select(~over)
            if not len(rows) or time.perf_counter() > deadline:
                break
        return X, loss


def _normal_equations(equations: Smooth, X: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return JᵀJ and Jᵀr: by their structure if J is large, otherwise as plain products."""
    if isinstance(equations, Equations) and X[0].numel() >= _LARGE:
        slope = equations.linearised(X).backward(r).flatten(1).unsqueeze(-1)
        return gauss_newton_of(equations, X), slope
    J = equations.jacobian(X)
    return J.mT @ J, J.mT @ r.flatten(1).unsqueeze(-1)


# Adaptive damping, for Levenberg–Marquardt and Newton–CG, which differ in how they
# compute a step.

LEAST = 1e-16  # the smallest α
_LARGEST = 1e12  # the α at which a start has stalled
_NEGLIGIBLE = 1e-15  # size of a step below rounding, relative to X


def damped_start(equations: Smooth, X: Tensor, damping: float) -> State:
    r = equations.residuals(X)
    loss = squared_loss(equations, r, X)
    memory = {"r": r, "alpha": torch.full_like(loss, damping)}
    return State(X, loss, torch.zeros_like(loss, dtype=torch.bool), memory)


def damped_step(
    equations: Smooth, state: State, p: Tensor, solved: Tensor | None = None
) -> State:
    """Take the step p where it lowers the loss. `solved` is False where p could not be computed."""
    X = state.X
    r = state.memory["r"]
    alpha = state.memory["alpha"]
    ahead = X + p
    r_ahead = equations.residuals(ahead)
    loss = squared_loss(equations, r_ahead, ahead)
    better = loss < state.loss
    better = better if solved is None else better & solved
    wide = better[:, None, None]
    alpha = torch.where(better, (alpha / 5).clamp(min=LEAST), alpha * 3)
    tiny = p.abs().amax((-2, -1)) <= _NEGLIGIBLE * X.abs().amax((-2, -1))
    return State(
        torch.where(wide, ahead, X),
        torch.where(better, loss, state.loss),
        (alpha > _LARGEST) | (tiny & ~better),
        {"r": torch.where(wide, r_ahead, r), "alpha": alpha},
    )
