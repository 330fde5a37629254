"""Texts that the attacker has: what a reader is learnt from, drawn at random and damaged at random.

A text to learn from is a line of the corpus or a window that runs over the ends of lines, so that
there are more of them than lines; some of its tokens are replaced by others, so that what is learnt
is to read the vector rather than to know the corpus by heart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.recover.embedding.scoring import Texts

_LINES = 0.6  # of the texts to learn from: the others are windows
_REPLACED = 0.2  # of the tokens, at most, in half of the texts


@dataclass(frozen=True, eq=False)
class Corpus:
    """All lines' tokens in one row, and where each line begins and how long it is."""

    tokens: Tensor  # (N,)
    starts: Tensor  # (lines,), the shortest line first
    lengths: Tensor  # (lines,)
    longest: int

    @classmethod
    def of(cls, tokenizer: Any, lines: Iterable[str], longest: int, device: Any) -> Corpus:
        lines = [line.strip() for line in lines]
        encoded = tokenizer(lines, add_special_tokens=False, truncation=False)["input_ids"]
        encoded = [ids for ids in encoded if ids]
        lengths = torch.tensor([len(ids) for ids in encoded])
        tokens = torch.tensor([token for ids in encoded for token in ids])
        order = lengths.argsort()
        starts = (lengths.cumsum(0) - lengths)[order]
        return cls(tokens.to(device), starts.to(device), lengths[order].to(device), longest)

    def draw(
        self, count: int, generator: torch.Generator, lengths: tuple[int, int] | None = None
    ) -> Texts:
        """Texts to learn from: lines and windows, of all `lengths` (from, to) alike."""
        device = self.tokens.device
        least, most = lengths or (1, self.longest)
        n = torch.randint(least, most + 1, (count,), generator=generator, device=device)
        lines = self._lines(n, generator)
        windows = torch.randint(
            0, max(1, len(self.tokens) - most), (count,), generator=generator, device=device
        )
        whole = torch.rand(count, generator=generator, device=device) < _LINES
        starts = torch.where(whole, self.starts[lines], windows)
        n = torch.where(whole, self.lengths[lines].clamp(max=most), n)
        places = starts[:, None] + torch.arange(most, device=device)
        ids = self.tokens[places.clamp(max=len(self.tokens) - 1)]
        share = torch.rand(count, 1, generator=generator, device=device)
        share = _REPLACED * (2 * share - 1).clamp(min=0)
        hit = torch.rand(ids.shape, generator=generator, device=device) < share
        return Texts(ids.where(~hit, self.random(ids.shape, generator)), n).clean()

    def _lines(self, n: Tensor, generator: torch.Generator) -> Tensor:
        """A line of length n or nearly, for each: lines are sorted by length."""
        first = torch.searchsorted(self.lengths, n)
        after = torch.searchsorted(self.lengths, n + 1)
        share = torch.rand(len(n), generator=generator, device=n.device)
        places = first + (share * (after - first).clamp(min=1)).long()
        return places.clamp(max=len(self.lengths) - 1)

    def random(self, shape: Any, generator: torch.Generator) -> Tensor:
        """Tokens as often as the corpus has them."""
        places = torch.randint(
            0, len(self.tokens), shape, generator=generator, device=self.tokens.device
        )
        return self.tokens[places]


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
