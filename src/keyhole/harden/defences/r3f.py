"""R3F: *Better Fine-Tuning by Reducing Representational Collapse*, arXiv 2008.03156.

    min_θ  E [ CE(f_θ(X), y) + λ KL_S(f_θ(X), f_θ(X + z)) ]
    z ~ U(−σ, σ)

No ascent: noise alone. Both passes drop the same units: if each dropped its own, their distance
would be a second regularizer next to the formula's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keyhole.harden.defences.defence import (
    Batch,
    answer,
    cross_entropy,
    draw,
    noise,
    positive,
    symmetric,
)


@dataclass(frozen=True)
class R3F:
    """`weight` is λ, `radius` σ; the defaults were not tuned here."""

    weight: float = 1.0
    radius: float = 1e-5

    def __post_init__(self) -> None:
        positive(weight=self.weight, radius=self.radius)

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        seed = draw(stream)
        clean = answer(model, batch, seed)
        delta = noise(model, batch, stream, normal=False) * self.radius
        noisy = answer(model, batch, seed, delta)
        yield cross_entropy(clean, labels) + self.weight * symmetric(clean, noisy)
