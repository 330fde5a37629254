"""What is counted in a corpus rather than learnt: a minute or two on a CPU.

The encoder is run once over lines of the corpus; a bag (bag.py) and n-grams (ngrams.py) come from
that, and the lines themselves, the nearest of which are first guesses. For each vector it gives the
search on a CPU (climb.py) its candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keyhole.recover.embedding.bag import Bag
from keyhole.recover.embedding.candidates import NEVER, Candidates, Tokens
from keyhole.recover.embedding.ngrams import NGrams
from keyhole.recover.embedding.scoring import Encoder, Texts

SHIPPED = Path(__file__).with_name("corpus.txt")  # training/make_corpus.py: English sentences
_LINES = 50_000  # that the encoder is run on
_LENGTH = 16  # tokens: longer lines are cut into pieces
_ENOUGH = 64  # lines, from which on they say how vectors vary
_TOKENS = 1_000  # that texts are put together from, and those that a guess lacks


@dataclass(frozen=True, eq=False)
class Counted:
    """A bag, n-grams, and lines with their vectors (lines, d), as this encoder compares them."""

    encoder: Encoder
    bag: Bag
    ngrams: NGrams
    lines: Texts
    vectors: Tensor
    special: Tensor  # tokens that no text holds

    @classmethod
    def of(
        cls, encoder: Encoder, lines: Sequence[Sequence[int]], ngrams: NGrams | None = None,
        guess: bool = True, seed: int = 0,
    ) -> Counted:  # fmt: skip
        """From a corpus of token lists; other n-grams may be given, the first guess left out.

        The encoder compares vectors in units of how they vary over the corpus, from here on.
        """
        pieces = sorted({piece for line in lines for piece in _cut(tuple(line))})
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
        chosen = [list(pieces[k]) for k in order[:_LINES].tolist()]
        texts = Texts.of(chosen, _LENGTH, encoder.device)
        enough = len(texts) >= _ENOUGH
        vectors = encoder.whiten(texts) if enough else encoder.vectors(texts, fast=True)
        if guess:
            bag = Bag.of(encoder, texts, vectors)
        else:
            vectors = vectors[:1].expand(len(texts), -1)
            bag = Bag.blank(encoder, texts, vectors.shape[1])
        bag = Bag(bag.weights.cpu(), bag.offset.cpu())
        texts = Texts(texts.ids.cpu(), texts.lengths.cpu())
        ngrams = ngrams or NGrams.of(lines, len(encoder.table))
        frame = torch.tensor(sorted({*encoder.before, *encoder.after, encoder.pad}))
        return cls(encoder, bag, ngrams, texts, vectors.cpu(), frame)

    def nearest(self, goal: Tensor, count: int, longest: int) -> list[list[int]]:
        """The lines nearest to a vector, of at most so many tokens."""
        cosines = (self.vectors @ goal).where(self.lines.lengths <= longest, -2.0)
        best = cosines.topk(min(count, len(self.lines))).indices
        return [self.lines.tokens(int(row)) for row in best if cosines[row] > -2]

    def candidates(self, goal: Tensor, longest: int) -> Candidates:
        """The likeliest tokens of the text behind a vector."""
        odds = self.bag.odds(goal)
        odds[self.special] = NEVER
        count = min(_TOKENS, len(odds) - len(self.special))
        return Candidates(odds, odds.topk(count).indices, self.ngrams, longest)


def _cut(line: Tokens) -> Iterable[Tokens]:
    """A line in pieces that are short enough."""
    return (line[start : start + _LENGTH] for start in range(0, len(line), _LENGTH))
