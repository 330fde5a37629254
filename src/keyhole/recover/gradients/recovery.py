"""What the recovery of a batch from an update returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from keyhole.core import Status, environment
from keyhole.core.result import Result, restored
from keyhole.recover.recovery import TextRecovery

_ADVICE = {
    Status.RECOVERED: "Treat these gradients as the texts themselves.",
    Status.INEXACT: "Part of the batch is known, as its texts' marks say. Treat it as given away.",
    Status.UNSOLVED: "Not recovered this time, which is no proof of safety.",
    Status.NOT_IDENTIFIABLE: "More tokens than the model is wide: the span of their inputs is all "
    "there is.",
}


@dataclass(frozen=True, repr=False)
class BatchRecovery(Result):
    """The texts of a batch, in no order, with their classes where the task has any.

    `tokens` are the ids that are in the batch, as far as the update shows them by itself: all of
    them, wherever they stand. `residual` is the difference of the batch's own update from the
    leaked one, `precision` the size of the leak's errors, both relative to the update.
    """

    status: Status
    reason: str
    method: str
    texts: tuple[TextRecovery, ...]
    labels: tuple[int, ...]
    tokens: tuple[int, ...]
    passes: int
    seconds: float
    residual: float | None = None
    precision: float | None = None
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "batch recovery"

    @property
    def advice(self) -> str:
        return _ADVICE.get(self.status, self.status.advice)

    @property
    def verified(self) -> int:
        """How many texts are."""
        return sum(text.verified for text in self.texts)

    def summary(self) -> str:
        lines = [f"{self.status} ({self.reason})"]
        lines += [f"  {text.text} ({text.marked})" for text in self.texts]
        return "\n".join([*lines, f"  {self.cost}"])

    @property
    def cost(self) -> str:
        """What it took, and what to do about it."""
        return f"{self.passes:,} passes, {self.seconds:.2f} s. {self.advice}"

    def contents(self) -> dict[str, Any]:
        return {**asdict(self), "advice": self.advice}

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:  # noqa: ARG003
        return restored(cls, data, more=True)
