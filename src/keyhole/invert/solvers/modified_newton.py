"""Newton's method with the indefinite Hessian made positive definite; converges quadratically.

*Unmasking Transformers*, Section 4.4, calls for "a modified Newton's method" for a Hessian that is
not positive definite, and adds a constant γ that moves the minimiser (regularized_newton.py). This
method modifies the eigenvalues of each Hessian instead,

    ∇²L = U diag(λ) Uᵀ,    p = −U diag(1/max(|λ|, δ)) Uᵀ ∇L,    X ← X + t·p

where t is halved until the loss decreases enough (Armijo). p is a descent direction for any signs
of λ and leads away from saddles. Near an exact input λ > 0: nothing is modified, t = 1 is accepted
and the number of correct digits doubles. δ is the rounding error of the largest λ.
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
    """Newton's method on |∇²L| with a line search, from many starts at once."""

    starts: int = 64
    steps: int = 200

    def begin(self, equations: Equations, X: Tensor) -> State:
        return State.at(equations, X)

    def step(self, equations: Equations, state: State) -> State:
        slope = gradient_of(equations, state.X).flatten(1)
        p = -_solved(solvable(equations, hessian_of(equations, state.X)), slope)
        promise = (slope * p).sum(1)
        p = p.reshape(state.X.shape)
        free = equations.free
        p = p if free is None else p * free
        X, loss, _ = line_search(equations, state, p, torch.ones_like(promise), promise)
        return State(X, loss, ~(loss < state.loss))


def _solved(H: Tensor, slope: Tensor) -> Tensor:
    """`|H|⁻¹ · slope`, or 0 where H is not finite, so that the row does not move."""
    usable = H.isfinite().all(-1).all(-1)
    H = torch.where(usable[:, None, None], H, 0.0)
    values, U = torch.linalg.eigh(H)
    sizes = values.abs()
    least = _EPS * H.shape[-1] * sizes.amax(1, keepdim=True)
    inverse = torch.where(sizes > 0, 1 / torch.maximum(sizes, least), 0.0)
    turned = (U.mT @ slope.unsqueeze(-1)).squeeze(-1)
    solution = (U @ (turned * inverse).unsqueeze(-1)).squeeze(-1)
    return torch.where(usable.unsqueeze(-1), solution, 0.0)
