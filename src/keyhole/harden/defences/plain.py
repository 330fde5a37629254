"""Plain fine-tuning: the baseline of every comparison.

min_θ  E CE(f_θ(x), y)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keyhole.harden.defences.defence import Batch, answer, cross_entropy, draw


@dataclass(frozen=True)
class Plain:
    """Cross entropy, nothing else."""

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        yield cross_entropy(answer(model, batch, draw(stream)), labels)
