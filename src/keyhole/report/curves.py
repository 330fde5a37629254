"""Error against queries as a drawing: logarithmic axes, the floor marked. Numbers only.

No attack can do with fewer queries than its floor, the number of unknowns over the numbers in an
answer. The template draws what this places, in the colours of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.results import Finding

WIDTH, HEIGHT = 620, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 22, 44
SMALLEST = 1e-17  # errors of exactly zero have to stand somewhere on a logarithmic axis
_TICKS = 7  # along an axis, at most
_LARGEST = 10**18  # queries: a file may say anything
_MOST = 300  # points that are drawn: more cannot be told apart


@dataclass(frozen=True)
class Axis:
    """Whole decades from `low` to `high`, from pixel `begin` to pixel `end`."""

    low: int
    high: int
    begin: float
    end: float

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[tuple[float, int]]:
        """Where lines stand, and the power of ten that each stands for."""
        step = max(1, math.ceil((self.high - self.low) / _TICKS))
        return [(self.place(10.0**power), power) for power in range(self.low, self.high + 1, step)]


@dataclass(frozen=True)
class Curve:
    """What a template needs to draw a trace; `floor` is where the floor's line stands."""

    across: Axis
    up: Axis
    points: tuple[tuple[float, float], ...]
    floor: float | None
    about: str

    width: int = WIDTH
    height: int = HEIGHT

    @property
    def path(self) -> str:
        return " ".join(f"{x:g},{y:g}" for x, y in self.points)


def curve(finding: Finding) -> Curve | None:
    """The drawing of a finding that was followed on its way; None for the others."""
    trace = [
        (min(max(1, queries), _LARGEST), max(error, SMALLEST))
        for queries, error in _thinned(finding.trace)
        if math.isfinite(error)
    ]
    if not trace:
        return None
    queries, errors = zip(*trace, strict=True)
    floor = finding.floor if finding.floor and 0 < finding.floor <= _LARGEST else None
    across = _axis([*queries, *([floor] if floor else [])], _LEFT, WIDTH - _RIGHT)
    up = _axis(errors, HEIGHT - _BOTTOM, _TOP)
    return Curve(
        across, up, tuple((across.place(x), up.place(y)) for x, y in trace),
        across.place(floor) if floor else None, _about(trace, floor),
    )  # fmt: skip


def _axis(values: Sequence[float], begin: float, end: float) -> Axis:
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    return Axis(low, max(high, low + 1), begin, end)


def _thinned(trace: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    step = max(1, math.ceil(len(trace) / _MOST))
    return [*trace[:-1:step], *trace[-1:]]


def _about(trace: Sequence[tuple[int, float]], floor: int | None) -> str:
    """The drawing in words, for whoever does not see it."""
    (first, high), (last, low) = trace[0], trace[-1]
    words = (
        f"Error {low:.1e} after {last:,} queries"
        if len(trace) == 1
        else f"Error {high:.1e} after {first:,} queries, {low:.1e} after {last:,}"
    )
    return f"{words}; the floor is {floor:,}." if floor else f"{words}."
