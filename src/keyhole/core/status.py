"""How an attack ended: failure is a value, with advice on what to try next."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Status(StrEnum):
    """How an attack ended; `advice` says what to try next."""

    RECOVERED = "recovered"
    WITHIN = "recovered within a domain"
    INEXACT = "inexact"
    EXPOSED = "exposed"
    UNVERIFIED = "unverified"
    MISMATCH = "mismatch"
    NOT_IDENTIFIABLE = "not identifiable"
    NOT_APPLICABLE = "not applicable"
    SATURATED = "saturated"
    BUDGET = "budget exhausted"
    ORACLE_FAILED = "oracle failed"
    UNSOLVED = "unsolved"
    INTERRUPTED = "interrupted"

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    Status.RECOVERED: "Do not return this value to people who may not have the weights.",
    Status.WITHIN: "Recovered where the reason says; beyond it the target answers differently.",
    Status.INEXACT: "The weights are known approximately; exact answers would give all of them.",
    Status.EXPOSED: "It is open, and nothing was read from it yet: the command tries it.",
    Status.UNVERIFIED: "Allow a few more queries than the attack needs, for the check.",
    Status.MISMATCH: "The answers do not come from this kind of model: try another method.",
    Status.NOT_IDENTIFIABLE: "No number of these queries can settle it.",
    Status.NOT_APPLICABLE: "This attack reads another kind of answer: try another method.",
    Status.SATURATED: "Attention stays at 0 or 1 at every scale tried: try smaller inputs.",
    Status.BUDGET: "Resume with the same ledger and a larger budget: nothing is asked twice.",
    Status.ORACLE_FAILED: "Repair the target and resume: a ledger keeps what was answered.",
    Status.UNSOLVED: "Try more starts or another method.",
    Status.INTERRUPTED: "Run again with more time.",
}


class Unsuccessful(Exception):
    """Raised inside an attack to end it with a status; never leaves the library."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


# What a status means for whoever has to decide: given away, exposed, kept, or could not be checked.
#
# One table for all commands, for the page's headline and for exit codes: 0 nothing was given away,
# 1 something was, or a way to it is open, 3 something could not be checked. What could not be
# checked is never clean, even where everything else is. (2 is for wrong input, which never gets as
# far as a status.)
#
# `kept` is the outcome where an attack ran to its end without the secret: it was not found
# (unsolved), or cannot be found (not identifiable). It is no proof of safety. A search for the text
# behind one vector ends at its budget alone: one that found none could not check.


class Outcome(StrEnum):
    GIVEN_AWAY = "given away"
    EXPOSED = "exposed"
    KEPT = "kept"
    UNCHECKED = "could not check"


OUTCOMES = {
    Status.RECOVERED: Outcome.GIVEN_AWAY,
    Status.WITHIN: Outcome.GIVEN_AWAY,
    Status.INEXACT: Outcome.GIVEN_AWAY,
    Status.EXPOSED: Outcome.EXPOSED,
    Status.NOT_IDENTIFIABLE: Outcome.KEPT,
    Status.UNSOLVED: Outcome.KEPT,
    Status.BUDGET: Outcome.UNCHECKED,
    Status.UNVERIFIED: Outcome.UNCHECKED,
    Status.MISMATCH: Outcome.UNCHECKED,
    Status.NOT_APPLICABLE: Outcome.UNCHECKED,
    Status.SATURATED: Outcome.UNCHECKED,
    Status.ORACLE_FAILED: Outcome.UNCHECKED,
    Status.INTERRUPTED: Outcome.UNCHECKED,
}


def exit_code(statuses: Iterable[Status | Outcome]) -> int:
    """0, 1 or 3 for all that was checked; 3 also where there was nothing to check."""
    outcomes = [OUTCOMES[status] if isinstance(status, Status) else status for status in statuses]
    if Outcome.GIVEN_AWAY in outcomes or Outcome.EXPOSED in outcomes:
        return 1
    return 3 if not outcomes or Outcome.UNCHECKED in outcomes else 0
