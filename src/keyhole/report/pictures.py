"""A cut as a picture: layers down, heads across, in each a grid of query (row) and key (column).

Only numbers and tokens leave this module; the template draws them, and escapes the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from keyhole.results.cuts import Cut

_WIDEST = 880  # pixels for all heads of a layer
_SMALLEST, _LARGEST, _GAP, _MARGIN = 1.0, 6.0, 6.0, 26.0


@dataclass(frozen=True)
class Square:
    """One head, or one unit of it: a place, a size, and what to say about it."""

    x: float
    y: float
    size: float
    title: str


@dataclass(frozen=True)
class Picture:
    """What a template needs to draw a cut; sizes in pixels."""

    width: float
    height: float
    heads: tuple[Square, ...]
    units: tuple[Square, ...]
    across: tuple[tuple[float, int], ...]  # where each head's number stands
    down: tuple[tuple[float, int], ...]  # where each layer's does


def picture(cut: Cut) -> Picture:
    """Every head of the model as a grid, every unit that was cut as a cell."""
    cell = (_WIDEST / max(1, cut.heads) - _GAP) / max(1, len(cut.tokens))
    cell = min(_LARGEST, max(_SMALLEST, cell))
    side = cell * len(cut.tokens)
    step = side + _GAP
    heads = tuple(
        Square(
            _MARGIN + head * step, _MARGIN + layer * step, side,
            f"layer {layer + 1}, head {head + 1}",
        )
        for layer in range(cut.layers)
        for head in range(cut.heads)
    )  # fmt: skip
    units = tuple(
        Square(
            _MARGIN + head * step + key * cell, _MARGIN + layer * step + query * cell, cell,
            f"layer {layer + 1}, head {head + 1}: {cut.tokens[query]} → {cut.tokens[key]}",
        )
        for layer, head, query, key in cut.units
    )  # fmt: skip
    across = tuple((_MARGIN + head * step + side / 2, head + 1) for head in range(cut.heads))
    down = tuple((_MARGIN + layer * step + side / 2, layer + 1) for layer in range(cut.layers))
    width, height = _MARGIN + cut.heads * step, _MARGIN + cut.layers * step
    return Picture(width, height, heads, units, across, down)


def words(cut: Cut) -> Iterator[tuple[str, int, float]]:
    """Each token, in how many units it was no longer seen, and that over the most of any."""
    unseen = Counter(key for _, _, _, key in cut.units)
    most = max(unseen.values(), default=1)
    for place, token in enumerate(cut.tokens):
        yield token, unseen[place], unseen[place] / most
