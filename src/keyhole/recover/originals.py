"""Did a text come back? Its characters decide, not its tokens.

A text is exact if decoding the recovered ids gives what the tokenizer makes of the original, and
that is the original's characters up to what the tokenizer's own normaliser changes (case, accents,
where its tokens are words the spaces between them) and a space at either end, which tokenizers add
and take away. What became the unknown token, what has no token at all and what was cut off after
the model's last position did not come back.

A text that is not exact may still give away what matters: `shared` counts the tokens that came back
wherever they stand, and the names and numbers among the words.
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
_NAMED = 3  # characters or words without a token that a note names


@dataclass(frozen=True, eq=False)
class Original:
    """A text and its tokens: `ids` up to the maximum length, `notes` on what they lose.

    `made` is what decoding all of its tokens gives.
    """

    text: str
    ids: list[int]
    made: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any, text: str, max_length: int) -> Original:
        """The text as the model gets it, cut off after `max_length` tokens."""
        text, given = opening(text, max_length), len(text)
        ids = list(tokenizer(text, truncation=True, max_length=max_length)["input_ids"])
        whole = list(tokenizer(text, verbose=False)["input_ids"])
        notes = [_unknown(tokenizer, text, whole)]
        if len(whole) > len(ids) or len(text) < given:
            more = "more than " if len(text) < given else ""
            notes.append(f"cut off after {max_length} of {more}{len(whole)} tokens")
        made = decoded(tokenizer, whole)
        if not any(notes) and _characters(tokenizer, made) != _characters(tokenizer, text):
            notes.append("the tokenizer does not keep all of its characters")
        return cls(text, ids, made, tuple(note for note in notes if note))

    def is_exactly(self, tokenizer: Any, ids: Sequence[int]) -> bool:
        """Do these ids give every character of the text?"""
        return not self.notes and _trimmed(decoded(tokenizer, list(ids))) == _trimmed(self.made)

    def shared(self, tokenizer: Any, ids: Sequence[int]) -> Shared:
        """What these ids have in common with the text, in whatever order."""
        special = set(tokenizer.all_special_ids)
        truth, given = (
            Counter(id_ for id_ in each if id_ not in special) for each in (self.ids, ids)
        )
        both = 2 * (truth & given).total()
        f1 = both / max(1, truth.total() + given.total())
        words = set(_WORD.findall(_normalised(tokenizer, decoded(tokenizer, list(ids)))))
        names = named(self.text)
        read = [name for name in names if {*_WORD.findall(_normalised(tokenizer, name))} <= words]
        return Shared(f1, len(read), len(names))


@dataclass(frozen=True)
class Shared:
    """The F1 of tokens, and how many of so many names and numbers came back."""

    f1: float
    read: int
    named: int

    def __str__(self) -> str:
        words = f", {self.read} of {self.named} names and numbers" if self.named else ""
        return f"token F1 {self.f1:.2f}{words}"


def named(text: str) -> list[str]:
    """Words with a digit, and capitalised ones that do not only begin a sentence; each once."""
    found: list[str] = []
    for match in _WORD.finditer(text):
        word, before = match.group(), text[: match.start()].rstrip("\"'([ \n\t“‘")
        begins = not before or before[-1] in ".!?:"
        if any(sign.isdigit() for sign in word) or (word[0].isupper() and not begins):
            found.append(word)
    return list(dict.fromkeys(found))


def _unknown(tokenizer: Any, text: str, ids: list[int]) -> str:
    """What the tokenizer has no token for, in words; empty where it has one for everything."""
    unknown = unknown_token(tokenizer)
    if unknown is None or unknown not in ids:
        return ""
    if not getattr(tokenizer, "is_fast", False):
        return "the tokenizer knows no token for some of it"
    spans = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    words = [
        text[start:end] for (start, end), id_ in zip(spans, ids, strict=True) if id_ == unknown
    ]
    words = list(dict.fromkeys(words))
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return f"the tokenizer knows no token for {', '.join(words[:_NAMED])}{more}"


def _trimmed(text: str) -> str:
    """Without a space at either end: tokenizers put one there, and take it away."""
    return text.removeprefix(" ").removesuffix(" ")


def _characters(tokenizer: Any, text: str) -> str:
    """A text as the tokenizer's normaliser leaves it, without spaces."""
    return "".join(_normalised(tokenizer, text).split())


def _normalised(tokenizer: Any, text: str) -> str:
    inner = getattr(tokenizer, "backend_tokenizer", None)
    normaliser = getattr(inner, "normalizer", None)
    if normaliser is not None:
        text = normaliser.normalize_str(text)
        text = text.replace("\u2581", " ")  # SentencePiece's sign for a space
    return text
