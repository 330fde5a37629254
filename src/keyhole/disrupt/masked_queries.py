"""The attacker's hands on the model: masked predictions and gradients, in batches, counted.

A query is one example under one mask. Masks of one ordering are its prefixes, so a batch of queries
is an ordering (the step at which each unit goes) and a list of steps; the booleans exist one site
at a time. Examples and prefixes share a batch, which never holds more than `batch` examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.disrupt.budget import Budget
from keyhole.disrupt.rankings import RANKINGS
from keyhole.disrupt.tasks import Question
from keyhole.disrupt.units import NEVER, Place, Units
from keyhole.models.masking import Site, Untouched, rewriting


@dataclass(frozen=True, eq=False)
class Ordering:
    """Unit u of an example is cut at step s where `goes[u] < s`; (b, units), int32."""

    goes: Tensor

    def at(self, steps: Tensor, indices: Tensor) -> Tensor:
        """The masks (len(indices), units) of examples `indices` at their steps."""
        return self.goes[indices] < steps.unsqueeze(-1)

    def slice(self, place: Place) -> Ordering:
        return Ordering(self.goes[:, place.start : place.stop])


def fixed(cut: Tensor) -> Ordering:
    """The ordering whose every step is this mask."""
    return Ordering(torch.where(cut, -1, NEVER).to(torch.int32))


class Cuts(Untouched):
    """Cuts the units of an ordering, one step for each example in the batch."""

    def __init__(self, units: Units, ordering: Ordering, indices: Tensor, steps: Tensor) -> None:
        self.units, self.ordering, self.indices, self.steps = units, ordering, indices, steps

    def cut(self, site: Site, shape: torch.Size) -> Tensor:
        place = self.units.places[site.index]
        return self.ordering.slice(place).at(self.steps, self.indices).view(shape)


class Slopes(Cuts):
    """Cuts, and asks for the gradient with respect to zeros added to the probabilities."""

    def __init__(self, units: Units, ordering: Ordering, indices: Tensor, steps: Tensor) -> None:
        super().__init__(units, ordering, indices, steps)
        self.bumps: list[Tensor] = []
        self.probabilities: list[Tensor] = []

    def seen(self, site: Site, probabilities: Tensor) -> None:
        del site
        self.probabilities.append(probabilities.detach())

    def bump(self, site: Site, shape: torch.Size) -> Tensor:
        del site
        zeros = torch.zeros_like(self.probabilities[-1]).requires_grad_()
        self.bumps.append(zeros)
        return zeros.view(shape)


class Silenced(Untouched):
    """Whole heads without output: site s, head h of each query; head −1 is the whole layer."""

    def __init__(self, sites: Tensor, heads: Tensor) -> None:
        self.sites, self.heads = sites, heads

    def gate(self, site: Site, shape: torch.Size) -> Tensor:
        numbers = torch.arange(shape[1], device=self.heads.device)
        hit = (self.heads.unsqueeze(1) == numbers) | (self.heads.unsqueeze(1) < 0)
        hit &= (self.sites == site.index).unsqueeze(1)
        each = shape[0] // len(self.sites)
        return (~hit).float().repeat_interleave(each, 0)[:, :, None, None]


class MaskedQueries:
    """A model, a question, its units; `asked` counts for each example what was asked.

    `batch` is the most examples in one pass.
    """

    def __init__(self, model: Any, question: Question, units: Units, batch: int) -> None:
        self.model, self.question, self.units, self.batch = model, question, units, batch
        self.asked = torch.zeros(question.size, dtype=torch.long)

    def _chunks(self, indices: Tensor) -> Iterator[tuple[slice, Tensor, Question]]:
        for start in range(0, len(indices), self.batch):
            part = slice(start, start + self.batch)
            chosen = indices[part]
            self.asked += torch.bincount(chosen.cpu(), minlength=len(self.asked))
            yield part, chosen, self.question.part(chosen)

    def logits(
        self, ordering: Ordering, indices: Tensor, steps: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """(len(indices), m, classes) for examples `indices`, each at its step of the ordering.

        `rows` says which row of the ordering is whose, where it does not hold all examples.
        """
        rows = indices if rows is None else rows
        return self._answers(
            indices, lambda part: Cuts(self.units, ordering, rows[part], steps[part])
        )

    def silenced(self, indices: Tensor, sites: Tensor, heads: Tensor) -> Tensor:
        """Logits with a whole head, or a whole layer, gone."""
        return self._answers(indices, lambda part: Silenced(sites[part], heads[part]))

    def _answers(self, indices: Tensor, rewrite: Callable[[slice], Untouched]) -> Tensor:
        answers: list[Tensor] = []
        for part, _, question in self._chunks(indices):
            with torch.no_grad(), rewriting(self.model, rewrite(part)):
                answers.append(question.logits(self.model))
        return torch.cat(answers)

    def slopes(
        self, cut: Tensor, indices: Tensor, loss: str, aim: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities and gradients (len(indices), units) under masks `cut`, and the margins.

        An untargeted loss leads to the most likely other class, or with `aim` to the next ones.
        """
        probabilities: list[Tensor] = []
        gradients: list[Tensor] = []
        margins: list[Tensor] = []
        for part, chosen, question in self._chunks(indices):
            rows = torch.arange(len(chosen), device=cut.device)
            slopes = Slopes(self.units, fixed(cut[part]), rows, torch.zeros_like(rows))
            with torch.enable_grad(), rewriting(self.model, slopes):
                logits = question.logits(self.model)
                margin = question.margin(logits)
                if loss == "cross-entropy":
                    raised = question.surprise(logits)
                else:
                    raised = -question.margin(logits, aim)
                slope = torch.autograd.grad(
                    raised.sum(), slopes.bumps, allow_unused=True, materialize_grads=True
                )
            probabilities.append(_joined(slopes.probabilities, len(chosen)))
            gradients.append(_joined(list(slope), len(chosen)))
            margins.append(margin.detach())
        return torch.cat(probabilities), torch.cat(gradients), torch.cat(margins)


