"""What an audit found; pages and tables are made from this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self

from keyhole.results.finding import Finding, Skip
from keyhole.results.json import environment
from keyhole.results.outcome import Outcome, exit_code
from keyhole.results.result import Result
from keyhole.results.typed import restored

if TYPE_CHECKING:  # torch takes seconds to load: reports are made without it
    from torch import Tensor


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """Findings about a target, what could not be checked, and where and when that was."""

    target: str
    identity: str
    findings: tuple[Finding, ...]
    skips: tuple[Skip, ...] = ()
    seed: int = 0
    seconds: float = 0.0
    created: str = field(default_factory=_now)
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "audit"

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

    def contents(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:  # noqa: ARG003
        return restored(cls, data, more=True)


def _count(group: Sequence[Finding]) -> str:
    exposed = [finding.exposure for finding in group if finding.exposed]
    first = f" ({exposed[0]}{', …' if len(exposed) > 1 else ''})" if exposed else ""
    return f"{len(exposed)} of {len(group)}{first}"
