"""Single changes of texts (a token replaced, put in or left out), and texts with several of them.

All changes of p texts stand in one table (p, N), the same kinds and places for every text, so that
what each does to the vector is one tensor (p, N, d) that can be added up (sums.py). Two changes go
together if they are in different slots: a token is replaced or left out once, and one token is put
into a gap.

Which tokens are worth trying where? How promising token t is at a place of a text whose vector is
off by e − e′:

    a·log odds_t(e)  +  b·missing_t(e − e′)  +  c·log p(t between its neighbours)

with the odds of counts.py, which count a token that the text holds already for nothing, and the
log-probability of its n-grams. Half of the tokens are chosen by weights for a text that is far off,
half by weights that trust what is missing, which says more the nearer it is; and some by the odds
alone. When it is a text's turn again, chance counts too, the more the more often, so that tokens
further down come to be tried. The gradient of the encoder is of no use here: it ranks
the right token among thousands.

Then the same tokens in another order: two pieces [a, b) and [c, d) of a text, a < b ≤ c < d, change
places ("glad and tired" becomes "tired and glad"). All of these are looked at, ⅙n³ + n⁴/24 or so
(in a long text some of them), but not run: what an exchange does to the log p of bigrams is told by
the ends of the pieces alone, and some are drawn by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from keyhole.recover.embeddings.counts import Counted, NGrams, mixed
from keyhole.recover.embeddings.encoder import Texts

REPLACED, PUT_IN, LEFT_OUT = 0, 1, 2
_COMMON = 200  # tokens that follow most others: vectors say little of them
_MISSED = 100  # tokens that a text lacks
_ORDINARY = 40  # tokens of a text
_MOST_CUTS = 1 << 16  # exchanges that are looked at in longer ones
_TURNS = 3  # after which chance counts no more than it did
_NEVER = -1e3  # the log-odds of a token that no text holds
_HEAT = 2.0  # nats: exchanges are drawn with probability exp(change of log p / heat)


@dataclass(frozen=True, eq=False)
class SingleChanges:
    """N single changes of each of p texts."""

    parents: Texts
    tokens: Tensor  # (p, N) that are put in, or in the place of another
    allowed: Tensor  # (p, N)
    kinds: Tensor  # (N,)
    places: Tensor  # (N,) a token's place, or the gap before it
    max_length: int

    @classmethod
    def of(cls, parents: Texts, replaced: Tensor, put_in: Tensor, max_length: int) -> SingleChanges:
        """From tokens (p, n, m) for every place, and (p, n + 1, m′) for every gap."""
        (n, m), gaps = replaced.shape[1:], put_in.shape[2]
        device = replaced.device
        places, between = (torch.arange(k, device=device) for k in (n, n + 1))
        inside = places < parents.lengths[:, None]
        fits = (between <= parents.lengths[:, None]) & (parents.lengths < max_length)[:, None]
        new = replaced != parents.ids[:, :n, None]
        may_replace = (inside[..., None] & new).flatten(1)
        may_leave_out = inside & (parents.lengths > 1)[:, None]
        kinds = [REPLACED] * (n * m) + [PUT_IN] * ((n + 1) * gaps) + [LEFT_OUT] * n
        return cls(
            parents,
            torch.cat([replaced.flatten(1), put_in.flatten(1), parents.ids[:, :n]], 1),
            torch.cat([may_replace, fits.repeat_interleave(gaps, 1), may_leave_out], 1),
            torch.tensor(kinds).to(device),
            torch.cat([places.repeat_interleave(m), between.repeat_interleave(gaps), places]),
            max_length,
        )

    @property
    def width(self) -> int:
        """Places of the longest of these texts."""
        return int(self.places.max())

    @property
    def slots(self) -> Tensor:
        """(N,) the slot that each change takes, below 2·width + 1."""
        return self.places + self.width * (self.kinds == PUT_IN)

    def applied(self, rows: Tensor, sets: Tensor) -> tuple[Texts, Tensor]:
        """Text `rows[b]` with the changes `sets[b]` (b, k), -1 for none; and which are allowed."""
        n, every = self.width, torch.arange(len(rows), device=rows.device)
        parents = self.parents[rows]
        tokens = parents.ids[:, :n].where(parents.mask[:, :n], -1)
        gaps = torch.full((len(rows), n + 1), -1, device=rows.device)
        for column in sets.unbind(1):
            change = column.clamp(min=0)
            kind = self.kinds[change].where(column >= 0, -1)
            place, token = self.places[change], self.tokens[rows, change]
            token = token.where(kind != LEFT_OUT, -1)
            in_gap, at_place = kind == PUT_IN, (kind == REPLACED) | (kind == LEFT_OUT)
            gaps[every[in_gap], place[in_gap]] = token[in_gap]
            tokens[every[at_place], place[at_place]] = token[at_place]
        both = torch.full((len(rows), 2 * n + 1), -1, device=rows.device)
        both[:, 0::2], both[:, 1::2] = gaps, tokens
        order = (both < 0).long().argsort(dim=1, stable=True)
        lengths = (both >= 0).sum(1)
        texts = Texts(both.gather(1, order).clamp(min=0), lengths).padded(self.max_length)
        return texts.clean(), (lengths > 0) & (lengths <= self.max_length)


@dataclass(frozen=True)
class Weights:
    """What the odds, the missing and the order of tokens count for: a, b and c above."""

    odds: float
    missing: float
    order: float


# Both were chosen on sentences that the benchmarks do not take.
FAR = Weights(0.3, 0.4, 0.6)
NEAR = Weights(0.1, 0.32, 0.6)  # the second of them for e − e′ of length one


@dataclass(frozen=True)
class Shares:
    """How many tokens are tried at each place, by their odds alone, and in each gap."""

    replaced: int = 32
    by_odds: int = 8
    put_in: int = 8

    def within(self, length: int) -> Shares:
        """Fewer in a long text, so that as many changes are tried as in one of ordinary length."""
        share = min(1.0, _ORDINARY / length)
        counts = (self.replaced, self.by_odds, self.put_in)
        return Shares(*(max(2, round(share * count)) for count in counts))


@dataclass(frozen=True, eq=False)
class Chance:
    """Noise on what is promised, in nats: as much as the turns (p,) that a text had before."""

    turns: Tensor
    generator: torch.Generator

    def on(self, promise: Tensor) -> Tensor:
        """(p, places, c) with that noise."""
        heat = self.turns.clamp(max=_TURNS)[:, None, None]
        return promise + heat * gumbel(promise, self.generator)


@dataclass(frozen=True, eq=False)
class LikelyTokens:
    """The log-odds (v, V) of every token for each of v vectors, and their rank as candidates."""

    counted: Counted
    odds: Tensor
    ranks: Tensor  # (v, V): the odds, common tokens before all others

    @classmethod
    def of(cls, counted: Counted, goals: Tensor) -> LikelyTokens:
        odds = counted.token_odds.odds(goals)
        odds[:, counted.special] = _NEVER
        ranks = odds.clone()
        ends = counted.ngrams.ends[: odds.shape[1]]
        ranks[:, ends.topk(min(_COMMON, len(ends))).indices] -= _NEVER
        ranks[:, counted.special] = _NEVER
        return cls(counted, odds, ranks)

    def changes(
        self, parents: Texts, off: Tensor, vectors: Tensor, chance: Chance, max_length: int,
        base: int, shares: Shares, own: Tensor | None = None,
    ) -> SingleChanges:  # fmt: skip
        """Changes of texts that are `off` (p, d) from `vectors` (p,), out of `base` candidates.

        `own` (p, n + 1, V) is what a language model says of every token in each gap.
        """
        ngrams, n = self.counted.ngrams, int(parents.lengths.max())
        missing = self.counted.token_odds.missing(off)
        tokens = self._candidates(vectors, missing, base)
        odds, missing = self.odds[vectors].gather(1, tokens), missing.gather(1, tokens)
        row = ngrams.framed(Texts(parents.ids[:, :n], parents.lengths))
        wide = tokens[:, None].expand(-1, n + 1, -1)
        after = ngrams.pairs(row[:, :-1, None].expand_as(wide), wide)
        if own is not None:
            after = mixed(after, own[:, : n + 1].gather(2, wide))
        before = ngrams.pairs(wide, row[:, 1:, None].expand_as(wide))
        same = tokens[:, None] == row[:, 1:-1, None]  # (p, n, c)
        odds = odds.where(~same.any(1), 0.0)
        length = off.norm(dim=-1, keepdim=True).clamp(min=1e-3)

        def chosen(order: Tensor, count: int, barred: Tensor, by_odds: int = 0) -> Tensor:
            """Tokens (p, places, count) by what they promise, the same one never twice."""
            picks: list[Tensor] = []
            far = FAR.order * order + (FAR.odds * odds + FAR.missing * missing)[:, None]
            near = NEAR.odds * odds + NEAR.missing * missing / length
            near = NEAR.order * order + near[:, None]
            by_odds_alone = odds[:, None].expand_as(order)
            for promise, wanted in ((far, count), (near, count), (by_odds_alone, 2 * by_odds)):
                left = order.shape[2] - sum(pick.shape[2] for pick in picks) - 1
                most = max(0, min(wanted // 2, left))
                pick = promise.masked_fill(barred, -torch.inf).topk(most, dim=-1).indices
                barred = barred.scatter(2, pick, True)
                picks.append(pick)
            places = torch.cat(picks, -1)
            return tokens[:, None].expand(-1, places.shape[1], -1).gather(2, places)

        order = chance.on(after[:, :-1] + before[:, 1:])
        replaced = chosen(order, shares.replaced, same, shares.by_odds)
        put_in = chosen(
            chance.on(after + before), shares.put_in, torch.zeros_like(wide, dtype=torch.bool)
        )
        return SingleChanges.of(parents, replaced, put_in, max_length)

    def _candidates(self, vectors: Tensor, missing: Tensor, base: int) -> Tensor:
        """The likeliest tokens of each vector, and those that its text lacks most (p, c)."""
        ranks = self.ranks[vectors]
        ordinary = ranks.shape[1] - len(self.counted.special)
        likeliest = ranks.topk(min(base, ordinary), dim=1)
        lacking = missing.where((ranks < likeliest.values[:, -1:]) & (ranks > _NEVER), -torch.inf)
        more = min(_MISSED, max(0, ordinary - base))
        return torch.cat([likeliest.indices, lacking.topk(more, dim=1).indices], 1)


def exchanged(
    parents: Texts, ngrams: NGrams, count: int, generator: torch.Generator
) -> tuple[Texts, Tensor]:
    """`count` exchanges of each text, or as many as there are, the likelier the rather.

    With them comes the row of the text that each was made from.
    """
    n = int(parents.lengths.max())
    cuts = (_cuts(n) if n <= _ORDINARY else _some_cuts(n, generator)).to(parents.ids.device)
    gains = likelier(Texts(parents.ids[:, :n], parents.lengths), cuts, ngrams) / _HEAT
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


def _some_cuts(n: int, generator: torch.Generator) -> Tensor:
    """Exchanges in a longer text, drawn by chance: half of them of neighbouring pieces."""
    shape, device = (4, _MOST_CUTS), generator.device
    drawn = torch.randint(n + 1, shape, generator=generator, device=device).sort(dim=0).values
    drawn[2, ::2] = drawn[1, ::2]
    return drawn[:, (drawn[0] < drawn[1]) & (drawn[2] < drawn[3])]


@lru_cache
def _cuts(n: int) -> Tensor:
    """Every exchange in a text of n tokens: a, b, c, d in four rows."""
    joined = [(a, b, b, d) for a, b, d in combinations(range(n + 1), 3)]
    apart = list(combinations(range(n + 1), 4))
    return torch.tensor([*joined, *apart], dtype=torch.long).view(-1, 4).T


def gumbel(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Noise: the largest of log p + noise is a draw from p, the k largest are k different ones."""
    noise = torch.rand(scores.shape, generator=generator, device=scores.device)
    return -(-noise.clamp(1e-9, 1 - 1e-7).log()).log()
