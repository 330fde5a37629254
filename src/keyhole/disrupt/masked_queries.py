"""Queries to a model under masks: predictions and gradients, in batches, with a count.

A query is one example under one mask. Attackers mostly ask for the prefixes of an
ordering, so a batch of queries is an ordering (the step at which each unit is cut) and
a list of steps. The boolean masks exist for one site at a time, and a batch never holds
more than `batch` examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keyhole.disrupt.budget import Budget
from keyhole.disrupt.rankings import RANKINGS
from keyhole.disrupt.tasks import Question
from keyhole.disrupt.units import NEVER, FixedCuts, Units
from keyhole.models.masking import Site, Untouched, rewriting


@dataclass(frozen=True, eq=False)
class Ordering:
    """The order in which units are cut: at step s, a unit u with `goes[u] < s` is cut.

    `goes` is (b, units), int32, and NEVER for units that are not cut.
    """

    goes: Tensor

    def at(self, steps: Tensor, indices: Tensor) -> Tensor:
        """The masks (len(indices), units) of examples `indices` at their steps."""
        return self.goes[indices] < steps.unsqueeze(-1)


def fixed(cut: Tensor) -> Ordering:
    """An ordering that cuts the mask `cut` at every step."""
    return Ordering(torch.where(cut, -1, NEVER).to(torch.int32))


@dataclass(eq=False)
class Cuts(Untouched):
    """Cuts the units of an ordering, at one step for each example in the batch."""

    units: Units
    ordering: Ordering
    indices: Tensor
    steps: Tensor

    def cut(self, site: Site, shape: torch.Size) -> Tensor:
        place = self.units.places[site.index]
        part = Ordering(self.ordering.goes[:, place.start : place.stop])
        return part.at(self.steps, self.indices).view(shape)


@dataclass(eq=False)
class Slopes(FixedCuts):
    """Cuts units, and adds zeros to the probabilities, with respect to which to differentiate."""

    bumps: list[Tensor] = field(default_factory=list[Tensor])
    probabilities: list[Tensor] = field(default_factory=list[Tensor])

    def seen(self, site: Site, probabilities: Tensor) -> None:
        del site
        self.probabilities.append(probabilities.detach())

    def bump(self, site: Site, shape: torch.Size) -> Tensor:
        del site
        zeros = torch.zeros_like(self.probabilities[-1]).requires_grad_()
        self.bumps.append(zeros)
        return zeros.view(shape)


@dataclass(eq=False)
class Silenced(Untouched):
    """Silences one head of one site for each query, or all heads of it if the head is −1."""

    sites: Tensor
    heads: Tensor

    def gate(self, site: Site, shape: torch.Size) -> Tensor:
        heads = self.heads[:, None]
        hit = (heads == torch.arange(shape[1], device=heads.device)) | (heads < 0)
        hit &= (self.sites == site.index)[:, None]
        rows = shape[0] // len(self.sites)
        return (~hit).float().repeat_interleave(rows, 0)[:, :, None, None]


@dataclass(eq=False)
class MaskedQueries:
    """Asks a model a question under masks; `asked` counts the queries of each example.

    `batch` is the batch size.
    """

    model: Any
    question: Question
    units: Units
    batch: int

    def __post_init__(self) -> None:
        self.asked = torch.zeros(self.question.size, dtype=torch.long)

    def _batches(self, indices: Tensor) -> Iterator[tuple[slice, Question]]:
        for start in range(0, len(indices), self.batch):
            part = slice(start, start + self.batch)
            self.asked += torch.bincount(indices[part].cpu(), minlength=len(self.asked))
            yield part, self.question.part(indices[part])

    def logits(
        self,
        ordering: Ordering,
        indices: Tensor,
        steps: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits (len(indices), m, classes) of examples `indices`, each at its own step.

        `rows` are the rows of the ordering for these examples, if it does not hold all
        examples.
        """
        rows = indices if rows is None else rows
        return self._answers(
            indices, lambda part: Cuts(self.units, ordering, rows[part], steps[part])
        )

    def silenced(
        self,
        indices: Tensor,
        sites: Tensor,
        heads: Tensor,
    ) -> Tensor:
        """Logits without one head (or without a whole layer, if the head is −1) for each query."""
        return self._answers(indices, lambda part: Silenced(sites[part], heads[part]))

    def _answers(
        self, indices: Tensor, rewrite: Callable[[slice], Untouched]
    ) -> Tensor:
        answers: list[Tensor] = []
        for part, question in self._batches(indices):
            with torch.no_grad(), rewriting(self.model, rewrite(part)):
                answers.append(question.logits(self.model))
        return torch.cat(answers)

    def slopes(
        self,
        cut: Tensor,
        indices: Tensor,
        loss: str,
        aim: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Probabilities and gradients of the loss (len(indices), units) under masks `cut`.

        The untargeted margin is against the most likely other class, or by `aim` a less
        likely one.
        """
        probabilities: list[Tensor] = []
        gradients: list[Tensor] = []
        for part, question in self._batches(indices):
            slopes = Slopes(self.units, cut[part])
            with torch.enable_grad(), rewriting(self.model, slopes):
                logits = question.logits(self.model)
                if loss == "cross-entropy":
                    raised = question.surprise(logits)
                else:
                    raised = -question.margin(logits, aim)
                gradient = torch.autograd.grad(
                    raised.sum(),
                    slopes.bumps,
                    allow_unused=True,
                    materialize_grads=True,
                )
            size = len(question.labels)
            for found, sites in (
                (probabilities, slopes.probabilities),
                (gradients, gradient),
            ):
                found.append(torch.cat([each.reshape(size, -1) for each in sites], 1))
        return torch.cat(probabilities), torch.cat(gradients)


@dataclass(frozen=True, eq=False)
class Search:
    """The task of a schedule: queries, limits, and the ranking of units.

    Gradients are those of `loss`. Random choices derive from `noise` (b, units).
    """

    queries: MaskedQueries
    limits: Budget
    ranking: str
    loss: str
    noise: Tensor

    def scores(
        self,
        units: Units,
        a: Tensor,
        g: Tensor,
        noise: Tensor,
    ) -> Tensor:
        """The ranking's scores (b, units) from probabilities, gradients and noise."""
        return units.each(RANKINGS[self.ranking], a, g, noise)


@dataclass(frozen=True, eq=False)
class Proposal:
    """A schedule's mask for each example (b, units), whether it seemed to flip, and the steps."""

    cut: Tensor
    flipped: Tensor
    steps: Tensor


def first_flip(
    queries: MaskedQueries,
    ordering: Ordering,
    last: int,
) -> Proposal:
    """Find the first of the steps 1…last that flips each example; without a flip, the last step.

    Steps are asked in blocks of doubling size, so that an early flip costs few queries.
    A block serves all examples that are not flipped yet.
    """
    device = ordering.goes.device
    size = queries.question.size
    steps = torch.full((size,), last, device=device)
    flipped = torch.zeros(size, dtype=torch.bool, device=device)
    done = 0
    block = max(4, queries.batch // max(1, size))
    while done < last and not flipped.all():
        block = min(block, last - done)
        left = (~flipped).nonzero().squeeze(1)
        indices = left.repeat_interleave(block)
        asked = torch.arange(done + 1, done + block + 1, device=device)
        logits = queries.logits(ordering, indices, asked.repeat(len(left)))
        hit = queries.question.part(indices).flipped(logits).view(len(left), block)
        flipped[left] = hit.any(1)
        steps[left] = torch.where(hit.any(1), asked[hit.int().argmax(1)], last)
        done += block
        block *= 2
    cut = ordering.at(steps, torch.arange(size, device=device))
    return Proposal(cut, flipped, steps)
