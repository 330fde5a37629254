"""Whether a text was recovered: its characters decide, not its tokens.

A recovery is exact if two things hold. First, the recovered ids decode to the same text
as the original's own ids. Second, that text has the original's characters, apart from
changes that tokenizers make: case and accents (the normaliser), spaces between words, a
space at either end. So a recovery is not exact if a character has no token, or if the
text was cut off at the model's last position.

An inexact recovery may still give away what matters. `Original.shared` counts the
tokens that were recovered at any position, and the names and numbers among the words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.data import opening
from keyhole.models.pieces import decoded, unknown_token

_WORD = re.compile(r"\w+")
_LISTED = 3  # the most words that a note on words without a token lists


@dataclass(frozen=True, eq=False)
class Original:
    """A text, its token `ids` up to the maximum length, and `notes` on what these lose of it.

    `round_trip` is what the text's tokens decode to, including those beyond the maximum
    length.
    """

    text: str
    ids: list[int]
    round_trip: str
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        text: str,
        max_length: int,
    ) -> Original:
        """Return the text as the model takes it, cut off after `max_length` tokens."""
        start = opening(text, max_length)
        ids = list(
            tokenizer(start, truncation=True, max_length=max_length)["input_ids"]
        )
        uncut = list(tokenizer(start, verbose=False)["input_ids"])
        notes = [_unknown_words(tokenizer, start, uncut)]
        if len(uncut) > len(ids) or len(start) < len(text):
            more = "more than " if len(start) < len(text) else ""
            notes.append(f"cut off after {max_length} of {more}{len(uncut)} tokens")
        round_trip = decoded(tokenizer, uncut)
        if not any(notes) and _characters(tokenizer, round_trip) != _characters(
            tokenizer, start
        ):
            notes.append("the tokenizer does not keep all of its characters")
        return cls(start, ids, round_trip, tuple(note for note in notes if note))

    def is_exactly(self, tokenizer: Any, ids: Sequence[int]) -> bool:
        """Return whether these ids give every character of the text."""
        if self.notes:  # each says that the text's own ids lose a part of it
            return False
        return _trimmed(decoded(tokenizer, list(ids))) == _trimmed(self.round_trip)

    def shared(self, tokenizer: Any, ids: Sequence[int]) -> Shared:
        """Count what these ids have in common with the text, in any order."""
        special = set(tokenizer.all_special_ids)
        truth, given = (
            Counter(id_ for id_ in each if id_ not in special)
            for each in (self.ids, ids)
        )
        both = 2 * (truth & given).total()
        f1 = both / max(1, truth.total() + given.total())
        words = set(
            _WORD.findall(_normalised(tokenizer, decoded(tokenizer, list(ids))))
        )
        names = names_and_numbers(self.text)
        read = [
            name
            for name in names
            if {*_WORD.findall(_normalised(tokenizer, name))} <= words
        ]
        return Shared(f1, len(read), len(names))


@dataclass(frozen=True)
class Shared:
    """The F1 score of tokens, and how many of the `named` names and numbers were `read`."""

    f1: float
    read: int
    named: int

    def __str__(self) -> str:
        words = f", {self.read} of {self.named} names and numbers" if self.named else ""
        return f"token F1 {self.f1:.2f}{words}"


def names_and_numbers(text: str) -> list[str]:
    """Return the words with a digit or with a capital inside a sentence, without repeats."""
    found: list[str] = []
    for match in _WORD.finditer(text):
        word = match.group()
        before = text[: match.start()].rstrip("\"'([ \n\t“‘")
        begins = not before or before[-1] in ".!?:"
        if any(sign.isdigit() for sign in word) or (word[0].isupper() and not begins):
            found.append(word)
    return list(dict.fromkeys(found))


def _unknown_words(
    tokenizer: Any,
    text: str,
    ids: list[int],
) -> str:
    """Return a note on the words that the tokenizer has no token for; empty if there are none."""
    unknown = unknown_token(tokenizer)
    if unknown is None or unknown not in ids:
        return ""
    if not getattr(tokenizer, "is_fast", False):
        return "the tokenizer knows no token for some of it"
    spans = tokenizer(text, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    words = [
        text[start:end]
        for (start, end), id_ in zip(spans, ids, strict=True)
        if id_ == unknown
    ]
    words = list(dict.fromkeys(words))
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return f"the tokenizer knows no token for {', '.join(words[:_LISTED])}{more}"


def _trimmed(text: str) -> str:
    """Return the text without a space at either end: tokenizers add and remove one there."""
    return text.removeprefix(" ").removesuffix(" ")


def _characters(tokenizer: Any, text: str) -> str:
    """Return the normalised text without spaces."""
    return "".join(_normalised(tokenizer, text).split())


def _normalised(tokenizer: Any, text: str) -> str:
    """Return the text as the tokenizer's normaliser changes it, such as to lower case."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    normaliser = getattr(inner, "normalizer", None)
    if normaliser is not None:
        text = normaliser.normalize_str(text)
        text = text.replace("\u2581", " ")  # SentencePiece's sign for a space
    return text
