"""What is counted in a corpus rather than learnt: seconds on a GPU, a minute or two on a CPU.

The encoder is run once over lines of the corpus; a bag (bag.py) and n-grams (ngrams.py) come from
that, and the lines themselves, the nearest of which are what a search begins with (sum_search.py).
Where the encoder is quick it is also run on the lines with some tokens replaced by any others, so
that the bag has seen every token of the vocabulary in some text. For last states every token is
also run at the end of a text (endings.py), and a search begins there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from keyhole.recover.embedding.bag import Bag, alone
from keyhole.recover.embedding.endings import Endings
from keyhole.recover.embedding.ngrams import NGrams
from keyhole.recover.embedding.scoring import Encoder, Texts

SHIPPED = Path(__file__).with_name("corpus.txt")  # training/make_corpus.py: English sentences
_LINES = {"cuda": 200_000, "cpu": 50_000}  # that the encoder is run on …
_ALTERED = {"cuda": 4, "cpu": 0}  # … and times that it is run on them with tokens replaced
_REPLACED = 0.3  # of a line's tokens, at most
_ENOUGH = 64  # lines, from which on they say how vectors vary


@dataclass(frozen=True, eq=False)
class Counted:
    """A bag, n-grams, and lines with their vectors (lines, d), as this encoder compares them."""

    encoder: Encoder
    bag: Bag
    ngrams: NGrams
    lines: Texts
    vectors: Tensor
    special: Tensor  # tokens that no text holds
    endings: Endings | None = None  # of last states

    @classmethod
    def of(
        cls, encoder: Encoder, lines: Sequence[Sequence[int]], longest: int,
        ngrams: NGrams | None = None, guess: bool = True, seed: int = 0,
    ) -> Counted:  # fmt: skip
        """From a corpus of token lists, for texts of up to `longest` tokens.

        Other n-grams may be given, the first guess left out. The encoder compares vectors in units
        of how they vary over the corpus, from here on.
        """
        device = encoder.device
        pieces = sorted({piece for line in lines for piece in _cut(tuple(line), longest)})
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))
        chosen = [list(pieces[k]) for k in order[: _LINES[device.type]].tolist()]
        texts = Texts.of(chosen, longest, device)
        enough = len(texts) >= _ENOUGH
        vectors = encoder.whiten(texts) if enough else encoder.vectors(texts, fast=True)
        frame = torch.tensor(sorted({*encoder.before, *encoder.after, encoder.pad}), device=device)
        endings = None
        if guess:
            seen = _altered(encoder, texts, vectors, frame, seed)
            if encoder.exposure.pooling == "last":
                endings = Endings.of(encoder, texts, seed)
            bag = Bag.of(*seen, endings.of_tokens if endings else alone(encoder))
        else:
            vectors = vectors[:1].expand(len(texts), -1)
            bag = Bag.blank(encoder, texts, vectors.shape[1])
        ngrams = ngrams or NGrams.of(lines, len(encoder.table))
        return cls(encoder, bag, ngrams.to(device), texts, vectors, frame, endings)

    def nearest(self, goals: Tensor, count: int, longest: int) -> tuple[Texts, Tensor]:
        """The lines nearest to each vector (v, d), of at most so many tokens; and its number.

        Of last states as many endings again.
        """
        cosines = (goals @ self.vectors.T).where(self.lines.lengths <= longest, -2.0)
        best = cosines.topk(min(count, len(self.lines)), dim=1)
        vector, place = (best.values > -2).nonzero().unbind(1)
        lines = self.lines[best.indices[vector, place]].padded(longest)
        if self.endings is None:
            return lines, vector
        ends, owner = self.endings.nearest(goals, self.special, count, longest)
        return Texts.cat([lines, ends]), torch.cat([vector, owner])


def _altered(
    encoder: Encoder, texts: Texts, vectors: Tensor, special: Tensor, seed: int
) -> tuple[Texts, Tensor]:
    """Texts and their vectors, and the same with tokens replaced by any of the vocabulary."""
    device = encoder.device
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.ones(len(encoder.table), dtype=torch.bool, device=device)
    words[special] = False
    words = words.nonzero().flatten()
    parts, runs = [texts], [vectors]
    for _ in range(_ALTERED[device.type]):
        share = _REPLACED * torch.rand(len(texts), 1, generator=generator, device=device)
        luck = torch.rand(texts.ids.shape, generator=generator, device=device)
        any_ = torch.randint(len(words), texts.ids.shape, generator=generator, device=device)
        ids = texts.ids.where((luck >= share) | ~texts.mask, words[any_])
        parts.append(Texts(ids, texts.lengths))
        runs.append(encoder.vectors(parts[-1], fast=True))
    return Texts.cat(parts), torch.cat(runs)


def _cut(line: tuple[int, ...], length: int) -> Iterable[tuple[int, ...]]:
    """A line in pieces that are short enough."""
    return (line[start : start + length] for start in range(0, len(line), length))
