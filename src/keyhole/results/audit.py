"""What an audit found; pages and tables are made from this and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

from torch import Tensor

from keyhole.results.finding import Finding, Skip
from keyhole.results.json import environment
from keyhole.results.result import Result
from keyhole.results.status import Status


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
    def exposed(self) -> int:
        return sum(finding.exposed for finding in self.findings)

    @property
    def failed(self) -> bool:
        """Nothing could be checked: that is no clean bill of health."""
        return all(finding.status is Status.ORACLE_FAILED for finding in self.findings)

    def by_sought(self) -> dict[str, list[Finding]]:
        """Findings grouped by what the attacker is after."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.sought, []).append(finding)
        return groups

    def summary(self) -> str:
        lines = [f"{self.target}: {self.exposed} of {len(self.findings)} exposures gave something"]
        lines += [f"  {sought}: {_count(group)}" for sought, group in self.by_sought().items()]
        if self.skips:
            lines.append(f"  skipped: {len(self.skips)}")
        return "\n".join([*lines, f"  {self.seconds:.1f} s, {self.created}"])

    def contents(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:  # noqa: ARG003
        plain = ("target", "identity", "seed", "seconds", "created", "environment")
        return cls(
            findings=tuple(Finding.from_dict(finding) for finding in data["findings"]),
            skips=tuple(Skip(**skip) for skip in data["skips"]),
            **{name: data[name] for name in plain},
        )


def _count(group: Sequence[Finding]) -> str:
    exposed = [finding.exposure for finding in group if finding.exposed]
    first = f" ({exposed[0]}{', …' if len(exposed) > 1 else ''})" if exposed else ""
    return f"{len(exposed)} of {len(group)}{first}"
