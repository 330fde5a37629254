"""How far a remedy goes, where the audit itself measured it: nothing here is promised or guessed.

What was measured of an exposure stands in three places: in its own readings, which were also tried
rounded, noisy or scaled; in what it was told of a model trained against the attack
(`Finding.remedied`); and in other findings of the same part of the target, where less was exposed
(labels in place of scores, a defence in front, fewer decimals).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.assess.assessment import Item
from keyhole.core import Readings
from keyhole.core.text import percent


@dataclass(frozen=True)
class Measure:
    """Something done against an exposure, and the share that was still given away.

    `words` say what was left; where that is a finding of its own, `item` is that finding, and its
    exposure says what was done.
    """

    change: str
    share: float
    words: str = ""
    item: Item | None = None


_PRECISIONS = {
    "bfloat16": "rounded to bfloat16", "int8": "rounded to int8",
    "noise of 10%": "noise of 10% added", "normalised": "scaled to length 1",
}  # fmt: skip
_LESS = {  # rules whose exposures are less than those of another
    "KH-WEIGHTS-SCORES": ("KH-WEIGHTS-ROUNDED-SCORES", "KH-WEIGHTS-SIGNS"),
    "KH-WEIGHTS-ROUNDED-SCORES": ("KH-WEIGHTS-SIGNS",),
}


def measured(item: Item, items: Sequence[Item]) -> list[Measure]:
    """What helped most first; empty where nothing was measured."""
    finding = item.finding
    own = [_rounded(cell) for cell in finding.texts[1:]]
    told = [Measure(each.remedy, each.left, each.words) for each in finding.remedied]
    others = [
        Measure("", other.share if other.finding.exposed else 0.0, "", other)
        for other in items
        if _exposes_less(other, item)
    ]
    return sorted([*own, *told, *others], key=lambda measure: measure.share)


def _rounded(cell: Readings) -> Measure:
    count = len(cell.readings)
    words = f"{percent(cell.known)} of tokens right, {cell.exact} of {count} texts exact"
    return Measure(_PRECISIONS.get(cell.precision, cell.precision), cell.known, words)


def _exposes_less(other: Item, item: Item) -> bool:
    """Is it the same secret of the same part of the target, with less of it in sight?"""
    more, less = item.finding.exposure, other.finding.exposure
    if other is item or other.family is not item.family or less.part != more.part:
        return False
    fewer = item.rule.id in _LESS and (less.rule in _LESS[more.rule] or less.variant == "budget")
    return fewer or less.narrows(more)
