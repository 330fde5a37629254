"""Heads in orthogonal subspaces (Assumption C.1), planted together with the bases of these.

*Provably Learning Attention with Queries* (arXiv 2601.16873), Appendix C: `W_h = P_h W_h P_h` and
`v_h = P_h v_h` with orthogonal projectors P_h.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number, expect_seed
from keyhole.oracle.planted import MultiHead


def plant_orthogonal(
    dim: int, heads: int, *, scale: float = 1.0, seed: int = 0
) -> tuple[MultiHead, list[Tensor]]:
    """Heads in random orthogonal subspaces, as even as can be, and their bases (d, k)."""
    expect_count("dim", dim)
    expect_count("heads", heads)
    if heads > dim:
        raise InputError(f"expected at most one head a dimension, {dim}, got {heads} heads")
    expect_number("scale", scale, least=0)
    expect_seed(seed)
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    Q = torch.linalg.qr(normal(dim, dim)).Q
    bases = [part.contiguous() for part in Q.tensor_split(heads, dim=1)]
    W: list[Tensor] = []
    v: list[Tensor] = []
    for basis in bases:
        k = basis.shape[1]
        W.append(basis @ (scale / math.sqrt(k) * normal(k, k)) @ basis.mT)
        v.append(basis @ normal(k))
    return MultiHead(W, v), bases
