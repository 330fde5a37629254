"""A finding with its id, its rule and how bad it is: a row of every format."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from enum import StrEnum

from keyhole.assess.severity import Severity, exact, is_proved, share
from keyhole.core import Finding
from keyhole.core.exposure import Family, Rule


class State(StrEnum):
    """What became of a finding since the baseline."""

    NEW = "new"
    WORSE = "worse"
    SAME = "same"
    BETTER = "better"
    GONE = "gone"


@dataclass(frozen=True)
class Ignore:
    """Findings that somebody has decided to live with: whose, why, and until when.

    `finding` is an id of a finding or of a rule; `*` stands for anything.
    """

    finding: str
    reason: str
    until: date


@dataclass(frozen=True)
class Item:
    """A finding, its id in all formats, and how bad it is.

    `id` is made of what the finding is about, not of where it stands, so that the next audit of
    the same target gives the same one. `score` is 0 to 10, `why` says what it is made of. `state`
    is set where there is a baseline, `ignored` where a policy says so.
    """

    id: str
    rule: Rule
    finding: Finding
    severity: Severity
    score: int
    why: str
    state: State | None = None
    ignored: Ignore | None = None

    @property
    def family(self) -> Family:
        return self.rule.family

    @property
    def share(self) -> float:
        return share(self.finding)

    @property
    def exact(self) -> float:
        return exact(self.finding)

    @property
    def proved(self) -> bool:
        return is_proved(self.finding)
