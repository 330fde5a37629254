"""How an attack ended, and what that means: failure is a value, with advice on what to try next."""

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


def mismatch(reason: str) -> Unsuccessful:
    return Unsuccessful(Status.MISMATCH, reason)


def not_applicable(reason: str) -> Unsuccessful:
    return Unsuccessful(Status.NOT_APPLICABLE, reason)


def not_identifiable(reason: str) -> Unsuccessful:
    return Unsuccessful(Status.NOT_IDENTIFIABLE, reason)


class Outcome(StrEnum):
    """What a status means for whoever has to decide.

    `KEPT` means that an attack ran to its end without the secret: it was not found
    (unsolved), or cannot be found (not identifiable). It is no proof of safety. A
    search for the text behind one vector only ever ends at its budget, so one that
    found nothing counts as `UNCHECKED`.
    """

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
    """Return the exit code of a command that checked all of these.

    1 if anything was given away or a way to it is open; otherwise 3 if anything could
    not be checked or nothing was checked; otherwise 0. (2 is for wrong input, which has
    no status.)
    """
    outcomes = [
        OUTCOMES[status] if isinstance(status, Status) else status
        for status in statuses
    ]
    if Outcome.GIVEN_AWAY in outcomes or Outcome.EXPOSED in outcomes:
        return 1
    if not outcomes or Outcome.UNCHECKED in outcomes:
        return 3
    return 0


def joint_exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of several targets: 1 if any gave something away, else 3, else 0."""
    found = set(codes)
    return next((code for code in (1, 3) if code in found), 0)
