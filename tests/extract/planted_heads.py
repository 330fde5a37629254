"""Heads in orthogonal subspaces, for the tests of several modules."""

from __future__ import annotations

import math

import torch

from keyhole.extract.bilinear import random_orthogonal
from keyhole.oracle.planted import MultiHead


def orthogonal_heads(sizes, seed=0, scale=1.0, unused=0):
    """Heads in random orthogonal subspaces of the given sizes, and their bases."""
    stream = torch.Generator().manual_seed(seed)
    Q = random_orthogonal(sum(sizes) + unused, stream)
    bases = [part.contiguous() for part in Q[:, : sum(sizes)].split(list(sizes), dim=1)]
    W = []
    v = []
    for basis in bases:
        k = basis.shape[1]
        inner = (
            torch.randn(k, k, generator=stream, dtype=torch.float64)
            * scale
            / math.sqrt(k)
        )
        W.append(basis @ inner @ basis.mT)
        v.append(basis @ torch.randn(k, generator=stream, dtype=torch.float64))
    return MultiHead(W, v), bases
