"""Vectors that vary alike in every direction, so that a cosine counts all of them (ours).

The last states of a causal model lie in a narrow cone and vary most in what they predict, which
many texts share; what tells texts apart is in the directions of little variance. With mean μ and
covariance C = U diag(λ) Uᵀ over some texts, a vector v becomes (v − μ) U diag(λ + ε)^-½. ε, a share
of the largest λ, keeps rounding from counting as much as the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 1e-3  # of the largest variance: what rounding may be


@dataclass(frozen=True, eq=False)
class Whitening:
    """`mean` (d,) and `map` (d, d) of some vectors."""

    mean: Tensor
    map: Tensor

    @classmethod
    def of(cls, vectors: Tensor, least: float = _LEAST) -> Whitening:
        """Learnt from vectors (b, d); with fewer of them than numbers the rest counts alike."""
        mean = vectors.double().mean(0)
        off = vectors.double() - mean
        spread, axes = torch.linalg.eigh(off.T @ off / len(off))
        scale = (spread.clamp(min=0) + least * spread[-1].clamp(min=1e-30)).rsqrt()
        return cls(mean.to(vectors), (axes * scale).to(vectors))

    def __call__(self, vectors: Tensor) -> Tensor:
        return (vectors - self.mean) @ self.map
