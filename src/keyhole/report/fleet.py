"""Audits of many targets as one page and one table: a row for each, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keyhole.assess import Assessment, Card, Item, Severity, assess
from keyhole.progress import duration
from keyhole.report.pages import fill
from keyhole.report.terminal import STYLES
from keyhole.results import Audit, Fleet
from keyhole.visible import visible

_COUNTED = {1: "give something away", 3: "could not be checked", 0: "give nothing away"}
Judge = Callable[[Audit], Assessment]  # what an audit means, where a policy has a say in it


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


def rows(fleet: Fleet, pages: Mapping[str, str] | None = None, judge: Judge = assess) -> list[Row]:
    """The targets, the worst first; `pages` are the files of their pages, by name."""
    made = [
        Row(name, quote((pages or {}).get(name, "")), judge(audit))
        for name, audit in fleet.audits.items()
    ]
    return sorted(made, key=_order)


def _order(row: Row) -> tuple[int, int, str]:
    worst = row.worst
    return -row.severity.rank, 0 if worst is None else -worst.score, row.name


def verdict(fleet: Fleet) -> str:
    """The one sentence that a reader takes away: what is given away, whatever a policy allows."""
    counts = Counter(audit.exit_code for audit in fleet.audits.values())
    parts = [f"{counts[code]} {words}" for code, words in _COUNTED.items() if counts[code]]
    total = len(fleet.audits)
    return f"Of {total} {'target' if total == 1 else 'targets'} {', '.join(parts)}."


def render_fleet(
    fleet: Fleet, pages: Mapping[str, str] | None = None, judge: Judge = assess
) -> str:
    """The page of a fleet; everything that came from a target is escaped."""
    made = rows(fleet, pages, judge)
    return fill(
        "fleet.html", fleet=fleet, rows=made, verdict=verdict(fleet), duration=duration,
        heads=[card.family.value for card in made[0].families] if made else [],
    )  # fmt: skip


def fleet_table(fleet: Fleet, judge: Judge = assess) -> Group:
    """The same for the terminal."""
    made = rows(fleet, judge=judge)
    view = Table(box=box.SIMPLE)
    for heading in ("target", "severity", "worst finding"):
        view.add_column(heading)
    for card in made[0].families if made else ():
        view.add_column(card.family.value)
    view.add_column("seconds", justify="right", no_wrap=True)
    for row in made:
        worst = row.verdict if row.worst is None else row.worst.finding.exposure
        view.add_row(
            # Text: what came from a target is never taken for markup.
            Text(visible(row.name)),
            Text(row.severity.value, style=STYLES[row.severity]),
            Text(visible(worst)),
            *(Text(card.level.value) for card in row.families),
            f"{row.audit.seconds:.1f}",
        )
    return Group(Text(verdict(fleet), style="bold"), view)
