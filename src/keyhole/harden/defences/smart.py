"""SMART: *Robust and Efficient Fine-Tuning … through Principled Regularized
Optimization*, arXiv 1911.03437.

    min_θ  E [ CE(f_θ(X), y) + λ max_{‖δ‖_∞ ≤ ε} KL_S(f_θ(X + δ), f_θ(X)) ]
    KL_S(p, q) = KL(p ‖ q) + KL(q ‖ p)
    δ_0 ~ N(0, σ²)        δ_{t+1} = clip(δ_t + η g_t/‖g_t‖_∞, ±ε),   g_t = ∂KL_S/∂δ_t

This is SMART's smoothness-inducing regularizer. The Bregman proximal term is left out.
It keeps the answers near those of the step before and needs a second copy of the model;
it stabilises the optimizer, and does not concern robustness. Both passes use the same
dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.harden.defences.defence import (
    Batch,
    climbed,
    expect_nonnegative,
    noise,
    passes,
    symmetric,
)


@dataclass(frozen=True)
class SMART:
    """`weight` is λ, `radius` ε, `start` σ, `rate` η; the defaults are as published."""

    weight: float = 1.0
    radius: float = 1e-5
    steps: int = 1
    rate: float = 1e-3
    start: float = 1e-5

    def __post_init__(self) -> None:
        expect_nonnegative(self)

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        scores = passes(model, batch, stream)
        clean = scores()
        delta = noise(model, batch, stream, normal=True) * self.start
        delta = delta.clamp(-self.radius, self.radius)
        for _ in range(self.steps):
            delta.requires_grad_(True)
            rough = symmetric(scores(delta), clean.detach())
            (gradient,) = torch.autograd.grad(rough, delta)
            delta = climbed(delta, gradient, self.rate)
            delta = delta.clamp(-self.radius, self.radius)
        rough = symmetric(scores(delta), clean)
        yield cross_entropy(clean, labels) + self.weight * rough
