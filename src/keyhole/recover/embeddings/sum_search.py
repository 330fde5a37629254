"""A search for the texts behind vectors, many at once, by sums of single changes (ours).

Every vector has a few populations of texts, which start from the nearest lines of the
corpus. Each round has three steps:

1. Each population gives one text. Its most promising single changes are run through the encoder
   (changes.py). Sets of changes whose effects add up to the residual are found without
   the encoder (sums.py) and run; then sets that extend the best of these.
2. Pieces of good texts are exchanged.
3. A population that does not improve starts again, from the best text of any population of its
   vector with a part left out.

The search for a vector ends once a text gives the vector back up to rounding. For a
vector stored with fewer digits, other texts may come as near; its search ends once the
best text has stood for some rounds and `may_be` says that it may be the right one. A
best text that stands may be wrong in a token of low odds, such as a piece of a
password, or in an order that the bigrams hold unlikely. So many more exchanges are
tried then, and many more tokens at each place, finally all of them.

How good is a text? Let r be the residual of its vector, ‖r‖² = 2(1 − cos). If the d
numbers of r were noise of one unknown variance, the likelihood of the text would be
(‖r‖²)^(−d/2), up to a factor. With the log p of the n-grams, and divided by d/2,

    score = −log(1 − cos) + (2/d)·log p

so that far from the vector likely texts score well, and near it the vector decides.
Each population weighs the n-grams differently, so that populations keep different
texts. Its texts are changed by turns: each time that one is changed, all texts of the
same tokens in any order lose some score.

Nothing is learnt: the search needs the encoder, and counts of a corpus (counts.py). It
is the same on a GPU with hundreds of vectors and on a CPU with one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keyhole.core.progress import Progress, silent
from keyhole.core.tensors import indices_of, row_numbers, seeded, squared_norms
from keyhole.recover.embeddings.changes import (
    LikelyTokens,
    Shares,
    SingleChanges,
    exchanged,
)
from keyhole.recover.embeddings.counts import Counted, NGrams
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.embeddings.sums import Effects, Sets, picked

MayBe = Callable[
    [int, list[int]], bool
]  # (number of a vector, text): may it be the right one?
# single changes of a text, in the first round and later
_FIRST_CHANGES = 1000
_LAST_CHANGES = 3000
_GROWING = 20  # rounds until the number of changes grows no more
_SETTLED = 5  # rounds that the best text has stood when `may_be` is called
# After so many rounds in which the best text stood, so many tokens are tried at each of
# its places.
_WIDER = {3: 256, 6: 1_024, 9: 4_096, 14: 1 << 20}
_CHANGES_PER_TOKEN = 4  # changes for each token that is tried
_ORDERS_PER_TOKEN = 8  # exchanges for each token that is tried
_PER_GAP = 32  # tokens tried at a place for each one tried in a gap
_PATIENCE = 3  # rounds without improvement after which a population starts again
_PASSES = {"cuda": 1_000_000, "cpu": 12_000}  # texts run for a vector, at most
_BATCH_SIZE = {"cuda": 200, "cpu": 4}  # populations whose changes are run in one batch
# Attention without the kernels that make a plan for each shape: shapes differ in every
# call.
_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_NONE = -2.0  # the cosine where there is no text yet
_LOWEST = -1e4  # a score below all others
_HALF = 1e-4  # the resolution of 1 − cos in half precision
_TURN_LOSS = 0.2  # the score that texts of the same tokens lose at each turn
_BETTER = 0.03  # the least improvement of a score that counts
_NOISE = 3e-3  # the error of a cosine in half precision
_CLOSE = 0.97  # the cosine from which on a text is run exactly
_OVERLAP = 0.1  # ρ of sums.py before it is measured
_LEFT_OUT = 0.6  # the largest share of a text that is left out to start again


class Reading(NamedTuple):
    """The best text for a vector, its cosine, and the passes that the search took."""

    tokens: list[int]
    cosine: float
    passes: int


@dataclass(frozen=True)
class SumSearch:
    """The search, with about `passes` for each vector at most, by default what suits the device."""

    passes: int | None = None
    rounds: int = 1000
    trust: tuple[float, ...] = (0.6, 2.0)  # weight of the n-grams in each population
    kept: int = 24  # texts of a population
    nearest: int = 8  # lines of the corpus that a population starts from
    shares: Shares = Shares()  # tokens tried at each place and in each gap  # noqa: RUF009 - frozen
    width: int = 32  # of the beam over sets of changes
    depth: int = 5  # changes that are added at a time
    tried: int = 64  # sets that are run
    orders: int = 150  # exchanges that are run, twice in each round
    arrived: float = 1e-6  # 1 − cosine of a text that gives the vector back
    seed: int = 0

    def __call__(
        self,
        encoder: Encoder,
        goals: Tensor,
        counted: Counted,
        max_length: int,
        progress: Progress = silent,
        may_be: MayBe | None = None,
    ) -> list[Reading]:
        """Return a text of at most `max_length` tokens for each vector, given as directions.

        `progress` gets the number of vectors whose search has ended.
        """
        with sdpa_kernel(_KERNELS), torch.no_grad():
            state = self._search(encoder, goals, counted, max_length, progress, may_be)
            # The cosine of every vector's best text, exactly.
            best = state.exact(state.best_texts, row_numbers(goals)).tolist()
        passes = state.passes.tolist()
        return [
            Reading(state.best_texts.tokens(row), best[row], passes[row])
            for row in range(len(goals))
        ]

    def _search(
        self,
        encoder: Encoder,
        goals: Tensor,
        counted: Counted,
        max_length: int,
        progress: Progress,
        may_be: MayBe | None,
    ) -> Populations:
        generator = seeded(self.seed, encoder.device)
        trust = goals.new_tensor(self.trust)
        count = len(self.trust)
        state = Populations(
            encoder, counted.ngrams, goals, trust, self.kept, max_length, generator
        )
        likely = LikelyTokens.of(counted, goals)
        lines, vector = counted.nearest(goals, self.nearest * count, max_length)
        turn = row_numbers(vector) % count  # populations take turns
        state.take(lines, vector * count + turn)
        size = _BATCH_SIZE[encoder.device.type]
        for number in range(self.rounds):
            rows = self._unfinished(state, row_numbers(state.vector))
            progress(len(goals) - len(rows) // count, note=f"read, {number} rounds")
            if not len(rows):
                break
            growth = (_LAST_CHANGES / _FIRST_CHANGES) ** min(1.0, number / _GROWING)
            change_count = round(_FIRST_CHANGES * growth)
            for some in rows.split(size):
                parents = state.parents(some)
                shares = self.shares.within(int(parents.texts.lengths.max()))
                self._change(state, likely, some, parents, change_count, shares)
            # Exchange pieces of the best text, then of one of the best four.
            for among in (1, 4):
                rows = self._unfinished(state, rows)
                for some in rows.split(size) if len(rows) else ():
                    leading = state.leading(some, among)
                    texts, born = exchanged(
                        leading, counted.ngrams, self.orders, generator
                    )
                    state.take(texts, some[born])
            state.renew(rows)
            stood = state.stood()
            standing = indices_of((stood == _SETTLED) & ~state.ended)
            for row in standing.tolist():
                text = state.best_texts.tokens(row)
                state.ended[row] = may_be is not None and may_be(row, text)
            for long, tokens in _WIDER.items():
                self._widen(state, likely, indices_of(stood == long), tokens)
        return state

    def _widen(
        self,
        state: Populations,
        likely: LikelyTokens,
        vectors: Tensor,
        tokens: int,
    ) -> None:
        """Exchange pieces of each vector's nearest text, then try `tokens` tokens at each place."""
        most = self.passes or _PASSES[vectors.device.type]
        for vector in vectors.tolist():
            rows = state.nearest[vector : vector + 1]
            if not len(self._unfinished(state, rows)):
                continue
            parents = state.parents(rows, by_turn=False)
            orders = min(_ORDERS_PER_TOKEN * tokens, most - int(state.passes[vector]))
            texts, _ = exchanged(parents.texts, state.ngrams, orders, state.generator)
            state.take(texts, rows.expand(len(texts)))
            # for a place
            left = (most - int(state.passes[vector])) // int(parents.texts.lengths)
            count = min(tokens, len(state.encoder.table))
            if tokens > count:  # the last time: as many as the passes allow
                count = min(count, left - left // _PER_GAP)
            fits = 0 < count + count // _PER_GAP <= left
            if fits and len(self._unfinished(state, rows)):
                shares = Shares(count, 0, max(_CHANGES_PER_TOKEN, count // _PER_GAP))
                change_count = _CHANGES_PER_TOKEN * count
                self._change(state, likely, rows, parents, change_count, shares)

    def _unfinished(self, state: Populations, rows: Tensor) -> Tensor:
        """Return the populations among `rows` for whose vector the search goes on."""
        most = self.passes or _PASSES[rows.device.type]
        goes_on = (state.best < 1 - self.arrived) & (state.passes < most) & ~state.ended
        return rows[goes_on[state.vector[rows]]]

    def _change(
        self,
        state: Populations,
        likely: LikelyTokens,
        rows: Tensor,
        parents: Parents,
        count: int,
        shares: Shares,
    ) -> None:
        """Run `count` single changes of each population's parent, then sets of them, in two stages.

        The second stage extends the best sets of the first.
        """
        encoder = state.encoder
        vector = state.vector[rows]
        goals = state.goals[vector]
        off = goals - parents.vectors
        own = encoder.next_log_p(parents.texts) if encoder.predicts else None
        changes = likely.changes(
            parents.texts,
            off,
            vector,
            parents.turns,
            state.generator,
            state.max_length,
            count,
            shares,
            own,
        )
        # the weight of log p against ‖off‖²
        prior = state.trust[rows] * squared_norms(off)
        every = row_numbers(changes.kinds).where(changes.allowed, -1)
        moves, log_p, ran = self._run(state, changes, rows, every[..., None])
        # in place: this is the largest tensor of the search
        moves -= parents.vectors[:, None]
        moves.masked_fill_(~ran[..., None], 0.0)
        likelier = (log_p - parents.likelihoods[:, None]).where(ran, 0.0)
        effects = Effects.of(changes, moves, likelier, prior)
        sets = Sets.none(off)
        for stage in range(2):
            if not len(self._unfinished(state, rows)):
                break
            overlap = state.overlap[rows]
            tried = effects.grown(sets, self.width, self.depth, self.tried, overlap)
            vectors, _, ran = self._run(state, changes, rows, tried)
            if stage == 0:
                did = vectors - parents.vectors[:, None]
                state.overlap[rows] = effects.overlap(tried, did, ran).clamp(0.0, 1.0)
            cosines = (vectors * goals[:, None]).sum(-1).where(ran, _NONE)
            best = cosines.topk(min(self.width // 2, cosines.shape[1]), dim=1)
            off = goals[:, None] - picked(vectors, best.indices)
            sets = Sets(picked(tried, best.indices), off, best.values > _NONE)

    def _run(
        self,
        state: Populations,
        changes: SingleChanges,
        rows: Tensor,
        sets: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run sets of changes (p, w, k): return vectors (p, w, d), log p, and which were run."""
        shape = sets.shape[:2]
        parent = row_numbers(sets).repeat_interleave(shape[1])
        texts, fits = changes.applied(parent, sets.flatten(0, 1))
        fits &= (sets >= 0).any(-1).flatten()
        vectors = state.goals.new_zeros(len(parent), state.goals.shape[1])
        log_p = vectors.new_zeros(len(parent))
        vectors[fits], log_p[fits] = state.take(texts[fits], rows[parent[fits]])
        vectors, log_p, fits = (
            part.unflatten(0, shape) for part in (vectors, log_p, fits)
        )
        return vectors, log_p, fits


class Parents(NamedTuple):
    """Texts to change: vectors (r, d), log p (r,), and how often each had its turn before (r,)."""

    texts: Texts
    vectors: Tensor
    likelihoods: Tensor
    turns: Tensor


class Populations:
    """The best `kept` texts of each population.

    For each of v vectors, the `goals` (v, d), there are i populations; `trust` (i,) is
    the weight of the n-grams in each. Tensors have r = v·i rows, in which those of a
    vector are neighbours.
    """

    def __init__(
        self,
        encoder: Encoder,
        ngrams: NGrams,
        goals: Tensor,
        trust: Tensor,
        kept: int,
        max_length: int,
        generator: torch.Generator,
    ) -> None:
        self.encoder = encoder
        self.ngrams = ngrams
        self.goals = goals
        self.kept = kept
        self.max_length = max_length
        self.generator = generator
        v, d = goals.shape
        rows = v * len(trust)
        self.count = len(trust)  # populations of each vector
        self.vector = row_numbers(goals).repeat_interleave(self.count)  # (r,)
        self.trust = trust.repeat(v) * 2 / d
        # (r,) as last measured (sums.py)
        self.overlap = torch.full_like(self.trust, _OVERLAP)
        ids = self.vector.new_zeros(rows, kept, max_length)
        self.texts = Texts(ids, torch.ones_like(ids[..., 0]))
        self.cosines = goals.new_full((rows, kept), _NONE)
        self.likelihoods = torch.zeros_like(self.cosines)  # log p
        self.vectors = goals.new_zeros(rows, kept, d)
        # The best text of each vector, and its cosine, which is exact from `_CLOSE` on.
        self.best = goals.new_full((v,), _NONE)
        self.best_texts = Texts(ids.new_zeros(v, max_length), ids.new_ones(v))
        self.passes = ids.new_zeros(v)
        # since the best text may be it
        self.ended = torch.zeros_like(self.best, dtype=torch.bool)
        # How many rounds the best text of each vector has stood, and its cosine in the
        # last round.
        self._stood = torch.zeros_like(self.passes)
        self._last = self.best.clone()
        # (r, rounds) token sums of texts changed so far
        self._changed = ids.new_zeros(rows, 0)
        # The best score of each population, and how many rounds ago it was reached.
        self._peaks = goals.new_full((rows,), _LOWEST)
        self._still = torch.zeros_like(self.vector)
        # Random numbers of tokens and places: equal sums of them mean equal texts.
        size = (len(encoder.table) + max_length,)
        numbers = torch.randint(
            1, 2**40, size, generator=generator, device=goals.device
        )
        self._token_numbers = numbers[:-max_length]
        self._place_numbers = numbers[-max_length:]

    def take(self, texts: Texts, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts, each for the population in `rows`, and keep the best different ones.

        Return the vectors (b, d) and log p (b,) of all of them.
        """
        if not len(texts):
            return self.goals[:0], self.likelihoods[:0, 0]
        # log p is the n-grams', averaged with a language model's own.
        own = None
        if self.encoder.predicts:
            vectors, own = self.encoder.read(texts)
        else:
            vectors = self.encoder.vectors(texts, fast=True)
        vectors = vectors.float()
        likelihoods = self.ngrams.log_p(texts, own)
        self.passes += self.vector[rows].bincount(minlength=len(self.goals))
        cosines = (vectors * self.goals[self.vector[rows]]).sum(-1)
        score = _score(cosines, likelihoods, self.trust[rows])
        # The old texts of each population and its best new ones, side by side.
        touched, places = best_of_each(rows, score, 2 * self.kept)
        inside = places.clamp(min=0)
        both = Texts.cat([self.texts[touched], texts[inside]], 1)
        new = cosines[inside].where(places >= 0, _NONE)
        new = torch.cat([self.cosines[touched], new], 1)
        likely = torch.cat([self.likelihoods[touched], likelihoods[inside]], 1)
        # Of equal texts the first counts.
        sums = (both.ids * self._place_numbers).sum(-1) * 64 + both.lengths
        same = (sums[:, :, None] == sums[:, None]) & (new[:, None] > _NONE)
        new = new.where(~same.tril(-1).any(-1), _NONE)
        ranks = _score(new, likely, self.trust[touched][:, None])
        order = ranks.where(new > _NONE, _LOWEST).topk(self.kept, dim=1).indices
        run = torch.cat([self.vectors[touched], vectors[inside]], 1)
        self.vectors[touched] = picked(run, order)
        self.texts.ids[touched] = picked(both.ids, order)
        self.texts.lengths[touched] = both.lengths.gather(1, order)
        self.cosines[touched] = new.gather(1, order)
        self.likelihoods[touched] = likely.gather(1, order)
        self._update_best(texts, rows, cosines)
        return vectors, likelihoods

    def _update_best(
        self,
        texts: Texts,
        rows: Tensor,
        cosines: Tensor,
    ) -> None:
        """Replace the best text of each vector by the nearest new one, if that is nearer.

        A text that is near is first run again exactly; half precision is enough for the
        others.
        """
        vectors, places = best_of_each(self.vector[rows], cosines, 1)
        places = places[:, 0]
        near = cosines[places] > self.best[vectors] - _NOISE
        vectors = vectors[near]
        places = places[near]
        found = cosines[places]
        close = indices_of(found > _CLOSE)
        if len(close):
            found[close] = self.exact(texts[places[close]], vectors[close])
        better = found > self.best[vectors]
        vectors = vectors[better]
        best = texts[places[better]]
        self.best[vectors] = found[better]
        self.best_texts.ids[vectors] = best.ids
        self.best_texts.lengths[vectors] = best.lengths

    def exact(self, texts: Texts, vectors: Tensor) -> Tensor:
        """Return the exact cosines (b,) of texts with the vectors of these numbers."""
        return (self.encoder.vectors(texts) * self.goals[vectors]).sum(-1)

    @property
    def nearest(self) -> Tensor:
        """For each vector, the population (v,) that has the nearest text to it."""
        best = self.cosines.amax(1).view(-1, self.count).argmax(1)
        return best + self.count * row_numbers(best)

    def parents(self, rows: Tensor, by_turn: bool = True) -> Parents:
        """Return the text to change of each population: by turn, or the one that is nearest."""
        texts = self.texts[rows]
        place = self.cosines[rows].argmax(1)
        turns = torch.zeros_like(rows)
        if by_turn:
            # in any order
            sums = self._token_numbers[texts.ids].where(texts.mask, 0).sum(-1)
            before = (sums[:, :, None] == self._changed[rows][:, None]).sum(-1)
            place = (self._scores(rows) - _TURN_LOSS * before).argmax(1)
            each = row_numbers(rows)
            turns = before[each, place]
            turn = self._changed.new_zeros(len(self._changed), 1)
            turn[rows, 0] = sums[each, place]
            self._changed = torch.cat([self._changed, turn], 1)
        likelihoods = self.likelihoods[rows, place]
        return Parents(
            self.texts[rows, place], self.vectors[rows, place], likelihoods, turns
        )

    def leading(self, rows: Tensor, among: int) -> Texts:
        """Return a random one of the best `among` texts of each population."""
        ranks = self._scores(rows).topk(min(among, self.kept), dim=1)
        there = (ranks.values > _LOWEST).sum(1, keepdim=True)
        chosen = (self._chance(len(rows), 1) * there).long()
        return self.texts[rows, ranks.indices.gather(1, chosen)[:, 0]]

    def renew(self, rows: Tensor) -> None:
        """Start populations again that do not improve, except the nearest one of each vector.

        Half of them start from the nearest text of all, the others from that of a
        random population of their vector; tokens are left out at random.
        """
        now = self._scores(rows).max(1).values
        better = now > self._peaks[rows] + _BETTER
        self._still[rows] = (self._still[rows] + 1).where(~better, 0)
        self._peaks[rows] = torch.maximum(now, self._peaks[rows])
        nearest = self.nearest
        stuck = rows[self._still[rows] >= _PATIENCE]
        stuck = stuck[stuck != nearest[self.vector[stuck]]]
        if not len(stuck):
            return
        chance = self._chance(len(stuck), 2)
        other = self.vector[stuck] * self.count + (chance[:, 0] * self.count).long()
        other = torch.where(chance[:, 1] < 0.5, nearest[self.vector[stuck]], other)
        texts = self.texts[other, self.cosines[other].argmax(1)]
        share = _LEFT_OUT * self._chance(len(stuck), 1)
        kept = (self._chance(*texts.ids.shape) > share) & texts.mask
        kept[:, 0] |= ~kept.any(1)
        order = (~kept).long().argsort(dim=1, stable=True)
        self.cosines[stuck] = _NONE
        self._peaks[stuck] = _LOWEST
        self._still[stuck] = 0
        self.take(Texts(texts.ids.gather(1, order), kept.sum(1)).clean(), stuck)

    def stood(self) -> Tensor:
        """Count the rounds (v,) that each vector's best text has stood; call it once a round."""
        self._stood = (self._stood + 1).where(self.best == self._last, 0)
        self._last = self.best.clone()
        return self._stood

    def _scores(self, rows: Tensor) -> Tensor:
        cosines = self.cosines[rows]
        scores = _score(cosines, self.likelihoods[rows], self.trust[rows][:, None])
        return scores.where(cosines > _NONE, _LOWEST)

    def _chance(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.goals.device)


def _score(
    cosines: Tensor,
    likelihoods: Tensor,
    trust: Tensor,
) -> Tensor:
    """Return the score of the module's docstring; `trust` holds the factor 2/d."""
    return trust * likelihoods - (1 - cosines + _HALF).clamp(min=_HALF).log()


def best_of_each(
    rows: Tensor,
    scores: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Return the distinct rows, and places (r, count) of the largest scores of each, or -1."""
    order = scores.argsort(descending=True)
    order = order[rows[order].argsort(stable=True)]
    touched, sizes = rows[order].unique_consecutive(return_counts=True)
    steps = torch.arange(count, device=rows.device)
    places = (sizes.cumsum(0) - sizes)[:, None] + steps
    inside = steps < sizes[:, None]
    return touched, order[places.clamp(max=len(order) - 1)].where(inside, -1)
