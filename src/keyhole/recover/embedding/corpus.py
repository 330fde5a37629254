"""Texts that the attacker has: what a reader is learnt from, drawn at random and changed at random.

A corpus of some ten thousand sentences is soon known by heart, and a reader that knows it by heart
recalls instead of reading the vector. So few texts are drawn as they stand. The others are chains:
from the beginning of a line on (or from its end backwards), and after each token, by chance, on
from another place of the corpus where the same token stands. Chains read like the corpus for a few
tokens at a time and hardly ever repeat. In half of all texts some tokens are replaced as well: by
tokens that the encoder takes for similar, by any of the vocabulary, or by others of the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.data import read_texts
from keyhole.errors import InputError
from keyhole.recover.embedding.scoring import Texts

_LINES = 0.1  # of the texts; the others are chains
_JUMPS = 0.6  # of a chain's tokens, at most, after which it goes on elsewhere
_REPLACED = 0.3  # of the tokens, at most, in half of the texts
_SIMILAR, _ANY = 0.5, 0.25  # of what tokens are replaced by; the others are the corpus's
_NEAREST = 16  # tokens that count as similar


@dataclass(frozen=True, eq=False)
class Corpus:
    """All lines' tokens in one row, and where each line begins and how long it is."""

    tokens: Tensor  # (N,)
    starts: Tensor  # (lines,), the shortest line first
    lengths: Tensor  # (lines,)
    places: Tensor  # (N,): where each token stands, the first token's places first
    firsts: Tensor  # (V + 1,): where in those each token's begin
    longest: int
    similar: Tensor  # (V, m): the tokens nearest to each
    any: Tensor  # (V',): the vocabulary without special tokens

    @classmethod
    def of(cls, tokenizer: Any, lines: Iterable[str], longest: int, table: Tensor) -> Corpus:
        """The lines in the tokens of an encoder, whose token embeddings are `table` (V, e)."""
        lines = [line.strip() for line in lines]
        encoded = tokenizer(lines, add_special_tokens=False, truncation=False)["input_ids"]
        encoded = [ids for ids in encoded if ids]
        lengths = torch.tensor([len(ids) for ids in encoded])
        tokens = torch.tensor([token for ids in encoded for token in ids])
        order = lengths.argsort()
        starts = (lengths.cumsum(0) - lengths)[order]
        ordinary = torch.ones(len(table), dtype=torch.bool)
        ordinary[[id_ for id_ in tokenizer.all_special_ids if id_ < len(table)]] = False
        words = ordinary.nonzero().flatten().to(table.device)
        firsts = torch.zeros(len(table) + 1, dtype=torch.long)
        firsts[1:] = tokens.bincount(minlength=len(table)).cumsum(0)
        places = tokens.argsort()
        parts = (tokens, starts, lengths[order], places, firsts)
        tokens, starts, lengths, places, firsts = (part.to(table.device) for part in parts)
        similar = _similar(table, words)
        return cls(tokens, starts, lengths, places, firsts, longest, similar, words)

    def draw(
        self, count: int, generator: torch.Generator, lengths: tuple[int, int] | None = None
    ) -> Texts:
        """Texts to learn from, of all `lengths` (from, to) alike."""
        device = self.tokens.device
        least, most = lengths or (1, self.longest)
        n = torch.randint(least, most + 1, (count,), generator=generator, device=device)
        lines = self._lines(n, generator)
        whole = self._share((count,), generator) < _LINES
        n = torch.where(whole, self.lengths[lines].clamp(max=most), n)
        lines = torch.where(whole, lines, self._whole(len(self.starts), (count,), generator))
        jumps = (_JUMPS * self._share((count,), generator)).where(~whole, 0.0)
        back = ~whole & (self._share((count,), generator) < 0.5)
        ids = self._chains(lines, jumps, back, most, generator)
        turned = (n[:, None] - 1 - torch.arange(most, device=device)).clamp(min=0)
        ids = torch.where(back[:, None], ids.gather(1, turned), ids)
        return Texts(self._replaced(ids, generator), n).clean()

    def _chains(
        self, lines: Tensor, jumps: Tensor, back: Tensor, count: int, generator: torch.Generator
    ) -> Tensor:
        """So many tokens from the beginnings of lines on, or from their ends `back`wards."""
        place = self.starts[lines] + (self.lengths[lines] - 1).where(back, 0)
        step = 1 - 2 * back.long()
        luck = self._share((2, count, len(lines)), generator)
        tokens: list[Tensor] = []
        for number in range(count):
            token = self.tokens[place]
            tokens.append(token)
            first = self.firsts[token]
            there = first + (luck[0, number] * (self.firsts[token + 1] - first)).long()
            place = torch.where(luck[1, number] < jumps, self.places[there], place)
            place = (place + step).clamp(0, len(self.tokens) - 1)
        return torch.stack(tokens, 1)

    def _replaced(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        share = _REPLACED * (2 * self._share((len(ids), 1), generator) - 1).clamp(min=0)
        hit = self._share(ids.shape, generator) < share
        similar = self.similar[ids, self._whole(self.similar.shape[1], ids.shape, generator)]
        other = self.any[self._whole(len(self.any), ids.shape, generator)]
        kind = self._share(ids.shape, generator)
        new = torch.where(kind < _SIMILAR + _ANY, other, self.random(ids.shape, generator))
        return ids.where(~hit, torch.where(kind < _SIMILAR, similar, new))

    def _lines(self, n: Tensor, generator: torch.Generator) -> Tensor:
        """A line of length n or nearly, for each: lines are sorted by length."""
        first = torch.searchsorted(self.lengths, n)
        after = torch.searchsorted(self.lengths, n + 1)
        share = self._share((len(n),), generator)
        places = first + (share * (after - first).clamp(min=1)).long()
        return places.clamp(max=len(self.lengths) - 1)

    def _share(self, shape: Any, generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator, device=self.tokens.device)

    def _whole(self, below: int, shape: Any, generator: torch.Generator) -> Tensor:
        return torch.randint(0, below, shape, generator=generator, device=self.tokens.device)

    def random(self, shape: Any, generator: torch.Generator) -> Tensor:
        """Tokens as often as the corpus has them."""
        return self.tokens[self._whole(len(self.tokens), shape, generator)]


def _similar(table: Tensor, words: Tensor) -> Tensor:
    """The tokens (V, m) of those given that are nearest to each by the cosine of embeddings."""
    rows = normalize(table.float(), dim=-1)
    count = min(_NEAREST, len(words) - 1)
    parts = [(some @ rows[words].T).topk(count + 1).indices[:, 1:] for some in rows.split(4096)]
    return words[torch.cat(parts)]


def corpus_texts(corpus: str | Path | Sequence[str]) -> list[str]:
    """The texts of a corpus, a file of them or the texts themselves; empty ones are left out."""
    texts = read_texts(corpus) if isinstance(corpus, str | Path) else corpus
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise InputError(f"expected texts in the corpus, got none in {corpus}")
    return texts


def damaged(texts: Texts, corpus: Corpus, generator: torch.Generator) -> Texts:
    """Texts with tokens replaced, left out, put in and moved: what a search is at, half-way."""
    device, (count, n) = texts.ids.device, texts.ids.shape

    def share(shape: Any) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    hit = share((count, n)) < 0.7 * share((count, 1)).square()
    ids = texts.ids.where(~hit, corpus.random((count, n), generator))
    # Two neighbouring pieces change places: positions sorted by the piece they are in.
    cuts = (share((count, 3)) * (texts.lengths[:, None] + 1)).long().sort(-1).values
    places = torch.arange(n, device=device).expand(count, n)
    piece = (places[..., None] >= cuts[:, None]).sum(-1)
    swapped = torch.tensor([0, 2, 1, 3], device=device)[piece]
    moves = share((count, 1)) < 0.5
    order = torch.where(moves, swapped, 0) * n + places
    # Dropped tokens go behind the end; tokens put in are copies of places, replaced.
    mask = texts.mask
    dropped = mask & (share((count, n)) < 0.3 * share((count, 1)).square())
    order = torch.where(mask & ~dropped, order, 10 * n + places)
    lengths = (mask & ~dropped).sum(-1)
    ids = ids.gather(1, order.argsort(dim=-1, stable=True))
    inserted = (share((count,)) < 0.3) & (lengths < n)
    at = (share((count,)) * (lengths + 1)).long()[:, None]
    shifted = ids.gather(1, (places - (places > at).long()).clamp(min=0))
    shifted = shifted.where(places != at, corpus.random((count, 1), generator))
    ids = torch.where(inserted[:, None], shifted, ids)
    lengths = (lengths + inserted.long()).clamp(min=1, max=n)
    return Texts(ids, lengths).clean()
