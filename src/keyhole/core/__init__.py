"""The results of attacks, trainings and audits: statuses, findings, evidence, and their files."""

from keyhole.core.exposure import RULES, Exposure, Family, Rule
from keyhole.core.finding import (
    Audit,
    Cut,
    Estimate,
    Finding,
    Fleet,
    Piece,
    Reading,
    Readings,
    Remedied,
    Skip,
)
from keyhole.core.result import FORMAT, Result, dump, environment, read
from keyhole.core.status import (
    OUTCOMES,
    Outcome,
    Status,
    Unsuccessful,
    exit_code,
    mismatch,
    not_applicable,
    not_identifiable,
)

__all__ = [
    "FORMAT",
    "OUTCOMES",
    "RULES",
    "Audit",
    "Cut",
    "Estimate",
    "Exposure",
    "Family",
    "Finding",
    "Fleet",
    "Outcome",
    "Piece",
    "Reading",
    "Readings",
    "Remedied",
    "Result",
    "Rule",
    "Skip",
    "Status",
    "Unsuccessful",
    "dump",
    "environment",
    "exit_code",
    "mismatch",
    "not_applicable",
    "not_identifiable",
    "read",
]
