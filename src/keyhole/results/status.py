"""How an attack ended: failure is a value, with advice on what to try next."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How an attack ended; `advice` says what to try next."""

    RECOVERED = "recovered"
    WITHIN = "recovered within a domain"
    INEXACT = "inexact"
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
