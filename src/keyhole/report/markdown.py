"""An audit as Markdown for a pull request: the verdict, four cards, what is given away.

Everything from a target, a server or a file is put into a code span (core/text.py), so that it
mentions nobody, links nothing and opens no tag. GitHub allows 65,536 characters in a comment; rows
that do not fit are counted instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from keyhole.assess import Assessment, Card, Item, Level, Severity
from keyhole.assess.severity import cost
from keyhole.core.text import as_code
from keyhole.report import words

MOST = 60_000  # characters in all; GitHub allows some more
SHOWN = 20  # findings that are shown without a click
CELL = 160  # characters of a cell
SIGNS = {
    Severity.CRITICAL: "🔴", Severity.HIGH: "🟠", Severity.MEDIUM: "🟡", Severity.LOW: "🔵",
    Severity.UNKNOWN: "⚪", Severity.NONE: "🟢",
}  # fmt: skip
HEAD = (
    "| severity | given away | how much | cost | fix |",
    "| --- | --- | --- | --- | --- |",
)


def render(assessment: Assessment) -> str:
    """Return a comment that is complete, or says how many findings it leaves out."""
    rows = [_row(item) for item in assessment.exposed]
    top = [*_title(assessment), *_cards(assessment.families), *_decision(assessment)]
    bottom = [*_not_counted(assessment), *_how_to_reproduce(assessment)]
    left = MOST - sum(len(line) + 1 for line in (*top, *bottom))
    fitting = sum(size <= left for size in accumulate(len(line) + 1 for line in rows))
    return "\n".join([*top, *_given_away(rows, fitting), *bottom]) + "\n"


def _title(assessment: Assessment) -> list[str]:
    ways = sum(item.finding.open for item in assessment.items)
    found_open = f"{ways} found a way open, " if ways else ""
    return [
        f"## {SIGNS[assessment.severity]} Keyhole: {assessment.verdict}", "",
        f"Target {as_code(assessment.audit.target, CELL)}: {len(assessment.exposed) - ways} of "
        f"{len(assessment.items)} checks gave something away, {found_open}worst severity "
        f"**{assessment.severity}**, exit code {assessment.exit_code}.", "",
    ]  # fmt: skip


def _cards(cards: Sequence[Card]) -> list[str]:
    rows = [
        f"| {SIGNS[card.severity]} {card.severity} | {card.family} | {card.level} | "
        f"{card.exposed} of {card.checked} | {as_code(card.fix, CELL)} |"
        if card.level is not Level.NOT_TRIED
        else f"| – | {card.family} | {card.level} | – | |"
        for card in cards
    ]
    return [
        "| severity | what | given away | through | the fix that serves most |",
        "| --- | --- | --- | --- | --- |", *rows, "",
    ]  # fmt: skip


def _decision(assessment: Assessment) -> list[str]:
    decision = assessment.decision
    if decision is None:
        return []
    end = {0: "passes", 1: "fails"}.get(decision.exit_code, "could not be checked")
    rule, source = as_code(decision.rule, 400), as_code(decision.source, CELL)
    return [f"By the policy {source} this **{end}**: {rule}", ""]


def _row(item: Item) -> str:
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
    shown, more = rows[: min(fitting, SHOWN)], rows[SHOWN:fitting]
    lines = [] if not shown else ["### Given away", "", *HEAD, *shown, ""]
    if more:
        lines += [f"<details><summary>{len(more)} more</summary>", "", *HEAD, *more, ""]
        lines += ["</details>", ""]
    if left := len(rows) - fitting:
        lines += [f"{left} more findings do not fit here: the JSON file has all of them.", ""]
    return lines


def _not_counted(assessment: Assessment) -> list[str]:
    """Return lists of whatever is not in the table, and what was assumed of the service."""
    lines = _folded("could not be checked, which is not clean", words.unchecked(assessment))
    for about, items in (
        ("gone since the baseline", assessment.gone),
        ("of the baseline not tried this time, as before", assessment.untried),
        ("hypothetical: the service does not return it", assessment.hypothetical),
    ):
        lines += _folded(about, [words.in_full(item.finding.exposure) for item in items])
    note = words.assumed(assessment)
    return [*lines, note, ""] if note else lines


def _folded(about: str, names: Sequence[str]) -> list[str]:
    """Return a list that is folded under a line with its count."""
    if not names:
        return []
    listed = [f"- {as_code(name, CELL)}" for name in names[:SHOWN]]
    listed += [f"- and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return [f"<details><summary>{len(names)} {about}</summary>", "", *listed, "", "</details>", ""]


def _how_to_reproduce(assessment: Assessment) -> list[str]:
    audit = assessment.audit
    return [
        "<details><summary>How to reproduce</summary>", "",
        f"Keyhole {as_code(words.version(audit))}, seed {audit.seed}, finished "
        f"{as_code(audit.created, 40)}, {audit.seconds:.0f} s, on "
        f"{as_code(audit.environment.get('platform', ''), CELL)}; the target's identity is "
        f"{as_code(audit.identity, CELL)}.", "",
        "```sh", f"keyhole audit TARGET --seed {audit.seed}",
        "keyhole report AUDIT.json  # this audit as a page", "```", "", "</details>",
    ]  # fmt: skip
