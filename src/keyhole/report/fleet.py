"""The audits of a fleet as a page, a table and files, with the worst target first.

All take a `FleetAssessment`; `render_fleet` and `fleet_table` also take the audits
alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keyhole.assess import (
    Assessment,
    Family,
    FleetAssessment,
    Item,
    Severity,
    assess_fleet,
)
from keyhole.core import Audit, Fleet, dump
from keyhole.core.progress import duration
from keyhole.core.text import inert, visible
from keyhole.report import json_form, sarif, words
from keyhole.report.page import fill
from keyhole.report.terminal import STYLES


@dataclass(frozen=True)
class Row:
    """A target: its name, the URL of its page, and its assessment."""

    name: str
    page: str
    assessment: Assessment

    @property
    def audit(self) -> Audit:
        return self.assessment.audit

    @property
    def verdict(self) -> str:
        """The verdict, or the reasons if the target could not be opened."""
        if self.audit.findings or not self.audit.unchecked:
            return self.assessment.verdict
        reasons = "; ".join(skip.reason for skip in self.audit.unchecked_skips)
        return f"Could not check: {reasons}"

    @property
    def severity(self) -> Severity:
        """The severity of the worst finding; unknown if that depends on checks without a result."""
        if self.assessment.exit_code == 3:
            return Severity.UNKNOWN
        return self.assessment.severity

    @property
    def worst(self) -> Item | None:
        return next(iter(self.assessment.exposed), None)


def rows(assessment: FleetAssessment, pages: Mapping[str, str]) -> list[Row]:
    """Return the targets, the worst first; `pages` are the files of their pages, by name."""

    def order(row: Row) -> tuple[int, int, str]:
        scores = [item.score for item in row.assessment.exposed]
        return -row.severity.rank, -max(scores, default=0), row.name

    targets = assessment.targets.items()
    return sorted(
        (Row(name, quote(pages.get(name, "")), of) for name, of in targets), key=order
    )


def _assessed(fleet: Fleet | FleetAssessment) -> FleetAssessment:
    """Return an assessment as it is: a policy or a baseline was applied to its audits."""
    if isinstance(fleet, FleetAssessment):
        return fleet
    return assess_fleet(fleet)


def render_fleet(
    fleet: Fleet | FleetAssessment, pages: Mapping[str, str] | None = None
) -> str:
    """Return the page of a fleet, in which everything from a target is escaped."""
    assessment = _assessed(fleet)
    return fill(
        "fleet.html",
        fleet=assessment.fleet,
        rows=rows(assessment, pages or {}),
        verdict=assessment.verdict,
        families=list(Family),
        duration=duration,
        words=words,
    )


def fleet_table(fleet: Fleet | FleetAssessment) -> Group:
    assessment = _assessed(fleet)
    view = Table(box=box.SIMPLE)
    for heading in ("target", "severity", "worst finding", *Family):
        view.add_column(heading)
    view.add_column("seconds", justify="right", no_wrap=True)
    for row in rows(assessment, {}):
        worst = row.verdict
        if row.worst is not None:
            worst = words.exposure(row.worst.finding.exposure)
        view.add_row(
            # As Text, so that nothing from a target is taken for markup.
            Text(visible(row.name)),
            Text(row.severity.value, style=STYLES[row.severity]),
            Text(visible(worst)),
            *(Text(card.level.value) for card in row.assessment.families),
            f"{row.audit.seconds:.1f}",
        )
    return Group(Text(assessment.verdict, style="bold"), view)


def as_json(assessment: FleetAssessment) -> str:
    """Return the JSON file that `Fleet.load` reads, with the meaning of all audits."""
    meaning = {
        "verdict": assessment.verdict,
        "exit_code": assessment.exit_code,
        "targets": {
            name: json_form.meaning(a) for name, a in assessment.targets.items()
        },
    }
    return f"{dump({**assessment.fleet.to_dict(), 'assessment': meaning})}\n"


def as_sarif(assessment: FleetAssessment) -> str:
    """Return a SARIF file with a run for each target."""
    ids = _distinct(assessment.targets)
    made = [sarif.run(of, ids[name]) for name, of in assessment.targets.items()]
    return sarif.written(made)


FLEET_FORMATS: Mapping[str, Callable[[FleetAssessment], str]] = {
    "json": as_json,
    "sarif": as_sarif,
}


def _distinct(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each run of a file, with a digest if two would be the same."""
    short = {name: words.slug(inert(name)) for name in names}
    count = Counter(short.values())
    for name, plain in short.items():
        if count[plain] > 1:
            short[name] = f"{plain} {sha256(name.encode()).hexdigest()[:8]}"
    return short
