"""FreeLB: *Enhanced Adversarial Training for Natural Language Understanding*, arXiv 1909.11764.

    min_θ  E [ 1/K Σ_{t<K} CE(f_θ(X + δ_t), y) ]        ‖δ_t‖_F ≤ ε
    δ_0 ~ U(−1, 1)·m/√(n·e)        δ_{t+1} = Π_ε(δ_t + α g_t/‖g_t‖_F),   g_t = ∂CE/∂δ_t

with X the n×e token embeddings of one text. One backward pass gives both the weights' gradient and
g_t. All K passes drop the same units. Padding is never perturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.harden.defences.defence import (
    Batch,
    answer,
    ascended,
    cross_entropy,
    draw,
    inside,
    noise,
    positive,
    unpadded,
)


@dataclass(frozen=True)
class FreeLB:
    """Ascent on the embeddings: `steps` of size `rate` from `start`, inside `radius`.

    The defaults are of the size that is usual for BERT; they were not tuned here.
    """

    steps: int = 3
    rate: float = 0.1
    radius: float = 0.45
    start: float = 0.08

    def __post_init__(self) -> None:
        positive(rate=self.rate, radius=self.radius, start=self.start)
        if self.steps < 1:
            raise InputError(f"steps must be 1 or more, not {self.steps}")

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        seed = draw(stream)
        lengths = unpadded(model, batch).sum(1, keepdim=True).clamp(min=1)
        delta = noise(model, batch, stream, normal=False)
        delta = inside(delta * self.start / (lengths * delta.shape[-1]).sqrt(), self.radius)
        for step in range(self.steps):
            delta.requires_grad_(True)
            yield cross_entropy(answer(model, batch, seed, delta), labels) / self.steps
            if step + 1 < self.steps:
                delta = self._next(delta)

    def _next(self, delta: Tensor) -> Tensor:
        gradient = delta.grad
        if gradient is None:
            raise InputError("each loss must be differentiated before the next is computed")
        return ascended(delta, gradient, self.rate, self.radius)
