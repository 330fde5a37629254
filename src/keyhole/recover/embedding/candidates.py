"""One vector's candidate tokens, and the texts made of them that look best without the encoder.

How promising a text is, next to a guess whose vector is e′:

    a·Σ log odds_t(e), over its distinct tokens  +  b·Σ missing_t(e − e′)  +  c·log p(text)

with the odds of the bag (bag.py) and the log-probability of the n-grams (ngrams.py). Among a
thousand or two tokens everything is a look-up in one table of pairs: from nothing a beam search
writes texts of every length, and the changes of a guess (a token replaced, put in or left out, two
put in the place of one or two, pieces moved) are ranked all together by what they promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

ODDS, MISSING, ORDER = 0.3, 0.4, 0.6  # a, b and c above: found on texts that nothing is measured on
_PAIRED = 48  # tokens that are tried together with as many others
_BRANCHES = 16  # of each text in the beam
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Shares:
    """How many changes of each kind are wanted of one text."""

    replaced: int = 40
    put_in: int = 16
    left_out: int = 12
    paired: int = 12
    moved: int = 12


@dataclass(frozen=True, eq=False)
class Candidates:
    """Tokens by number: `ids` (c,), their `odds` (c,), and log p of `pairs` (c + 1, c + 1).

    Texts are tuples of places in `ids`; c itself is the mark at both ends of a text.
    """

    ids: Tensor
    odds: Tensor
    pairs: Tensor
    longest: int

    def log_p(self, text: Tokens) -> float:
        mark = len(self.ids)
        row = torch.tensor([mark, *text, mark])
        return float(self.pairs[row[:-1], row[1:]].sum())

    def written(self, width: int, each: int) -> list[Tokens]:
        """From nothing: the `each` most promising texts of each length, by a beam of that width."""
        mark, texts = len(self.ids), list[Tokens]()
        beam: list[tuple[float, Tokens]] = [(0.0, ())]
        for _ in range(self.longest):
            last = torch.tensor([text[-1] if text else mark for _, text in beam])
            scores = torch.tensor([score for score, _ in beam])[:, None]
            scores = scores + ORDER * self.pairs[last, :mark] + ODDS * self.odds
            for row, (_, text) in enumerate(beam):
                again = list(set(text))
                scores[row, again] -= ODDS * self.odds[again]
            best = scores.topk(min(_BRANCHES, mark), dim=-1)
            grown = [
                (float(score), (*beam[row][1], int(token)))
                for row in range(len(beam))
                for score, token in zip(best.values[row], best.indices[row], strict=True)
            ]
            beam = sorted(grown, reverse=True)[:width]
            ended = [(s + ORDER * float(self.pairs[t[-1], mark]), t) for s, t in beam]
            texts += [text for _, text in sorted(ended, reverse=True)[:each]]
        return texts

    def changed(
        self, text: Tokens, missing: Tensor, shares: Shares, known: set[Tokens], turn: int
    ) -> list[Tokens]:
        """The most promising changes that are not `known`; `turn` counts how often it was asked."""
        changes = _Changes(self, text, missing)
        new: dict[Tokens, None] = {}
        for kind, wanted in (
            (changes.replaced, shares.replaced),
            (changes.put_in, shares.put_in if len(text) < self.longest else 0),
            (changes.left_out, shares.left_out if len(text) > 1 else 0),
            (changes.paired, shares.paired),
            (changes.moved, shares.moved),
        ):
            room = len(new) + wanted
            for child in kind(wanted * (turn + 2)) if wanted else ():
                if len(new) < room and child != text and child not in known:
                    new[child] = None
        return list(new)


class _Changes:
    """What the changes of one text promise: each kind gives its best `count`, the best first."""

    def __init__(self, candidates: Candidates, text: Tokens, missing: Tensor) -> None:
        self.text, self.longest = text, candidates.longest
        self.pairs = candidates.pairs
        mark, n = len(candidates.ids), len(text)
        row = torch.tensor([mark, *text, mark])
        once, each = ODDS * candidates.odds, MISSING * missing
        held = Counter(text)
        self.into = each + once  # what a token brings
        self.into[list(held)] -= once[list(held)]  # in the bag it counts once
        alone = torch.tensor([held[token] == 1 for token in text])
        here = row[1:-1]
        self.out = -(each[here] + once[here].where(alone, 0.0))
        self.after = ORDER * self.pairs[row[:-1], :mark]  # (n + 1, c): behind each place
        self.before = ORDER * self.pairs[:mark, row[1:]].T  # (n + 1, c): before each place
        self.now = ORDER * self.pairs[row[:-1], row[1:]]  # (n + 1,)
        self.row, self.n = row, n

    def replaced(self, count: int) -> Iterator[Tokens]:
        gain = self.after[:-1] + self.before[1:] + self.into
        gain = gain + (self.out - self.now[:-1] - self.now[1:])[:, None]
        for place, token in _best(gain, count):
            yield (*self.text[:place], token, *self.text[place + 1 :])

    def put_in(self, count: int) -> Iterator[Tokens]:
        gain = self.after + self.before + self.into - self.now[:, None]
        for place, token in _best(gain, count):
            yield (*self.text[:place], token, *self.text[place:])

    def left_out(self, count: int) -> Iterator[Tokens]:
        joined = ORDER * self.pairs[self.row[:-2], self.row[2:]]
        gain = self.out + joined - self.now[:-1] - self.now[1:]
        for place in gain.topk(min(count, self.n)).indices.tolist():
            yield (*self.text[:place], *self.text[place + 1 :])

    def paired(self, count: int) -> Iterator[Tokens]:
        """Two new tokens in the place of one or of two neighbours."""
        few = min(_PAIRED, self.after.shape[1])
        first = (self.after + self.into).topk(few)
        second = (self.before + self.into).topk(few)
        made: list[tuple[float, Tokens]] = []
        for start, end in _spans(self.n, self.longest):
            one, two = first.indices[start], second.indices[end]
            gain = first.values[start][:, None] + second.values[end]
            gain = gain + ORDER * self.pairs[one][:, two]
            lost = float(self.out[start:end].sum() - self.now[start : end + 1].sum())
            for a, b in _best(gain, count):
                pair = (int(one[a]), int(two[b]))
                text = (*self.text[:start], *pair, *self.text[end:])
                made.append((float(gain[a, b]) + lost, text))
        for _, text in sorted(made, reverse=True)[:count]:
            yield text

    def moved(self, count: int) -> Iterator[Tokens]:
        orders = _orders(self.n)
        if not len(orders):
            return
        ends = orders.new_zeros(len(orders), 1)
        whole = self.row[torch.cat([ends, orders + 1, ends + self.n + 1], 1)]
        likely = self.pairs[whole[:, :-1], whole[:, 1:]].sum(-1)
        for order in orders[likely.topk(min(count, len(orders))).indices].tolist():
            yield tuple(self.text[place] for place in order)


def _best(gain: Tensor, count: int) -> list[tuple[int, int]]:
    """Row and column of the largest entries, the largest first."""
    best = gain.flatten().topk(min(count, gain.numel())).indices
    return list(zip((best // gain.shape[1]).tolist(), (best % gain.shape[1]).tolist(), strict=True))


def _spans(n: int, longest: int) -> list[tuple[int, int]]:
    """One place, if there is room for a token more, and two neighbours: from, to."""
    single = [(start, start + 1) for start in range(n)] if n < longest else []
    return single + [(start, start + 2) for start in range(n - 1)]


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
