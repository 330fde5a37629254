"""The exposure matrix: what leaks, down; in which layer, across; in each precision, a row.

A model's cells are the shares of tokens that came back. What has no layers (endpoints, flips) is
one chip for each finding. All of them are links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from keyhole.assess import Assessment, Item
from keyhole.core import Readings
from keyhole.core.text import percent
from keyhole.report import words

WHOLE = "model"  # the column of what is made by no single layer
_SHADES = 5


@dataclass(frozen=True)
class Cell:
    """What one exposure gave away in one precision."""

    item: Item
    readings: Readings

    @property
    def words(self) -> str:
        readings = self.readings
        whole = readings.readings and readings.exact == len(readings.readings)
        return "exact" if whole else percent(readings.known)

    @property
    def shade(self) -> int:
        return shade(self.readings.known)


@dataclass
class Part:
    """One part of the target: its matrix, where text was read of it, and chips for the rest."""

    name: str
    columns: list[str] = field(default_factory=list[str])
    kinds: dict[str, dict[str, dict[str, Cell]]] = field(  # kind, precision, column
        default_factory=dict[str, dict[str, dict[str, Cell]]]
    )
    chips: list[Item] = field(default_factory=list[Item])


def shade(share: float) -> int:
    """Which of the shades of the stylesheet a share has: 0 for nothing, the last for all."""
    return 0 if share <= 0 else min(_SHADES, 1 + int(share * _SHADES))


def parts(assessment: Assessment) -> list[Part]:
    """One for each part of the target, the worst first."""
    made: dict[str, Part] = {}
    for item in assessment.items:
        part = made.setdefault(item.finding.part, Part(item.finding.part))
        if item.finding.texts:
            _place(part, item, item.finding.texts)
        else:
            part.chips.append(item)
    for part in made.values():
        part.columns.sort(key=lambda name: (name == WHOLE, int(name) if name != WHOLE else 0))
    return list(made.values())


def _place(part: Part, item: Item, texts: Sequence[Readings]) -> None:
    exposure = item.finding.exposure
    column = WHOLE if exposure.layer is None else str(exposure.layer)
    kind = words.exposure(replace(exposure, layer=None))
    if column not in part.columns:
        part.columns.append(column)
    rows = part.kinds.setdefault(kind, {})
    for readings in texts:
        row = rows.setdefault(readings.precision, {})
        best = row.get(column)  # of several attacks on one leak, the one that read most counts
        if best is None or best.readings.known < readings.known:
            row[column] = Cell(item, readings)
