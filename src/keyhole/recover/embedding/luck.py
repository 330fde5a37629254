"""Draws at random, for many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor


def gumbel(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Noise: the largest of log p + noise is a draw from p, the k largest are k different ones."""
    noise = torch.rand(scores.shape, generator=generator, device=scores.device)
    return -(-noise.clamp(1e-9, 1 - 1e-7).log()).log()
