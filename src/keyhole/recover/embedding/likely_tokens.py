"""Which tokens are worth trying where, in texts that come near a vector.

How promising token t is at a place of a text, next to a text whose vector is off by e − e′:

    a·log odds_t(e)  +  b·missing_t(e − e′)  +  c·log p(t between its neighbours)

with the odds of the bag (bag.py), which count a token that the text holds already for nothing, and
the log-probability of the n-grams (ngrams.py). Half of the tokens are chosen by weights for a text
that is far off, half by weights that trust what is missing, which says more the nearer it is; and
some by the odds alone. When it is a text's turn again, luck counts too, the more the more often, so
that tokens further down come to be tried. The gradient of the encoder is of no use here: in texts
of 17–24 tokens of which 2, 3, 5, 8 are wrong the right token's median rank by it is 2,184, 2,952,
5,112 and 6,011 of 30,522, and 4, 4, 8 and 23 by this sum (benchmarks/embedding_sums.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.recover.embedding.counted import Counted
from keyhole.recover.embedding.luck import gumbel
from keyhole.recover.embedding.ngrams import mixed
from keyhole.recover.embedding.scoring import Texts
from keyhole.recover.embedding.singles import Singles

_COMMON = 200  # tokens that follow most others: vectors say little of them
_MISSED = 100  # tokens that a text lacks
_TURNS = 3  # after which luck counts no more than it did
_NEVER = -1e3  # the log-odds of a token that no text holds


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


@dataclass(frozen=True, eq=False)
class Luck:
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
        odds = counted.bag.odds(goals)
        odds[:, counted.special] = _NEVER
        ranks = odds.clone()
        ends = counted.ngrams.ends[: odds.shape[1]]
        ranks[:, ends.topk(min(_COMMON, len(ends))).indices] -= _NEVER
        ranks[:, counted.special] = _NEVER
        return cls(counted, odds, ranks)

    def singles(
        self, parents: Texts, off: Tensor, vectors: Tensor, luck: Luck, longest: int, base: int,
        shares: Shares, own: Tensor | None = None,
    ) -> Singles:  # fmt: skip
        """Changes of texts that are `off` (p, d) from `vectors` (p,), out of `base` candidates.

        `own` (p, n + 1, V) is what a language model says of every token in each gap.
        """
        ngrams, n = self.counted.ngrams, int(parents.lengths.max())
        missing = self.counted.bag.missing(off)
        tokens = self._candidates(vectors, missing, base)
        odds, missing = self.odds[vectors].gather(1, tokens), missing.gather(1, tokens)
        row = ngrams.framed(Texts(parents.ids[:, :n], parents.lengths))
        wide = tokens[:, None].expand(-1, n + 1, -1)
        after = ngrams.pairs(row[:, :-1, None].expand_as(wide), wide)
        if own is not None:
            after = mixed(after, own[:, : n + 1].gather(2, wide))
        before = ngrams.pairs(wide, row[:, 1:, None].expand_as(wide))
        here = tokens[:, None] == row[:, 1:-1, None]  # (p, n, c)
        odds = odds.where(~here.any(1), 0.0)
        length = off.norm(dim=-1, keepdim=True).clamp(min=1e-3)

        def chosen(order: Tensor, count: int, barred: Tensor, by_odds: int = 0) -> Tensor:
            """Tokens (p, places, count) by what they promise, the same one never twice."""
            picks: list[Tensor] = []
            for promise, wanted in (
                (FAR.order * order + (FAR.odds * odds + FAR.missing * missing)[:, None], count),
                (
                    NEAR.order * order
                    + (NEAR.odds * odds + NEAR.missing * missing / length)[:, None],
                    count,
                ),
                (odds[:, None].expand_as(order), 2 * by_odds),
            ):
                room = min(wanted // 2, order.shape[2] - sum(pick.shape[2] for pick in picks) - 1)
                pick = promise.masked_fill(barred, -torch.inf).topk(max(0, room), dim=-1).indices
                barred = barred.scatter(2, pick, True)
                picks.append(pick)
            places = torch.cat(picks, -1)
            return tokens[:, None].expand(-1, places.shape[1], -1).gather(2, places)

        order = luck.on(after[:, :-1] + before[:, 1:])
        replaced = chosen(order, shares.replaced, here, shares.by_odds)
        put_in = chosen(
            luck.on(after + before), shares.put_in, torch.zeros_like(wide, dtype=torch.bool)
        )
        return Singles.of(parents, replaced, put_in, longest)

    def _candidates(self, vectors: Tensor, missing: Tensor, base: int) -> Tensor:
        """The likeliest tokens of each vector, and those that its text lacks most (p, c)."""
        ranks = self.ranks[vectors]
        ordinary = ranks.shape[1] - len(self.counted.special)
        likeliest = ranks.topk(min(base, ordinary), dim=1)
        lacking = missing.where((ranks < likeliest.values[:, -1:]) & (ranks > _NEVER), -torch.inf)
        more = min(_MISSED, max(0, ordinary - base))
        return torch.cat([likeliest.indices, lacking.topk(more, dim=1).indices], 1)
