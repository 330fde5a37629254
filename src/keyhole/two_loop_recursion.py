"""The two-loop recursion of L-BFGS (Nocedal 1980), batched over independent problems.

    H ∇ for the inverse Hessian's estimate H that the pairs s = Δx, y = Δ∇ build from H₀ = scale·I:
    H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ,   ρ = 1 / sᵀy,   oldest pair first.

A pair of weight ρ = 0 changes nothing, so each problem of a batch may leave out pairs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Pair = tuple[Tensor, Tensor, Tensor]  # s (b, m), y (b, m), ρ (b,)


def two_loops(slope: Tensor, pairs: Sequence[Pair], scale: Tensor) -> Tensor:
    """The inverse Hessian's estimate times the slope (b, m), for `pairs` from oldest to newest."""
    q = slope
    shares: list[Tensor] = []
    for s, y, weight in reversed(pairs):
        shares.append(weight * (s * q).sum(-1))
        q = q - shares[-1][:, None] * y
    q = q * scale[:, None]
    for (s, y, weight), share in zip(pairs, reversed(shares), strict=True):
        q = q + (share - weight * (y * q).sum(-1))[:, None] * s
    return q
