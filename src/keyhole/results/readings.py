"""Recovered text beside the original: what a report shows of a finding about text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One token as it is written, how far it is to be believed, and whether it is right.

    `right` is None where nobody knows the original: then a verified token counts as right.
    """

    text: str
    mark: str
    right: bool | None

    @property
    def counts(self) -> bool:
        return self.mark == "verified" if self.right is None else self.right


@dataclass(frozen=True)
class Reading:
    """One text, and what was read of it; `original` is empty where a store has it no longer.

    `exact`: every character came back, up to what the tokenizer's own normaliser changes. `note`
    says what could not: characters that the tokenizer has no token for, an end that was cut off.

    Of a stored embedding also: `tokens`, the length of the original or, where nobody knows it, of
    what was read, without special tokens; `overlap`, the F1 of the tokens wherever they stand,
    where the original is known; `similarity`, the cosine of the stored vector with that of what was
    read. They say how near a text came that is not exact.
    """

    original: str
    pieces: tuple[Piece, ...]
    exact: bool
    verified: bool
    note: str = ""
    tokens: int | None = None
    overlap: float | None = None
    similarity: float | None = None

    @property
    def known(self) -> float:
        """The share of the tokens that are right."""
        return sum(piece.counts for piece in self.pieces) / max(1, len(self.pieces))


@dataclass(frozen=True)
class Readings:
    """The texts read from one exposure in one precision: a cell of the exposure matrix.

    `chance` is the share of tokens that guesses without the leak would have right, where that was
    looked at.
    """

    kind: str
    layer: int
    precision: str
    readings: tuple[Reading, ...]
    chance: float | None = None

    @property
    def known(self) -> float:
        """The share of all tokens that are right."""
        pieces = [piece for reading in self.readings for piece in reading.pieces]
        return sum(piece.counts for piece in pieces) / max(1, len(pieces))

    @property
    def exact(self) -> int:
        """Texts that came back exactly, and verified."""
        return sum(reading.exact and reading.verified for reading in self.readings)
