"""Combine several defences: the sum of their losses.

    min_θ  Σ_k L_k(θ)

The defences complement each other: FreeLB's ascent on the embeddings also raises clean
accuracy, which compensates for the cost of training on the attack's masks. The losses
come one after the other, so only one graph is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, expect_number
from keyhole.harden.defences.attack_masks import AttackMasks
from keyhole.harden.defences.defence import Batch, Defence, Plain
from keyhole.harden.defences.freelb import FreeLB


@dataclass(frozen=True)
class Combined:
    """The sum of the losses of `methods`; each keeps its own weight."""

    methods: tuple[Defence, ...]

    def __post_init__(self) -> None:
        if not self.methods:
            raise InputError("give at least one method to combine")

    @classmethod
    def strongest(cls, share: float = 0.01, weight: float = 1.0) -> Combined:
        """FreeLB and AttackMasks: the most robust combination without a loss of clean accuracy."""
        return cls((FreeLB(), AttackMasks(share=share, weight=weight)))

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        for method in self.methods:
            yield from method.losses(model, batch, labels, stream)


@dataclass(frozen=True)
class PlainFirst:
    """Plain training for a share of the steps, then the defence.

    An untrained model learns little from masks that undo its answers, and on hard tasks
    it never begins to learn. The learning rate has one schedule over both parts.
    """

    share: float
    defence: Defence

    def __post_init__(self) -> None:
        expect_number("plain_first", self.share, above=0, below=1)
        if isinstance(self.defence, Plain):
            raise InputError(
                f"plain_first={self.share:g} needs a defence to go on with: choose another "
                "--method than plain"
            )

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        """Yield the defence's losses, for callers that do not use `current`."""
        return self.defence.losses(model, batch, labels, stream)


def current(defence: Defence, share: float) -> Defence:
    """Return the defence to use after a share of all steps."""
    if not isinstance(defence, PlainFirst):
        return defence
    return Plain() if share < defence.share else defence.defence
