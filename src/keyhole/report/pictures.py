"""A cut as a picture: layers down, heads across, in each a grid of query (row) and key (column).

Layers of which nothing was cut are left out.

Only numbers and tokens leave this module; the template draws them, and escapes the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from keyhole.core.finding import Cut
from keyhole.report.matrix import shade

_WIDEST = 700  # pixels for all heads of a layer
_SMALLEST, _LARGEST, _GAP, _MARGIN = 1.0, 3.0, 6.0, 26.0
_NAMED = 5  # pairs that a head's title names


@dataclass(frozen=True)
class Head:
    """One head: its place and size, what was cut of it, and that in words.

    `path` is drawn in cells: a line of width 1 through each row of the grid where it was cut.
    """

    x: float
    y: float
    size: float
    title: str
    path: str


@dataclass(frozen=True)
class Picture:
    """What a template needs to draw a cut; sizes in pixels, `cell` is one unit's."""

    width: float
    height: float
    cell: float
    heads: tuple[Head, ...]
    across: tuple[tuple[float, int], ...]  # where each head's number stands
    down: tuple[tuple[float, int], ...]  # where each layer's does


def picture(cut: Cut) -> Picture:
    """Every head of the layers that were cut as a grid, with the units of it that were."""
    cell = (_WIDEST / max(1, cut.heads) - _GAP) / max(1, len(cut.tokens))
    cell = min(_LARGEST, max(_SMALLEST, cell))
    side = cell * len(cut.tokens)
    step = side + _GAP
    units: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for layer, head, query, key in cut.units:
        units.setdefault((layer, head), []).append((query, key))
    layers = sorted({layer for layer, _ in units})
    heads = tuple(
        Head(
            _MARGIN + head * step, _MARGIN + row * step, side,
            *_drawn(cut, layer, head, units.get((layer, head), [])),
        )
        for row, layer in enumerate(layers)
        for head in range(cut.heads)
    )  # fmt: skip
    across = tuple((_MARGIN + head * step + side / 2, head + 1) for head in range(cut.heads))
    down = tuple((_MARGIN + row * step + side / 2, layer + 1) for row, layer in enumerate(layers))
    width, height = _MARGIN + cut.heads * step, _MARGIN + len(layers) * step
    return Picture(width, height, cell, heads, across, down)


def _drawn(cut: Cut, layer: int, head: int, pairs: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """What was cut of a head, in words and as a path."""
    title = f"layer {layer + 1}, head {head + 1}"
    if pairs:
        named = [f"{cut.tokens[query]} → {cut.tokens[key]}" for query, key in pairs[:_NAMED]]
        more = [f"{len(pairs) - _NAMED} more"] if len(pairs) > _NAMED else []
        title += f": {', '.join([*named, *more])}"
    return title, _path(pairs)


def _path(pairs: Sequence[tuple[int, int]]) -> str:
    """Cells that stand side by side are one line."""
    parts: list[str] = []
    for query, row in groupby(sorted(set(pairs)), lambda pair: pair[0]):
        keys = [key for _, key in row]
        for _, run in groupby(enumerate(keys), lambda place: place[1] - place[0]):
            run_of = [key for _, key in run]
            parts.append(f"M{run_of[0]} {query}.5h{len(run_of)}")
    return "".join(parts)


def words(cut: Cut) -> Iterator[tuple[str, int, int]]:
    """Each token, in how many units it was no longer seen, and its shade among the others."""
    unseen = Counter(key for _, _, _, key in cut.units)
    most = max(unseen.values(), default=1)
    for place, token in enumerate(cut.tokens):
        yield token, unseen[place], shade(unseen[place] / most)
