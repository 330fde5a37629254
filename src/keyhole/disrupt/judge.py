"""The judge: an attack proposes masks; a flip counts only if a fresh pass under them shows it.

The judge takes the bare masks, runs the model again, reads the prediction, and counts the units
whose probability it saw at zero. It also checks that nothing was cut that had to be spared and that
no limit was passed; an attack that did either is wrong, and its flip does not count. And it runs
the control, k = 0, which must change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.disrupt.budget import Budget
from keyhole.disrupt.disruption import Control
from keyhole.disrupt.tasks import Question
from keyhole.disrupt.units import Units
from keyhole.models.masking import Site, Untouched, rewriting


@dataclass(frozen=True, eq=False)
class Verdict:
    """For each example: the flip, the prediction and confidence, the units really masked."""

    flipped: Tensor
    predicted: Tensor
    confidence: Tensor
    masked: Tensor  # (b, units)


class _Explicit(Untouched):
    """These masks (b, units), and what became of the units."""

    def __init__(self, units: Units, cut: Tensor) -> None:
        self.units, self.mask = units, cut
        self.gone: list[Tensor] = []

    def cut(self, site: Site, shape: torch.Size) -> Tensor:
        return self.units.at(self.mask, self.units.places[site.index]).reshape(shape)

    def seen(self, site: Site, probabilities: Tensor) -> None:
        del site
        self.gone.append((probabilities == 0).reshape(len(self.mask), -1))


def judge(
    model: Any, question: Question, units: Units, cut: Tensor, limits: Budget, batch: int
) -> Verdict:
    """Run the masks `cut` (b, units) afresh."""
    logits: list[Tensor] = []
    masked: list[Tensor] = []
    for indices in _parts(question, batch):
        explicit = _Explicit(units, cut[indices])
        with torch.no_grad(), rewriting(model, explicit):
            logits.append(question.part(indices).logits(model))
        masked.append(torch.cat(explicit.gone, 1) & cut[indices] & units.exists[indices])
    answers, really = torch.cat(logits), torch.cat(masked)
    return Verdict(
        question.flipped(answers) & _lawful(units, cut, limits), question.predicted(answers),
        question.confidence(answers), really,
    )  # fmt: skip


def _lawful(units: Units, cut: Tensor, limits: Budget) -> Tensor:
    spared = ~(cut & ~units.free).any(1)
    left = limits.left(units, cut)
    return spared & (left.heads >= 0).all(1) & (left.rows >= 0).all(1) & (left.total >= 0)


def run_control(model: Any, question: Question, units: Units, batch: int) -> tuple[Control, Tensor]:
    """k = 0 against the model untouched and the model as loaded; and the untouched logits."""
    result = Control(0.0, 0.0, 0)
    clean: list[Tensor] = []
    for indices in _parts(question, batch):
        part = question.part(indices)
        nothing = torch.zeros_like(units.free[indices])
        with torch.no_grad():
            own = part.logits(model)
            with rewriting(model, Untouched()):
                untouched = part.logits(model)
            with rewriting(model, _Explicit(units, nothing)):
                zero = part.logits(model)
        flips = (part.predicted(zero) != part.predicted(own)).any(-1).sum()
        result = result.joined(
            Control(float((zero - untouched).abs().max()), float((zero - own).abs().max()),
                    int(flips))
        )  # fmt: skip
        clean.append(untouched)
    return result, torch.cat(clean)


def _parts(question: Question, batch: int) -> Iterator[Tensor]:
    indices = torch.arange(question.size, device=question.labels.device)
    yield from indices.split(max(1, batch // question.rows))
