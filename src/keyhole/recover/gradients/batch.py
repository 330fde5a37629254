"""A batch of texts as tokens, with their classes, and the loss that a client takes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from keyhole.core.errors import InputError

_IGNORED = -100  # a token whose prediction is no part of the loss


@dataclass(frozen=True)
class Batch:
    """Token ids of each text, and each one's class where the task has classes."""

    texts: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise InputError("expected texts of one token or more, got none")

    def __getitem__(self, number: int) -> Batch:
        """The batch of one of its texts."""
        return Batch((self.texts[number],), self.labels[number : number + 1])

    def padded(self, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids and mask (b, n), padding after the texts."""
        longest = max(map(len, self.texts))
        ids = [[*text, *[pad] * (longest - len(text))] for text in self.texts]
        mask = [[1] * len(text) + [0] * (longest - len(text)) for text in self.texts]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def loss(model: Any, weights: Mapping[str, Tensor], batch: Batch, task: str, pad: int) -> Tensor:
    """The mean cross-entropy: of the texts' classes, or of all tokens but the first of each."""
    device = next(iter(weights.values())).device
    ids, mask = batch.padded(pad, device)
    given = {"input_ids": ids, "attention_mask": mask}
    logits = functional_call(model, dict(weights), kwargs=given).logits
    if task == "classification":
        labels = torch.tensor(batch.labels, device=device)
        return torch.nn.functional.cross_entropy(logits, labels)
    following = ids.masked_fill(mask == 0, _IGNORED)[:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), following.flatten())


def expect_batch(batch: Batch, task: str, classes: int) -> None:
    """Refuse a batch that has no loss of this kind."""
    if task == "causal":
        short = [text for text in batch.texts if len(text) < 2]
        if short:
            raise InputError("expected texts of two tokens or more to predict one, got a shorter")
        return
    if classes < 2:
        raise InputError(f"expected a classifier of two classes or more, got {classes}")
    wrong = [label for label in batch.labels if not 0 <= label < classes]
    if wrong:
        raise InputError(f"expected classes from 0 to {classes - 1}, got {wrong[0]}")
