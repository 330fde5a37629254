"""Tables for the terminal: of an audit (verdict, four cards, findings), and of a training.

`table` takes an audit, or an assessment of one, and returns what Rich prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from rich import box
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    RenderableType,
    RenderResult,
)
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keyhole.assess import Assessment, Item, Severity, assessed
from keyhole.assess.severity import cost
from keyhole.core import Audit, Skip
from keyhole.core.text import percent, visible
from keyhole.report import words
from keyhole.report.page import groups

if TYPE_CHECKING:  # reports need no torch
    from keyhole.harden.evaluate import Evaluation
    from keyhole.harden.run import Hardening

_HEADINGS = ("severity", "exposure", "outcome", "error", "cost")
STYLES = {
    Severity.CRITICAL: "bold red",
    Severity.HIGH: "red",
    Severity.MEDIUM: "yellow",
    Severity.LOW: "cyan",
    Severity.UNKNOWN: "magenta",
    Severity.NONE: "green",
}


def table(audit: Audit | Assessment) -> Group:
    """Return the tables of an audit, which fit 80 columns: long cells are wrapped, not cut off.

    An assessment is given if a policy or a baseline was applied to the audit.
    """
    assessment = assessed(audit)
    audit = assessment.audit
    findings = [item.finding for item in assessment.items]
    parts: list[RenderableType] = []

    def add(title: str, *below: RenderableType) -> None:
        """Add what stands below a title, if anything does."""
        if below:
            parts.extend([_line(title, "bold"), *below])

    parts.append(_line(assessment.verdict, "bold"))
    ruling = words.ruling(assessment)
    if ruling:
        parts.append(_line(ruling))
    parts += [_line(f"  {reason}") for reason in words.unfinished(audit)]
    if findings:
        parts += [_line(f"{words.counts(assessment)}."), _cards(assessment)]
        parts.append(_Findings(assessment.items))
    ways = [
        _line(f"  {words.exposure(each.exposure)}: {each.command}")
        for each in findings
        if each.command
    ]
    add("Open, not tried: what tries it", *ways)
    for title, items in (
        (words.hypothetical(assessment), assessment.hypothetical),
        ("Controls, not counted", assessment.controls),
    ):
        if items:
            add(title, _Findings(items))
    for title, items in (
        ("Gone since the baseline", assessment.gone),
        ("Not tried this time, as before", assessment.untried),
    ):
        names = [words.in_full(item.finding.exposure) for item in items]
        add(title, *(_line(f"  {name}") for name in names))
    if audit.skips:
        add("Not tried", _skips(audit.skips))
    note = words.assumed(assessment)
    if note:
        parts.append(_line(note, "dim"))
    return Group(*parts)


def _cards(assessment: Assessment) -> Table:
    view = Table(box=box.SIMPLE, show_header=False)
    for _ in range(3):
        view.add_column(no_wrap=True)
    view.add_column(overflow="fold")
    for card in assessment.families:
        exposed = "–"
        style = "dim"
        if card.checked:
            exposed = f"{card.exposed} of {card.checked}"
            style = STYLES[card.severity]
        view.add_row(
            card.family.value,
            Text(card.level.value, style=style),
            exposed,
            _line(words.brief(card.fix)),
        )
    return view


@dataclass(frozen=True)
class _Findings:
    """Findings in groups, in columns of the same widths."""

    items: Sequence[Item]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        headings = [Text(word, style="dim") for word in _HEADINGS]
        rows = {item.id: _row(item) for item in self.items}
        widths, gap = _widths([headings, *rows.values()], options.max_width - 2)
        yield Text()
        yield _columns(widths, gap, [headings])
        for group in groups(self.items):
            yield _line(group.title, "bold")
            yield _columns(widths, gap, [rows[item.id] for item in group.items])
        yield Text()


def _row(item: Item) -> list[Text]:
    finding = item.finding
    style = STYLES[item.severity]
    return [
        Text(item.severity.value, style=style),
        _line(words.exposure(finding.exposure)),
        Text(words.outcome(finding), style=style),
        Text(words.error(finding)),
        Text(cost(finding)),
    ]


def _widths(rows: Sequence[Sequence[Text]], width: int) -> tuple[list[int], int]:
    """Return widths and a gap at which nothing is wrapped, or which fit into `width`."""
    widths = [
        max(text.cell_len for text in column) for column in zip(*rows, strict=True)
    ]
    gaps = len(widths) - 1
    if sum(widths) + 2 * gaps <= width:
        return widths, 2
    severity, _, outcome, error, cost = widths
    outcome = min(outcome, 21)
    cost = min(cost, 14)
    exposure = max(12, width - gaps - severity - outcome - error - cost)
    return [severity, exposure, outcome, error, cost], 1


def _columns(
    widths: Sequence[int],
    gap: int,
    rows: Iterable[Sequence[Text]],
) -> Padding:
    view = Table.grid(padding=(0, gap, 0, 0))
    sides: list[JustifyMethod] = ["left", "left", "left", "right", "right"]
    for width, justify in zip(widths, sides, strict=True):
        view.add_column(width=width, justify=justify, overflow="fold")
    for row in rows:
        view.add_row(*row)
    return Padding(view, (0, 0, 0, 2), expand=False)


def _skips(skips: Iterable[Skip]) -> Table:
    view = Table(box=box.SIMPLE, show_header=False)
    view.add_column(no_wrap=True)
    for _ in ("exposure", "why not"):
        view.add_column(overflow="fold")
    for skip in skips:
        word = "could not check" if skip.unchecked else "skipped"
        view.add_row(word, _line(words.skip(skip)), _line(skip.reason))
    return view


def _line(text: str, style: str = "") -> Text:
    """Return text in one line, in which nothing from a target is markup or a control character."""
    return Text(visible(text.replace("\n", " ").replace("\t", " ")), style=style)


def hardening(result: Hardening) -> Group:
    """Return a table of figures before and after a training, with means and ranges over seeds."""
    after = result.after
    seeds = "after"
    if len(after) > 1:
        seeds = f"after, {len(after)} seeds"
    title = _title(after[-1]) if after else "nothing was measured"
    view = Table(box=box.SIMPLE)
    view.add_column("")
    for heading in ("before", seeds):
        view.add_column(heading, justify="right", no_wrap=True)
    old = [each.figures() for each in (result.before,) if each is not None]
    new = [each.figures() for each in after]
    for name in dict.fromkeys(name for figures in (*old, *new) for name in figures):
        view.add_row(name, _spread(name, old), _spread(name, new))
    return Group(Text(title, style="italic"), view)


def _title(evaluation: Evaluation) -> str:
    """Say what the shares in the table are shares of."""
    title = f"accuracy on {evaluation.examples} texts"
    disruptions = evaluation.disruptions.values()
    tried = max((len(disruption.outcomes) for disruption in disruptions), default=0)
    if not tried:
        return title
    shares = {f"{100 * disruption.method['share']:g}%" for disruption in disruptions}
    return (
        f"{title}, flips of the right answers among {tried}, {'/'.join(sorted(shares))} of each "
        "head cut"
    )


def _spread(name: str, evaluations: Sequence[Mapping[str, float]]) -> str:
    """Return the mean of a figure, and its range over several evaluations."""
    values = [figures[name] for figures in evaluations if name in figures]
    if not values:
        return "–"
    whole = percent(mean(values), 1)
    if len(values) == 1:
        return whole
    return f"{whole} ({percent(min(values), 1)}–{percent(max(values), 1)})"
