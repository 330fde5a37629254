"""The formats of a fleet: one file for all of its targets, each of which is told apart in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Any

from keyhole.assess import FleetAssessment
from keyhole.core import dump
from keyhole.report import json_form, junit, markdown, sarif, sarif_log, words
from keyhole.report.fleet import Row, rows
from keyhole.report.inert import as_code, inert
from keyhole.report.provenance import slug

MOST_RUNS = 20  # of a SARIF file that GitHub takes
_TARGETS = (
    "| severity | target | given away | verdict | the fix that serves most |",
    "| --- | --- | --- | --- | --- |",
)


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
    return sarif_log.written(made)


def as_junit(assessment: FleetAssessment) -> str:
    """A suite for each target."""
    suites = [junit.whole(name, of) for name, of in assessment.targets.items()]
    return junit.written(f"keyhole audit of {len(suites)} targets", suites)


def as_markdown(assessment: FleetAssessment) -> str:
    """A comment: the targets, the worst first, then what each of them gives away."""
    made = rows(assessment)
    sign = markdown.SIGNS[made[0].severity.value if made else "unknown"]
    top = [
        f"## {sign} Keyhole: {assessment.verdict}", "",
        f"Exit code {assessment.exit_code}.", "",
    ]  # fmt: skip
    found = [
        markdown.row(item, f"{as_code(row.name, markdown.CELL)}<br>")
        for row in made
        for item in row.assessment.exposed
    ]
    tables = [
        markdown.Table("Targets", "targets", _TARGETS, [_target(row) for row in made]),
        markdown.Table("Given away", "findings", markdown.HEAD, found),
    ]
    gone = [
        f"{row.name}: {words.in_full(item.finding.exposure)}"
        for row in made
        for item in row.assessment.gone
    ]
    return markdown.fitted(top, tables, markdown.folded("gone since the baseline", gone))


FLEET_FORMATS: Mapping[str, Callable[[FleetAssessment], str]] = {
    "json": as_json,
    "sarif": as_sarif,
    "sarif-github": lambda assessment: as_sarif(assessment, sarif.needs_somebody),
    "markdown": as_markdown,
    "junit": as_junit,
}


def _distinct(names: Iterable[str]) -> dict[str, str]:
    """A short name for each run of a file; where two agree, some digits of the whole name."""
    short = {name: slug(inert(name)) for name in names}
    count = Counter(short.values())
    return {
        name: plain if count[plain] == 1 else f"{plain} {sha256(name.encode()).hexdigest()[:8]}"
        for name, plain in short.items()
    }


def _target(row: Row) -> str:
    audit, assessment = row.audit, row.assessment
    other = f"<br>{as_code(audit.target, markdown.CELL)}" if audit.target != row.name else ""
    worst = row.worst
    fix = worst.finding.remedy if worst is not None else ""
    return (
        f"| {markdown.SIGNS[row.severity.value]} {row.severity} | "
        f"{as_code(row.name, markdown.CELL)}{other} | "
        f"{len(assessment.exposed)} of {len(assessment.items)} | "
        f"{as_code(row.verdict, markdown.CELL)} | {as_code(fix, markdown.CELL)} |"
    )
