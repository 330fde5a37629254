"""The mean field: the input that has the given output to first order in the scores.

Ours; *Unmasking Transformers* asks for a start close to the true input and does not say
how to find one. Let the scores be small, so that `softmax(s) ≈ (1 + s − mean s)/n`.
With the mean m of the tokens, the centred tokens D and their covariance `Σ = DᵀD/n`,
attention (after V is removed as in reduce.py) is

    y_i = m + Σ (Wᵀx_i + u)          so, centred,        E = D W Σ

E is known. Hence `S = EᵀE/n` is known, and Σ satisfies `Σ (WᵀΣW) Σ = S`. For a given
middle factor P the solution of `ΣPΣ = S` is the geometric mean `Σ = P⁻¹ # S`. The
iteration

    Σ ← (Wᵀ Σ W)⁻¹ # S

halves distances in Thompson's metric, in which congruence by W and inversion are
isometries and `·# S` contracts by ½. So for invertible W there is exactly one positive
Σ. The iteration finds it from any start, one bit in each step, and then

    D = E (WΣ)⁻¹,        m = (I + ΣWᵀ)⁻¹(ȳ − Σu)

Where the tokens span fewer than d directions, all of this is computed inside their
span.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.core.numerics import LinAlgError, thin_svd
from keyhole.invert.problem import Problem

_ROUNDS = 60  # one bit in each
_NEGLIGIBLE = 1e-10  # directions in which the tokens vary by less are left out


def mean_field(problem: Problem) -> Tensor | None:
    """Return the mean field (n×d) of a problem, or None if it has none."""
    if (
        problem.causal
        or problem.residual
        or problem.known is not None
        or problem.heads > 1
    ):
        return None
    if problem.outputs != problem.dim or problem.length == 1:
        return None
    d = problem.dim
    W = problem.W.reshape(d, d)
    V = problem.V.reshape(d, d)
    try:
        Y = torch.linalg.solve(V, problem.unbiased, left=False)
        centre = Y.mean(0)
        E = Y - centre
        sizes, directions = thin_svd(E)[1:]
        Q = directions[sizes > _NEGLIGIBLE * sizes[0]].mT  # in which the tokens vary
        if not Q.shape[
            1
        ]:  # all tokens have the same output, so the scores do not matter
            return None
        inside = Q.mT @ W @ Q
        covariance = covariance_of(inside, (E @ Q).mT @ (E @ Q) / problem.length)
        D = torch.linalg.solve(inside @ covariance, E @ Q, left=False) @ Q.mT
        full = Q @ covariance @ Q.mT
        if problem.key_bias is not None:
            centre = centre - full @ problem.key_bias.reshape(d)
        m = torch.linalg.solve(
            torch.eye(d, dtype=W.dtype, device=W.device) + full @ W.mT, centre
        )
    except LinAlgError:
        return None
    X = D + m
    return X if X.isfinite().all() else None


def covariance_of(W: Tensor, S: Tensor) -> Tensor:
    """Return the only positive solution of `Σ (WᵀΣW) Σ = S`, for invertible W and positive S."""
    covariance = torch.eye(len(S), dtype=S.dtype, device=S.device)
    for _ in range(_ROUNDS):
        covariance = geometric_mean(torch.linalg.inv(W.mT @ covariance @ W), S)
    return covariance


def geometric_mean(P: Tensor, S: Tensor) -> Tensor:
    """`P # S = P^½ (P^−½ S P^−½)^½ P^½` of positive matrices: the only Σ with `Σ P⁻¹ Σ = S`."""
    root = _power(P, 0.5)
    inverse_root = _power(P, -0.5)
    mean = root @ _power(inverse_root @ S @ inverse_root, 0.5) @ root
    return (mean + mean.mT) / 2


def _power(S: Tensor, exponent: float) -> Tensor:
    sizes, directions = torch.linalg.eigh((S + S.mT) / 2)
    least = torch.finfo(S.dtype).eps ** 2 * sizes[-1]
    return directions * sizes.clamp(min=least) ** exponent @ directions.mT
