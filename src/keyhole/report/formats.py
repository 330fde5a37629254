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
from keyhole.core import Outcome, Skip
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
    top = [*_title(assessment), *_cards(assessment.families), *_decision(assessment)]
    bottom = [*_not_counted(assessment), *_how_to_reproduce(assessment)]
    room = MOST - sum(len(line) + 1 for line in (*top, *bottom))
    fitting = sum(size <= room for size in accumulate(len(line) + 1 for line in rows))
    return "\n".join([*top, *_given_away(rows, fitting), *bottom]) + "\n"


def _title(assessment: Assessment) -> list[str]:
    ways = sum(
        item.finding.open for item in assessment.items
    )  # open to attack, but not attacked
    found_open = f"{ways} found a way open, " if ways else ""
    return [
        f"## {SIGNS[assessment.severity]} Keyhole: {assessment.verdict}",
        "",
        f"Target {as_code(assessment.audit.target, CELL)}: {len(assessment.exposed) - ways} of "
        f"{len(assessment.items)} checks gave something away, {found_open}worst severity "
        f"**{assessment.severity}**, exit code {assessment.exit_code}.",
        "",
    ]


def _cards(cards: Sequence[Card]) -> list[str]:
    """Return a table with one row for each kind of attack."""
    rows = [
        f"| {SIGNS[card.severity]} {card.severity} | {card.family} | {card.level} | "
        f"{card.exposed} of {card.checked} | {as_code(card.fix, CELL)} |"
        if card.level is not Level.NOT_TRIED
        else f"| – | {card.family} | {card.level} | – | |"
        for card in cards
    ]
    return [
        "| severity | what | given away | through | the fix that serves most |",
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]


def _decision(assessment: Assessment) -> list[str]:
    """Return what the policy decided, if there is one."""
    decision = assessment.decision
    if decision is None:
        return []
    verdict = {0: "passes", 1: "fails"}.get(decision.exit_code, "could not be checked")
    rule = as_code(decision.rule, 400)
    source = as_code(decision.policy, CELL)
    return [f"By the policy {source} this **{verdict}**: {rule}", ""]


def _row(item: Item) -> str:
    """Return a finding's row of the table under `HEAD`."""
    finding = item.finding
    state = f" ({item.state})" if item.state is not None else ""
    tries = f"<br>{as_code(finding.command, CELL)}" if finding.command else ""
    ignored = ""
    if item.ignored is not None:
        reason = as_code(item.ignored.reason, CELL)
        ignored = f"<br>ignored until {item.ignored.until}: {reason}"
    return (
        f"| {SIGNS[item.severity]} {item.severity}{state} | "
        f"{as_code(words.in_full(finding.exposure), CELL)}<br>{item.rule.id}{ignored} | "
        f"{words.outcome(finding)}{tries} | {cost(finding)} | {as_code(finding.remedy, CELL)} |"
    )


def _given_away(rows: Sequence[str], fitting: int) -> list[str]:
    """Return the table of findings, of which the first `fitting` rows fit."""
    shown = rows[: min(fitting, SHOWN)]
    more = rows[SHOWN:fitting]
    lines = [] if not shown else ["### Given away", "", *HEAD, *shown, ""]
    if more:
        lines += [f"<details><summary>{len(more)} more</summary>", "", *HEAD, *more, ""]
        lines += ["</details>", ""]
    if left := len(rows) - fitting:
        lines += [
            f"{left} more findings do not fit here: the JSON file has all of them.",
            "",
        ]
    return lines


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
        lines += _folded(
            about, [words.in_full(item.finding.exposure) for item in items]
        )
    note = words.assumed(assessment)
    return [*lines, note, ""] if note else lines


def _folded(about: str, names: Sequence[str]) -> list[str]:
    """Return a list that is folded under a line with its count."""
    if not names:
        return []
    listed = [f"- {as_code(name, CELL)}" for name in names[:SHOWN]]
    listed += [f"- and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return [
        f"<details><summary>{len(names)} {about}</summary>",
        "",
        *listed,
        "",
        "</details>",
        "",
    ]


