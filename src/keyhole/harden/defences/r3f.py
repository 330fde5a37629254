"""R3F: *Better Fine-Tuning by Reducing Representational Collapse*, arXiv 2008.03156.

    min_θ  E [ CE(f_θ(X), y) + λ KL_S(f_θ(X), f_θ(X + z)) ]
    z ~ U(−σ, σ)

There is only noise, no ascent. Both passes use the same dropout, because the difference
between two draws of dropout would act as a second regularizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.harden.defences.defence import (
    Batch,
    expect_nonnegative,
    noise,
    passes,
    symmetric,
)


@dataclass(frozen=True)
class R3F:
    """`weight` is λ, `radius` σ; the defaults were not tuned."""

    weight: float = 1.0
    radius: float = 1e-5

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
        noisy = scores(self.radius * noise(model, batch, stream, normal=False))
        yield cross_entropy(clean, labels) + self.weight * symmetric(clean, noisy)
