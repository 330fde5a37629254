"""An axis of a drawing: which number stands at which pixel, and where its ticks stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
