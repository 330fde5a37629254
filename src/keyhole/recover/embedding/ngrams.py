"""What follows what in a corpus: interpolated bigrams (Kneser and Ney, 1995).

    p(b | a) = max(c(ab) − D, 0) / c(a) + D·(tokens seen after a) / c(a) · q(b)

c counts pairs of neighbours, q(b) is the share of the distinct pairs that end in b: a word that
follows many others is likely after a new one. Before the first token and behind the last one
stands a mark of its own, V. `uniform` knows nothing: every token is as likely everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from keyhole.recover.embedding.scoring import Texts

_DISCOUNT = 0.75
_SEEN = 0.05  # pairs that a token which ends none counts as


@dataclass(frozen=True, eq=False)
class NGrams:
    """Pairs that were seen as keys a·(V + 1) + b in order, and what p(b | a) is made of."""

    keys: Tensor  # (pairs,)
    seen: Tensor  # (pairs,) max(c(ab) − D, 0) / c(a)
    left: Tensor  # (V + 1,) the share of each a that is left for pairs not seen
    ends: Tensor  # (V + 1,) q(b)

    @property
    def mark(self) -> int:
        """What stands before the first token and behind the last."""
        return len(self.ends) - 1

    @classmethod
    def of(cls, lines: Iterable[Sequence[int]], vocabulary: int) -> NGrams:
        size = vocabulary + 1
        row = torch.tensor([vocabulary, *chain.from_iterable((*x, vocabulary) for x in lines)])
        keys, counts = (row[:-1] * size + row[1:]).unique(return_counts=True)
        first, second = keys // size, keys % size
        totals = torch.zeros(size, dtype=torch.float64).index_add_(0, first, counts.double())
        kinds = torch.bincount(first, minlength=size)
        ends = torch.bincount(second, minlength=size) + _SEEN
        left = torch.where(totals > 0, _DISCOUNT * kinds / totals.clamp(min=1), 1.0)
        seen = (counts - _DISCOUNT) / totals[first]
        return cls(keys, seen.float(), left.float(), (ends / ends.sum()).float())

    @classmethod
    def uniform(cls, vocabulary: int) -> NGrams:
        none, every = torch.zeros(0), torch.ones(vocabulary + 1)
        return cls(none.long(), none, every, every / len(every))

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """log p(b | a), for tokens or marks a and b of one shape."""
        p = self.left[first] * self.ends[second]
        if len(self.keys):
            wanted = first * len(self.ends) + second
            place = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
            p = p + self.seen[place].where(self.keys[place] == wanted, 0.0)
        return p.log()

    def framed(self, texts: Texts) -> Tensor:
        """Tokens (b, n + 2) with a mark before them, and marks behind."""
        ids = texts.ids.where(texts.mask, self.mark)
        ends = ids.new_full((len(ids), 1), self.mark)
        return torch.cat([ends, ids, ends], 1)

    def log_p(self, texts: Texts, own: Tensor | None = None) -> Tensor:
        """log p (b,) of whole texts, their ends included.

        `own` (b, n) is what a language model says of each token: half of it is taken where there
        is any, and half of what the n-grams say.
        """
        row = self.framed(texts)
        terms = self.pairs(row[:, :-1], row[:, 1:])
        if own is not None:
            terms[:, :-1] = mixed(terms[:, :-1], own)
        inside = torch.arange(terms.shape[1], device=row.device) <= texts.lengths[:, None]
        return terms.where(inside, 0.0).sum(-1)

    def to(self, device: Any) -> NGrams:
        parts = (self.keys, self.seen, self.left, self.ends)
        return NGrams(*(part.to(device) for part in parts))


def mixed(counted: Tensor, own: Tensor) -> Tensor:
    """log(½p + ½q) of two log-probabilities; the first where the second is not a number."""
    both = torch.logaddexp(counted, own.to(counted)) - math.log(2)
    return counted.where(own.isnan(), both)
