"""Levenberg–Marquardt on the residual: the workhorse.

Minimise `‖r(X)‖²` by steps `(JᵀJ + μI) p = −Jᵀr`. Where the paper adds a constant γ that keeps the
Hessian definite and moves the minimiser away from the input (its Section 3), the damping
`μ = α·‖r‖²·mean diag(JᵀJ)` vanishes with the residual: the steps become Newton's, digits double,
and the limit is an exact input (Yamashita and Fukushima 2001: quadratic under a local error bound).
α shrinks after a step that came true and grows after one that did not.

It works on `Y = BV⁻¹` and in the row space of Y (reduce.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.equations import Equations, Smooth
from keyhole.invert.hessian import gauss_newton_of
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.race import State, Watch
from keyhole.invert.search import solve, solve_all

_GAVE_UP = 1e12
_LEAST = 1e-16
_LARGE = 200  # unknowns
_CONVERGED = 4 * torch.finfo(torch.float64).eps  # relative to B


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Damped Gauss–Newton from many starts at once; `solutions` different ones end the search."""

    starts: int = 256
    steps: int = 400
    seed: int = 0
    solutions: int = 1
    seconds: float | None = None
    device: str = "cpu"
    damping: float = 1e-2

    def __call__(
        self, problem: Problem, *, start: Tensor | None = None, watch: Watch | None = None
    ) -> Inversion:
        return solve(self, problem, start=start, watch=watch)

    def many(self, problems: Sequence[Problem], *, watch: Watch | None = None) -> list[Inversion]:
        return solve_all(self, problems, watch=watch)

    def begin(self, equations: Smooth, X: Tensor) -> State:
        r = equations.residuals(X)
        alpha = X.new_full((len(X),), self.damping)
        loss = equations.loss_of(r, X)
        return State(X, loss, torch.zeros_like(loss, dtype=torch.bool), {"r": r, "alpha": alpha})

    def step(self, equations: Smooth, state: State) -> State:
        X, r, alpha = state.X, state.memory["r"], state.memory["alpha"]
        normal, slope = _normal_equations(equations, X, r)
        if equations.gamma:
            slope = slope + equations.gamma * X.flatten(1).unsqueeze(-1)
        diagonal = normal.diagonal(dim1=-2, dim2=-1)
        relative = state.loss / equations.B.square().sum((-2, -1)).clamp(min=1e-300)
        mu = (alpha * relative.clamp(max=1.0) + _LEAST) * diagonal.mean(-1) + equations.gamma
        diagonal += mu.unsqueeze(-1)
        factor, info = torch.linalg.cholesky_ex(normal)
        p = -torch.cholesky_solve(slope, factor).squeeze(-1)
        ahead = X + p.reshape(X.shape)
        r_ahead = equations.residuals(ahead)
        loss_ahead = equations.loss_of(r_ahead, ahead)
        better = (loss_ahead < state.loss) & (info == 0)
        wide = better[:, None, None]
        alpha = torch.where(better, (alpha / 5).clamp(min=_LEAST), alpha * 3)
        tiny = p.abs().amax(-1) <= 1e-15 * X.abs().amax((-2, -1))
        return State(
            torch.where(wide, ahead, X),
            torch.where(better, loss_ahead, state.loss),
            (alpha > _GAVE_UP) | (tiny & ~better),
            {"r": torch.where(wide, r_ahead, r), "alpha": alpha},
        )

    def descend(
        self, equations: Smooth, X: Tensor, accuracy: float = _CONVERGED
    ) -> tuple[Tensor, Tensor]:
        """Every row of X to where its own search ends, and the losses there; nobody judges."""
        deadline = torch.inf if self.seconds is None else time.perf_counter() + self.seconds
        state = self.begin(equations, X)
        rows = torch.arange(len(X), device=X.device)
        X, loss = X.clone(), state.loss.clone()
        target = equations.B[0].numel() * (accuracy * equations.B.abs().max()) ** 2
        for _ in range(self.steps):
            state = self.step(equations, state)
            X[rows], loss[rows] = state.X, state.loss
            over = state.stalled | (state.loss <= target) | ~state.loss.isfinite()
            if over.any():
                state, rows, equations = state.keep(~over), rows[~over], equations.select(~over)
            if not len(rows) or time.perf_counter() > deadline:
                break
        return X, loss


def _normal_equations(equations: Smooth, X: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """JᵀJ and Jᵀr: by their structure where that pays, as plain products of a small J."""
    if isinstance(equations, Equations) and X[0].numel() >= _LARGE:
        slope = equations.linearised(X).backward(r).flatten(1).unsqueeze(-1)
        return gauss_newton_of(equations, X), slope
    J = equations.linearised(X).jacobian()
    return J.mT @ J, J.mT @ r.flatten(1).unsqueeze(-1)