def _joined(values: list[Tensor], size: int) -> Tensor:
    return torch.cat([value.reshape(size, -1) for value in values], 1)


@dataclass(frozen=True, eq=False)
class Search:
    """A model's masked answers, the limits, and how units are ranked.

    `loss` is what gradients are taken of; random choices are made of `noise` (b, units).
    """

    queries: MaskedQueries
    limits: Budget
    ranking: str
    loss: str
    noise: Tensor

    def scores(self, units: Units, a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
        """The ranking's scores (b, units) of the examples that `units` are of."""
        return units.each(RANKINGS[self.ranking], a, g, noise)


@dataclass(frozen=True, eq=False)
class Proposal:
    """A mask for each example (b, units), whether it seemed to flip, and the steps taken."""

    cut: Tensor
    flipped: Tensor
    steps: Tensor


def first_flip(queries: MaskedQueries, ordering: Ordering, last: int) -> Proposal:
    """The first of the steps 1…last that flips each example, or the last step's mask.

    Steps are asked in blocks that double, so that an early flip does not pay for all; one block
    serves all examples that are still standing.
    """
    device = ordering.goes.device
    size = queries.question.size
    steps = torch.full((size,), last, device=device)
    flipped = torch.zeros(size, dtype=torch.bool, device=device)
    done, block = 0, max(4, queries.batch // max(1, size))
    while done < last and not bool(flipped.all()):
        block = min(block, last - done)
        left = (~flipped).nonzero().squeeze(1)
        indices = left.repeat_interleave(block)
        asked = torch.arange(done + 1, done + block + 1, device=device).repeat(len(left))
        logits = queries.logits(ordering, indices, asked)
        hit = queries.question.part(indices).flipped(logits).view(len(left), block)
        steps[left] = torch.where(hit.any(1), done + 1 + hit.int().argmax(1), steps[left])
        flipped[left] = hit.any(1)
        done += block
        block *= 2
    cut = ordering.at(steps, torch.arange(size, device=device))
    return Proposal(cut, flipped, steps)
