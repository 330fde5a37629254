"""What an audit found; pages and tables are made from this and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

from keyhole.core.exposure import expect_returns, rule_of
from keyhole.core.finding import Finding, Skip
from keyhole.core.result import Result, environment
from keyhole.core.status import Outcome, exit_code

_FOLDERS = re.compile(r"[^\s,:;()]*/(?=[^\s])")  # of every path in a target's name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """Findings about a target, what could not be checked, and where and when that was.

    `target` says what it is, and may hold a path; `name` is what somebody calls it. `returns` is
    what its service returns, where that was said (core/exposure.py: RETURNS).
    """

    target: str
    identity: str
    findings: tuple[Finding, ...]
    skips: tuple[Skip, ...] = ()
    seed: int = 0
    seconds: float = 0.0
    created: str = field(default_factory=_now)
    environment: dict[str, str] = field(default_factory=environment)
    name: str = ""
    returns: tuple[str, ...] = ()

    kind: ClassVar[str] = "audit"

    def __post_init__(self) -> None:  # a file may say anything
        expect_returns(self.returns, "returns")

    def is_of(self, other: Audit) -> bool:
        """Are both of one target: the same weights, vectors or address, or of the same name?

        Folders do not count: what stands in another one is still the same.
        """
        same = bool(self.identity) and self.identity == other.identity
        return same or (bool(self._called) and self._called == other._called)

    @property
    def _called(self) -> str:
        return self.name or _FOLDERS.sub("", self.target.rstrip("/"))

    @property
    def attacks(self) -> tuple[Finding, ...]:
        """The findings that count: controls do not."""
        return tuple(finding for finding in self.findings if not finding.control)

    @property
    def exposed(self) -> int:
        return sum(finding.exposed for finding in self.findings)

    @property
    def unchecked(self) -> int:
        """How many attacks applied and could not be run to an end."""
        findings = sum(finding.outcome is Outcome.UNCHECKED for finding in self.attacks)
        return findings + sum(skip.unchecked for skip in self.skips)

    @property
    def exit_code(self) -> int:
        """0 nothing was given away, 1 something was, 3 something could not be checked."""
        outcomes = [finding.outcome for finding in self.attacks]
        return exit_code([*outcomes, *(Outcome.UNCHECKED for s in self.skips if s.unchecked)])

    def by_sought(self) -> dict[str, list[Finding]]:
        """The findings that count, grouped by what the attacker is after."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.attacks:
            groups.setdefault(finding.sought, []).append(finding)
        return groups

    def summary(self) -> str:
        lines = [f"{self.target}: {self.exposed} of {len(self.attacks)} exposures gave something"]
        lines += [f"  {sought}: {_count(group)}" for sought, group in self.by_sought().items()]
        if self.unchecked:
            lines.append(f"  could not check: {self.unchecked}")
        if self.skips:
            lines.append(f"  skipped: {len(self.skips)}")
        return "\n".join([*lines, f"  {self.seconds:.1f} s, {self.created}"])


def _count(group: Sequence[Finding]) -> str:
    exposed = [rule_of(finding.exposure).name for finding in group if finding.exposed]
    first = f" ({exposed[0]}{', …' if len(exposed) > 1 else ''})" if exposed else ""
    return f"{len(exposed)} of {len(group)}{first}"


# What audits of many targets found, side by side.


@dataclass(frozen=True, repr=False)
class Fleet(Result):
    """The audit of each target by the name that its row has; `seconds` is for all of them."""

    audits: dict[str, Audit]
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "fleet"

    @property
    def exit_code(self) -> int:
        """As of one audit: 1 something was given away, 3 something could not be checked, else 0."""
        codes = {audit.exit_code for audit in self.audits.values()}
        return next((code for code in (1, 3) if code in codes), 0)

    def summary(self) -> str:
        counts = Counter(audit.exit_code for audit in self.audits.values())
        lines = [
            f"{len(self.audits)} targets: {counts[1]} give something away, {counts[3]} could not "
            f"be checked, {counts[0]} give nothing away; {self.seconds:.1f} s"
        ]
        for name, audit in self.audits.items():
            lines.append(f"  {name}: {audit.exposed} of {len(audit.attacks)} exposures")
        return "\n".join(lines)
