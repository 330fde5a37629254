"""Findings as people read them: by what is lost, then by the part of the target that loses it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keyhole.assess import Assessment, Card, Family, Item


@dataclass(frozen=True)
class Group:
    """What was tried on one part of the target to one end, the worst first."""

    family: Family
    part: str
    items: tuple[Item, ...]

    @property
    def title(self) -> str:
        """Of what, in words."""
        return f"{self.family} of {self.part}" if self.part else str(self.family)


def groups(items: Iterable[Item]) -> list[Group]:
    """By family, in the order of the cards; in a family, the part with the worst finding first."""
    gathered: dict[tuple[Family, str], list[Item]] = {}
    for item in items:
        gathered.setdefault((item.family, item.finding.part), []).append(item)
    made = [Group(family, part, tuple(mine)) for (family, part), mine in gathered.items()]
    order = list(Family)
    return sorted(made, key=lambda group: order.index(group.family))  # stable: the worst first


def sections(assessment: Assessment) -> list[tuple[Card, list[Group]]]:
    """The families of which anything was tried, each with its card and its groups."""
    made = groups(assessment.items)
    return [
        (card, [group for group in made if group.family is card.family])
        for card in assessment.families
        if card.checked
    ]
