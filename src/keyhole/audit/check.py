"""What an audit consists of: checks that are made one by one, and what each of them gives.

A check is one attack on one exposure of one part of the target. It needs nothing from the others,
so an audit that was stopped goes on with those that are not done (core/journal.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from keyhole.core import Finding, Skip, Status
from keyhole.core.exposure import Exposure
from keyhole.core.machine import largest_matrix
from keyhole.core.progress import Track
from keyhole.core.result import restored


@dataclass(frozen=True)
class Checked:
    """The findings of a check, and what it could not try."""

    findings: tuple[Finding, ...] = ()
    skips: tuple[Skip, ...] = ()

    @property
    def answered(self) -> bool:
        """Did the target answer? Where it did not, the check is worth another try."""
        failed = any(finding.status is Status.ORACLE_FAILED for finding in self.findings)
        return not failed and not any(skip.unchecked for skip in self.skips)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Checked:
        return cls(
            tuple(Finding.from_dict(finding) for finding in data["findings"]),
            tuple(restored(Skip, skip) for skip in data["skips"]),
        )


@dataclass(frozen=True)
class Check:
    """One attack on one exposure, not made yet.

    `attack` is its name, where an exposure is tried with several. `weight` is about how many
    seconds it takes: the time that is left is estimated by it, and corrected by what others took.
    `queries` is the most questions that it asks a server, where those are many.
    """

    exposure: Exposure
    run: Callable[[Track], Checked]
    attack: str = ""
    weight: float = 0.02
    queries: int = 0

    @property
    def name(self) -> str:
        """What tells it from the other checks of its target, in a journal for example."""
        return f"{self.exposure}, {self.attack}" if self.attack else str(self.exposure)


class Part(ABC):
    """One part of a target; `name` is empty where it is alone, `loaded` are its known weights."""

    name: str
    loaded: Any
    observed: bool = False  # does it give by itself what is checked, or is its model run for that?

    @property
    @abstractmethod
    def identity(self) -> str:
        """What two parts share only if they are the same."""

    @property
    def size(self) -> int:
        """How many numbers its largest matrix has: threads follow from it."""
        return 0 if self.loaded is None else largest_matrix(self.loaded.model)

    @property
    def settings(self) -> dict[str, Any]:
        """What its findings follow from besides its identity."""
        return {}

    @abstractmethod
    def checks(self, seed: int, *, against_defences: bool = False) -> list[Check]: ...


def found(
    exposure: Exposure, attack: str, status: Status, reason: str, remedy: str, started: float, *,
    queries: int = 1, **more: Any,
) -> Checked:  # fmt: skip
    """One finding, which took from `started` until now."""
    finding = Finding(
        exposure=exposure, attack=attack, status=status, reason=reason, remedy=remedy,
        queries=queries, seconds=time.perf_counter() - started, **more,
    )  # fmt: skip
    return Checked((finding,))


def nothing_to_try(skip: Skip, exposure: Exposure | None = None) -> Check:
    """A check whose outcome is known before it is made: there is nothing to try.

    `exposure` is that of the check, where the skip is about more than that.
    """
    return Check(exposure or skip.exposure, lambda _: Checked(skips=(skip,)), weight=0.0)


def joined(parts: Iterable[Checked]) -> Checked:
    """What several checks gave; what two of them found alike is there once."""
    parts = list(parts)
    findings = dict.fromkeys(finding for part in parts for finding in part.findings)
    skips = dict.fromkeys(skip for part in parts for skip in part.skips)
    return Checked(tuple(findings), tuple(skips))
