"""The result of an attack on attention: an outcome with the cut units for each example, and totals.

All counts are of units that the judge saw at probability zero. `share` is relative to
all units of the model on that input, `worst_head` to the units of the head that lost
the largest share, and `perturbation` (the paper's figure) to the units of the attacked
heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor

from keyhole.core import Result, Status, environment
from keyhole.core.text import percent
from keyhole.data import Batch, Example
from keyhole.disrupt.units import Unit


@dataclass(frozen=True)
class Outcome:
    """The outcome of one example: the answers before and after, the cost, and the cut units.

    `before` and `after` hold one class, one choice, or the m tokens of a continuation.
    `queries` counts masked forward passes and gradients. `steps` counts the heads or
    units that were cut when the answer flipped. If `right` is False the model got the
    example wrong, and it was not attacked.
    """

    id: str
    right: bool
    flipped: bool
    before: tuple[int, ...]
    after: tuple[int, ...]
    confidence_before: float
    confidence_after: float
    queries: int = 0
    steps: int = 0
    masked: int = 0
    units: int = 0
    heads: int = 0
    worst_head: float = 0.0
    perturbation: float = 0.0
    cut: tuple[Unit, ...] = ()

    @property
    def share(self) -> float:
        """Units masked over all units of the model."""
        return self.masked / self.units if self.units else 0.0


@dataclass(frozen=True)
class Control:
    """The control, which cuts no unit and must change nothing.

    `change` is the largest difference of a logit from the same attention function
    without a mask, and `own` from the model as loaded, which may round differently.
    `flips` counts the answers that differ from those of the model as loaded.
    """

    change: float
    own: float
    flips: int

    def joined(self, other: Control) -> Control:
        return Control(
            _largest(self.change, other.change),
            _largest(self.own, other.own),
            self.flips + other.flips,
        )


def _largest(*numbers: float) -> float:
    """Return the largest number, or NaN if there is one: `max` may drop it."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


@dataclass(frozen=True, repr=False)
class Disruption(Result):
    """All outcomes, in the order of the examples, with the method and the control.

    `method` is the attacker's description (`described`). `model` and `data` are where
    the model and the examples come from. `identity` is equal for models that give the
    same answers. `examples` are kept for pictures and not saved.
    """

    method: dict[str, Any]
    outcomes: tuple[Outcome, ...]
    control: Control
    seconds: float
    model: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    # the ids of examples without an outcome, with the reason
    failed: tuple[tuple[str, str], ...] = ()
    identity: str = ""
    task: str = "classification"
    data: str = ""
    environment: dict[str, str] = field(default_factory=environment)
    # some examples had no label: the model's own answers count as right
    own_answers: bool = False
    examples: tuple[Example, ...] = field(default=(), compare=False)

    kind: ClassVar[str] = "disruption"

    @property
    def attacked(self) -> tuple[Outcome, ...]:
        """The examples that the model got right, which are the ones that were attacked."""
        return tuple(outcome for outcome in self.outcomes if outcome.right)

    @property
    def skipped(self) -> int:
        return len(self.outcomes) - len(self.attacked)

    @property
    def flips(self) -> int:
        return sum(outcome.flipped for outcome in self.attacked)

    @property
    def status(self) -> Status:
        """Whether all, some or none of the right answers flipped, or there were none.

        If the control changes answers, flips are not those of the model as loaded.
        """
        if self.control.flips:
            return Status.NOT_APPLICABLE
        cut = sum(outcome.masked for outcome in self.attacked)
        if not self.attacked or not (self.flips or cut):
            return Status.NOT_APPLICABLE
        if self.flips == len(self.attacked):
            return Status.RECOVERED
        return Status.INEXACT if self.flips else Status.UNSOLVED

    @property
    def obstacle(self) -> str:
        """Why there was nothing to attack, or why flips mean nothing, or ""."""
        if self.status is not Status.NOT_APPLICABLE:
            return ""
        if self.control.flips:
            if self.control.flips == 1:
                what = "an answer"
            else:
                what = f"{self.control.flips} answers"
            return f"the attack's own attention function changes {what}, though nothing is cut"
        if not self.outcomes:
            return "no example has an outcome"
        if not self.attacked:
            return f"the model gets none of {len(self.outcomes)} right"
        return (
            "the texts are too short: the share allowed is less than one unit of a head"
        )

    @property
    def success(self) -> float:
        """The share of right answers that flipped."""
        return self.flips / max(1, len(self.attacked))

    @property
    def accuracy(self) -> float:
        return len(self.attacked) / max(1, len(self.outcomes))

    @property
    def share(self) -> float:
        """The mean share of all units that was cut for a flip."""
        taken = [outcome.share for outcome in self.attacked if outcome.flipped]
        return sum(taken) / max(1, self.flips)

    @property
    def queries(self) -> float:
        """Mean queries of an attacked example."""
        total = sum(outcome.queries for outcome in self.attacked)
        return total / max(1, len(self.attacked))

    def summary(self) -> str:
        right = len(self.attacked)
        lines = [
            f"{self.flips} of {right} right answers flipped ({percent(self.success, 1)})"
        ]
        if self.obstacle:
            lines = [f"could not check: {self.obstacle}"]
        elif self.flips:
            lines[0] += f", by {percent(self.share, 2)} of all units on average"
        before = (
            f"accuracy before: {percent(self.accuracy, 1)} ({self.skipped} of "
            f"{len(self.outcomes)} were wrong and left alone)"
        )
        if self.own_answers:
            before = "without labels, the model's own answers count as right"
        lines.append(
            f"{before}; {self.queries:.0f} queries an example, {self.seconds:.1f} s"
        )
        lines.append(f"control, nothing cut: logits changed by {self.control.change:g}")
        lines += [f"no outcome for {name}: {reason}" for name, reason in self.failed]
        return "\n".join(lines)

    def contents(self) -> dict[str, Any]:
        data = asdict(replace(self, examples=()))
        del data["examples"]
        accuracy = None if self.own_answers else self.accuracy
        return {
            **data,
            "success": self.success,
            "accuracy": accuracy,
            "share": self.share,
        }


def joined(parts: list[Disruption]) -> Disruption:
    """Combine the batches of one run into one result."""
    return replace(
        parts[0],
        control=reduce(Control.joined, (part.control for part in parts)),
        seconds=sum(part.seconds for part in parts),
        outcomes=tuple(outcome for part in parts for outcome in part.outcomes),
        failed=tuple(failure for part in parts for failure in part.failed),
    )


class Attacker(Protocol):
    """A way to cut attention; a frozen dataclass of hyperparameters.

    `words` describes it for people. `control` is True if the cuts are random, so that
    flips do not depend on the choice of units.
    """

    @property
    def words(self) -> str: ...
    @property
    def control(self) -> bool: ...

    def __call__(
        self,
        model: Any,
        batch: Batch,
        labels: Tensor | None = None,
        *,
        ids: Sequence[str] = (),
    ) -> Disruption:
        """Attack a batch. `ids` name its examples in the result."""
        ...


def described(attacker: Attacker) -> dict[str, Any]:
    """Return an attacker's name, hyperparameters and words, as results store them."""
    return {
        "attack": type(attacker).__name__,
        **asdict(cast("Any", attacker)),
        "words": attacker.words,
        "control": attacker.control,
    }
