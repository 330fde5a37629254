"""What changed since an earlier audit: new, worse, same, better, gone.

Findings are compared by their ids. What was given away and is so no longer is gone, whether the
attack failed this time or there is nothing left to attack. What could not be checked this time is
not better for it: it counts as it did.
"""

from __future__ import annotations

from dataclasses import replace

from keyhole.assess.assessment import Assessment, Item, State
from keyhole.core import Outcome

SLACK = 0.02  # of the share that came back: two runs of one search differ by as much


def compared(new: Assessment, old: Assessment) -> Assessment:
    """Each item with what became of it, and those of the old audit that are gone."""
    before = {item.id: item for item in old.items}
    items = tuple(replace(item, state=state(item, before.get(item.id))) for item in new.items)
    still = {item.id for item in items}
    gone = tuple(
        replace(item, state=State.GONE)
        for item in old.items
        if item.finding.exposed and item.id not in still
    )
    cards = tuple(
        replace(card, worst=_again(card.worst, items)) for card in new.families
    )  # the same rows, with their states
    return replace(new, items=items, families=cards, gone=gone)


def state(item: Item, old: Item | None) -> State:
    """What became of one finding."""
    was = old is not None and old.finding.exposed
    if item.finding.outcome is Outcome.UNCHECKED:
        return State.NEW if old is None else State.SAME
    if not item.finding.exposed:
        return State.GONE if was else State.SAME if old is not None else State.NEW
    if old is None:
        return State.NEW
    if not was:
        return State.WORSE
    change = (item.severity.rank - old.severity.rank, item.score - old.score)
    for difference in (*change, _beyond(item.share - old.share)):
        if difference:
            return State.WORSE if difference > 0 else State.BETTER
    return State.SAME


def _beyond(change: float) -> float:
    return 0.0 if abs(change) <= SLACK else change


def _again(worst: Item | None, items: tuple[Item, ...]) -> Item | None:
    return next((item for item in items if worst is not None and item.id == worst.id), None)
