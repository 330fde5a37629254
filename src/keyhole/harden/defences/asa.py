"""ASA: *Adversarial Self-Attention for Language Understanding*, arXiv 2206.12608.

    min_θ  E [ CE(f_θ(x), y) + λ max_μ KL(f_θ(x) ‖ f_θ(x; μ)) ]
    A' = A·(1 − μ)        0 ≤ μ ≤ ε   for every unit of every layer and head

The paper trains a second network that proposes a binary mask for each layer, with a
reversed gradient and a penalty on how much it masks. Here the mask of each batch is
found by gradient ascent from a random start. It is soft and bounded by ε, so there is
no second network and no penalty.

    μ_0 ~ U(0, σ)        μ_{t+1} = clip(μ_t + η g_t/‖g_t‖_∞, 0, ε)   for each text and head

The start is random because the divergence and its gradient are zero at μ = 0. In the
divergence f_θ(x) is a constant, so the gated answer moves towards the clean one, and
only one graph is in memory at a time. All passes use the same dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.core.errors import expect_number
from keyhole.harden.defences.defence import (
    Batch,
    climbed,
    divergence,
    expect_nonnegative,
    local,
    passes,
)
from keyhole.models.masking import Site, Untouched, rewriting


@dataclass(frozen=True)
class ASA:
    """`weight` is λ, `radius` ε, `start` σ, `rate` η."""

    weight: float = 1.0
    radius: float = 0.5
    steps: int = 1
    rate: float = 0.5
    start: float = 0.05

    def __post_init__(self) -> None:
        expect_nonnegative(self)
        expect_number("radius", self.radius, most=1)

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        scores = passes(model, batch, stream)
        gates = Gates()
        own = local(stream, next(model.parameters()).device)
        with rewriting(model, gates) as sites:
            clean = scores()
            # Yielded before there is a gate, because gradient checkpointing runs the
            # clean layers again. It also frees the clean graph before the gated one is
            # built.
            yield cross_entropy(clean, labels)
            clean = clean.detach()
            gates.masks = [
                torch.rand(shape, generator=own, device=own.device)
                .mul(self.start)
                .clamp(max=self.radius)
                for _, shape in sites.calls
            ]
            for _ in range(self.steps):
                for mask in gates.masks:
                    mask.requires_grad_(True)
                gradients = torch.autograd.grad(
                    divergence(clean, scores()), gates.masks
                )
                gates.masks = [
                    climbed(mask, gradient, self.rate).clamp(0, self.radius)
                    for mask, gradient in zip(gates.masks, gradients, strict=True)
                ]
            yield self.weight * divergence(clean, scores())


class Gates(Untouched):
    """Multiplies the probabilities at each site by 1 − μ, once there are masks μ."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []

    def gate(self, site: Site, shape: torch.Size) -> Tensor | None:
        del shape
        return 1 - self.masks[site.index] if self.masks else None
