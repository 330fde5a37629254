"""What a view consists of: words, tables and drawings, as numbers and strings that are not HTML.

A view never writes HTML itself: the template (templates/notebook.html) draws these blocks and
escapes everything in them, so hostile text cannot leave the cell whichever result holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from keyhole.core import OUTCOMES, Outcome, Piece, Status

_COLOURS = {Outcome.GIVEN_AWAY: "bad", Outcome.KEPT: "good", Outcome.UNCHECKED: "part"}
_MOST_ROWS = 50  # of a table, and of what else is listed
_WIDEST = 64  # numbers of a matrix that is drawn


@dataclass(frozen=True)
class Head:
    """The first line: a tag in the colour of the outcome, and a sentence."""

    block: ClassVar[str] = "head"
    tag: str
    colour: str
    words: str


@dataclass(frozen=True)
class Words:
    block: ClassVar[str] = "words"
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of strings; the columns from `numbers` on are numbers. `more` rows are not shown."""

    block: ClassVar[str] = "table"
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int = 1
    colours: tuple[str, ...] = ()  # of each row's first cell, where it has one
    more: int = 0


@dataclass(frozen=True)
class Marked:
    """A text, token by token, in the colours of their marks."""

    block: ClassVar[str] = "marked"
    pieces: tuple[Piece, ...]
    caption: str = ""


@dataclass(frozen=True)
class Bars:
    """Shares of one, each with its name and what is written behind it."""

    block: ClassVar[str] = "bars"
    bars: tuple[tuple[str, float, str], ...]
    caption: str = ""


@dataclass(frozen=True)
class Grid:
    """A matrix as squares, the darker the larger; values from 0 to 1."""

    block: ClassVar[str] = "grid"
    rows: tuple[tuple[float, ...], ...]
    caption: str
    down: str
    across: str


def head(status: Status, words: str) -> Head:
    return Head(str(status), _COLOURS[OUTCOMES[status]], words)


def facts(**values: str | None) -> Table:
    """Names and figures in two columns; what is None is left out. `_` in a name is a space."""
    rows = [(name.replace("_", " "), value) for name, value in values.items() if value is not None]
    return Table((), tuple(rows), numbers=2)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 1,
    colours: Sequence[str] = (),
) -> Table:  # fmt: skip
    """The first rows, and how many there are besides."""
    listed = [tuple(row) for row in rows]
    shown = tuple(listed[:_MOST_ROWS])
    return Table(
        tuple(columns), shown, numbers, tuple(colours[:_MOST_ROWS]), len(listed) - len(shown)
    )


def number(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


def matrix(values: Tensor, caption: str, down: str, across: str) -> list[Grid | Words]:
    """A matrix by the size of its entries; one that is too large is named only."""
    shape = " × ".join(str(size) for size in values.shape)
    if values.ndim != 2 or max(values.shape) > _WIDEST or not values.numel():
        return [Words(f"{caption}: {shape}")]
    sizes = values.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(sizes.max()) or 1.0
    rows = tuple(tuple(float(size) / largest for size in row) for row in sizes)
    return [Grid(rows, f"{caption}: {shape}, the darker the larger", down, across)]


def bars(shares: Iterable[tuple[str, float, str]], caption: str = "") -> Bars:
    """A share that is no number is none."""
    kept = [
        (name, min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0, words)
        for name, share, words in shares
    ]
    return Bars(tuple(kept[:_MOST_ROWS]), caption)


def heads(lost: Mapping[tuple[int, int], int], depth: int, width: int) -> list[Grid]:
    """Layers down, heads across: how many units of attention each lost; a huge model has none."""
    if not lost or depth * width > _WIDEST**2:
        return []
    most = max(lost.values())
    rows = tuple(
        tuple(lost.get((layer, each), 0) / most for each in range(width)) for layer in range(depth)
    )
    return [Grid(rows, f"where attention was cut, at most {most} units a head", "layer", "head")]
