"""A model and labelled examples for it, in batches of texts of like length: padding is work.

An attack on one batch is HackAttend's (hack_attend.py); here is all that it takes to attack many
examples in this process: the batches on the model's device, the outcomes in the examples' order.
For many workers, and files that remember, see sweep.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from keyhole.data import Batch, Example, encode
from keyhole.disrupt.disruption import Disruption, joined
from keyhole.disrupt.hack_attend import HackAttend
from keyhole.errors import InputError
from keyhole.models.loading import SPEAKING, head_of


def grouped(examples: Iterable[Example], together: int) -> list[list[Example]]:
    """Runs of at most `together` neighbours with as many choices: what one batch can hold."""
    groups: list[list[Example]] = []
    for example in examples:
        last = groups[-1] if groups else []
        if last and len(last) < together and len(last[0].choices) == len(example.choices):
            last.append(example)
        else:
            groups.append([example])
    return groups


@dataclass(frozen=True, eq=False)
class Table:
    """`together` examples make a batch, `longest` is where a text is cut off.

    `alike` is False where the examples' order must stay: what an attack draws at random depends on
    a batch's width. `watch` is told after each batch how many examples are done, and of how many.
    """

    model: Any
    tokenizer: Any
    examples: Sequence[Example]
    together: int = 64
    longest: int | None = 128
    alike: bool = True
    watch: Callable[[int, int], None] | None = None

    def first(self, count: int | None) -> Table:
        return replace(self, examples=list(self.examples)[:count])

    def batches(self) -> Iterator[tuple[list[Example], Batch, Tensor]]:
        device, done = next(self.model.parameters()).device, 0
        for part in grouped((self.examples[number] for number in self._order()), self.together):
            batch, labels = encode(self.tokenizer, part, longest=self.longest)
            moved = {name: value.to(device) for name, value in batch.items()}
            yield part, moved, labels.to(device)
            done += len(part)
            if self.watch is not None:
                self.watch(done, len(self.examples))

    def predicted(self, batch: Batch) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "special_tokens_mask"}
        with torch.no_grad():
            return self.model(**inputs).logits.argmax(-1)

    def accuracy(self) -> float:
        right = sum(
            int((self.predicted(batch) == labels).sum()) for _, batch, labels in self.batches()
        )
        return right / max(1, len(self.examples))

    def attack(self, method: HackAttend) -> Disruption:
        if not self.examples:
            raise InputError("expected one example or more to attack, got none")
        speaks = head_of(self.model) in SPEAKING
        parts = [
            method(self.model, batch, None if speaks else labels, ids=[one.id for one in part])
            for part, batch, labels in self.batches()
        ]
        found = joined(parts)
        place = dict(zip(self._order(), found.outcomes, strict=True))
        return replace(found, outcomes=tuple(place[number] for number in range(len(place))))

    def _order(self) -> list[int]:
        """The examples' numbers as the batches take them."""

        def size(number: int) -> tuple[int, int]:
            one = self.examples[number]
            return len(one.choices), len(one.text) + sum(map(len, one.choices))

        numbers = range(len(self.examples))
        return sorted(numbers, key=size) if self.alike else list(numbers)
