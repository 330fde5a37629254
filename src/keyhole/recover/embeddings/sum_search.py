"""The search for the texts behind vectors, many at once, by sums of single changes (ours).

Every vector has a few populations of texts. In a round each population gives one text. All of its
single changes that promise something are run through the encoder (changes.py), sets of changes
whose effects add up to what is missing are found without it (sums.py) and run, then sets that go on
from the best of those as they really are. Then pieces of good texts change places. It begins with
the lines of the corpus that are nearest. A vector leaves as soon as a text gives it back to
rounding, so that the hard ones get the machine to themselves; one that was stored with fewer
digits, where other texts may come as near, once its best text may be the one (`may_be`) and has
stood for some rounds. A text that stands may be wrong in a token that promised nothing, such as a
piece of a password, or in an order that bigrams do not speak for: then many more exchanges are
tried, and many more tokens at each of its places, at last all.

How good is a text? Its vector is off by r, ‖r‖² = 2(1 − cos). If the d numbers of r were noise of
one unknown variance, the likelihood of the text would be (‖r‖²)^(−d/2), up to a factor; with the
log p of the n-grams, and divided by d/2,

    score = −log(1 − cos) + (2/d)·log p

so that far from the vector what is likely counts, and near it the vector alone. A population trusts
the n-grams more or less than that, so that populations keep different texts. Texts of the same
tokens are changed by turns: each time all of them step back a little. A population that gets no
better begins again, from the best text of any of its vector's with a part of it left out.

Nothing is learnt: it needs the encoder, and counts of a corpus (counts.py). It runs alike on a GPU
with hundreds of vectors and on a CPU with one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keyhole.recover.embeddings.changes import (
    Chance,
    LikelyTokens,
    Shares,
    SingleChanges,
    exchanged,
)
from keyhole.recover.embeddings.counts import Counted, NGrams
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.embeddings.sums import Effects, Sets, picked

Notify = Callable[[int, int, int], None]  # rounds, arrived, passes
MayBe = Callable[[int, list[int]], bool]  # the number of a vector, a text
_BASE, _MOST = 1000, 3000  # candidates for a text, in the first rounds and in the last
_CALM = 20  # rounds after which there are the most
_SETTLED = 5  # rounds that the best text of a vector has stood
_WIDER = {3: 256, 6: 1_024, 9: 4_096, 14: 1 << 20}  # rounds that a text stood: tokens tried then
_CHOICE = 4  # times as many are candidates
_ORDERS = 8  # times as many exchanges
_SELDOM = 32  # of them to one in a gap
_PASSES = {"cuda": 1_000_000, "cpu": 12_000}
_BATCH_SIZE = {"cuda": 200, "cpu": 4}  # populations whose changes are run in one batch
# Attention without the kernels that are planned anew for each shape: here every call has its own.
_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_NONE = -2.0  # the cosine of no text
_LOWEST = -1e4  # a score below all others
_HALF = 1e-4  # of 1 − cos: half precision tells no more
_BACK = 0.2  # of a score: texts of the same tokens step back by it
_BETTER = 0.03  # of a score: less is standing still
_NOISE = 3e-3  # of a cosine in half precision
_CLOSE = 0.97  # the cosine from which on a text is run exactly
_OVERLAP = 0.1  # of changes, before it is measured
_RUINED = 0.6  # of a text, at most, is left out to begin again


@dataclass(frozen=True)
class Reading:
    """The best text for a vector, and what it took."""

    tokens: list[int]
    cosine: float
    passes: int


@dataclass(frozen=True)
class SumSearch:
    """How much is tried: about `passes` for a vector at most, by default what suits the device."""

    passes: int | None = None
    rounds: int = 1000
    trust: tuple[float, ...] = (0.6, 2.0)  # in the n-grams, of each population
    kept: int = 24  # texts of a population
    nearest: int = 8  # lines of the corpus that each begins with
    shares: Shares = Shares()  # noqa: RUF009 - frozen
    width: int = 32  # of the beam over sets of changes
    depth: int = 5  # changes that are added at a time
    tried: int = 64  # sets that are run
    orders: int = 150  # exchanges that are run, twice
    arrived: float = 1e-6  # 1 − cosine
    seed: int = 0

    def __call__(
        self, encoder: Encoder, goals: Tensor, counted: Counted, max_length: int,
        notify: Notify | None = None, may_be: MayBe | None = None,
    ) -> list[Reading]:  # fmt: skip
        """Texts of at most `max_length` tokens for vectors (v, d) as the encoder compares them."""
        with sdpa_kernel(_KERNELS), torch.no_grad():
            found = self._search(encoder, goals, counted, max_length, notify, may_be)
            found.look_at_all()
        return [
            Reading(found.best_texts.tokens(row), float(found.best[row]), int(found.passes[row]))
            for row in range(len(goals))
        ]

    def _search(
        self, encoder: Encoder, goals: Tensor, counted: Counted, max_length: int,
        notify: Notify | None, may_be: MayBe | None,
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
            if notify:
                notify(number, len(goals) - len(rows) // count, int(found.passes.sum()))
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
        """Try so many tokens at each place of the nearest text of each vector, if passes allow.

        Before that, so many times `_ORDERS` exchanges of its pieces.
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
            if tokens > count:  # the last time: as many as passes allow
                count = min(count, left - left // _SELDOM)
            if len(self._open(found, rows)) and 0 < count + count // _SELDOM <= left:
                shares = Shares(count, 0, max(_CHOICE, count // _SELDOM))
                self._add_up(found, likely, rows, parents, _CHOICE * count, shares)

    def _open(self, found: Populations, rows: Tensor) -> Tensor:
        """The populations whose vector has no text yet and passes left."""
        most = self.passes or _PASSES[rows.device.type]
        is_open = (found.best < 1 - self.arrived) & (found.passes < most) & ~found.left
        return rows[is_open[found.vector[rows]]]

    def _add_up(
        self, found: Populations, likely: LikelyTokens, rows: Tensor, parents: Parents, base: int,
        shares: Shares,
    ) -> None:  # fmt: skip
        """Run single changes of one text of each population, then sets of them, twice."""
        encoder = found.encoder
        vector = found.vector[rows]
        goals = found.goals[vector]
        off = goals - parents.vectors
        chance = Chance(parents.turns, found.generator)
        own = encoder.next_log_p(parents.texts) if encoder.speaks else None
        changes = likely.changes(
            parents.texts, off, vector, chance, found.max_length, base, shares, own
        )
        prior = found.trust[rows] * off.square().sum(-1)  # what log p counts for in ‖off‖²
        effects = Effects.of(changes, *_effects(found, changes, rows, parents), prior)
        sets = Sets.none(off)
        for stage in range(2):
            if not len(self._open(found, rows)):
                break
            overlap = found.overlap[rows]
            tried = effects.grown(sets, self.width, self.depth, self.tried, overlap)
            vectors, ran = self._tried(found, changes, rows, tried)
            if stage == 0:
                did = vectors - parents.vectors[:, None]
                found.overlap[rows] = effects.overlap(tried, did, ran).clamp(0.0, 1.0)
            cosines = (vectors * goals[:, None]).sum(-1).where(ran, _NONE)
            best = cosines.topk(min(self.width // 2, cosines.shape[1]), dim=1)
            off = goals[:, None] - picked(vectors, best.indices)
            sets = Sets(picked(tried, best.indices), off, best.values > _NONE)

    def _tried(
        self, found: Populations, changes: SingleChanges, rows: Tensor, sets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run texts with sets of changes (p, w, k): their vectors (p, w, d), and which were run."""
        p, w = sets.shape[:2]
        parent = torch.arange(p, device=rows.device).repeat_interleave(w)
        texts, fits = changes.applied(parent, sets.flatten(0, 1))
        fits &= (sets >= 0).any(-1).flatten()
        vectors = found.goals.new_zeros(p * w, found.goals.shape[1])
        vectors[fits], _ = found.take(texts[fits], rows[parent[fits]])
        return vectors.view(p, w, -1), fits.view(p, w)


def _effects(
    found: Populations, changes: SingleChanges, rows: Tensor, parents: Parents
) -> tuple[Tensor, Tensor]:
    """Run every single change: what it adds to the vector of its text (p, N, d), and to log p."""
    parent, change = changes.allowed.nonzero().unbind(1)
    texts, _ = changes.applied(parent, change[:, None])
    vectors, likelihoods = found.take(texts, rows[parent])
    moves = vectors.new_zeros(*changes.allowed.shape, vectors.shape[1])
    likelier = vectors.new_zeros(changes.allowed.shape)
    moves[parent, change] = vectors - parents.vectors[parent]
    likelier[parent, change] = likelihoods - parents.likelihoods[parent]
    return moves, likelier


@dataclass(frozen=True, eq=False)
class Parents:
    """Texts that are changed: vectors (r, d), log p (r,), and how often it was their turn (r,)."""

    texts: Texts
    vectors: Tensor
    likelihoods: Tensor
    turns: Tensor


@dataclass(eq=False)
class Populations:
    """The best k texts of each population, r = v·i rows, those of one vector in sequence."""

    encoder: Encoder
    ngrams: NGrams
    goals: Tensor  # (v, d)
    trust: Tensor  # (i,) in the n-grams
    kept: int
    max_length: int
    generator: torch.Generator
    patience: int = 3  # rounds without getting better, after which a population begins again
    vector: Tensor = field(init=False)  # (r,) which vector a population works for
    ids: Tensor = field(init=False)  # (r, k, n)
    lengths: Tensor = field(init=False)  # (r, k)
    cosines: Tensor = field(init=False)  # (r, k), -2 where there is no text yet
    likelihoods: Tensor = field(init=False)  # (r, k), log p
    vectors: Tensor = field(init=False)  # (r, k, d)
    best: Tensor = field(init=False)  # (v,) the largest cosine, exact from `_CLOSE` on …
    best_ids: Tensor = field(init=False)  # … and its text
    best_lengths: Tensor = field(init=False)
    passes: Tensor = field(init=False)  # (v,)
    left: Tensor = field(init=False)  # (v,) vectors that nothing more is tried for
    overlap: Tensor = field(init=False)  # (r,) of changes, as last measured (sums.py)
    _stood: Tensor = field(init=False)  # (v,) rounds since the best text changed …
    _last: Tensor = field(init=False)  # … and how near it was then
    _changed: Tensor = field(init=False)  # (r, rounds): the tokens of the texts that were changed
    _peaks: Tensor = field(init=False)  # (r,) the best score, and how long ago it was reached
    _still: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device, (v, d) = self.goals.device, self.goals.shape
        rows, kept = v * len(self.trust), self.kept
        self.vector = torch.arange(v, device=device).repeat_interleave(len(self.trust))
        self.trust = self.trust.repeat(v) * 2 / d
        self.overlap = torch.full_like(self.trust, _OVERLAP)
        self.ids = torch.zeros(rows, kept, self.max_length, dtype=torch.long, device=device)
        self.lengths = torch.ones_like(self.ids[..., 0])
        self.cosines = torch.full((rows, kept), _NONE, device=device)
        self.likelihoods = torch.zeros_like(self.cosines)
        self.vectors = torch.zeros(rows, kept, d, device=device)
        self.best = torch.full((v,), _NONE, device=device)
        self.best_ids = torch.zeros(v, self.max_length, dtype=torch.long, device=device)
        self.best_lengths = torch.ones_like(self.best_ids[:, 0])
        self.passes = torch.zeros_like(self.best_lengths)
        self.left = torch.zeros_like(self.best, dtype=torch.bool)
        self._stood, self._last = torch.zeros_like(self.passes), self.best.clone()
        self._changed = self.ids.new_zeros(rows, 0)
        self._peaks = torch.full((rows,), _LOWEST, device=device)
        self._still = torch.zeros_like(self.vector)
        size = (len(self.encoder.table) + self.max_length,)
        keys = torch.randint(1, 2**40, size, generator=self.generator, device=device)
        self._tokens, self._places = keys[: -self.max_length], keys[-self.max_length :]

    @property
    def count(self) -> int:
        """Populations of each vector."""
        return len(self.vector) // len(self.goals)

    @property
    def best_texts(self) -> Texts:
        return Texts(self.best_ids, self.best_lengths)

    def take(self, texts: Texts, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts, each for its population, and keep the best that differ.

        Gives the vectors (b, d) and log p (b,) of them all.
        """
        if not len(texts):
            return self.goals[:0], self.likelihoods[:0, 0]
        vectors, likelihoods = self._run(texts)
        self.passes += self.vector[rows].bincount(minlength=len(self.goals))
        cosines = (vectors * self.goals[self.vector[rows]]).sum(-1)
        score = _score(cosines, likelihoods, self.trust[rows])
        touched, places = best_of_each(rows, score, 2 * self.kept)
        inside = places.clamp(min=0)
        ids = torch.cat([self.ids[touched], texts.ids[inside]], 1)
        lengths = torch.cat([self.lengths[touched], texts.lengths[inside]], 1)
        new = cosines[inside].where(places >= 0, _NONE)
        new = torch.cat([self.cosines[touched], new], 1)
        likely = torch.cat([self.likelihoods[touched], likelihoods[inside]], 1)
        new = new.where(~self._repeated(ids, lengths, new), _NONE)
        ranks = _score(new, likely, self.trust[touched][:, None]).where(new > _NONE, _LOWEST)
        order = ranks.topk(self.kept, dim=1).indices
        both = torch.cat([self.vectors[touched], vectors[inside]], 1)
        self.vectors[touched], self.ids[touched] = picked(both, order), picked(ids, order)
        self.lengths[touched] = lengths.gather(1, order)
        self.cosines[touched] = new.gather(1, order)
        self.likelihoods[touched] = likely.gather(1, order)
        self._look_again(texts, rows, cosines)
        return vectors, likelihoods

    def _run(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """Their vectors, and log p: of a language model, what it says itself counts half."""
        if not self.encoder.speaks:
            return self.encoder.vectors(texts, fast=True).float(), self.ngrams.log_p(texts)
        vectors, own = self.encoder.read(texts)
        return vectors.float(), self.ngrams.log_p(texts, own)

    def _look_again(self, texts: Texts, rows: Tensor, cosines: Tensor) -> None:
        """Keep the nearest new text of each vector, if it is the nearest of all.

        It is run again exactly if it is near: half precision does for texts that are far off.
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
        self.best_ids[vectors] = texts.ids[places]
        self.best_lengths[vectors] = texts.lengths[places]

    def _exact(self, texts: Texts, vectors: Tensor) -> Tensor:
        """Cosines (b,) of texts with the vectors of these numbers, in full precision."""
        return (self.encoder.vectors(texts) * self.goals[vectors]).sum(-1)

    def look_at_all(self) -> None:
        """Run the best text of every vector exactly."""
        self.best = self._exact(self.best_texts, torch.arange(len(self.goals)))

    @property
    def nearest(self) -> Tensor:
        """(v,) the population that holds the nearest text to each vector."""
        best = self.cosines.max(1).values.view(-1, self.count).argmax(1)
        return best + self.count * torch.arange(len(self.goals), device=best.device)

    def parents(self, rows: Tensor, by_turn: bool = True) -> Parents:
        """The text of each population whose turn it is, or the nearest."""
        if not by_turn:
            return self._parents(rows, self.cosines[rows].argmax(1), torch.zeros_like(rows))
        held = self._tokens[self.ids[rows]]
        places = torch.arange(self.max_length, device=rows.device)
        keys = held.where(places < self.lengths[rows][..., None], 0).sum(-1)
        turns = (keys[:, :, None] == self._changed[rows][:, None]).sum(-1)
        place = (self._scores(rows) - _BACK * turns).argmax(1)
        turn = self._changed.new_zeros(len(self._changed), 1)
        turn[rows, 0] = keys.gather(1, place[:, None])[:, 0]
        self._changed = torch.cat([self._changed, turn], 1)
        return self._parents(rows, place, turns.gather(1, place[:, None])[:, 0])

    def _parents(self, rows: Tensor, place: Tensor, turns: Tensor) -> Parents:
        held = self.vectors[rows, place], self.likelihoods[rows, place]
        return Parents(self._texts(rows, place), *held, turns)

    def leading(self, rows: Tensor, among: int) -> Texts:
        """One of the best `among` texts of each population, by chance."""
        ranks = self._scores(rows).topk(min(among, self.kept), dim=1)
        chosen = (self._chance(len(rows), 1) * (ranks.values > _LOWEST).sum(1, keepdim=True)).long()
        return self._texts(rows, ranks.indices.gather(1, chosen)[:, 0])

    def renew(self, rows: Tensor) -> None:
        """Populations that stand still begin again, but for the nearest one of each vector."""
        now = self._scores(rows).max(1).values
        better = now > self._peaks[rows] + _BETTER
        self._still[rows] = (self._still[rows] + 1).where(~better, 0)
        self._peaks[rows] = torch.maximum(now, self._peaks[rows])
        nearest = self.nearest
        stuck = rows[self._still[rows] >= self.patience]
        stuck = stuck[stuck != nearest[self.vector[stuck]]]
        if not len(stuck):
            return
        chance = self._chance(len(stuck), 2)
        other = self.vector[stuck] * self.count + (chance[:, 0] * self.count).long()
        other = torch.where(chance[:, 1] < 0.5, nearest[self.vector[stuck]], other)
        texts = self._texts(other, self.cosines[other].argmax(1))
        share = _RUINED * self._chance(len(stuck), 1)
        kept = (self._chance(*texts.ids.shape) > share) & texts.mask
        kept[:, 0] |= ~kept.any(1)
        order = (~kept).long().argsort(dim=1, stable=True)
        self.cosines[stuck], self._peaks[stuck], self._still[stuck] = _NONE, _LOWEST, 0
        self.take(Texts(texts.ids.gather(1, order), kept.sum(1)).clean(), stuck)

    def stood(self) -> Tensor:
        """(v,) the rounds that the best text of each vector has stood; to be asked each round."""
        same = self.best == self._last
        self._stood, self._last = (self._stood + 1).where(same, 0), self.best.clone()
        return self._stood

    def _scores(self, rows: Tensor) -> Tensor:
        cosines = self.cosines[rows]
        scores = _score(cosines, self.likelihoods[rows], self.trust[rows][:, None])
        return scores.where(cosines > _NONE, _LOWEST)

    def _texts(self, rows: Tensor, places: Tensor) -> Texts:
        return Texts(self.ids[rows, places], self.lengths[rows, places])

    def _chance(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.goals.device)

    def _repeated(self, ids: Tensor, lengths: Tensor, cosines: Tensor) -> Tensor:
        """Which of the texts (r, c, n) of a row stand there already, before them."""
        keys = (ids * self._places).sum(-1) * 64 + lengths
        steps = torch.arange(ids.shape[1], device=ids.device)
        same = (keys[:, :, None] == keys[:, None]) & (cosines[:, None] > _NONE)
        return (same & (steps[:, None] > steps)).any(-1)


def _score(cosines: Tensor, likelihoods: Tensor, trust: Tensor) -> Tensor:
    return trust * likelihoods - (1 - cosines + _HALF).clamp(min=_HALF).log()


def best_of_each(rows: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rows that occur, and for each the places (r, count) of its largest scores, then -1."""
    order = scores.argsort(descending=True)
    order = order[rows[order].argsort(stable=True)]
    touched, sizes = rows[order].unique_consecutive(return_counts=True)
    steps = torch.arange(count, device=rows.device)
    places = (sizes.cumsum(0) - sizes)[:, None] + steps
    inside = steps < sizes[:, None]
    return touched, order[places.clamp(max=len(order) - 1)].where(inside, -1)
