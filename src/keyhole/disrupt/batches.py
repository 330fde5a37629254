"""A model and labelled examples for it, in batches of texts of like length: padding is work.

An attack on one batch is an attacker's; this is all that it takes to attack many
examples in this process: the batches on the model's device, the outcomes in the examples' order.
For many workers, and files that remember, see sweep.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, silent
from keyhole.data import Batch, Example, encode
from keyhole.disrupt.disruption import Attacker, Disruption, described, joined
from keyhole.models.anatomy import fitting
from keyhole.models.loading import GENERATES, head_of


def grouped(examples: Iterable[Example], batch_size: int) -> list[list[Example]]:
    """Runs of at most `batch_size` neighbours with as many choices: what one batch can hold."""
    groups: list[list[Example]] = []
    for example in examples:
        last = groups[-1] if groups else []
        if last and len(last) < batch_size and len(last[0].choices) == len(example.choices):
            last.append(example)
        else:
            groups.append([example])
    return groups


@dataclass(frozen=True, eq=False)
class Batches:
    """`batch_size` examples make a batch, `max_length` is where a text is cut off.

    `alike` is False where the examples' order must stay: what an attack draws at random depends on
    a batch's width. `progress` is called after each batch with how many examples are done.
    """

    model: Any
    tokenizer: Any
    examples: Sequence[Example]
    batch_size: int = 64
    max_length: int | None = 128
    alike: bool = True
    progress: Progress = silent

    def first(self, count: int | None) -> Batches:
        return replace(self, examples=list(self.examples)[:count])

    def __iter__(self) -> Iterator[tuple[list[Example], Batch, Tensor]]:
        device, done = next(self.model.parameters()).device, 0
        max_length = fitting(self.model, self.tokenizer, self.max_length)
        for part in grouped((self.examples[number] for number in self._order()), self.batch_size):
            batch, labels = encode(self.tokenizer, part, max_length=max_length)
            moved = {name: value.to(device) for name, value in batch.items()}
            yield part, moved, labels.to(device)
            done += len(part)
            self.progress(done, len(self.examples))

    def predicted(self, batch: Batch) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "special_tokens_mask"}
        with torch.no_grad():
            return self.model(**inputs).logits.argmax(-1)

    def accuracy(self) -> float:
        right = sum(int((self.predicted(batch) == labels).sum()) for _, batch, labels in self)
        return right / max(1, len(self.examples))

    def attack(self, attacker: Attacker) -> Disruption:
        if not self.examples:
            raise InputError("there are no examples to attack")
        generates = head_of(self.model) in GENERATES
        parts = [
            attacker(
                self.model, batch, None if generates else labels,
                ids=[example.id for example in examples],
            )
            for examples, batch, labels in self
        ]  # fmt: skip
        result = joined(parts)
        place = dict(zip(self._order(), result.outcomes, strict=True))
        return replace(
            result, method=described(attacker), examples=tuple(self.examples),
            outcomes=tuple(place[number] for number in range(len(place))),
        )  # fmt: skip

    def _order(self) -> list[int]:
        """The examples' numbers as the batches take them."""

        def size(number: int) -> tuple[int, int]:
            example = self.examples[number]
            return len(example.choices), len(example.text) + sum(map(len, example.choices))

        numbers = range(len(self.examples))
        return sorted(numbers, key=size) if self.alike else list(numbers)
