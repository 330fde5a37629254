"""What audits of many targets mean: each by its name, one verdict, one exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keyhole.assess.assessment import Assessment, assess
from keyhole.core import Audit, Fleet

_COUNTED = {1: "give something away", 3: "could not be checked", 0: "give nothing away"}


@dataclass(frozen=True)
class FleetAssessment:
    """What the table, the page and all formats of a fleet are made from."""

    fleet: Fleet
    targets: Mapping[str, Assessment]  # by the name that the target's row has

    @property
    def verdict(self) -> str:
        """The one sentence that a reader takes away: what is given away, whatever a policy says."""
        counts = Counter(audit.exit_code for audit in self.fleet.audits.values())
        parts = [f"{counts[code]} {words}" for code, words in _COUNTED.items() if counts[code]]
        total = len(self.targets)
        return f"Of {total} {'target' if total == 1 else 'targets'} {', '.join(parts)}."

    @property
    def exit_code(self) -> int:
        """As of one audit: 1 where any target fails, else 3 where something was not checked."""
        codes = {assessment.exit_code for assessment in self.targets.values()}
        return next((code for code in (1, 3) if code in codes), 0)


def assess_fleet(
    fleet: Fleet, judge: Callable[[str, Audit], Assessment] = lambda name, audit: assess(audit)  # noqa: ARG005
) -> FleetAssessment:  # fmt: skip
    """Every audit with its meaning; `judge` is told the target's name, and may know a policy."""
    made = {name: judge(name, audit) for name, audit in fleet.audits.items()}
    return FleetAssessment(fleet, made)
