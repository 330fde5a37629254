"""A curve as places in a picture: the axes, their ticks, and the line between its points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480.0, 210.0, 58.0, 14.0, 12.0, 40.0
_SMALLEST = 1e-17  # an error of exactly zero has to stand somewhere on a logarithmic axis
_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """A range of numbers along so many pixels, each power of ten as far as the next where `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high, here = (self._scaled(each) for each in (self.low, self.high, value))
        share = (here - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, _SMALLEST)) if self.log else value

    def ticks(self) -> tuple[tuple[float, str], ...]:
        low, high = self._scaled(self.low), self._scaled(self.high)
        if self.log:
            first, last = math.floor(low), math.ceil(high)
            step = max(1, math.ceil((last - first) / _TICKS))
            powers = [power for power in range(first, last + 1, step) if low <= power <= high]
            return tuple((self.at(10.0**power), f"1e{power}") for power in powers)
        count = min(_TICKS, max(1, round(high - low))) if high > low else 1
        values = [low + (high - low) * n / count for n in range(count + 1)]
        return tuple((self.at(value), f"{value:.3g}") for value in values)


@dataclass(frozen=True)
class Curve:
    """Points in a picture of `width` × `height` pixels, and a dotted line where the floor is."""

    block: ClassVar[str] = "curve"
    points: tuple[tuple[float, float, str], ...]
    across: tuple[tuple[float, str], ...]
    down: tuple[tuple[float, str], ...]
    floor: float | None
    x_name: str
    y_name: str
    width: float = _WIDTH
    height: float = _HEIGHT

    @property
    def frame(self) -> tuple[float, float, float, float]:
        return _LEFT, _TOP, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    @property
    def path(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in self.points)


def curve(
    points: Sequence[tuple[float, float]], x_name: str, y_name: str, *, floor: float | None = None,
    log_x: bool = False, log_y: bool = True,
) -> list[Curve]:  # fmt: skip
    """One curve through what is finite of the points; none where nothing is."""
    finite = [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return []
    xs = [x for x, _ in finite] + ([] if floor is None else [float(floor)])
    ys = [max(y, _SMALLEST) if log_y else y for _, y in finite]
    across = Axis(*_around(xs, log_x), _LEFT, _WIDTH - _RIGHT, log_x)
    down = Axis(*_around(ys, log_y), _HEIGHT - _BOTTOM, _TOP, log_y)
    places = tuple((across.at(x), down.at(y), f"{x:,.6g} {x_name}: {y:.3g}") for x, y in finite)
    return [
        Curve(
            places, across.ticks(), down.ticks(), None if floor is None else across.at(floor),
            x_name, y_name,
        )
    ]  # fmt: skip


def _around(values: Sequence[float], log: bool) -> tuple[float, float]:
    """The range of an axis: whole powers of ten where it is logarithmic."""
    low, high = min(values), max(values)
    if not log:
        return (low, high) if high > low else (low - 0.5, high + 0.5)
    powers = [math.log10(max(each, _SMALLEST)) for each in (low, high)]
    first, last = math.floor(powers[0]), math.ceil(powers[1])
    return 10.0**first, 10.0 ** (last if last > first else first + 1)
