"""Audits in a cell: verdict, cards, findings, a text and a cut; of a fleet, its rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from keyhole.assess import Assessment, Card, Level, Severity, assess, assess_fleet
from keyhole.core import Audit, Cut, Finding, Fleet
from keyhole.core.text import percent
from keyhole.report import fleet as fleets
from keyhole.report import wording
from keyhole.report.notebook.blocks import Grid, Head, Marked, Table, Words, heads, table

_COLOURS = {0: "good", 1: "bad", 3: "part"}  # by the exit code
_LEVELS = {
    Level.ALL: "bad", Level.PARTLY: "bad", Level.UNKNOWN: "part", Level.NONE: "good",
    Level.NOT_TRIED: "part",
}  # fmt: skip


@dataclass(frozen=True)
class CardShown:
    name: str
    level: str
    colour: str
    words: str


@dataclass(frozen=True)
class Cards:
    block: ClassVar[str] = "cards"
    cards: tuple[CardShown, ...]


@dataclass(frozen=True)
class Sentence:
    """A text's tokens, each with the share of the most that any was cut from, and how often."""

    block: ClassVar[str] = "sentence"
    tokens: tuple[tuple[str, float, int], ...]
    caption: str


Block = Head | Words | Cards | Table | Marked | Sentence | Grid


def audit(result: Audit) -> list[Block]:
    assessment = assess(result)
    blocks: list[Block] = [
        Head(str(assessment.severity), _COLOURS[result.exit_code], assessment.verdict),
        Words(f"{result.target}: {result.seconds:.1f} s, {result.created}"),
        Cards(tuple(_card(card) for card in assessment.families if card.checked or card.unchecked)),
        _findings(assessment),
    ]
    skips = [skip for skip in result.skips if skip.unchecked]
    blocks += [Words(f"could not check {skip.exposure}: {skip.reason}") for skip in skips]
    blocks += [block for finding in result.findings if finding.texts for block in _text(finding)][
        :1
    ]
    cuts = [cut for finding in result.findings if finding.exposed for cut in finding.cuts]
    return blocks + [block for cut in cuts[:1] for block in _cut(cut)]


def _colour(severity: Severity) -> str:
    return {Severity.NONE: "good", Severity.UNKNOWN: "part"}.get(severity, "bad")


def _cut(cut: Cut) -> list[Block]:
    """Where attention was cut: on the sentence, and in the heads."""
    unseen = Counter(key for _, _, _, key in cut.units)
    most = max(unseen.values(), default=1)
    tokens = tuple(
        (token, unseen[place] / most, unseen[place]) for place, token in enumerate(cut.tokens)
    )
    caption = (
        f"{cut.before} ({percent(cut.sure_before)} sure) became {cut.after}: "
        f"{len(cut.units)} units cut, {percent(cut.share, 2)} of all; the redder a word, the more"
    )
    lost = Counter((layer, head) for layer, head, _, _ in cut.units)
    return [Sentence(tokens, caption), *heads(lost, cut.layers, cut.heads)]


def fleet(result: Fleet) -> list[Block]:
    """A row for each target, the worst first."""
    meant = assess_fleet(result)
    made = fleets.rows(meant)
    families = [str(card.family) for card in made[0].families] if made else []
    return [
        Head(f"{len(made)} targets", _COLOURS[result.exit_code], meant.verdict),
        table(
            ("severity", "target", "worst finding", *families, "seconds"),
            [
                (
                    str(row.severity), row.name,
                    row.verdict if row.worst is None else row.worst.finding.exposure,
                    *(str(card.level) for card in row.families), row.seconds,
                )
                for row in made
            ],
            numbers=3 + len(families),
            colours=[_COLOURS[row.audit.exit_code] for row in made],
        ),
    ]  # fmt: skip


def _card(card: Card) -> CardShown:
    words = f"through {card.exposed} of {card.checked} exposures"
    if card.unchecked:
        words += f", {card.unchecked} could not be checked"
    return CardShown(
        str(card.family), str(card.level), _LEVELS[card.level],
        f"{words}. {card.fix}" if card.exposed else words,
    )  # fmt: skip


def _findings(assessment: Assessment) -> Table:
    items = assessment.items
    return table(
        ("severity", "what the attacker sees", "outcome", "what would stop it", "error", "queries"),
        [
            (
                str(item.severity), item.of, wording.outcome(item.finding), item.finding.remedy,
                wording.error(item.finding), f"{item.finding.queries:,}",
            )
            for item in items
        ],
        numbers=4,
        colours=[_colour(item.severity) for item in items],
    )  # fmt: skip


def _text(finding: Finding) -> list[Marked]:
    """The text of which most came back, as it came back."""
    readings = finding.texts[0].readings
    if not readings:
        return []
    best = max(readings, key=lambda reading: reading.known)
    original = f", put in as “{best.original}”" if best.original else ""
    caption = f"{finding.exposure}: {percent(best.known)} of these tokens came back{original}"
    return [Marked(best.pieces, caption)]
