"""The exposure matrix: what leaks, down; in which layer, across; in each precision, a row.

A model's cells are the shares of tokens that came back. What has no layers (endpoints, flips) is
one chip for each finding. All of them are links.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from keyhole.assess import Assessment, Item
from keyhole.core import Readings
from keyhole.core.text import percent

WHOLE = "model"  # the column of what is made by no single layer
_LAYER = re.compile(r" of layer (\d+)$")
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
class Surface:
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


def surfaces(assessment: Assessment) -> list[Surface]:
    """One for each part of the target, the worst first."""
    made: dict[str, Surface] = {}
    for item in assessment.items:
        surface = made.setdefault(item.finding.surface, Surface(item.finding.surface))
        if item.finding.texts:
            _place(surface, item, item.finding.texts)
        else:
            surface.chips.append(item)
    for surface in made.values():
        surface.columns.sort(key=lambda name: (name == WHOLE, int(name) if name != WHOLE else 0))
    return list(made.values())


def _place(surface: Surface, item: Item, texts: Sequence[Readings]) -> None:
    match = _LAYER.search(item.finding.exposure)
    kind, column = item.finding.exposure, WHOLE
    if match:
        kind, column = kind[: match.start()], str(int(match.group(1)))
    if column not in surface.columns:
        surface.columns.append(column)
    rows = surface.kinds.setdefault(kind, {})
    for readings in texts:
        row = rows.setdefault(readings.precision, {})
        rival = row.get(column)  # another attack on the same leak: the one that read more counts
        if rival is None or rival.readings.known < readings.known:
            row[column] = Cell(item, readings)
