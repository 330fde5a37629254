"""Single changes of texts (a token replaced, inserted or deleted), and texts with several of them.

All changes of p texts stand in one table (p, N), with the same kinds and places for
every text, so that what each does to the vector is one tensor (p, N, d) whose rows can
be added (sums.py). Two changes are compatible if they take different slots: a token is
replaced or deleted once, and one token is inserted into a gap.

Which tokens are worth trying at a place? For a text with vector e′ and a leaked vector
e, token t scores

    a·log odds_t(e)  +  b·missing_t(e − e′)  +  c·log p(t between its neighbours)

with the odds of counts.py, counted as 0 for a token that the text has already, and the
log-probability of its n-grams. Half of the tokens are chosen with weights for a text
that is far from e, the other half with weights that trust e − e′, which says more the
nearer the text is; a few are chosen by the odds alone. Each time that a text is changed
again, more noise is added to the scores, so that tokens further down get their turn.
The gradient of the encoder does not help here: it ranks the right token among
thousands.

Exchanges keep the tokens and change their order: two pieces [a, b) and [c, d) of a
text, with a < b ≤ c < d, change places ("glad and tired" becomes "tired and glad").
There are about ⅙n³ + n⁴/24 of them; in a long text only a random sample is considered.
How an exchange changes the bigrams' log p follows from the ends of the pieces alone,
and the exchanges to run are drawn by that.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.tensors import row_numbers
from keyhole.recover.embeddings.counts import Counted, NGrams, mixed
from keyhole.recover.embeddings.encoder import Texts

REPLACED = 0
INSERTED = 1
DELETED = 2
_COMMON = 200  # tokens that follow most others: vectors say little about them
_MISSED = 100  # candidates that a text lacks most
_ORDINARY = 40  # tokens of a text of ordinary length
_MOST_CUTS = 1 << 16  # exchanges that are considered in longer texts
_TURNS = 3  # turns after which the noise grows no more
_NEVER = -1e3  # the log-odds of a token that no text has
_HEAT = 2.0  # nats: exchanges are drawn with probability exp(change of log p / heat)
# The weights a and b of far texts and of near ones, and c, chosen on sentences that the
# benchmarks do not use. The b of near texts is for e − e′ of length one.
_FAR = (0.3, 0.4)
_NEAR = (0.1, 0.32)
_ORDER = 0.6


class SingleChanges(NamedTuple):
    """N single changes of each of p texts."""

    parents: Texts
    tokens: Tensor  # (p, N) the token that is inserted, or that replaces another
    allowed: Tensor  # (p, N)
    kinds: Tensor  # (N,)
    places: Tensor  # (N,) the place of the token, or of the gap before it
    max_length: int

    @classmethod
    def of(
        cls,
        parents: Texts,
        replaced: Tensor,
        inserted: Tensor,
        max_length: int,
    ) -> SingleChanges:
        """Make the changes to tokens (p, n, m) at every place and (p, n + 1, m′) in every gap."""
        n, m = replaced.shape[1:]
        gaps = inserted.shape[2]
        ids = parents.ids[:, :n]
        lengths = parents.lengths[:, None]
        between = row_numbers(inserted[0])
        places = between[:n]
        inside = places < lengths
        may_replace = inside[..., None] & (replaced != ids[..., None])
        may_insert = (between <= lengths) & (lengths < max_length)
        may_delete = inside & (lengths > 1)
        allowed = (
            may_replace.flatten(1),
            may_insert.repeat_interleave(gaps, 1),
            may_delete,
        )
        kinds = [REPLACED] * (n * m) + [INSERTED] * ((n + 1) * gaps) + [DELETED] * n
        where = (places.repeat_interleave(m), between.repeat_interleave(gaps), places)
        return cls(
            parents,
            torch.cat([replaced.flatten(1), inserted.flatten(1), ids], 1),
            torch.cat(allowed, 1),
            places.new_tensor(kinds),
            torch.cat(where),
            max_length,
        )

    @property
    def width(self) -> int:
        """The number of places of the longest text."""
        return int(self.places.max())

    @property
    def slots(self) -> Tensor:
        """The slot (N,) that each change takes, below 2·width + 1."""
        return self.places + self.width * (self.kinds == INSERTED)

    def applied(self, rows: Tensor, sets: Tensor) -> tuple[Texts, Tensor]:
        """Return each text `rows[b]` with its changes `sets[b]` (b, k), and whether it is allowed.

        Sets are padded by -1.
        """
        n = self.width
        every = row_numbers(rows)
        parents = self.parents[rows]
        # Gaps, each before its token; -1 where there is none.
        both = rows.new_full((len(rows), 2 * n + 1), -1)
        both[:, 1::2] = parents.ids[:, :n].where(parents.mask[:, :n], -1)
        for column in sets.unbind(1):
            change = column.clamp(min=0)
            kind = self.kinds[change]
            token = self.tokens[rows, change].where(kind != DELETED, -1)
            place = 2 * self.places[change] + (kind != INSERTED)
            taken = column >= 0
            both[every[taken], place[taken]] = token[taken]
        order = (both < 0).long().argsort(dim=1, stable=True)
        lengths = (both >= 0).sum(1)
        texts = Texts(both.gather(1, order).clamp(min=0), lengths)
        fits = (lengths > 0) & (lengths <= self.max_length)
        return texts.padded(self.max_length).clean(), fits


class Shares(NamedTuple):
    """How many tokens to try at each place, how many of these by odds alone, and in each gap."""

    replaced: int = 32
    by_odds: int = 8
    put_in: int = 8

    def within(self, length: int) -> Shares:
        """Return smaller shares for a long text, so that the number of changes stays the same."""
        share = min(1.0, _ORDINARY / length)
        counts = (self.replaced, self.by_odds, self.put_in)
        return Shares(*(max(2, round(share * count)) for count in counts))


class LikelyTokens(NamedTuple):
    """The log-odds (v, V) of every token for each of v vectors, and the ranks of the candidates."""

    counted: Counted
    odds: Tensor
    ranks: Tensor  # (v, V) the odds, with common tokens before all others

    @classmethod
    def of(cls, counted: Counted, goals: Tensor) -> LikelyTokens:
        odds = counted.token_odds.odds(goals)
        odds[:, counted.special] = _NEVER
        ends = counted.ngrams.ends[: odds.shape[1]]
        ranks = odds.clone()
        ranks[:, ends.topk(min(_COMMON, len(ends))).indices] -= _NEVER
        ranks[:, counted.special] = _NEVER
        return cls(counted, odds, ranks)

    def changes(
        self,
        parents: Texts,
        off: Tensor,
        vectors: Tensor,
        turns: Tensor,
        generator: torch.Generator,
        max_length: int,
        base: int,
        shares: Shares,
        own: Tensor | None = None,
    ) -> SingleChanges:
        """Return the changes to try of texts with residuals `off` (p, d), from `base` candidates.

        `vectors` (p,) are the numbers of their leaked vectors, `turns` (p,) says how
        often each text was changed before, and `own` (p, n + 1, V) is a language
        model's log p of every token in each gap.
        """
        ngrams = self.counted.ngrams
        n = int(parents.lengths.max())
        missing = self.counted.token_odds.missing(off)
        tokens = self._candidates(vectors, missing, base)
        odds = self.odds[vectors].gather(1, tokens)
        missing = missing.gather(1, tokens)
        row = ngrams.framed(Texts(parents.ids[:, :n], parents.lengths))
        wide = tokens[:, None].expand(-1, n + 1, -1)
        after = ngrams.pairs(row[:, :-1, None].expand_as(wide), wide)
        if own is not None:
            after = mixed(after, own[:, : n + 1].gather(2, wide))
        before = ngrams.pairs(wide, row[:, 1:, None].expand_as(wide))
        same = tokens[:, None] == row[:, 1:-1, None]  # (p, n, c)
        odds = odds.where(~same.any(1), 0.0)
        length = off.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        far_odds = _FAR[0] * odds + _FAR[1] * missing
        near_odds = _NEAR[0] * odds + _NEAR[1] * missing / length
        heat = turns.clamp(max=_TURNS)[:, None, None]

        def chosen(
            log_p: Tensor,
            count: int,
            barred: Tensor,
            by_odds: int = 0,
        ) -> Tensor:
            """Return the tokens (p, places, count) with the best scores, each once."""
            order = _ORDER * (log_p + heat * gumbel(log_p, generator))
            ways = [
                (order + far_odds[:, None], count // 2),
                (order + near_odds[:, None], count // 2),
                (odds[:, None].expand_as(order), by_odds),
            ]
            picks: list[Tensor] = []
            left = order.shape[2] - 1
            for scores, wanted in ways:
                most = max(0, min(wanted, left))
                pick = scores.masked_fill(barred, -torch.inf).topk(most, dim=-1).indices
                barred = barred.scatter(2, pick, True)
                picks.append(pick)
                left -= most
            places = torch.cat(picks, -1)
            return wide[:, : places.shape[1]].gather(2, places)

        replaced = chosen(
            after[:, :-1] + before[:, 1:], shares.replaced, same, shares.by_odds
        )
        anything = torch.zeros_like(wide, dtype=torch.bool)
        inserted = chosen(after + before, shares.put_in, anything)
        return SingleChanges.of(parents, replaced, inserted, max_length)

    def _candidates(
        self,
        vectors: Tensor,
        missing: Tensor,
        base: int,
    ) -> Tensor:
        """Return the likeliest tokens (p, c) of each vector, and those that its text lacks most."""
        ranks = self.ranks[vectors]
        ordinary = ranks.shape[1] - len(self.counted.special)
        likeliest = ranks.topk(min(base, ordinary), dim=1)
        others = (ranks < likeliest.values[:, -1:]) & (ranks > _NEVER)
        lacking = missing.where(others, -torch.inf)
        more = min(_MISSED, max(0, ordinary - base))
        return torch.cat([likeliest.indices, lacking.topk(more, dim=1).indices], 1)


def exchanged(
    parents: Texts,
    ngrams: NGrams,
    count: int,
    generator: torch.Generator,
) -> tuple[Texts, Tensor]:
    """Draw `count` exchanges of each text, likely ones first, and return each one's row too.

    There are fewer if a text has no more.
    """
    n = int(parents.lengths.max())
    cuts = _cuts(n) if n <= _ORDINARY else _some_cuts(n, generator)
    cuts = cuts.to(parents.ids.device)
    gains = likelier(Texts(parents.ids[:, :n], parents.lengths), cuts, ngrams) / _HEAT
    gains = gains + gumbel(gains, generator)
    gains = gains.where(cuts[3] <= parents.lengths[:, None], -torch.inf)
    best = gains.topk(min(count, gains.shape[1]), dim=1)
    rows, places = (best.values > -torch.inf).nonzero().unbind(1)
    return apply(parents[rows], cuts[:, best.indices[rows, places]]), rows


def likelier(
    texts: Texts,
    cuts: Tensor,
    ngrams: NGrams,
) -> Tensor:
    """Return how much each of q exchanges (4, q) changes log p (p, q)."""
    row = ngrams.framed(texts)
    size = row.shape[1]
    first = row[:, :, None].expand(-1, -1, size)
    table = ngrams.pairs(first, first.mT).flatten(1)

    def pair(left: Tensor, right: Tensor) -> Tensor:
        """Return log p of the token at `right` after the token before `left`."""
        return table[:, left * size + right + 1]

    a, b, c, d = cuts
    apart = pair(d, b) + pair(c, a) - pair(c, c)
    gains = pair(a, c) + torch.where(b < c, apart, pair(d, a)) + pair(b, d)
    return gains - pair(a, a) - pair(b, b) - pair(d, d)


def apply(texts: Texts, cuts: Tensor) -> Texts:
    """Return each text (b, n) after its own exchange (4, b)."""
    a, b, c, d = cuts[..., None]
    places = row_numbers(texts.ids.T).expand_as(texts.ids)
    middle = a + d - c  # where the part between the pieces begins
    last = middle + c - b
    source = torch.where(places < d, places - last + a, places)
    source = torch.where(places < last, places - middle + b, source)
    source = torch.where(places < middle, places - a + c, source)
    source = torch.where(places < a, places, source)
    return Texts(texts.ids.gather(1, source), texts.lengths)


def _some_cuts(n: int, generator: torch.Generator) -> Tensor:
    """Draw exchanges in a long text at random, half of them of neighbouring pieces."""
    shape = (4, _MOST_CUTS)
    drawn = torch.randint(n + 1, shape, generator=generator, device=generator.device)
    drawn = drawn.sort(dim=0).values
    drawn[2, ::2] = drawn[1, ::2]
    return drawn[:, (drawn[0] < drawn[1]) & (drawn[2] < drawn[3])]


@lru_cache
def _cuts(n: int) -> Tensor:
    """Return every exchange in a text of n tokens: a, b, c and d in four rows."""
    joined = [(a, b, b, d) for a, b, d in combinations(range(n + 1), 3)]
    apart = list(combinations(range(n + 1), 4))
    return torch.tensor([*joined, *apart], dtype=torch.long).view(-1, 4).T


def gumbel(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise such that the k largest of log p + noise are k different draws from p."""
    noise = torch.rand(scores.shape, generator=generator, device=scores.device)
    return -(-noise.clamp(1e-9, 1 - 1e-7).log()).log()
