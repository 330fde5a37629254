"""A search for the texts behind vectors, many at once, by sums of single changes (ours).

Every vector has a few populations of texts, which start from the nearest lines of the corpus. In
each round,

1. each population gives one text; its most promising single changes are run through the encoder
(changes.py), and sets of changes whose effects add up to the residual are found without it
(sums.py) and run; then sets that extend the best of these are run; 2. pieces of good texts are
exchanged; 3. a population that does not improve starts again, from the best text of any population
of its vector with a part left out.

The search for a vector ends once a text gives the vector back up to rounding. A vector stored with
fewer digits, for which other texts may come as near, ends once its best text may be the right one
(`may_be`) and has stood for some rounds. A best text that stands may have a wrong token that scored
badly, such as a piece of a password, or an order that the bigrams score badly. So many more
exchanges are tried then, and many more tokens at each of its places, finally all of them.

How good is a text? Let r be the residual of its vector, ‖r‖² = 2(1 − cos). If the d numbers of r
were noise of one unknown variance, the likelihood of the text would be (‖r‖²)^(−d/2), up to a
factor. With the log p of the n-grams, and divided by d/2,

    score = −log(1 − cos) + (2/d)·log p

so that far from the vector likely texts score well, and near it the vector decides. Each population
weighs the n-grams differently, so that populations keep different texts. Texts are changed by
turns: each time that texts of some tokens are changed, all texts of these tokens lose some score.

Nothing is learnt: the search needs the encoder, and counts of a corpus (counts.py). It is the same
on a GPU with hundreds of vectors and on a CPU with one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keyhole.core.progress import Progress, silent
from keyhole.recover.embeddings.changes import LikelyTokens, Shares, SingleChanges, exchanged
from keyhole.recover.embeddings.counts import Counted, NGrams
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.embeddings.sums import Effects, Sets, picked

MayBe = Callable[[int, list[int]], bool]  # the number of a vector, a text
_BASE, _MOST = 1000, 3000  # candidates for a text, in the first rounds and in the last
_CALM = 20  # rounds until the number of candidates grows no more
_SETTLED = 5  # rounds that the best text has stood when `may_be` is called
_WIDER = {3: 256, 6: 1_024, 9: 4_096, 14: 1 << 20}  # rounds that a text stood: tokens tried then
_CHOICE = 4  # candidates for each token that is tried
_ORDERS = 8  # exchanges for each token that is tried
_SELDOM = 32  # tokens tried at a place for each one tried in a gap
_PATIENCE = 3  # rounds without improvement after which a population starts again
_PASSES = {"cuda": 1_000_000, "cpu": 12_000}
_BATCH_SIZE = {"cuda": 200, "cpu": 4}  # populations whose changes are run in one batch
# Attention without the kernels that make a plan for each shape: shapes differ in every call.
_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_NONE = -2.0  # the cosine where there is no text yet
_LOWEST = -1e4  # a score below all others
_HALF = 1e-4  # the resolution of 1 − cos in half precision
_BACK = 0.2  # the score that texts of the same tokens lose at each turn
_BETTER = 0.03  # the least improvement of a score that counts
_NOISE = 3e-3  # the error of a cosine in half precision
_CLOSE = 0.97  # the cosine from which on a text is run exactly
_OVERLAP = 0.1  # ρ before it is measured
_RUINED = 0.6  # the largest share of a text that is left out to start again


@dataclass(frozen=True)
class Reading:
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
    shares: Shares = Shares()  # noqa: RUF009 - frozen
    width: int = 32  # of the beam over sets of changes
    depth: int = 5  # changes that are added at a time
    tried: int = 64  # sets that are run
    orders: int = 150  # exchanges that are run, twice in each round
    arrived: float = 1e-6  # 1 − cosine of a text that gives the vector back
    seed: int = 0

    def __call__(
        self, encoder: Encoder, goals: Tensor, counted: Counted, max_length: int,
        progress: Progress = silent, may_be: MayBe | None = None,
    ) -> list[Reading]:  # fmt: skip
        """Return a text of at most `max_length` tokens for each vector, given as directions.

        `progress` gets the number of vectors whose search has ended.
        """
        with sdpa_kernel(_KERNELS), torch.no_grad():
            found = self._search(encoder, goals, counted, max_length, progress, may_be)
            found.look_at_all()
        return [
            Reading(found.best_texts.tokens(row), float(found.best[row]), int(found.passes[row]))
            for row in range(len(goals))
        ]

    def _search(
        self, encoder: Encoder, goals: Tensor, counted: Counted, max_length: int,
        progress: Progress, may_be: MayBe | None,
    ) -> Populations:  # fmt: skip
        generator = torch.Generator(encoder.device).manual_seed(self.seed)
        trust, count = goals.new_tensor(self.trust), len(self.trust)
        found = Populations(encoder, counted.ngrams, goals, trust, self.kept, max_length, generator)
        likely = LikelyTokens.of(counted, goals)
        lines, vector = counted.nearest(goals, self.nearest * count, max_length)
        turn = torch.arange(len(vector), device=vector.device) % count
        found.take(lines, vector * count + turn)
        for number in range(self.rounds):
            rows = self._open(found, torch.arange(len(found.vector), device=encoder.device))
            progress(len(goals) - len(rows) // count, note=f"read, {number} rounds")
            if not len(rows):
                break
            base = round(_BASE * (_MOST / _BASE) ** min(1.0, number / _CALM))
            for some in rows.split(_BATCH_SIZE[rows.device.type]):
                parents = found.parents(some)
                shares = self.shares.within(int(parents.texts.lengths.max()))
                self._add_up(found, likely, some, parents, base, shares)
            for among in (1, 4):
                rows = self._open(found, rows)
                for some in rows.split(_BATCH_SIZE[rows.device.type]) if len(rows) else ():
                    leading = found.leading(some, among)
                    texts, born = exchanged(leading, counted.ngrams, self.orders, generator)
                    found.take(texts, some[born])
            found.renew(rows)
            stood = found.stood()
            for row in ((stood == _SETTLED) & ~found.left).nonzero().flatten().tolist():
                if may_be and may_be(row, found.best_texts.tokens(row)):
                    found.left[row] = True
            for long, tokens in _WIDER.items():
                self._widen(found, likely, (stood == long).nonzero().flatten(), tokens)
        return found

    def _widen(
        self, found: Populations, likely: LikelyTokens, vectors: Tensor, tokens: int
    ) -> None:
        """Change the nearest text of each vector, if its passes allow.

        First try `_ORDERS` · `tokens` exchanges of its pieces, then `tokens` tokens at each place.
        """
        most = self.passes or _PASSES[vectors.device.type]
        for vector in vectors.tolist():
            rows = found.nearest[vector : vector + 1]
            if not len(self._open(found, rows)):
                continue
            parents = found.parents(rows, by_turn=False)
            orders = min(_ORDERS * tokens, most - int(found.passes[vector]))
            texts, _ = exchanged(parents.texts, found.ngrams, orders, found.generator)
            found.take(texts, rows.expand(len(texts)))
            left = (most - int(found.passes[vector])) // int(parents.texts.lengths)
            count = min(tokens, len(found.encoder.table))
            if tokens > count:  # the last time: as many as the passes allow
                count = min(count, left - left // _SELDOM)
            if len(self._open(found, rows)) and 0 < count + count // _SELDOM <= left:
                shares = Shares(count, 0, max(_CHOICE, count // _SELDOM))
                self._add_up(found, likely, rows, parents, _CHOICE * count, shares)

    def _open(self, found: Populations, rows: Tensor) -> Tensor:
        """Return the populations among `rows` whose vector has no text yet, and passes left."""
        most = self.passes or _PASSES[rows.device.type]
        is_open = (found.best < 1 - self.arrived) & (found.passes < most) & ~found.left
        return rows[is_open[found.vector[rows]]]

    def _add_up(
        self, found: Populations, likely: LikelyTokens, rows: Tensor, parents: Parents, base: int,
        shares: Shares,
    ) -> None:  # fmt: skip
        """Run the single changes of a text of each population, then two rounds of sets of them."""
        encoder = found.encoder
        vector = found.vector[rows]
        goals = found.goals[vector]
        off = goals - parents.vectors
        own = encoder.next_log_p(parents.texts) if encoder.predicts else None
        changes = likely.changes(
            parents.texts, off, vector, parents.turns, found.generator, found.max_length,
            base, shares, own,
        )  # fmt: skip
        prior = found.trust[rows] * off.square().sum(-1)  # the weight of log p against ‖off‖²
        every = torch.arange(len(changes.kinds), device=off.device).where(changes.allowed, -1)
        moves, log_p, ran = self._tried(found, changes, rows, every[..., None])
        moves -= parents.vectors[:, None]  # in place: this is the largest tensor of the search
        moves.masked_fill_(~ran[..., None], 0.0)
        likelier = (log_p - parents.likelihoods[:, None]).where(ran, 0.0)
        effects = Effects.of(changes, moves, likelier, prior)
        sets = Sets.none(off)
        for stage in range(2):
            if not len(self._open(found, rows)):
                break
            overlap = found.overlap[rows]
            tried = effects.grown(sets, self.width, self.depth, self.tried, overlap)
            vectors, _, ran = self._tried(found, changes, rows, tried)
            if stage == 0:
                did = vectors - parents.vectors[:, None]
                found.overlap[rows] = effects.overlap(tried, did, ran).clamp(0.0, 1.0)
            cosines = (vectors * goals[:, None]).sum(-1).where(ran, _NONE)
            best = cosines.topk(min(self.width // 2, cosines.shape[1]), dim=1)
            off = goals[:, None] - picked(vectors, best.indices)
            sets = Sets(picked(tried, best.indices), off, best.values > _NONE)

    def _tried(
        self, found: Populations, changes: SingleChanges, rows: Tensor, sets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run sets of changes (p, w, k): return vectors (p, w, d), log p, and which were run."""
        p, w = sets.shape[:2]
        parent = torch.arange(p, device=rows.device).repeat_interleave(w)
        texts, fits = changes.applied(parent, sets.flatten(0, 1))
        fits &= (sets >= 0).any(-1).flatten()
        vectors = found.goals.new_zeros(p * w, found.goals.shape[1])
        log_p = found.goals.new_zeros(p * w)
        vectors[fits], log_p[fits] = found.take(texts[fits], rows[parent[fits]])
        return vectors.view(p, w, -1), log_p.view(p, w), fits.view(p, w)


