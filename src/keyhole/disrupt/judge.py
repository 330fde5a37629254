"""The judge: an attack proposes masks, and a flip counts only if a new forward pass confirms it.

A mask cuts units: single attention probabilities (units.py). The judge gets only the
masks. It runs the model again, reads the prediction, and counts the units whose
probability is zero. A flip does not count if the mask cuts units that must be spared,
or more units than the budget allows. The judge also runs the control: cutting no unit
must change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keyhole.disrupt.budget import Budget
from keyhole.disrupt.disruption import Control
from keyhole.disrupt.tasks import Question
from keyhole.disrupt.units import FixedCuts, Units
from keyhole.models.masking import Site, Untouched, rewriting


@dataclass(frozen=True, eq=False)
class Verdict:
    """For each example: the flip, the prediction, its confidence, and the masked units."""

    flipped: Tensor
    predicted: Tensor
    confidence: Tensor
    masked: Tensor  # (b, units)


@dataclass(eq=False)
class _RecordedCuts(FixedCuts):
    """Cuts units, and records which probabilities are zero."""

    zeros: list[Tensor] = field(default_factory=list[Tensor])

    def seen(self, site: Site, probabilities: Tensor) -> None:
        """Record the final probabilities of a layer; `rewriting` calls this."""
        del site
        self.zeros.append((probabilities == 0).reshape(len(self.mask), -1))


def judge(
    model: Any,
    question: Question,
    units: Units,
    cut: Tensor,
    limits: Budget,
    batch: int,
) -> Verdict:
    """Run the model again with the units `cut` (b, units), and return which predictions flipped."""
    logits: list[Tensor] = []
    masked: list[Tensor] = []
    for indices in _parts(question, batch):
        cuts = _RecordedCuts(units, cut[indices])
        with torch.no_grad(), rewriting(model, cuts):
            logits.append(question.part(indices).logits(model))
        # Reported is what really became zero; the budget is checked on all that was
        # proposed.
        masked.append(torch.cat(cuts.zeros, 1) & cut[indices] & units.exists[indices])
    answers = torch.cat(logits)
    return Verdict(
        question.flipped(answers) & _within_limits(units, cut, limits),
        question.predicted(answers),
        question.confidence(answers),
        torch.cat(masked),
    )


def _within_limits(
    units: Units,
    cut: Tensor,
    limits: Budget,
) -> Tensor:
    """For each example (b,), whether only free units are cut and no limit is exceeded."""
    left = limits.left(units, cut)
    counts = torch.cat([left.heads, left.rows, left.total[:, None]], 1)
    return ~(cut & ~units.free).any(1) & (counts >= 0).all(1)


def run_control(
    model: Any,
    question: Question,
    units: Units,
    batch: int,
) -> tuple[Control, Tensor]:
    """Return how much cutting no unit changes the answers, and the logits without any cut.

    The answers are compared with those of the model as loaded (`own`), and with those
    of the rewritten attention that changes nothing.
    """
    result = Control(0.0, 0.0, 0)
    clean: list[Tensor] = []
    for indices in _parts(question, batch):
        part = question.part(indices)
        nothing = torch.zeros_like(units.free[indices])
        with torch.no_grad():
            own = part.logits(model)
            with rewriting(model, Untouched()):
                untouched = part.logits(model)
            with rewriting(model, FixedCuts(units, nothing)):
                zero = part.logits(model)
        flips = (part.predicted(zero) != part.predicted(own)).any(-1).sum()
        change = (zero - untouched).abs().max()
        from_own = (zero - own).abs().max()
        found = Control(float(change), float(from_own), int(flips))
        result = result.joined(found)
        clean.append(untouched)
    return result, torch.cat(clean)


def _parts(question: Question, batch: int) -> Sequence[Tensor]:
    indices = torch.arange(question.size, device=question.labels.device)
    return indices.split(max(1, batch // question.rows))
