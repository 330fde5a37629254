"""Adversarial data augmentation: train on each text again with tokens replaced against the model.

    min_θ  E ½ [ CE(f_θ(x), y) + CE(f_θ(x'), y) ]
    x' = x with the k tokens replaced whose replacement raises the loss most, to first
    order:
         max over i and v near x_i of  (e_v − e_{x_i}) · ∂CE/∂e_{x_i}

v is near x_i if it is among the tokens whose embeddings have the largest cosines with
that of x_i. Augmentation like TextFooler makes the texts once, with a thesaurus. Here
they are made for every batch, against the current model, without a thesaurus. Special
tokens are not replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.harden.defences.defence import (
    Batch,
    answer,
    draw,
    spared,
    unpadded,
    vectors,
)


@dataclass(frozen=True)
class Augmented:
    """At most `share` of a text's tokens are replaced, each by one of its `nearest`."""

    share: float = 0.15
    nearest: int = 8

    def __post_init__(self) -> None:
        expect_number("share", self.share, above=0)
        expect_count("nearest", self.nearest)

    def losses(
        self,
        model: nn.Module,
        batch: Batch,
        labels: Tensor,
        stream: torch.Generator,
    ) -> Iterator[Tensor]:
        seed = draw(stream)
        width = vectors(model).shape[1]
        delta = torch.zeros_like(unpadded(model, batch)).repeat(1, 1, width)
        delta.requires_grad_(True)
        loss = cross_entropy(answer(model, batch, seed, delta), labels)
        (gradient,) = torch.autograd.grad(loss, delta, retain_graph=True)
        yield loss / 2
        ids = self._replaced(model, batch, gradient.float())
        replaced = {**batch, "input_ids": ids}
        yield cross_entropy(answer(model, replaced, seed), labels) / 2

    @torch.no_grad()
    def _replaced(
        self,
        model: nn.Module,
        batch: Batch,
        gradient: Tensor,
    ) -> Tensor:
        ids = batch["input_ids"]
        flat = ids.flatten(0, -2)
        words = vectors(model).detach().float()
        fixed = spared(batch)
        if fixed is None:
            raise InputError("augmented needs special_tokens_mask in the batch")
        unit = nn.functional.normalize(words, dim=1)
        present, places = flat.unique(return_inverse=True)
        alike = (unit[present] @ unit.T).scatter(1, present[:, None], -1.0)
        near = alike.topk(self.nearest, 1).indices[places]
        gains = (
            (words[near] - words[flat][..., None, :]) * gradient[..., None, :]
        ).sum(-1)
        gain, best = gains.max(-1)
        gain = gain.masked_fill(fixed, -torch.inf)
        count = (unpadded(model, batch).sum((1, 2)) * self.share).ceil().long()
        rank = gain.argsort(1, descending=True).argsort(1)
        chosen = (rank < count[:, None]) & (gain > 0)
        new = near.gather(-1, best[..., None])[..., 0]
        return torch.where(chosen, new, flat).view_as(ids)
