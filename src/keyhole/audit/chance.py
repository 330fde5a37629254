"""How much of a text a reading has right by chance: what frequent words and places explain.

Whoever writes "the" and "." where they often stand is right now and then, leak or no leak. So what
was read is held against texts that it was not read from: the others of the audit, and ordinary
English sentences. Where no more is right of a text than of those, nothing was given away; where
more is, by odds of a thousand to one, something was, although nobody verified it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import Any

from keyhole.core import Readings
from keyhole.recover import TextRecovery
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts
from keyhole.recover.originals import Original
from keyhole.recover.pieces import unknown_token

_SENTENCES = 64  # of the corpus that ships
_LUCK = 1e-3  # the probability of as much by chance, above which chance explains it


def share_by_chance(
    tokenizer: Any,
    originals: Sequence[Original],
    recoveries: Sequence[TextRecovery],
    longest: int,
) -> float:
    """The larger of the shares that are right of other texts and of ordinary sentences."""
    texts = [_inside(tokenizer, original.ids) for original in originals]
    read = [_inside(tokenizer, recovery.ids) for recovery in recoveries]
    lines = islice(corpus_texts(SHIPPED), _SENTENCES)
    ordinary = [_inside(tokenizer, Original.of(tokenizer, line, longest).ids) for line in lines]
    shares: list[float] = []
    for others in (texts, ordinary):
        tallies = [
            _agreeing(ids, other, in_place=len(ids) == len(own))
            for number, (ids, own) in enumerate(zip(read, texts, strict=True))
            for place, other in enumerate(others)
            if others is ordinary or place != number
        ]
        right, total = sum(right for right, _ in tallies), sum(total for _, total in tallies)
        if total:  # one more than were right: chance may have been unlucky here
            shares.append((right + 1) / (total + 1))
    return max(shares, default=1.0)


def explained(cell: Readings) -> bool:
    """Is as much right as chance alone may well have right?"""
    if cell.chance is None:
        return True
    pieces = [piece for reading in cell.readings for piece in reading.pieces]
    right = sum(piece.counts for piece in pieces)
    return _at_least(right, len(pieces), cell.chance) > _LUCK


def _at_least(right: int, total: int, share: float) -> float:
    """The probability of so many right or more, each by itself with this probability."""
    if share >= 1 or not right:
        return 1.0
    log, other = math.log(share), math.log1p(-share)
    terms = (
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        + k * log + (total - k) * other
        for k in range(right, total + 1)
    )  # fmt: skip
    return math.fsum(math.exp(term) for term in terms)


def _inside(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Without special tokens, which stand in every text; but with the unknown one."""
    special = set(tokenizer.all_special_ids) - {unknown_token(tokenizer)}
    return [id_ for id_ in ids if id_ not in special]


def _agreeing(ids: Sequence[int], truth: Sequence[int], *, in_place: bool) -> tuple[int, int]:
    """How many tokens are right, of how many; where the length did not leak, wherever they fit."""
    if in_place:
        both = list(zip(ids, truth, strict=False))
        return sum(read == true for read, true in both), len(both)
    blocks = SequenceMatcher(None, truth, ids, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks), max(len(ids), len(truth))
