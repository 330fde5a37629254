"""What came of every defence: how far off the attacker is, and how far off the honest client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from keyhole.core.result import Result, environment, restored
from keyhole.core.status import Status


@dataclass(frozen=True)
class Tried:
    """One defence. Errors are relative, on an honest client's questions; None: nothing was had.

    `refused` is the share of the honest client's questions that the defence refuses. `waiting` is
    how long an attacker with one address waits for its answers, in seconds, where a rate holds it.
    """

    defence: str
    setting: str
    attack: str
    status: Status
    reason: str
    thief_error: float | None
    honest_error: float
    refused: float
    queries: int
    seconds: float
    waiting: float | None = None

    @property
    def better(self) -> bool:
        """Has the attacker a better copy than the answers that honest clients get?"""
        return self.thief_error is not None and self.thief_error <= max(self.honest_error, 1e-8)


@dataclass(frozen=True, repr=False)
class DefencesTried(Result):
    """Every defence in front of one target, each with the attack that adapts to it."""

    target: str
    dim: int
    tried: tuple[Tried, ...]
    seed: int = 0
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "defences"

    @property
    def statuses(self) -> list[Status]:
        return [each.status for each in self.tried]

    def summary(self) -> str:
        head = ("defence", "attack", "attacker's error", "honest error", "refused", "queries")
        rows = [
            (
                each.defence, each.attack,
                "nothing" if each.thief_error is None else f"{each.thief_error:.1e}",
                f"{each.honest_error:.1e}", f"{each.refused:.0%}", f"{each.queries:,}",
            )
            for each in self.tried
        ]  # fmt: skip
        widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        better = sum(each.better for each in self.tried)
        lines.append(
            f"in {better} of {len(self.tried)} cases the attacker's copy is at least as exact as "
            "the answers that honest clients get"
        )
        lines += [
            f"{each.defence}: at that rate the queries take {_duration(each.waiting)}"
            for each in self.tried
            if each.waiting is not None
        ]
        return "\n".join(lines)

    def contents(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:  # noqa: ARG003
        return cls(
            target=data["target"],
            dim=data["dim"],
            tried=tuple(restored(Tried, each) for each in data["tried"]),
            seed=data["seed"],
            environment=data["environment"],
        )


def _duration(seconds: float) -> str:
    """In the largest unit of which there is one at least."""
    for name, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
