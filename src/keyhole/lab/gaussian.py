"""Noise with a stated ε: the Gaussian mechanism, calibrated exactly.

*Improving the Gaussian Mechanism for Differential Privacy*, Balle and Wang, arXiv 1805.06530,
Theorem 8 (`epsilon_of` and `noise_for` in recover/gradients/update.py), where what is released of
two texts differs by Δ at most, and μ = Δ/σ. Here rows of a text are scaled down to a norm of C at
most, the largest of public texts, so texts of n tokens differ by Δ = 2C√n; of a cache with layers
l, μ² = Σ_l μ_l². The length is taken to be public. Then nobody names more than e^ε/N + δ of N
equally likely texts, which says something below ε = n log(vocabulary) alone. Noise is in units of
Δ: 1/μ.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from keyhole.recover.gradients.update import DELTA, epsilon_of
from keyhole.recover.leaks import Leak


def stated(noise: float, sigma: float, tokens: int, vocabulary: int) -> tuple[str, str]:
    """What noise promises, and what that proves of texts of so many tokens, if anything."""
    epsilon = epsilon_of(noise)
    proof = f"of N equally likely texts at most {math.exp(min(epsilon, 700)):.3g}/N + {DELTA:g}"
    says = epsilon < tokens * math.log(vocabulary)
    return f"ε = {epsilon:.3g}, δ = {DELTA:g}, σ = {sigma:.2g}", f"{proof} are named" * says


def gaussian(leak: Leak, clip: float, sigma: float, stream: torch.Generator) -> Leak:
    """The leak with rows of norm `clip` at most, and noise, whose size everybody knows."""
    scale = (clip / leak.rows(leak.tensors).norm(dim=-1, keepdim=True)).clamp(max=1)
    made = {
        name: tensor * scale + sigma * torch.randn(tensor.shape, generator=stream)
        for name, tensor in leak.tensors.items()
    }
    return replace(leak, **made, noise=sigma, precision=None)
