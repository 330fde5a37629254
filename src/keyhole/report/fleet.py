"""Audits of many targets as one page and one table: a row for each, the worst first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keyhole.assess import Assessment, Card, FleetAssessment, Item, Severity, assess_fleet
from keyhole.core import Audit, Fleet
from keyhole.core.progress import duration
from keyhole.core.text import visible
from keyhole.report import words
from keyhole.report.pages import fill
from keyhole.report.terminal import STYLES


@dataclass(frozen=True)
class Row:
    """One target: its name, the address of its page, and what its audit means."""

    name: str
    page: str
    assessment: Assessment

    @property
    def audit(self) -> Audit:
        return self.assessment.audit

    @property
    def verdict(self) -> str:
        """Of a target that nobody could open, why."""
        opened = self.audit.findings or not self.audit.unchecked
        return self.assessment.verdict if opened else f"Could not check: {self.reasons}"

    @property
    def reasons(self) -> str:
        return "; ".join(skip.reason for skip in self.audit.skips if skip.unchecked)

    @property
    def severity(self) -> Severity:
        """Of the worst finding; what gave nothing away but for what nobody could check: unknown."""
        if self.assessment.exit_code == 3:
            return Severity.UNKNOWN
        return self.assessment.severity

    @property
    def worst(self) -> Item | None:
        return next(iter(self.assessment.exposed), None)

    @property
    def families(self) -> tuple[Card, ...]:
        return self.assessment.families

    @property
    def seconds(self) -> str:
        return duration(self.audit.seconds) if self.audit.seconds else "–"


def rows(assessment: FleetAssessment, pages: Mapping[str, str] | None = None) -> list[Row]:
    """The targets, the worst first; `pages` are the files of their pages, by name."""
    made = [
        Row(name, quote((pages or {}).get(name, "")), of) for name, of in assessment.targets.items()
    ]
    return sorted(made, key=_order)


def _order(row: Row) -> tuple[int, int, str]:
    worst = row.worst
    return -row.severity.rank, 0 if worst is None else -worst.score, row.name


def render_fleet(
    fleet: Fleet,
    pages: Mapping[str, str] | None = None,
    assessment: FleetAssessment | None = None,
) -> str:
    """The page of a fleet; everything that came from a target is escaped.

    `assessment` is what `assess_fleet` made of it, where a policy or a baseline had a say in it.
    """
    meant = assess_fleet(fleet) if assessment is None else assessment
    made = rows(meant, pages)
    return fill(
        "fleet.html", fleet=fleet, rows=made, verdict=meant.verdict, duration=duration, words=words,
        heads=[card.family.value for card in made[0].families] if made else [],
    )  # fmt: skip


def fleet_table(fleet: Fleet, assessment: FleetAssessment | None = None) -> Group:
    """The same for the terminal."""
    meant = assess_fleet(fleet) if assessment is None else assessment
    made = rows(meant)
    view = Table(box=box.SIMPLE)
    for heading in ("target", "severity", "worst finding"):
        view.add_column(heading)
    for card in made[0].families if made else ():
        view.add_column(card.family.value)
    view.add_column("seconds", justify="right", no_wrap=True)
    for row in made:
        worst = row.verdict if row.worst is None else words.exposure(row.worst.finding.exposure)
        view.add_row(
            # Text: what came from a target is never taken for markup.
            Text(visible(row.name)),
            Text(row.severity.value, style=STYLES[row.severity]),
            Text(visible(worst)),
            *(Text(card.level.value) for card in row.families),
            f"{row.audit.seconds:.1f}",
        )
    return Group(Text(meant.verdict, style="bold"), view)
