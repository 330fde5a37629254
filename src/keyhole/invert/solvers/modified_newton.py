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

from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian import hessian_of, solvable
from keyhole.invert.solvers.multistart import Iterate, Solver

_EPS = torch.finfo(torch.float64).eps
_ARMIJO = 1e-4
_HALVINGS = 30


@dataclass(frozen=True)
class ModifiedNewton(Solver[Iterate]):
    """Newton's method with the absolute eigenvalues of ∇²L, from many starts at once."""

    starts: int = 64
    steps: int = 200

    def begin(self, equations: Equations, X: Tensor) -> Iterate:
        return Iterate.at(equations, X)

    def step(self, equations: Equations, state: Iterate) -> Iterate:
        slope = equations.linearised(state.x).gradient.flatten(1)
        p = -_solved(solvable(equations, hessian_of(equations, state.x)), slope)
        descent = (slope * p).sum(1)
        p = p.reshape(state.x.shape)
        if equations.free is not None:  # 0 at the entries of X that are known
            p = p * equations.free
        X, loss = line_search(equations, state, p, descent)
        return Iterate(X, loss, finished=~(loss < state.loss))


def line_search(
    equations: Equations,
    state: Iterate,
    p: Tensor,
    descent: Tensor,
) -> tuple[Tensor, Tensor]:
    """Halve each step p until the loss falls by a share of `descent`, its slope along p (Armijo).

    Returns inputs and losses, unchanged where no step was short enough.
    """
    X = state.x
    loss = state.loss
    taken = torch.zeros_like(state.finished)
    for halving in range(_HALVINGS):
        share = 0.5**halving
        trial = state.x + share * p
        value = equations.loss(trial)
        good = ~taken & (value <= state.loss + _ARMIJO * share * descent)
        X = torch.where(good[:, None, None], trial, X)
        loss = torch.where(good, value, loss)
        taken = taken | good
        if taken.all():
            break
    return X, loss


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
