"""The same tokens in another order: two pieces of a text change places.

Pieces [a, b) and [c, d), a < b ≤ c < d, may have something between them ("glad and tired" becomes
"tired and glad"). All of these are looked at, ⅙n³ + n⁴/24 or so, but not run: what an exchange does
to the log p of bigrams is told by the ends of the pieces alone, and some are drawn by that.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from keyhole.recover.embedding.luck import gumbel
from keyhole.recover.embedding.ngrams import NGrams
from keyhole.recover.embedding.scoring import Texts

_HEAT = 2.0  # nats: exchanges are drawn with probability exp(change of log p / heat)


def exchanged(
    parents: Texts, ngrams: NGrams, count: int, generator: torch.Generator
) -> tuple[Texts, Tensor]:
    """`count` exchanges of each text, or as many as there are, the likelier the rather.

    With them comes the row of the text that each was made from.
    """
    device, longest = parents.ids.device, int(parents.lengths.max())
    cuts = _cuts(longest).to(device)
    gains = likelier(Texts(parents.ids[:, :longest], parents.lengths), cuts, ngrams) / _HEAT
    gains = gains + gumbel(gains, generator)
    gains = gains.where(cuts[3] <= parents.lengths[:, None], -torch.inf)
    best = gains.topk(min(count, gains.shape[1]), dim=1)
    rows, places = (best.values > -torch.inf).nonzero().unbind(1)
    return apply(parents[rows], cuts[:, best.indices[rows, places]]), rows


def likelier(texts: Texts, cuts: Tensor, ngrams: NGrams) -> Tensor:
    """The change of log p (p, q) by each of q exchanges (4, q)."""
    row = ngrams.framed(texts)
    size = row.shape[1]
    table = ngrams.pairs(
        row[:, :, None].expand(-1, -1, size), row[:, None].expand(-1, size, -1)
    ).flatten(1)

    def pair(left: Tensor, right: Tensor) -> Tensor:
        """log p of token `right` behind the token before place `left`."""
        return table[:, left * size + right + 1]

    a, b, c, d = cuts
    apart = pair(d, b) + pair(c, a) - pair(c, c)
    gains = pair(a, c) + torch.where(b < c, apart, pair(d, a)) + pair(b, d)
    return gains - pair(a, a) - pair(b, b) - pair(d, d)


def apply(texts: Texts, cuts: Tensor) -> Texts:
    """Each text (b, n) with its own exchange (4, b)."""
    a, b, c, d = cuts[..., None]
    places = torch.arange(texts.ids.shape[1], device=texts.ids.device).expand_as(texts.ids)
    middle = a + d - c  # where what was between the pieces begins
    last = middle + c - b
    source = torch.where(places < d, places - last + a, places)
    source = torch.where(places < last, places - middle + b, source)
    source = torch.where(places < middle, places - a + c, source)
    source = torch.where(places < a, places, source)
    return Texts(texts.ids.gather(1, source), texts.lengths)


@lru_cache
def _cuts(n: int) -> Tensor:
    """Every exchange in a text of n tokens: a, b, c, d in four rows."""
    joined = [(a, b, b, d) for a, b, d in combinations(range(n + 1), 3)]
    apart = list(combinations(range(n + 1), 4))
    return torch.tensor([*joined, *apart], dtype=torch.long).view(-1, 4).T
