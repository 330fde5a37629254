"""One vector's candidate tokens, and the texts made of them that look best without the encoder.

How promising a text is, next to a guess whose vector is e′:

    a·Σ log odds_t(e), over its distinct tokens  +  b·Σ missing_t(e − e′)  +  c·log p(text)

with the odds of the bag (bag.py) and the log-probability of the n-grams (ngrams.py). From nothing a
beam search writes texts of every length. The changes of a guess (a token replaced, put in or left
out, two in the place of one or two, one in the place of two, pieces moved) are ranked by what they
promise, twice: by weights for a guess that is far off, and by weights that trust what is missing,
which says more the nearer the guess is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from keyhole.recover.embedding.ngrams import NGrams

_MISSED = 100  # tokens that are candidates because a guess lacks them
_BEAM = 300  # candidates that texts are written with from nothing
_BRANCHES = 16  # of each text in the beam
_PAIRED = 48  # tokens that are tried together with as many others
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Weights:
    """What the odds, the missing and the order of tokens count for: a, b and c above."""

    odds: float
    missing: float
    order: float


# Both were chosen on sentences that the benchmark does not take.
FAR = Weights(0.3, 0.4, 0.6)
NEAR = Weights(0.1, 0.32, 0.6)  # the second of them for e − e′ of length one


@dataclass(frozen=True)
class Shares:
    """How many changes of each kind are wanted of one text."""

    replaced: int = 40
    put_in: int = 16
    left_out: int = 12
    paired: int = 12
    merged: int = 8
    moved: int = 12


@dataclass(frozen=True, eq=False)
class Candidates:
    """The log-odds (V,) of every token, the likeliest tokens (c,), and what follows what."""

    odds: Tensor
    likeliest: Tensor
    ngrams: NGrams
    longest: int

    def written(self, width: int, each: int) -> list[Tokens]:
        """From nothing: the `each` most promising texts of each length, by a beam of that width."""
        ids = self.likeliest[:_BEAM]
        mark, texts = len(ids), list[Tokens]()
        order = FAR.order * self.ngrams.among(torch.cat([ids, ids.new_tensor([self.ngrams.mark])]))
        odds = FAR.odds * self.odds[ids]
        beam: list[tuple[float, Tokens]] = [(0.0, ())]
        for _ in range(self.longest):
            last = torch.tensor([text[-1] if text else mark for _, text in beam])
            scores = torch.tensor([score for score, _ in beam])[:, None]
            scores = scores + order[last, :mark] + odds
            for row, (_, text) in enumerate(beam):
                again = list(set(text))
                scores[row, again] -= odds[again]  # in the bag a token counts once
                scores[row, text[-1:]] = -torch.inf  # else a dash is followed by dashes
            best = scores.topk(min(_BRANCHES, mark), dim=-1)
            grown = [
                (score, (*beam[row][1], token))
                for row in range(len(beam))
                for score, token in zip(
                    best.values[row].tolist(), best.indices[row].tolist(), strict=True
                )
            ]
            beam = sorted(grown, reverse=True)[:width]
            ended = [(score + float(order[text[-1], mark]), text) for score, text in beam]
            texts += [text for _, text in sorted(ended, reverse=True)[:each]]
        return [tuple(ids[list(text)].tolist()) for text in texts]

    def changed(
        self, text: Tokens, missing: Tensor, distance: float, shares: Shares, known: set[Tokens],
        turn: int,
    ) -> list[Tokens]:  # fmt: skip
        """The most promising changes of a guess that are not `known`.

        `missing` (V,) is what the bag says of e − e′, which has length `distance`; `turn` counts
        how often this guess was asked for.
        """
        lacked = missing.where(self.odds > NEVER, -torch.inf).topk(min(_MISSED, len(missing)))
        tokens = torch.cat([self.likeliest, lacked.indices]).unique()
        near = Weights(NEAR.odds, NEAR.missing / max(distance, 1e-3), NEAR.order)
        new: dict[Tokens, None] = {}
        for weights in (FAR, near):
            changes = Changes(self, text, missing, tokens, weights)
            for kind, wanted in (
                (changes.replaced, shares.replaced),
                (changes.put_in, shares.put_in if len(text) < self.longest else 0),
                (changes.left_out, shares.left_out if len(text) > 1 else 0),
                (changes.paired, shares.paired),
                (changes.merged, shares.merged),
                (changes.moved, shares.moved),
            ):
                room = len(new) + -(-wanted // 2)
                for child in kind(wanted * (turn + 2)) if wanted else ():
                    if len(new) < room and child != text and child not in known:
                        new[child] = None
        return list(new)


NEVER = -1e3  # the log-odds of a token that no text holds


class Changes:
    """What the changes of one text promise: each kind gives its best `count`, the best first."""

    def __init__(
        self, candidates: Candidates, text: Tokens, missing: Tensor, tokens: Tensor,
        weights: Weights,
    ) -> None:  # fmt: skip
        self.text, self.tokens, self.n = text, tokens, len(text)
        self.longest, self._ngrams, self._order = (
            candidates.longest, candidates.ngrams, weights.order,
        )  # fmt: skip
        mark = self._ngrams.mark
        self.row = row = torch.tensor([mark, *text, mark])
        once, each = weights.odds * candidates.odds, weights.missing * missing
        held, here = Counter(text), row[1:-1]
        gone = torch.tensor([held[token] == 1 for token in text])
        self.out = -(each[here] + once[here].where(gone, 0.0))  # (n,) in the bag it counts once
        new = ~torch.isin(tokens, here)
        self.into = each[tokens] + once[tokens].where(new, 0.0)  # (c,)
        shape = (self.n + 1, len(tokens))
        self.after = self._pairs(row[:-1, None].expand(shape), tokens.expand(shape))
        self.before = self._pairs(tokens.expand(shape), row[1:, None].expand(shape))
        self.now = self._pairs(row[:-1], row[1:])  # (n + 1,)

    def _pairs(self, first: Tensor, second: Tensor) -> Tensor:
        return self._order * self._ngrams.pairs(first, second)

    def replaced(self, count: int) -> Iterator[Tokens]:
        gain = self.after[:-1] + self.before[1:] + self.into
        gain = gain + (self.out - self.now[:-1] - self.now[1:])[:, None]
        for place, token in self._best(gain, count):
            yield (*self.text[:place], token, *self.text[place + 1 :])

    def put_in(self, count: int) -> Iterator[Tokens]:
        gain = self.after + self.before + self.into - self.now[:, None]
        for place, token in self._best(gain, count):
            yield (*self.text[:place], token, *self.text[place:])

    def left_out(self, count: int) -> Iterator[Tokens]:
        joined = self._pairs(self.row[:-2], self.row[2:])
        gain = self.out + joined - self.now[:-1] - self.now[1:]
        for place in gain.topk(min(count, self.n)).indices.tolist():
            yield (*self.text[:place], *self.text[place + 1 :])

    def merged(self, count: int) -> Iterator[Tokens]:
        """One new token in the place of two neighbours."""
        gain = self.after[:-2] + self.before[2:] + self.into
        lost = self.out[:-1] + self.out[1:] - self.now[:-2] - self.now[1:-1] - self.now[2:]
        for place, token in self._best(gain + lost[:, None], count):
            yield (*self.text[:place], token, *self.text[place + 2 :])

    def paired(self, count: int) -> Iterator[Tokens]:
        """Two new tokens in the place of one, if there is room, or of two neighbours."""
        few = min(_PAIRED, len(self.tokens))
        wide = range(1 if self.n < self.longest else 2, min(2, self.n) + 1)
        spans = [(start, start + w) for w in wide for start in range(self.n - w + 1)]
        if not spans:
            return
        starts, ends = (torch.tensor(edges) for edges in zip(*spans, strict=True))
        first = (self.after + self.into)[starts].topk(few)
        second = (self.before + self.into)[ends].topk(few)
        one, two = self.tokens[first.indices], self.tokens[second.indices]
        shape = (len(spans), few, few)
        gain = first.values[:, :, None] + second.values[:, None]
        gain += self._pairs(one[:, :, None].expand(shape), two[:, None].expand(shape))
        lost = [float(self.out[a:b].sum() - self.now[a : b + 1].sum()) for a, b in spans]
        gain = (gain + torch.tensor(lost)[:, None, None]).flatten()
        for place in gain.topk(min(count, len(gain))).indices.tolist():
            span, (a, b) = place // few**2, divmod(place % few**2, few)
            start, end = spans[span]
            yield (*self.text[:start], int(one[span, a]), int(two[span, b]), *self.text[end:])

    def moved(self, count: int) -> Iterator[Tokens]:
        orders = _orders(self.n)
        ends = orders.new_zeros(len(orders), 1)
        whole = self.row[torch.cat([ends, orders + 1, ends + self.n + 1], 1)]
        likely = self._pairs(whole[:, :-1], whole[:, 1:]).sum(-1)
        for order in orders[likely.topk(min(count, len(orders))).indices].tolist():
            yield tuple(self.text[place] for place in order)

    def _best(self, gain: Tensor, count: int) -> list[tuple[int, int]]:
        """Place and token of the largest entries (places, c), the largest first."""
        best = gain.flatten().topk(min(count, gain.numel())).indices
        places, columns = best // gain.shape[1], best % gain.shape[1]
        return list(zip(places.tolist(), self.tokens[columns].tolist(), strict=True))


@lru_cache
def _orders(n: int) -> Tensor:
    """Neighbouring pieces changed, or two tokens swapped: orders (m, n) of the places."""
    places = list(range(n))
    orders: set[tuple[int, ...]] = set()
    for a, b, c in combinations(range(n + 1), 3):
        orders.add((*places[:a], *places[b:c], *places[a:b], *places[c:]))
    for a, b in combinations(range(n), 2):
        swapped = places.copy()
        swapped[a], swapped[b] = b, a
        orders.add(tuple(swapped))
    return torch.tensor(sorted(orders), dtype=torch.long).view(len(orders), n)
