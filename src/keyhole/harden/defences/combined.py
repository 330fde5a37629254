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
from keyhole.harden.defences.defence import Batch, Defence, Plain
from keyhole.harden.defences.freelb import FreeLB


@dataclass(frozen=True)
class Combined:
    """`methods` in the order in which their losses come; each keeps its own weight."""

    methods: tuple[Defence, ...]

    def __post_init__(self) -> None:
        if not self.methods:
            raise InputError("give at least one method to combine")

    @classmethod
    def strongest(cls, share: float = 0.01, weight: float = 1.0) -> Combined:
        """FreeLB and the attack's masks: what withstood most at no loss of clean accuracy."""
        return cls((FreeLB(), AttackMasks(share=share, weight=weight)))

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        for method in self.methods:
            yield from method.losses(model, batch, labels, stream)


@dataclass(frozen=True)
class PlainFirst:
    """Plain training for a share of the steps, then the defence.

    A model that has learnt nothing yet learns little from masks that undo its answers: on tasks
    that are hard for it, it never begins. The rate rises and falls once, over both.
    """

    share: float
    defence: Defence

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise InputError(f"plain_first must be at least 0 and below 1, got {self.share}")
        if isinstance(self.defence, Plain):
            raise InputError(
                f"plain_first={self.share:g} needs a defence to go on with: choose another "
                "--method than plain"
            )

    def losses(
        self, model: nn.Module, batch: Batch, labels: Tensor, stream: torch.Generator
    ) -> Iterator[Tensor]:
        """The defence's, for whoever does not say how far the training is."""
        return self.defence.losses(model, batch, labels, stream)


def current(defence: Defence, share: float) -> Defence:
    """The defence to use when that share of all steps was made."""
    if not isinstance(defence, PlainFirst):
        return defence
    return Plain() if share < defence.share else defence.defence
