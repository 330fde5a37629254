"""What attacks, trainings and audits return: statuses, findings, evidence, and their files."""

from keyhole.results.audit import Audit
from keyhole.results.cuts import Cut
from keyhole.results.estimate import Estimate
from keyhole.results.finding import Finding, Skip
from keyhole.results.fleet import Fleet
from keyhole.results.json import FORMAT, dump, environment, read
from keyhole.results.outcome import OUTCOMES, Outcome, exit_code
from keyhole.results.readings import Piece, Reading, Readings
from keyhole.results.result import Result
from keyhole.results.status import Status, Unsuccessful

__all__ = [
    "FORMAT", "OUTCOMES", "Audit", "Cut", "Estimate", "Finding", "Fleet", "Outcome", "Piece",
    "Reading", "Readings", "Result", "Skip", "Status", "Unsuccessful", "dump", "environment",
    "exit_code", "read",
]  # fmt: skip
