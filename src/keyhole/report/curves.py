"""Error against queries as a drawing: logarithmic axes, the lower bound marked. Numbers only.

No attack can do with fewer queries than the lower bound, the number of unknowns over the numbers in
an answer. The template draws what this places, in the colours of the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.core import Finding

WIDTH, HEIGHT = 620, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 22, 44
_LARGEST = 10**18  # queries: a file may say anything
_MOST = 300  # points that are drawn: more cannot be told apart


@dataclass(frozen=True)
class Curve:
    """What a template needs to draw a trace; `bound` is where the lower bound's line stands."""

    across: Axis
    up: Axis
    points: tuple[tuple[float, float], ...]
    bound: float | None
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
    bound = finding.lower_bound
    bound = bound if bound and 0 < bound <= _LARGEST else None
    across = Axis.around([*queries, *([bound] if bound else [])], _LEFT, WIDTH - _RIGHT)
    up = Axis.around(errors, HEIGHT - _BOTTOM, _TOP)
    return Curve(
        across, up, tuple((across.place(x), up.place(y)) for x, y in trace),
        across.place(bound) if bound else None, _about(trace, bound),
    )  # fmt: skip


def _thinned(trace: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    step = max(1, math.ceil(len(trace) / _MOST))
    return [*trace[:-1:step], *trace[-1:]]


def _about(trace: Sequence[tuple[int, float]], bound: int | None) -> str:
    """The drawing in words, for whoever does not see it."""
    (first, high), (last, low) = trace[0], trace[-1]
    words = (
        f"Error {low:.1e} after {last:,} queries"
        if len(trace) == 1
        else f"Error {high:.1e} after {first:,} queries, {low:.1e} after {last:,}"
    )
    return f"{words}; the lower bound is {bound:,}." if bound else f"{words}."


# An axis of a drawing: which number stands at which pixel, and where its ticks stand.

SMALLEST = 1e-17  # errors of exactly zero have to stand somewhere on a logarithmic axis
_TICKS = 7  # along an axis, at most about so many


@dataclass(frozen=True)
class Axis:
    """Numbers from `low` to `high`, or powers of ten where `log`, from pixel `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = True

    @classmethod
    def around(cls, values: Sequence[float], begin: float, end: float, *, log: bool = True) -> Axis:
        """An axis that holds all of them: whole powers of ten where it is logarithmic."""
        scaled = [_scaled(value, log) for value in values]
        low, high = min(scaled), max(scaled)
        if log:
            low, high = math.floor(low), math.ceil(high)
            return cls(low, max(high, low + 1), begin, end, log)
        half = 0.0 if high > low else max(0.5, 0.01 * abs(low))
        return cls(low - half, high + half, begin, end, log)

    def place(self, value: float) -> float:
        return self._at(_scaled(value, self.log))

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """Where each stands, and the number, or the power of ten, that it stands for."""
        if self.log:
            step = max(1, math.ceil((self.high - self.low) / _TICKS))
            powers = range(int(self.low), int(self.high) + 1, step)
            return [(self._at(power), power) for power in powers]
        count = min(_TICKS, max(1, round(self.high - self.low)))
        values = [self.low + (self.high - self.low) * (n / count) for n in range(count + 1)]
        return [(self._at(value), value) for value in values]

    def _at(self, scaled: float) -> float:
        share = (scaled - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


def _scaled(value: float, log: bool) -> float:
    return math.log10(max(value, SMALLEST)) if log else float(value)
