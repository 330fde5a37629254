"""A flipped prediction and where attention was cut for it: what a report shows of a disruption."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """One input: its tokens, the answers before and after, and the units between.

    A unit is (layer, head, query, key), positions counted in `tokens`. `layers` and `heads` say how
    many the model has; `share` is over all its units on this input.
    """

    tokens: tuple[str, ...]
    before: str
    after: str
    sure_before: float
    sure_after: float
    share: float
    layers: int
    heads: int
    units: tuple[tuple[int, int, int, int], ...]
