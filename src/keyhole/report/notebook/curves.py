"""A curve as places in a picture: the axes, their ticks, and the line between its points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from keyhole.report.axes import Axis

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480.0, 210.0, 58.0, 14.0, 12.0, 40.0


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
    across = Axis.around(xs, _LEFT, _WIDTH - _RIGHT, log=log_x)
    down = Axis.around([y for _, y in finite], _HEIGHT - _BOTTOM, _TOP, log=log_y)
    places = tuple(
        (across.place(x), down.place(y), f"{x:,.6g} {x_name}: {y:.3g}") for x, y in finite
    )
    return [
        Curve(
            places, _named(across), _named(down), None if floor is None else across.place(floor),
            x_name, y_name,
        )
    ]  # fmt: skip


def _named(axis: Axis) -> tuple[tuple[float, str], ...]:
    return tuple((at, f"1e{mark}" if axis.log else f"{mark:.3g}") for at, mark in axis.ticks)
