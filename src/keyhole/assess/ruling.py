"""What a policy decides: a ruling on each finding, an exit code, and the rule behind it.

Exit codes, for every command that judges: 0 nothing was given away that fails the policy, 1
findings fail it, 2 wrong input (which never gets as far as a decision), 3 something could not be
checked, also where everything else was clean. Findings that fail come first: a target that is known
to be open is not waiting for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PASSED, FAILED, UNCHECKED = 0, 1, 3


class Ruling(StrEnum):
    """What a policy says of one finding."""

    FAILS = "fails"
    IGNORED = "ignored"
    KNOWN = "known"  # in the baseline, and no worse
    UNCHECKED = "could not check"
    PASSES = "passes"


@dataclass(frozen=True)
class Ruled:
    """One finding, or one check that could not be made, and which rule decided about it."""

    name: str
    ruling: Ruling
    rule: str


@dataclass(frozen=True)
class Decision:
    """Whether the audit passes; `rule` says what decided, `rulings` the same for each finding."""

    exit_code: int
    rule: str
    rulings: tuple[Ruled, ...]
    source: str

    @property
    def failing(self) -> tuple[Ruled, ...]:
        return tuple(ruled for ruled in self.rulings if ruled.ruling is Ruling.FAILS)
