"""The formats of a report, by the names that people type, and two of them: Markdown and JUnit XML.

All of them are made from the same `Assessment`, so that no two can disagree about ids,
severities or the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from keyhole.assess import Assessment, Card, Item, Level, Ruling, Severity
from keyhole.assess.severity import cost
from keyhole.core import Audit, Outcome, Skip
from keyhole.core.exposure import NOT_CHECKED
from keyhole.core.text import as_code, inert
from keyhole.report import json_form, sarif, words
from keyhole.report.page import render

# Markdown, for a comment on a pull request: the verdict, four cards, what is given
# away.
#
# Everything from a target, a server or a file is put into a code span (core/text.py),
# so that it mentions nobody, links nothing and opens no tag. GitHub allows 65,536
# characters in a comment; rows that do not fit are counted instead.

MOST = 60_000  # the most characters of a comment; GitHub allows some more
SHOWN = 20  # findings that are shown without a click
CELL = 160  # the most characters of a target's text in a cell
SIGNS = {
    Severity.CRITICAL: "🔴",
    Severity.HIGH: "🟠",
    Severity.MEDIUM: "🟡",
    Severity.LOW: "🔵",
    Severity.UNKNOWN: "⚪",
    Severity.NONE: "🟢",
}
HEAD = (
    "| severity | given away | how much | cost | fix |",
    "| --- | --- | --- | --- | --- |",
)


def as_markdown(assessment: Assessment) -> str:
    """Return a comment that is complete, or says how many findings it leaves out."""
    rows = [_row(item) for item in assessment.exposed]
    top = [*_title(assessment), *_cards(assessment.families)]
    bottom = [*_not_counted(assessment), *_how_it_was_made(assessment.audit)]
    room = MOST - sum(len(line) + 1 for line in (*top, *bottom))
    fitting = sum(size <= room for size in accumulate(len(line) + 1 for line in rows))
    return "\n".join([*top, *_given_away(rows, fitting), *bottom]) + "\n"


def _title(assessment: Assessment) -> list[str]:
    target = as_code(assessment.audit.target, CELL)
    lines = [
        f"## {SIGNS[assessment.severity]} Keyhole: {assessment.verdict}",
        "",
        f"Target {target}: {words.counts(assessment)}; worst severity "
        f"**{assessment.severity}**, exit code {assessment.exit_code}.",
        "",
    ]
    ruling = words.ruling(assessment)
    if ruling:
        lines += [as_code(ruling, 400), ""]
    return lines


def _cards(cards: Sequence[Card]) -> list[str]:
    """Return a table with one row for each kind of attack."""
    lines = [
        "| severity | what | given away | through | the fix that serves most |",
        "| --- | --- | --- | --- | --- |",
    ]
    for card in cards:
        severity = "–"
        through = "–"
        if card.level is not Level.NOT_TRIED:
            severity = f"{SIGNS[card.severity]} {card.severity}"
            through = f"{card.exposed} of {card.checked}"
        lines.append(
            f"| {severity} | {card.family} | {card.level} | {through} | {as_code(card.fix, CELL)} |"
        )
    return [*lines, ""]


def _row(item: Item) -> str:
    """Return a finding's row of the table under `HEAD`."""
    finding = item.finding
    severity = f"{SIGNS[item.severity]} {item.severity}"
    if item.state is not None:
        severity += f" ({item.state})"
    exposure = f"{as_code(words.in_full(finding.exposure), CELL)}<br>{item.rule.id}"
    if item.ignored is not None:
        reason = as_code(item.ignored.reason, CELL)
        exposure += f"<br>ignored until {item.ignored.until}: {reason}"
    outcome = words.outcome(finding)
    if finding.command:
        outcome += f"<br>{as_code(finding.command, CELL)}"
    remedy = as_code(finding.remedy, CELL)
    return f"| {severity} | {exposure} | {outcome} | {cost(finding)} | {remedy} |"


def _given_away(rows: Sequence[str], fitting: int) -> list[str]:
    """Return the table of findings, of which the first `fitting` rows fit."""
    shown = rows[: min(fitting, SHOWN)]
    more = rows[SHOWN:fitting]
    left = len(rows) - fitting
    lines: list[str] = []
    if shown:
        lines += ["### Given away", "", *HEAD, *shown, ""]
    if more:
        lines += _details(f"{len(more)} more", [*HEAD, *more])
    if left:
        words = f"{left} more findings do not fit here: the JSON file has all of them."
        lines += [words, ""]
    return lines


def _details(title: str, lines: Sequence[str]) -> list[str]:
    """Return lines that are folded under a title."""
    return [
        f"<details><summary>{title}</summary>",
        "",
        *lines,
        "",
        "</details>",
        "",
    ]


def _not_counted(assessment: Assessment) -> list[str]:
    """Return lists of whatever is not in the table, and what was assumed of the service."""
    lines = _folded(
        "could not be checked, which is not clean", words.unchecked(assessment)
    )
    for about, items in (
        ("gone since the baseline", assessment.gone),
        ("of the baseline not tried this time, as before", assessment.untried),
        ("hypothetical: the service does not return it", assessment.hypothetical),
    ):
        names = [words.in_full(item.finding.exposure) for item in items]
        lines += _folded(about, names)
    note = words.assumed(assessment)
    if note:
        lines += [note, ""]
    return lines


