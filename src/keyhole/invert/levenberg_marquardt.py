"""Levenberg–Marquardt on the residual: the workhorse.

Minimise `‖r(X)‖²` by steps `(JᵀJ + μI) p = −Jᵀr`. Where the paper adds a constant γ that keeps the
Hessian definite and moves the minimiser away from the input (its Section 3), the damping
`μ = α·‖r‖²·mean diag(JᵀJ)` vanishes with the residual: the steps become Newton's, digits double,
and the limit is an exact input (Yamashita and Fukushima 2001: quadratic under a local error bound).
α shrinks after a step that came true and grows after one that did not.

It works on `Y = BV⁻¹` and in the row space of Y (reduce.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.equations import Equations, Linearised
from keyhole.invert.hessian import gauss_newton_of
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.search import State, Watch, solve, solve_all

_GAVE_UP = 1e12
_LEAST = 1e-16
_LARGE = 200  # unknowns


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

    def begin(self, equations: Equations, X: Tensor) -> State:
        r = equations.residuals(X)
        alpha = X.new_full((len(X),), self.damping)
        loss = equations.loss_of(r, X)
        return State(X, loss, torch.zeros_like(loss, dtype=torch.bool), {"r": r, "alpha": alpha})

    def step(self, equations: Equations, state: State) -> State:
        X, r, alpha = state.X, state.memory["r"], state.memory["alpha"]
        near = equations.linearised(X)
        normal = _normal(equations, near, X)
        slope = near.backward(r).flatten(1).unsqueeze(-1)
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


def _normal(equations: Equations, near: Linearised, X: Tensor) -> Tensor:
    """JᵀJ: by its structure where that pays, as a plain product where the matrices are small."""
    if X[0].numel() >= _LARGE:
        return gauss_newton_of(equations, X)
    J = near.jacobian()
    return J.mT @ J