def _how_to_reproduce(assessment: Assessment) -> list[str]:
    audit = assessment.audit
    return [
        "<details><summary>How to reproduce</summary>",
        "",
        f"Keyhole {as_code(words.version(audit))}, seed {audit.seed}, finished "
        f"{as_code(audit.created, 40)}, {audit.seconds:.0f} s, on "
        f"{as_code(audit.environment.get('platform', ''), CELL)}; the target's identity is "
        f"{as_code(audit.identity, CELL)}.",
        "",
        "```sh",
        f"keyhole audit TARGET --seed {audit.seed}",
        "keyhole report AUDIT.json  # this audit as a page",
        "```",
        "",
        "</details>",
    ]


# JUnit XML, in the dialect of Jenkins' xUnit plugin (junit-10), which all others read.
#
# Each check is a test case: a failure if something was given away, an error if it could
# not be checked, skipped if nothing was tried or a policy ignores it. If a policy
# decided, a test case fails if and only if the policy says so, so that the tests and
# the exit code agree.


def as_junit(assessment: Assessment) -> str:
    """Return a document with a suite for each part of the target."""
    audit = assessment.audit
    items = (*assessment.items, *assessment.hypothetical)
    cases = [
        (item.finding.part or audit.target, _case(item, assessment)) for item in items
    ]
    cases += [(audit.target, _skipped(skip, assessment)) for skip in audit.skips]
    name = inert(f"keyhole audit of {audit.target}")
    root = Element("testsuites", {"name": name, **_totals([case for _, case in cases])})
    about = {
        "verdict": assessment.verdict,
        "severity": assessment.severity.value,
        "identity": audit.identity,
        "keyhole": words.version(audit),
        "policy": "" if assessment.decision is None else assessment.decision.policy,
    }
    finished = words.finished(audit)
    when = {} if finished is None else {"timestamp": finished.removesuffix("Z")}
    for part in dict.fromkeys(part for part, _ in cases):
        mine = [case for of, case in cases if of == part]
        totals = {**_totals(mine), "skipped": _count(mine, "skipped"), **when}
        suite = SubElement(root, "testsuite", {"name": inert(part), **totals})
        properties = SubElement(suite, "properties")
        for key, value in about.items():
            SubElement(properties, "property", name=key, value=inert(value))
        suite.extend(mine)
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'


def _case(item: Item, assessment: Assessment) -> Element:
    finding = item.finding
    tag, decided_by = _result(item, assessment)
    details = [
        f"finding: {item.id}",
        f"rule: {item.rule.id} ({item.rule.name})",
        f"standards: {', '.join(standard.id for standard in item.rule.standards) or 'none'}",
        f"severity: {item.severity}, score {item.score} of 10 ({item.why})",
        f"cost: {cost(finding)}, {finding.seconds:.2f} s",
        f"status: {finding.status}",
    ]
    details += [f"decided by: {decided_by}"] if decided_by else []
    details += [f"reason: {finding.reason}"] if finding.reason else []
    details += [f"try it: {finding.command}"] if finding.command else []
    details += [f"fix: {finding.remedy}"] if finding.remedy and finding.exposed else []
    name = f"{words.exposure(finding.exposure)} ({finding.attack})"
    case = _testcase(item.family, finding.part, name, finding.seconds)
    text = "\n".join(map(inert, details))
    if tag:
        message = f"{item.severity}: {words.outcome(finding)}"
        _add_result(case, tag, item.severity.value, message, text)
    else:
        SubElement(case, "system-out").text = text
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
    has_rule = skip.exposure.rule != NOT_CHECKED
    name = f"{words.skip(skip)} ({skip.attack})"
    case = _testcase(skip.exposure.family if has_rule else "skipped", "", name, 0.0)
    needed = skip in assessment.audit.unchecked_skips and not assessment.excused(
        skip.exposure.id
    )
    tag = "error" if needed else "skipped"
    _add_result(case, tag, "unknown" if skip.unchecked else "not tried", skip.reason)
    return case


def _testcase(family: str, part: str, name: str, seconds: float) -> Element:
    classname = f"keyhole.{family}.{words.slug(part)}" if part else f"keyhole.{family}"
    time = f"{max(0.0, seconds):.3f}"
    return Element("testcase", classname=classname, name=inert(name), time=time)


def _add_result(
    case: Element, tag: str, kind: str, message: str, text: str | None = None
) -> None:
    SubElement(case, tag, type=kind, message=inert(message)).text = text


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
