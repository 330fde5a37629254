"""One exposure of a target and what an attack made of it, and what could not be checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keyhole.results.cuts import Cut
from keyhole.results.estimate import Estimate
from keyhole.results.outcome import OUTCOMES, Outcome
from keyhole.results.readings import Readings
from keyhole.results.status import Status
from keyhole.results.typed import restored


@dataclass(frozen=True)
class Remedied:
    """What was left to the same attack once a remedy was in place, measured.

    `left` is the share still given away, `words` say what was counted.
    """

    remedy: str
    left: float
    words: str


@dataclass(frozen=True)
class Finding:
    """One exposure of a target, and what one attack made of it.

    `surface` names the endpoint where a target has several, `sought` is what the attacker is after.
    `control` marks an attack without any choice, run for comparison: it is no exposure, whatever it
    achieves. `texts`, where text is sought, shows it as it was and as it came back, in each
    precision; `cuts`, where it is a prediction, where attention was cut for it. `estimate` is what
    a sample says of all the texts of a store, `remedied` what was left where a remedy was tried.
    """

    exposure: str
    attack: str
    status: Status
    reason: str
    remedy: str
    error: float | None
    queries: int
    seconds: float
    floor: int | None = None
    known: float = 0.0
    trace: tuple[tuple[int, float], ...] = ()
    surface: str = ""
    sought: str = "weights"
    texts: tuple[Readings, ...] = ()
    cuts: tuple[Cut, ...] = ()
    control: bool = False
    estimate: Estimate | None = None
    remedied: tuple[Remedied, ...] = ()

    @property
    def outcome(self) -> Outcome:
        return OUTCOMES[self.status]

    @property
    def exposed(self) -> bool:
        """Did the attacker come away with the secret, exactly or nearly?"""
        return self.outcome is Outcome.GIVEN_AWAY and not self.control

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        return restored(cls, data)


@dataclass(frozen=True)
class Skip:
    """An attack that was not run, and why: silence is not a clean bill of health.

    `unchecked` says that it would apply but could not be run: then the target is not clean.
    """

    exposure: str
    attack: str
    reason: str
    unchecked: bool = False


def points(trace: list[list[Any]]) -> tuple[tuple[int, float], ...]:
    """A trace as it is read from JSON."""
    return tuple((int(queries), float(error)) for queries, error in trace)
