"""Recovered texts as a page shows them, and a table of how many were read, by length.

Both are made of the `Readings` of a finding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean, median

from keyhole.core import Finding, Piece, Reading
from keyhole.report.words import SHOWN

_MARKS = ("verified", "likely")  # any other mark counts as unread


@dataclass(frozen=True)
class Run:
    """Successive tokens with the same mark."""

    text: str
    mark: str
    wrong: bool


@dataclass(frozen=True)
class Row:
    """A recovered text, with all precisions that gave the same."""

    precisions: tuple[str, ...]
    reading: Reading
    runs: tuple[Run, ...]

    @property
    def marks(self) -> str:
        """The counts of marks in words, because not everybody sees colours."""
        pieces = self.reading.pieces
        counts = Counter(piece.mark for piece in pieces).most_common()
        counts.append(("wrong", sum(piece.right is False for piece in pieces)))
        return ", ".join(f"{count} {mark}" for mark, count in counts if count)


@dataclass(frozen=True)
class Shown:
    """A text, and what was recovered of it."""

    original: str
    note: str
    rows: tuple[Row, ...]


def shown(finding: Finding) -> list[Shown]:
    """Return the first texts of a finding."""
    return [
        Shown(reading.original, reading.note, tuple(_rows(finding, number)))
        for cell in finding.texts[:1]
        for number, reading in enumerate(cell.readings[:SHOWN])
    ]


def _rows(finding: Finding, number: int) -> list[Row]:
    alike: dict[tuple[object, ...], tuple[list[str], Reading]] = {}
    for cell in finding.texts:
        if number < len(cell.readings):
            reading = cell.readings[number]
            key = (reading.pieces, reading.similarity, reading.overlap)
            alike.setdefault(key, ([], reading))[0].append(cell.precision)
    return [
        Row(tuple(names), reading, runs(reading.pieces))
        for names, reading in alike.values()
    ]


def runs(pieces: Sequence[Piece]) -> tuple[Run, ...]:
    def kind(piece: Piece) -> tuple[str, bool]:
        mark = piece.mark
        if mark not in _MARKS:
            mark = "unread"
        return mark, piece.right is False

    return tuple(
        Run("".join(piece.text for piece in group), mark, wrong)
        for (mark, wrong), group in groupby(pieces, kind)
    )


# The shortest length in each row of the table, without special tokens.
EDGES = (1, 10, 17, 25)


@dataclass(frozen=True)
class Span:
    """The texts in a range of lengths: how many were tried, and how many were read exactly.

    `overlap` is the mean F1 of the tokens and `similarity` the median cosine of the
    others. Both are None if there are no others or nobody knows the originals.
    """

    name: str
    tried: int
    exact: int
    overlap: float | None
    similarity: float | None

    @property
    def share(self) -> float:
        return self.exact / self.tried


def spans(finding: Finding) -> list[Span]:
    """Return the ranges of lengths that have texts, if this finding has texts with lengths."""
    readings = [
        r for cell in finding.texts[:1] for r in cell.readings if r.tokens is not None
    ]
    ranges = zip(EDGES, (*EDGES[1:], math.inf), strict=True)
    spans = [_span(readings, first, end - 1) for first, end in ranges]
    return [span for span in spans if span.tried]


def whose(finding: Finding) -> str:
    """Say whether the lengths are those of the original texts or of the recovered ones."""
    readings = finding.texts[0].readings
    unknown = sum(not reading.original for reading in readings)
    if not unknown:
        return "tokens of the store's own texts"
    if unknown == len(readings):
        return "tokens of what was read: the store has no texts"
    return f"tokens of the store's own texts, and of what was read where it has none ({unknown:,})"


def near(reading: Reading) -> str:
    """Say how near a text is to the original; empty if it is exact or that was not measured."""
    if reading.similarity is None or (reading.exact and reading.verified):
        return ""
    words = f"cosine {cosine(reading.similarity)}"
    if reading.overlap is not None:
        words += f", F1 of tokens {reading.overlap:.2f}"
    return words


def cosine(value: float) -> str:
    """Write a cosine, rounded down so that only 1 is written as 1."""
    return f"{math.floor(value * 1e4) / 1e4:.4f}"


def _span(
    readings: list[Reading],
    first: int,
    last: float,
) -> Span:
    # A vector of which nothing was read counts among the shortest.
    inside = [r for r in readings if first <= max(1, r.tokens or 0) <= last]
    missed = [r for r in inside if not (r.exact and r.verified)]
    name = f"{first} or more" if last == math.inf else f"{first}–{last:g}"
    return Span(
        name,
        len(inside),
        len(inside) - len(missed),
        _figure(mean, [reading.overlap for reading in missed]),
        _figure(median, [reading.similarity for reading in missed]),
    )


def _figure(
    of: Callable[[list[float]], float], values: Sequence[float | None]
) -> float | None:
    """Return a figure of the values that were measured, if any were."""
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return of(measured)
