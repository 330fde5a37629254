"""Text from an encoder's hidden states in random order.

What a row says about its own token it says in any order; where it stood it says too, in part
(search/row_order.py). So rows are put into the likeliest order and read as if it were theirs
(encoder.py, forward passes only). The right order fits as a whole. In another one the model's own
answer for the tokens shows which rows stand wrong: the order is corrected by it, and the likeliest
exchanges of two neighbours are tried, all by running the model, until an order fits or none is left
to try. What has not come back by then is searched for in the best order of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.attacks.encoder import EncoderStates
from keyhole.recover.judge import compare
from keyhole.recover.leaks import HiddenStates, Leak
from keyhole.recover.precision import precision_of
from keyhole.recover.search.row_length import whole_rows
from keyhole.recover.search.row_order import Places, places


@dataclass(frozen=True)
class UnorderedStates:
    """Order the rows, read them, correct the order: at most `rounds` times.

    In a round, `orders` of them are tried: the corrected one, and exchanges of two neighbours.
    `samples` random tokens fit what positions look like (None: 128 for each number in a row).
    `states` is the attack on rows in order.
    """

    states: EncoderStates = field(default_factory=EncoderStates)
    rounds: int = 8
    orders: int = 6
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 0 or self.orders < 1:
            raise InputError(
                f"expected rounds of 0 or more and orders of 1 or more, "
                f"got {self.rounds} and {self.orders}"
            )

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        rows = [cast("HiddenStates", leak) for leak in whole_rows(target, leaks)]
        samples = self.samples or max(4000, 128 * target.parts.width)
        longest = max(len(leak.values) for leak in rows)
        marks = places(target, rows[0].exposure, longest, samples, self.seed)
        texts = [_Text(number, leak, marks) for number, leak in enumerate(rows)]
        brief = replace(self.states, rounds=0, sweeps=0)
        for _ in range(self.rounds + 1):
            target.count.begin(text.number for text in texts)
            _try(target, brief, texts)
            yield from ((text.number, text.proposal(marks)) for text in texts if text.fits)
            texts = [text for text in texts if not text.fits]
            for text in texts:
                text.think(marks, self.orders)
            if not any(text.wanted for text in texts):
                break
        for text in texts:
            text.wanted = [text.order]
        _try(target, self.states, texts)
        yield from ((text.number, text.proposal(marks)) for text in texts)


class _Text:
    """One text under way: the best order so far, what was read in it, what to try next."""

    def __init__(self, number: int, leak: HiddenStates, marks: Places) -> None:
        self.number, self.leak = number, leak
        self.order = marks.order(leak.values.to(marks.means.device))
        self.wanted = [self.order]
        self.tried: set[tuple[int, ...]] = set()
        self.best, self.fits, self.loss = Proposal([]), False, float("inf")
        self.given = leak.values
        self.passes = self.forwards = 0

    def note(self, order: Tensor, read: Proposal, given: Tensor) -> None:
        """Take down what was read in an order, and what the model gives for it."""
        self.tried.add(tuple(order.tolist()))
        self.passes += read.passes + 1
        self.forwards += read.forwards + 1
        leak = self.leak.ordered(order)
        leaked = leak.values.to(given)
        loss = float((given - leaked).square().nansum())
        fits = compare(precision_of(leak), leaked, given).settled
        if (fits, -loss) > (self.fits, -self.loss):
            self.order, self.best, self.given = order, read, given
            self.fits, self.loss = fits, loss

    def think(self, marks: Places, most: int) -> None:
        """The next orders to try: the corrected one, then the likeliest exchanges."""
        rows = self.leak.values[self.order].to(marks.means.device)
        corrected, rising = marks.reordered(rows, self.given.to(rows))
        orders = [self.order[corrected]]
        for place in rising.argsort().tolist():
            swapped = self.order.clone()
            swapped[[place, place + 1]] = self.order[[place + 1, place]]
            orders.append(swapped)
        untried = [order for order in orders if tuple(order.tolist()) not in self.tried]
        self.wanted = untried[:most]

    def proposal(self, marks: Places) -> Proposal:
        return replace(
            self.best, passes=self.passes, forwards=self.forwards,
            fitting=self.best.fitting + marks.passes, note=f"{len(self.tried)} orders tried",
        )  # fmt: skip


def _try(target: Target, states: EncoderStates, texts: Sequence[_Text]) -> None:
    """Read every text in all orders that are wanted of it, together."""
    trials = [(text, order) for text in texts for order in text.wanted]
    if not trials:
        return
    quiet = Target.of(target.model, target.tokenizer)  # trials are no texts to be counted
    leaks = [text.leak.ordered(order) for text, order in trials]
    for number, read in states(quiet, leaks):
        text, order = trials[number]
        ids = torch.tensor([read.ids], device=target.parts.device)
        text.note(order, read, leaks[number].rows(target.expose(leaks[number], ids))[0])