def _folded(about: str, names: Sequence[str]) -> list[str]:
    """Return a list that is folded under a line with its count."""
    if not names:
        return []
    lines = [f"- {as_code(name, CELL)}" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        lines.append(f"- and {len(names) - SHOWN} more")
    return _details(f"{len(names)} {about}", lines)


def _how_it_was_made(audit: Audit) -> list[str]:
    about = (
        f"Keyhole {as_code(words.version(audit))}, seed {audit.seed}, finished "
        f"{as_code(audit.created, 40)}, {audit.seconds:.0f} s, on "
        f"{as_code(audit.environment.get('platform', ''), CELL)}; the target's identity is "
        f"{as_code(audit.identity, CELL)}. `keyhole report AUDIT.json` makes a page of it."
    )
    return _details("How this was made", [about])


# JUnit XML, in the dialect of Jenkins' xUnit plugin (junit-10), which all others read.
#
# Each check is a test case: a failure if something was given away, an error if it could
# not be checked, skipped if nothing was tried or a policy ignores it. If a policy
# decided, a test case fails if and only if the policy says so, so that the tests and
# the exit code agree.


def as_junit(assessment: Assessment) -> str:
    """Return a document with a suite for each part of the target."""
    audit = assessment.audit
    suites: dict[str, list[Element]] = {}
    for item in (*assessment.items, *assessment.hypothetical):
        part = item.finding.part or audit.target
        suites.setdefault(part, []).append(_case(item, assessment))
    for skip in audit.skips:
        suites.setdefault(audit.target, []).append(_skipped(skip, assessment))
    name = inert(f"keyhole audit of {audit.target}")
    every = [case for cases in suites.values() for case in cases]
    root = Element("testsuites", {"name": name, **_totals(every)})
    for part, cases in suites.items():
        suite = SubElement(root, "testsuite", {"name": inert(part), **_totals(cases)})
        suite.set("skipped", _count(cases, "skipped"))
        suite.extend(cases)
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _case(item: Item, assessment: Assessment) -> Element:
    finding = item.finding
    tag, decided_by = _result(item, assessment)
    standards = ", ".join(standard.id for standard in item.rule.standards)
    lines = [
        f"{item.id}, {item.rule.id} ({item.rule.name})",
        f"standards: {standards or 'none'}",
        words.sentence(item),
        decided_by and f"decided by: {decided_by}",
    ]
    name = f"{words.exposure(finding.exposure)} ({finding.attack})"
    case = _testcase(item.family, finding.part, name, finding.seconds)
    result = SubElement(case, tag or "system-out")
    if tag:
        message = f"{item.severity}: {words.outcome(finding)}"
        result.attrib = {"type": item.severity.value, "message": inert(message)}
    result.text = "\n".join(inert(line) for line in lines if line)
    return case


_TAGS = {
    Outcome.GIVEN_AWAY: "failure",
    Outcome.EXPOSED: "failure",
    Outcome.UNCHECKED: "error",
    Outcome.KEPT: "",
}
_TAGS_OF_RULINGS = {
    Ruling.FAILS: "failure",
    Ruling.UNCHECKED: "error",
    Ruling.IGNORED: "skipped",
    Ruling.ALLOWED: "skipped",
}


def _result(item: Item, assessment: Assessment) -> tuple[str, str]:
    """Return the tag of a check's result, empty if it passed, and the rule that decided it."""
    if item in assessment.hypothetical:
        return "skipped", "the service does not return it"
    ruled = assessment.ruled(item.id)
    if ruled is None:
        return _TAGS[item.finding.outcome], ""
    return _TAGS_OF_RULINGS.get(ruled.ruling, ""), ruled.rule


def _skipped(skip: Skip, assessment: Assessment) -> Element:
    """Return the test case of an exposure that was not attacked."""
    family = "skipped"
    if skip.exposure.rule != NOT_CHECKED:
        family = skip.exposure.family
    case = _testcase(family, "", f"{words.skip(skip)} ({skip.attack})", 0.0)
    tag = "skipped"
    excused = assessment.excused(skip.exposure.id)
    if skip in assessment.audit.unchecked_skips and not excused:
        tag = "error"
    kind = "unknown" if skip.unchecked else "not tried"
    SubElement(case, tag, type=kind, message=inert(skip.reason))
    return case


def _testcase(
    family: str,
    part: str,
    name: str,
    seconds: float,
) -> Element:
    classname = f"keyhole.{family}"
    if part:
        classname += f".{words.slug(part)}"
    time = f"{max(0.0, seconds):.3f}"
    return Element("testcase", classname=classname, name=inert(name), time=time)


def _totals(cases: Sequence[Element]) -> dict[str, str]:
    return {
        "tests": str(len(cases)),
        "failures": _count(cases, "failure"),
        "errors": _count(cases, "error"),
        "time": f"{sum(float(case.get('time', 0)) for case in cases):.3f}",
    }


def _count(cases: Sequence[Element], tag: str) -> str:
    return str(sum(case.find(tag) is not None for case in cases))


FORMATS: dict[str, Callable[[Assessment], str]] = {
    "html": render,
    "json": json_form.render,
    "sarif": sarif.render,
    "sarif-github": sarif.render_alerts,
    "markdown": as_markdown,
    "junit": as_junit,
}
