"""FreeLB: *Enhanced Adversarial Training for Natural Language Understanding*, arXiv 1909.11764.

    min_θ  E [ 1/K Σ_{t<K} CE(f_θ(X + δ_t), y) ]        ‖δ_t‖_F ≤ ε
    δ_0 ~ U(−1, 1)·m/√(n·e)        δ_{t+1} = Π_ε(δ_t + α g_t/‖g_t‖_F),   g_t = ∂CE/∂δ_t

with X the n×e token embeddings of one text. One backward pass gives both the weights'
gradient and g_t. All K passes use the same dropout. Padding is never perturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.core.errors import InputError, expect_count
from keyhole.harden.defences.defence import (
    Batch,
    ascended,
    expect_nonnegative,
    inside,
    noise,
    passes,
    unpadded,
)


@dataclass(frozen=True)
class FreeLB:
    """`steps` is K, `rate` α, `radius` ε, `start` m; the defaults are usual for BERT, not tuned."""

    steps: int = 3
    rate: float = 0.1
    radius: float = 0.45
    start: float = 0.08

    def __post_init__(self) -> None:
        expect_nonnegative(self)
        expect_count("steps", self.steps)

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        scores = passes(model, batch, stream)
        lengths = unpadded(model, batch).sum(1, keepdim=True).clamp(min=1)
        delta = noise(model, batch, stream, normal=False)
        delta = inside(
            delta * self.start / (lengths * delta.shape[-1]).sqrt(), self.radius
        )
        for step in range(self.steps):
            delta.requires_grad_(True)
            yield cross_entropy(scores(delta), labels) / self.steps
            if step + 1 < self.steps:
                if delta.grad is None:
                    raise InputError(
                        "each loss must be differentiated before the next is computed"
                    )
                delta = ascended(delta, delta.grad, self.rate, self.radius)
