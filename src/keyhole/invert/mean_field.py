"""A start without a prior: attention to first order in its scores has exactly one inverse.

Ours; the paper asks for a start close to the truth and is silent about finding one. Let the
scores be small, so that `softmax(s) ≈ (1 + s − mean s)/n`. With the mean m of the tokens, the
centred tokens D and their covariance `Σ = DᵀD/n`, attention (with V taken out, reduce.py) is

    y_i = m + Σ (Wᵀx_i + u)          so, centred,        E = D W Σ

E is known, hence `S = EᵀE/n`, and Σ satisfies `Σ (WᵀΣW) Σ = S`. For a given middle factor P the
solution of `ΣPΣ = S` is the geometric mean `Σ = P⁻¹ # S`. The iteration

    Σ ← (Wᵀ Σ W)⁻¹ # S

halves distances in Thompson's metric, in which congruence by W and inversion are isometries and
`·# S` contracts by ½. So for invertible W there is exactly one positive Σ, it is found from
anywhere, one bit a step, and `D = E (WΣ)⁻¹`, `m = (I + ΣWᵀ)⁻¹(ȳ − Σu)`. Where the tokens span
fewer directions than d, all of this happens inside their span.

With several heads `E = D·K(Σ)`, `K(Σ) = Σ_h W_h Σ V_h`. There `Σ ← Σ #_⅓ K⁻ᵀSK⁻¹` (⅓ because the
second factor has degree −2) is an iteration without a proof.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.invert.problem import Problem
from keyhole.linear import LinAlgError

_ROUNDS = 60  # one bit a step
_NEGLIGIBLE = 1e-10  # directions in which the tokens vary less than this do not count


def mean_field(problem: Problem) -> Tensor | None:
    """The input (n×d) that has this output to first order in the scores; None if there is none."""
    if problem.causal or problem.residual or problem.known is not None:
        return None
    if problem.outputs != problem.dim or problem.length == 1:
        return None
    d = problem.dim
    W, V = problem.W.reshape(-1, d, d), problem.V.reshape(-1, d, d)
    u = W.new_zeros(len(W), d) if problem.key_bias is None else problem.key_bias.reshape(-1, d)
    B = problem.B if problem.output_bias is None else problem.B - problem.output_bias
    centre = B.mean(0)
    E = B - centre
    try:
        Q = _span(E) if problem.heads == 1 else torch.eye(d, dtype=W.dtype, device=W.device)
        inside_W, inside_V = Q.mT @ W @ Q, Q.mT @ V @ Q
        S = (E @ Q).mT @ (E @ Q) / problem.length
        covariance = _one_head(inside_W[0], inside_V[0], S) if len(W) == 1 else _heads(W, V, S)
        D = torch.linalg.solve(_mixing(inside_W, inside_V, covariance), E @ Q, left=False)
        full = Q @ covariance @ Q.mT
        # ȳ = Σ_h V_hᵀ (m + Σ (W_hᵀ m + u_h)), as rows
        matrix = (V + W @ full @ V).sum(0)
        constant = (u.unsqueeze(1) @ full @ V).sum(0).squeeze(0)
        m = torch.linalg.solve(matrix.mT, centre - constant)
    except LinAlgError:
        return None
    X = D @ Q.mT + m
    return X if bool(X.isfinite().all()) else None


def _span(E: Tensor) -> Tensor:
    """An orthonormal basis of the directions in which the rows of E vary."""
    _, sizes, directions = torch.linalg.svd(E, full_matrices=False)
    return directions[sizes > _NEGLIGIBLE * sizes[0]].mT


def _mixing(W: Tensor, V: Tensor, covariance: Tensor) -> Tensor:
    """K(Σ) = Σ_h W_h Σ V_h."""
    return (W @ covariance @ V).sum(0)


def _one_head(W: Tensor, V: Tensor, S: Tensor) -> Tensor:
    """The one positive solution of `Σ (WᵀΣW) Σ = V⁻ᵀ S V⁻¹`."""
    inverse = torch.linalg.inv(V)
    S = inverse.mT @ S @ inverse
    covariance = torch.eye(len(S), dtype=S.dtype, device=S.device)
    for _ in range(_ROUNDS):
        middle = torch.linalg.inv(W.mT @ covariance @ W)
        covariance = _geometric_mean(middle, S, 0.5)
    return covariance


def _heads(W: Tensor, V: Tensor, S: Tensor) -> Tensor:
    covariance = torch.eye(len(S), dtype=S.dtype, device=S.device)
    for _ in range(_ROUNDS):
        inverse = torch.linalg.inv(_mixing(W, V, covariance))
        covariance = _geometric_mean(covariance, inverse.mT @ S @ inverse, 1 / 3)
    return covariance


def _geometric_mean(P: Tensor, S: Tensor, share: float) -> Tensor:
    """`P #_t S = P^½ (P^−½ S P^−½)^t P^½`; without weight, t = ½."""
    root, inverse_root = _power(P, 0.5), _power(P, -0.5)
    mean = root @ _power(inverse_root @ S @ inverse_root, share) @ root
    return (mean + mean.mT) / 2


def _power(S: Tensor, exponent: float) -> Tensor:
    sizes, directions = torch.linalg.eigh((S + S.mT) / 2)
    least = torch.finfo(S.dtype).eps ** 2 * sizes[-1]
    return directions * sizes.clamp(min=least) ** exponent @ directions.mT
