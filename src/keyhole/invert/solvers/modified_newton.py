"""Newton's method with the indefinite Hessian made positive definite; converges quadratically.

*Unmasking Transformers*, Section 4.4, calls for "a modified Newton's method" for a
Hessian that is not positive definite, and adds a constant γ that moves the minimiser
(regularized_newton.py). This method modifies the eigenvalues λ of each Hessian of the
loss L instead,

    ∇²L = U diag(λ) Uᵀ,    p = −U diag(1/max(|λ|, δ)) Uᵀ ∇L,    X ← X + t·p

where δ is the rounding error of the largest λ, and t is halved from 1 until L decreases
enough (Armijo). p is a descent direction for any signs of λ and leads away from
saddles. Near an exact input all λ > 0: nothing is modified, t = 1 is accepted and every
step doubles the correct digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import Equations, gradient_of
from keyhole.invert.derivatives.hessian import hessian_of, solvable
from keyhole.invert.solvers.multistart import Solver, State, line_search

_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class ModifiedNewton(Solver):
    """Newton's method with the absolute eigenvalues of ∇²L, from many starts at once."""

    starts: int = 64
    steps: int = 200

    def begin(self, equations: Equations, X: Tensor) -> State:
        return State.at(equations, X)

    def step(self, equations: Equations, state: State) -> State:
        slope = gradient_of(equations, state.X).flatten(1)
        p = -_solved(solvable(equations, hessian_of(equations, state.X)), slope)
        promise = (slope * p).sum(1)  # the slope along p
        p = p.reshape(state.X.shape)
        free = equations.free  # 0 at the entries of X that are known
        p = p if free is None else p * free
        X, loss, _ = line_search(equations, state, p, torch.ones_like(promise), promise)
        return State(X, loss, stalled=~(loss < state.loss))


def _solved(H: Tensor, slope: Tensor) -> Tensor:
    """Return `U diag(1/max(|λ|, δ)) Uᵀ slope`, or 0 for starts whose H is not finite."""
    usable = H.isfinite().all(-1).all(-1)
    H = torch.where(usable[:, None, None], H, 0.0)
    values, U = torch.linalg.eigh(H)
    sizes = values.abs()
    least = _EPS * H.shape[-1] * sizes.amax(1, keepdim=True)
    inverse = torch.where(sizes > 0, 1 / torch.maximum(sizes, least), 0.0)
    solution = (U @ (inverse.unsqueeze(-1) * (U.mT @ slope.unsqueeze(-1)))).squeeze(-1)
    return torch.where(usable.unsqueeze(-1), solution, 0.0)
