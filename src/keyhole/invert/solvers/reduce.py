"""Reduction of a problem to an equivalent one with fewer unknowns and a better condition.

Two exact steps for one head without a residual connection:

    V of full row rank:  Y = B V⁺, so that  A X = Y           V is removed
    n < d:               X = A⁻¹ Y lies in the row space of Y: X = X̂ Qᵀ with Q (d×n) orthonormal,
                         softmax(X̂ QᵀWQ X̂ᵀ) X̂ = Y Q          n² unknowns instead of nd

The first removes the condition of V from every step. The second makes the steps smaller
and puts every start into the space that contains the solution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import mismatch
from keyhole.core.numerics import least_squares
from keyhole.invert.problem import Problem

_OFF_RANGE = 1e-9  # tolerated relative distance of B from the range of V


@dataclass(frozen=True, eq=False)
class Reduced:
    """A reduced problem, and the basis Q if its tokens are coordinates X̂ in that basis."""

    problem: Problem
    basis: Tensor | None = None

    def restore(self, X: Tensor) -> Tensor:
        """Return the input of the original problem: X̂ Qᵀ."""
        return X if self.basis is None else X @ self.basis.to(X.device).mT

    def project(self, X: Tensor) -> Tensor:
        """Return the input of the reduced problem: X Q."""
        return X if self.basis is None else X @ self.basis.to(X.device)


def reduce(problem: Problem) -> Reduced:
    """Apply the two steps to a problem as far as they are possible."""
    if problem.heads > 1 or problem.residual or problem.gamma > 0:
        return Reduced(problem)
    n = problem.length
    d = problem.dim
    W = problem.W.reshape(d, d)
    V = problem.V.reshape(d, -1)
    if int(torch.linalg.matrix_rank(V)) < d:
        return Reduced(problem)
    B = problem.unbiased
    Y = least_squares(V.mT, B.mT).mT
    if not Y.isfinite().all():  # V is too small to divide B by
        return Reduced(problem)
    _check_range(problem, B, Y @ V)
    u = None if problem.key_bias is None else problem.key_bias.reshape(d)
    basis = None
    if n < d and problem.known is None:
        basis = torch.linalg.svd(Y, full_matrices=False).Vh.mT
        W = basis.mT @ W @ basis
        Y = Y @ basis
        u = None if u is None else u @ basis
    identity = torch.eye(W.shape[0], dtype=W.dtype, device=W.device)
    simpler = Problem(
        W, identity, Y, key_bias=u, known=problem.known, causal=problem.causal
    )
    return Reduced(simpler, basis)


def _check_range(
    problem: Problem,
    B: Tensor,
    reached: Tensor,
) -> None:
    off = float((B - reached).abs().max())
    if off > problem.tolerance + _OFF_RANGE * float(B.abs().max()):
        raise mismatch(
            f"no input has this output: B is {off:.1e} away from everything that V can produce"
        )
