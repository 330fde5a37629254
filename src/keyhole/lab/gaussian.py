"""Noise with a stated ε: the Gaussian mechanism, calibrated exactly.

*Improving the Gaussian Mechanism for Differential Privacy*, Balle and Wang, arXiv 1805.06530,
Theorem 8. If what is released of two texts differs by Δ at most, one release with noise of
deviation σ is (ε, δ)-private if and only if, for μ = Δ/σ,

    Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) ≤ δ.

Here rows of a text are scaled down to a norm of C at most, the largest of public texts, so texts of
n tokens differ by Δ = 2C√n; of a cache with layers l, μ² = Σ_l μ_l². The length is taken to be
public. Then nobody names more than e^ε/N + δ of N equally likely texts, which says something below
ε = n log(vocabulary) alone. Noise is in units of Δ: 1/μ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from keyhole.recover.leaks import Leak

DELTA = 1e-5


def delta_of(epsilon: float, noise: float) -> float:
    """The least δ for which so much noise is (ε, δ)-private."""
    from scipy.special import log_ndtr  # with the models

    near, far = (float(log_ndtr(sign / noise - epsilon * noise)) for sign in (0.5, -0.5))
    return max(0.0, math.exp(near) - math.exp(min(0.0, epsilon + far)))


def epsilon_of(noise: float) -> float:
    """The ε of one release with so much noise, at δ = 1e-5."""
    return _least(lambda each: delta_of(each, noise) <= DELTA, 0.5 / noise**2 + 9 / noise)


def noise_for(epsilon: float) -> float:
    """The least noise that gives this ε in one release, at δ = 1e-5."""
    return _least(lambda each: delta_of(epsilon, each) <= DELTA, 1e3)


def _least(holds: Callable[[float], bool], high: float) -> float:
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


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
