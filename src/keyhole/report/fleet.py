"""Audits of many targets as one page and one table: a row for each, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keyhole.assess import Assessment, Card, FleetAssessment, Item, Severity, assess_fleet
from keyhole.core import Audit, Fleet, dump
from keyhole.core.progress import duration
from keyhole.core.text import inert, visible
from keyhole.report import json_form, sarif, words
from keyhole.report.page import fill
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


# The formats of a fleet: one file for all of its targets.

MOST_RUNS = 20  # of a SARIF file that GitHub takes


def as_json(assessment: FleetAssessment) -> str:
    """What `Fleet.load` reads, and what it means."""
    return f"{dump(document(assessment))}\n"


def document(assessment: FleetAssessment) -> dict[str, Any]:
    """The whole file; the meaning of each target is that of its own file."""
    return {
        **assessment.fleet.to_dict(),
        "assessment": {
            "verdict": assessment.verdict,
            "exit_code": assessment.exit_code,
            "targets": {name: json_form.meaning(a) for name, a in assessment.targets.items()},
        },
    }


def as_sarif(assessment: FleetAssessment, keep: Callable[[dict[str, Any]], bool] = bool) -> str:
    """A run for each target; `keep` says which results are in it."""
    ids = _distinct(assessment.targets)
    made = [sarif.run(of, ids[name], keep) for name, of in assessment.targets.items()]
    return sarif.written(made)


FLEET_FORMATS: Mapping[str, Callable[[FleetAssessment], str]] = {
    "json": as_json,
    "sarif": as_sarif,
    "sarif-github": lambda assessment: as_sarif(assessment, sarif.needs_somebody),
}


def _distinct(names: Iterable[str]) -> dict[str, str]:
    """A short name for each run of a file; where two agree, some digits of the whole name."""
    short = {name: words.slug(inert(name)) for name in names}
    count = Counter(short.values())
    return {
        name: plain if count[plain] == 1 else f"{plain} {sha256(name.encode()).hexdigest()[:8]}"
        for name, plain in short.items()
    }
