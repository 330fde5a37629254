"""The search for the text behind one vector where every pass of the encoder is dear: on a CPU.

Best first, and nothing twice: every text that was ever run is remembered with its cosine. In a
round the best few are changed, in the ways that promise most (candidates.py) and were not tried
yet, and the encoder is run on those. Each time, all texts of the same tokens step back a little, so
that others come to their turn; those come back later, a text with its next best changes. Half of
the texts are chosen by the cosine alone, half with what the n-grams think of them. The search ends
where a text gives the vector back, or with the best so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.recover.embedding.candidates import Candidates, Shares, Tokens
from keyhole.recover.embedding.counted import Counted
from keyhole.recover.embedding.scoring import Encoder, Texts

_CLOSE = 0.997  # a cosine from which on a text may be the right one, half precision allowed for

_AGAIN = 4  # texts of each round that are run exactly, if they are that close


@dataclass(frozen=True)
class Reading:
    """The best text for a vector, and what it took."""

    tokens: list[int]
    cosine: float
    passes: int


@dataclass(frozen=True)
class Climb:
    """How much is tried: `passes` at most, of so many `parents` in a round."""

    passes: int = 12_000
    parents: int = 4
    shares: Shares = Shares()  # noqa: RUF009 - frozen
    width: int = 40  # of the beam that writes the first texts …
    each: int = 12  # … of which so many of each length are tried
    nearest: int = 30  # lines of the corpus that are tried
    back: float = 0.008  # of a cosine: texts of the same tokens step back by it
    prior: float = 0.02  # of a cosine, for each unit of log p a token
    arrived: float = 1e-6  # 1 − cosine

    def __call__(self, encoder: Encoder, goal: Tensor, counted: Counted, longest: int) -> Reading:
        before = encoder.passes
        candidates = counted.candidates(goal, longest)
        tried = _Tried(encoder, goal, candidates)
        lines = counted.nearest(goal, self.nearest, longest)
        tried.run([*candidates.written(self.width, self.each), *map(tuple, lines)])
        while not tried.arrived(self.arrived):
            new: dict[Tokens, None] = {}
            for text in tried.parents(self.parents, self.back, self.prior):
                new.update(dict.fromkeys(self._children(tried, counted, text)))
            room = self.passes - (encoder.passes - before)
            if not new or room <= 0:
                break
            tried.run(list(new)[:room])
        tokens, cosine = tried.best
        return Reading(list(tokens), cosine, encoder.passes - before)

    def _children(self, tried: _Tried, counted: Counted, text: int) -> Iterable[Tokens]:
        tokens, off = tried.texts[text], tried.goal - tried.vectors[text]
        turn = tried.turns[tokens]
        tried.turns[tokens] += 1
        tried.turns_of_set[frozenset(tokens)] += 1
        return tried.candidates.changed(
            tokens, counted.bag.missing(off), float(off.norm()), self.shares, tried.known, turn
        )


@dataclass(eq=False)
class _Tried:
    """Every text that was run, with its vector and its cosine; how often it was changed."""

    encoder: Encoder
    goal: Tensor
    candidates: Candidates
    texts: list[Tokens] = field(default_factory=list[Tokens])
    vectors: list[Tensor] = field(default_factory=list[Tensor])
    cosines: list[float] = field(default_factory=list[float])
    likely: list[float] = field(default_factory=list[float])  # log p a token
    turns: Counter[Tokens] = field(default_factory=Counter[Tokens])
    turns_of_set: Counter[frozenset[int]] = field(default_factory=Counter[frozenset[int]])
    known: set[Tokens] = field(default_factory=set[Tokens])
    best: tuple[Tokens, float] = ((), -2.0)  # run exactly

    def run(self, texts: Iterable[Tokens]) -> None:
        """Run the encoder on texts that it was not run on before, and look at the best again."""
        texts = [text for text in dict.fromkeys(texts) if text not in self.known]
        if not texts:
            return
        rows = Texts.of([list(text) for text in texts], max(map(len, texts)))
        vectors = self.encoder.vectors(rows.to(self.encoder.device), fast=True).cpu()
        cosines = (vectors @ self.goal).tolist()
        self.texts += texts
        self.vectors += vectors.unbind(0)
        self.cosines += cosines
        self.likely += (self.candidates.ngrams.log_p(rows) / (rows.lengths + 1)).tolist()
        self.known.update(texts)
        order = sorted(range(len(texts)), key=cosines.__getitem__, reverse=True)
        close = [k for k in order[:_AGAIN] if cosines[k] > min(_CLOSE, self.best[1])]
        if close:
            exact = self.encoder.vectors(rows[close].to(self.encoder.device)).cpu() @ self.goal
            cosine, place = exact.max(0)
            if float(cosine) > self.best[1]:
                self.best = texts[close[int(place)]], float(cosine)

    def arrived(self, within: float) -> bool:
        return self.best[1] > 1 - within

    def parents(self, count: int, back: float, prior: float) -> list[int]:
        """The texts whose turn it is: half by the cosine, half with the n-grams."""
        sets = [frozenset(text) for text in self.texts]
        score = torch.tensor(self.cosines)
        score -= back * torch.tensor([self.turns_of_set[tokens] for tokens in sets])
        likely = score + prior * torch.tensor(self.likely)
        chosen: dict[frozenset[int], int] = {}
        for scores, room in ((score, count // 2), (likely, count)):
            for text in scores.argsort(descending=True).tolist():
                if len(chosen) >= room:
                    break
                chosen.setdefault(sets[text], text)
        return list(chosen.values())
