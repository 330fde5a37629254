"""Batches of labelled examples for a model, grouped by length to avoid padding.

This module attacks many examples in one process, with a model that is already loaded.
For several workers and a journal, see sweep.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, silent
from keyhole.data import Batch, Example, encode
from keyhole.disrupt.disruption import Attacker, Disruption, described, joined
from keyhole.disrupt.tasks import answers
from keyhole.models.anatomy import fitting
from keyhole.models.loading import GENERATES, head_of


def grouped(examples: Iterable[Example], batch_size: int) -> list[list[Example]]:
    """Split examples into batches; examples in a batch have the same number of choices."""
    groups: list[list[Example]] = []
    for _, alike in groupby(examples, key=lambda example: len(example.choices)):
        rest = list(alike)
        groups += [rest[at : at + batch_size] for at in range(0, len(rest), batch_size)]
    return groups


@dataclass(frozen=True, eq=False)
class Batches:
    """A model with its tokenizer, and examples in batches on the model's device.

    Texts are cut off at `max_length` tokens. With `alike`, examples are sorted by
    length. Set it to False if the order must not change, because random draws depend on
    the width of a batch. `progress` is called after each batch with the number of
    examples done.
    """

    model: Any
    tokenizer: Any
    examples: Sequence[Example]
    batch_size: int = 64
    max_length: int | None = 128
    alike: bool = True
    progress: Progress = silent

    def __iter__(self) -> Iterator[tuple[list[Example], Batch, Tensor]]:
        device = next(self.model.parameters()).device
        done = 0
        max_length = fitting(self.model, self.tokenizer, self.max_length)
        ordered = [self.examples[number] for number in self._order()]
        for part in grouped(ordered, self.batch_size):
            batch, labels = encode(self.tokenizer, part, max_length=max_length)
            moved = {name: value.to(device) for name, value in batch.items()}
            yield part, moved, labels.to(device)
            done += len(part)
            self.progress(done, len(self.examples))

    def predicted(self, batch: Batch) -> Tensor:
        return answers(self.model, batch).argmax(-1)

    def accuracy(self) -> float:
        right = 0
        for _, batch, labels in self:
            right += int((self.predicted(batch) == labels).sum())
        return right / max(1, len(self.examples))

    def attack(self, attacker: Attacker) -> Disruption:
        if not self.examples:
            raise InputError("there are no examples to attack")
        generates = head_of(self.model) in GENERATES
        parts = [
            attacker(
                self.model,
                batch,
                None if generates else labels,
                ids=[example.id for example in examples],
            )
            for examples, batch, labels in self
        ]
        result = joined(parts)
        place = dict(zip(self._order(), result.outcomes, strict=True))
        return replace(
            result,
            method=described(attacker),
            examples=tuple(self.examples),
            outcomes=tuple(place[number] for number in range(len(place))),
        )

    def _order(self) -> list[int]:
        """The indices of the examples in the order of the batches."""

        def size(number: int) -> tuple[int, int]:
            example = self.examples[number]
            letters = len(example.text) + sum(map(len, example.choices))
            return len(example.choices), letters

        numbers = range(len(self.examples))
        return sorted(numbers, key=size) if self.alike else list(numbers)
