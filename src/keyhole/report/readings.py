"""Text as it was read, as a page shows it: tokens alike in one run, precisions alike in one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from keyhole.core import Finding, Piece, Reading

SHOWN = 100  # texts on the page; the JSON file has all
_MARKS = {"verified": "verified", "likely": "likely"}  # anything else nobody read


@dataclass(frozen=True)
class Run:
    """Tokens that stand side by side and are to be believed alike."""

    text: str
    mark: str
    wrong: bool


@dataclass(frozen=True)
class Row:
    """What was read of a text, in the precisions that gave the same."""

    precisions: tuple[str, ...]
    reading: Reading
    runs: tuple[Run, ...]

    @property
    def marks(self) -> str:
        """How many tokens have which mark, in words: colours alone are not for everybody."""
        counts = Counter(piece.mark for piece in self.reading.pieces)
        wrong = sum(piece.right is False for piece in self.reading.pieces)
        words = [f"{count} {mark}" for mark, count in counts.most_common()]
        return ", ".join([*words, *([f"{wrong} wrong"] if wrong else [])])


@dataclass(frozen=True)
class Shown:
    """A text as it was put in, and what came back of it."""

    original: str
    note: str
    rows: tuple[Row, ...]


def shown(finding: Finding) -> list[Shown]:
    """The first texts of a finding."""
    first = finding.texts[0].readings if finding.texts else ()
    return [
        Shown(reading.original, reading.note, tuple(_rows(finding, number)))
        for number, reading in enumerate(first[:SHOWN])
    ]


def _rows(finding: Finding, number: int) -> list[Row]:
    alike: dict[tuple[object, ...], tuple[list[str], Reading]] = {}
    for cell in finding.texts:
        if number < len(cell.readings):
            reading = cell.readings[number]
            key = (reading.pieces, reading.similarity, reading.overlap)
            alike.setdefault(key, ([], reading))[0].append(cell.precision)
    return [Row(tuple(names), reading, runs(reading.pieces)) for names, reading in alike.values()]


def runs(pieces: Sequence[Piece]) -> tuple[Run, ...]:
    """Marks that are none of ours (a file may say anything) count as not read."""
    alike = groupby(pieces, lambda piece: (_MARKS.get(piece.mark, "unread"), piece.right is False))
    return tuple(
        Run("".join(piece.text for piece in group), mark, wrong) for (mark, wrong), group in alike
    )
