"""Tables for the terminal: of an audit (verdict, four cards, findings), and of a training.

`table` takes an audit, or an assessment of one, and returns what Rich prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keyhole.assess import Assessment, Item, Severity, assess
from keyhole.assess.severity import cost
from keyhole.core import Audit, Skip
from keyhole.core.text import percent, visible
from keyhole.report import readings, words
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
    assessment = audit if isinstance(audit, Assessment) else assess(audit)
    audit = assessment.audit
    parts: list[RenderableType] = [_line(assessment.verdict, "bold")]
    if ruling := words.ruling(assessment):
        parts.append(_line(ruling))
    parts += [_line(f"  {reason}") for reason in words.unfinished(audit)]
    if assessment.items:
        parts += [_line(f"{words.counts(assessment)}."), _cards(assessment)]
        parts.append(_Findings(assessment.items))
    if ways := [item.finding for item in assessment.items if item.finding.command]:
        parts.append(_line("Open, not tried: what tries it", "bold"))
        parts += [
            _line(f"  {words.exposure(way.exposure)}: {way.command}") for way in ways
        ]
    if assessment.hypothetical:
        title = words.hypothetical(assessment)
        parts += [_line(title, "bold"), _Findings(assessment.hypothetical)]
    if assessment.controls:
        parts += [
            _line("Controls, not counted", "bold"),
            _Findings(assessment.controls),
        ]
    for title, items in (
        ("Gone since the baseline", assessment.gone),
        ("Not tried this time, as before", assessment.untried),
    ):
        parts += [_line(title, "bold")] if items else []
        parts += [_line(f"  {words.in_full(item.finding.exposure)}") for item in items]
    if audit.skips:
        parts += [_line("Not tried", "bold"), _skips(audit.skips)]
    parts += _by_length(audit)
    if note := words.assumed(assessment):
        parts.append(_line(note, "dim"))
    return Group(*parts)


def _cards(assessment: Assessment) -> Table:
    view = Table(box=box.SIMPLE, show_header=False)
    for _ in range(3):
        view.add_column(no_wrap=True)
    view.add_column(overflow="fold")
    for card in assessment.families:
        exposed = f"{card.exposed} of {card.checked}" if card.checked else "–"
        style = STYLES[card.severity] if card.checked else "dim"
        view.add_row(
            str(card.family),
            Text(str(card.level), style=style),
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
        rows = {item.id: _row(item) for item in self.items}
        widths, gap = _widths([_HEADINGS, *rows.values()], options.max_width - 2)
        yield Text()
        yield _columns(widths, gap, [[Text(word, style="dim") for word in _HEADINGS]])
        for group in groups(self.items):
            yield _line(group.title, "bold")
            yield _columns(
                widths, gap, [_styled(item, rows[item.id]) for item in group.items]
            )
        yield Text()


def _row(item: Item) -> tuple[str, ...]:
    finding = item.finding
    return (
        str(item.severity),
        _line(words.exposure(finding.exposure)).plain,
        words.outcome(finding),
        words.error(finding),
        cost(finding),
    )


def _styled(item: Item, row: Sequence[str]) -> list[Text]:
    style = STYLES[item.severity]
    return [
        Text(word, style=style if place in (0, 2) else "")
        for place, word in enumerate(row)
    ]


def _widths(rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """Return widths and a gap at which nothing is wrapped, or which fit into `width`."""
    widths = [
        max(cell_len(row[place]) for row in rows) for place in range(len(_HEADINGS))
    ]
    gaps = len(widths) - 1
    if sum(widths) + 2 * gaps <= width:
        return widths, 2
    widths[2], widths[4] = min(widths[2], 21), min(widths[4], 14)
    widths[1] = max(12, width - gaps - sum(widths) + widths[1])
    return widths, 1


def _columns(
    widths: Sequence[int], gap: int, rows: Iterable[Sequence[Text]]
) -> Padding:
    view = Table.grid(padding=(0, gap, 0, 0))
    for heading, width in zip(_HEADINGS, widths, strict=True):
        justify = "right" if heading in ("error", "cost") else "left"
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


def _by_length(audit: Audit) -> list[Text]:
    """Return, for each store, how many texts of which length were read exactly."""
    lines: list[Text] = []
    for finding in audit.findings:
        spans = readings.spans(finding)
        if spans:
            name = words.exposure(finding.exposure)
            heading = f"{name}, read exactly, by length ({readings.whose(finding)})"
            lines += [
                _line(f"  {heading}"),
                *(Text(f"    {span}") for span in spans),
                Text(),
            ]
    return lines


def _line(text: str, style: str = "") -> Text:
    """Return text in one line, in which nothing from a target is markup or a control character."""
    return Text(visible(text.replace("\n", " ").replace("\t", " ")), style=style)


def hardening(result: Hardening) -> Group:
    """Return a table of figures before and after a training, with means and ranges over seeds."""
    after = result.after
    seeds = f"after, {len(after)} seeds" if len(after) > 1 else "after"
    title = _title(after[-1]) if after else "nothing was measured"
    view = Table(box=box.SIMPLE)
    view.add_column("")
    for heading in ("before", seeds):
        view.add_column(heading, justify="right", no_wrap=True)
    old = {} if result.before is None else result.before.figures()
    new = [evaluation.figures() for evaluation in after]
    for name in dict.fromkeys([*old, *(name for figures in new for name in figures)]):
        values = [figures[name] for figures in new if name in figures]
        was = percent(old[name], 1) if name in old else "–"
        view.add_row(name, was, _spread(values))
    return Group(Text(title, style="italic"), view)


def _title(evaluation: Evaluation) -> str:
    """Say what the shares in the table are shares of."""
    disruptions = evaluation.disruptions.values()
    tried = max((len(disruption.outcomes) for disruption in disruptions), default=0)
    shares = {f"{100 * disruption.method['share']:g}%" for disruption in disruptions}
    cut = f", {'/'.join(sorted(shares))} of each head cut" if shares else ""
    flips = f", flips of the right answers among {tried}{cut}" if tried else ""
    return f"accuracy on {evaluation.examples} texts{flips}"


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    whole = percent(mean(values), 1)
    if len(values) == 1:
        return whole
    return f"{whole} ({percent(min(values), 1)}–{percent(max(values), 1)})"