@dataclass(frozen=True, eq=False)
class Parents:
    """Texts to change: vectors (r, d), log p (r,), and how often each was changed before (r,)."""

    texts: Texts
    vectors: Tensor
    likelihoods: Tensor
    turns: Tensor


class Populations:
    """The best `kept` texts of each population, in r = v·i rows; those of a vector are neighbours.

    `goals` (v, d) are the vectors, and `trust` (i,) is that of each population in the n-grams.
    """

    def __init__(
        self, encoder: Encoder, ngrams: NGrams, goals: Tensor, trust: Tensor, kept: int,
        max_length: int, generator: torch.Generator,
    ) -> None:  # fmt: skip
        self.encoder, self.ngrams, self.goals = encoder, ngrams, goals
        self.kept, self.max_length, self.generator = kept, max_length, generator
        device, (v, d), rows = goals.device, goals.shape, len(goals) * len(trust)
        self.count = len(trust)  # populations of each vector
        self.vector = torch.arange(v, device=device).repeat_interleave(self.count)  # (r,)
        self.trust = trust.repeat(v) * 2 / d
        self.overlap = torch.full_like(self.trust, _OVERLAP)  # (r,) as last measured (sums.py)
        ids = torch.zeros(rows, kept, max_length, dtype=torch.long, device=device)
        self.texts = Texts(ids, torch.ones_like(ids[..., 0]))
        self.cosines = torch.full((rows, kept), _NONE, device=device)
        self.likelihoods = torch.zeros_like(self.cosines)  # log p
        self.vectors = torch.zeros(rows, kept, d, device=device)
        # The best text of each vector, and its cosine, which is exact from `_CLOSE` on.
        self.best = torch.full((v,), _NONE, device=device)
        self.best_texts = Texts(ids.new_zeros(v, max_length), ids.new_ones(v))
        self.passes = ids.new_zeros(v)
        self.left = torch.zeros_like(self.best, dtype=torch.bool)  # vectors whose search has ended
        # How many rounds the best text of each vector has stood, and its cosine in the last round.
        self._stood, self._last = torch.zeros_like(self.passes), self.best.clone()
        self._changed = ids.new_zeros(rows, 0)  # (r, rounds) keys of the texts changed so far
        # The best score of each population, and how many rounds ago it was reached.
        self._peaks = torch.full((rows,), _LOWEST, device=device)
        self._still = torch.zeros_like(self.vector)
        size = (len(encoder.table) + max_length,)
        keys = torch.randint(1, 2**40, size, generator=generator, device=device)
        self._tokens, self._places = keys[:-max_length], keys[-max_length:]

    def take(self, texts: Texts, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts, each for the population in `rows`, and keep the best different ones.

        Return the vectors (b, d) and log p (b,) of all of them.
        """
        if not len(texts):
            return self.goals[:0], self.likelihoods[:0, 0]
        vectors, likelihoods = self._run(texts)
        self.passes += self.vector[rows].bincount(minlength=len(self.goals))
        cosines = (vectors * self.goals[self.vector[rows]]).sum(-1)
        score = _score(cosines, likelihoods, self.trust[rows])
        touched, places = best_of_each(rows, score, 2 * self.kept)
        inside = places.clamp(min=0)
        both = Texts.cat([self.texts[touched], texts[inside]], 1)
        new = cosines[inside].where(places >= 0, _NONE)
        new = torch.cat([self.cosines[touched], new], 1)
        likely = torch.cat([self.likelihoods[touched], likelihoods[inside]], 1)
        new = new.where(~self._repeated(both, new), _NONE)
        ranks = _score(new, likely, self.trust[touched][:, None]).where(new > _NONE, _LOWEST)
        order = ranks.topk(self.kept, dim=1).indices
        run = torch.cat([self.vectors[touched], vectors[inside]], 1)
        self.vectors[touched] = picked(run, order)
        self.texts.ids[touched] = picked(both.ids, order)
        self.texts.lengths[touched] = both.lengths.gather(1, order)
        self.cosines[touched] = new.gather(1, order)
        self.likelihoods[touched] = likely.gather(1, order)
        self._look_again(texts, rows, cosines)
        return vectors, likelihoods

    def _run(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """Return texts' vectors, and log p: the n-grams', averaged with a language model's own."""
        if not self.encoder.predicts:
            return self.encoder.vectors(texts, fast=True).float(), self.ngrams.log_p(texts)
        vectors, own = self.encoder.read(texts)
        return vectors.float(), self.ngrams.log_p(texts, own)

    def _look_again(self, texts: Texts, rows: Tensor, cosines: Tensor) -> None:
        """Replace the best text of each vector by the nearest new one, if that is nearer.

        A text that is near is first run again exactly; half precision is enough for the others.
        """
        vectors, places = best_of_each(self.vector[rows], cosines, 1)
        places = places[:, 0]
        near = cosines[places] > self.best[vectors] - _NOISE
        vectors, places = vectors[near], places[near]
        if not len(vectors):
            return
        found = cosines[places]
        close = (found > _CLOSE).nonzero().flatten()
        if len(close):
            found[close] = self._exact(texts[places[close]], vectors[close])
        better = found > self.best[vectors]
        vectors, places = vectors[better], places[better]
        self.best[vectors] = found[better]
        self.best_texts.ids[vectors] = texts.ids[places]
        self.best_texts.lengths[vectors] = texts.lengths[places]

    def _exact(self, texts: Texts, vectors: Tensor) -> Tensor:
        """Return the exact cosines (b,) of texts with the vectors of these numbers."""
        return (self.encoder.vectors(texts) * self.goals[vectors]).sum(-1)

    def look_at_all(self) -> None:
        """Compute the cosine of every vector's best text exactly."""
        self.best = self._exact(self.best_texts, torch.arange(len(self.goals)))

    @property
    def nearest(self) -> Tensor:
        """For each vector, the population (v,) that has the nearest text to it."""
        best = self.cosines.max(1).values.view(-1, self.count).argmax(1)
        return best + self.count * torch.arange(len(self.goals), device=best.device)

    def parents(self, rows: Tensor, by_turn: bool = True) -> Parents:
        """Return the text to change of each population: by turn, or the one that is nearest."""
        if not by_turn:
            return self._parents(rows, self.cosines[rows].argmax(1), torch.zeros_like(rows))
        texts = self.texts[rows]
        keys = self._tokens[texts.ids].where(texts.mask, 0).sum(-1)
        turns = (keys[:, :, None] == self._changed[rows][:, None]).sum(-1)
        place = (self._scores(rows) - _BACK * turns).argmax(1)
        turn = self._changed.new_zeros(len(self._changed), 1)
        turn[rows, 0] = keys.gather(1, place[:, None])[:, 0]
        self._changed = torch.cat([self._changed, turn], 1)
        return self._parents(rows, place, turns.gather(1, place[:, None])[:, 0])

    def _parents(self, rows: Tensor, place: Tensor, turns: Tensor) -> Parents:
        held = self.vectors[rows, place], self.likelihoods[rows, place]
        return Parents(self.texts[rows, place], *held, turns)

    def leading(self, rows: Tensor, among: int) -> Texts:
        """Return a random one of the best `among` texts of each population."""
        ranks = self._scores(rows).topk(min(among, self.kept), dim=1)
        chosen = (self._chance(len(rows), 1) * (ranks.values > _LOWEST).sum(1, keepdim=True)).long()
        return self.texts[rows, ranks.indices.gather(1, chosen)[:, 0]]

    def renew(self, rows: Tensor) -> None:
        """Start populations again that do not improve, except the nearest one of each vector."""
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
        share = _RUINED * self._chance(len(stuck), 1)
        kept = (self._chance(*texts.ids.shape) > share) & texts.mask
        kept[:, 0] |= ~kept.any(1)
        order = (~kept).long().argsort(dim=1, stable=True)
        self.cosines[stuck], self._peaks[stuck], self._still[stuck] = _NONE, _LOWEST, 0
        self.take(Texts(texts.ids.gather(1, order), kept.sum(1)).clean(), stuck)

    def stood(self) -> Tensor:
        """Count the rounds (v,) that each vector's best text has stood; call it once a round."""
        same = self.best == self._last
        self._stood, self._last = (self._stood + 1).where(same, 0), self.best.clone()
        return self._stood

    def _scores(self, rows: Tensor) -> Tensor:
        cosines = self.cosines[rows]
        scores = _score(cosines, self.likelihoods[rows], self.trust[rows][:, None])
        return scores.where(cosines > _NONE, _LOWEST)

    def _chance(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.goals.device)

    def _repeated(self, texts: Texts, cosines: Tensor) -> Tensor:
        """Return which of the texts (r, c, n) equal an earlier one of their row."""
        keys = (texts.ids * self._places).sum(-1) * 64 + texts.lengths
        steps = torch.arange(keys.shape[1], device=keys.device)
        same = (keys[:, :, None] == keys[:, None]) & (cosines[:, None] > _NONE)
        return (same & (steps[:, None] > steps)).any(-1)


def _score(cosines: Tensor, likelihoods: Tensor, trust: Tensor) -> Tensor:
    return trust * likelihoods - (1 - cosines + _HALF).clamp(min=_HALF).log()


def best_of_each(rows: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the distinct rows, and places (r, count) of the largest scores of each, then -1."""
    order = scores.argsort(descending=True)
    order = order[rows[order].argsort(stable=True)]
    touched, sizes = rows[order].unique_consecutive(return_counts=True)
    steps = torch.arange(count, device=rows.device)
    places = (sizes.cumsum(0) - sizes)[:, None] + steps
    inside = steps < sizes[:, None]
    return touched, order[places.clamp(max=len(order) - 1)].where(inside, -1)
