"""Several defences at once: the sum of their losses.

    min_θ  Σ_k L_k(θ)

What each protects is not the same: FreeLB's ascent on the embeddings also raises clean accuracy,
and pays for what training on the attack's masks costs. Losses come one after the other, so one
graph is held at a time, as in each alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.harden.defences.attack_masks import AttackMasks
from keyhole.harden.defences.defence import Batch, Defence
from keyhole.harden.defences.freelb import FreeLB


@dataclass(frozen=True)
class Combined:
    """`methods` in the order in which their losses come; each keeps its own weight."""

    methods: tuple[Defence, ...]

    def __post_init__(self) -> None:
        if not self.methods:
            raise InputError("expected one method or more, got none")

    @classmethod
    def strongest(cls, share: float = 0.01, weight: float = 1.0) -> Combined:
        """FreeLB and the attack's masks: what withstood most at no loss of clean accuracy."""
        return cls((FreeLB(), AttackMasks(share=share, weight=weight)))

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        for method in self.methods:
            yield from method.losses(model, batch, labels, stream)
