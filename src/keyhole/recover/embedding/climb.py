"""The search for the text behind one vector where every pass of the encoder is dear: on a CPU.

Best first, and nothing twice: every text that was ever run is remembered with its cosine. In a
round the best few are changed, in the ways that promise most (candidates.py) and were not tried
yet, and the encoder is run on those. A text that was changed before steps back a little each time,
so that others come to their turn and it comes back later with its next best changes; half of the
texts are chosen by the cosine alone, half with what the n-grams think of them. The
search ends where a text gives the vector back, or with the best so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.recover.embedding.candidates import Candidates, Shares, Tokens
from keyhole.recover.embedding.counted import Counted
from keyhole.recover.embedding.scoring import Encoder, Texts

_CLOSE = 0.997  # a cosine from which on a text may be the right one, half precision allowed for


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
    back: float = 0.008  # of a cosine: a text that was changed steps back by it
    prior: float = 0.02  # of a cosine, for each unit of log p a token
    arrived: float = 1e-6  # 1 − cosine

    def __call__(self, encoder: Encoder, goal: Tensor, counted: Counted, longest: int) -> Reading:
        before = encoder.passes
        near = counted.nearest(goal, self.nearest, longest)
        candidates = counted.candidates(goal, longest, near)
        tried = _Tried(encoder, goal, candidates)
        place = {int(token): number for number, token in enumerate(candidates.ids)}
        lines = [tuple(place[token] for token in tokens) for tokens in near]
        tried.run([*candidates.written(self.width, self.each), *lines])
        while not tried.arrived(self.arrived):
            new: dict[Tokens, None] = {}
            for text in tried.parents(self.parents, self.back, self.prior):
                new.update(dict.fromkeys(self._children(tried, counted, text)))
            room = self.passes - (encoder.passes - before)
            if not new or room <= 0:
                break
            tried.run(list(new)[:room])
        tokens, cosine = tried.best
        return Reading(candidates.ids[list(tokens)].tolist(), cosine, encoder.passes - before)

    def _children(self, tried: _Tried, counted: Counted, text: int) -> Iterable[Tokens]:
        candidates = tried.candidates
        missing = counted.bag.missing(tried.goal - tried.vectors[text])[candidates.ids]
        turn = tried.turns[text]
        tried.turns[text] += 1
        return candidates.changed(tried.texts[text], missing, self.shares, tried.known, turn)


@dataclass(eq=False)
class _Tried:
    """Every text that was run, with its vector, its cosine, and how often it was changed."""

    encoder: Encoder
    goal: Tensor
    candidates: Candidates
    texts: list[Tokens] = field(default_factory=list[Tokens])
    vectors: list[Tensor] = field(default_factory=list[Tensor])
    cosines: list[float] = field(default_factory=list[float])
    likely: list[float] = field(default_factory=list[float])  # log p a token
    turns: list[int] = field(default_factory=list[int])
    known: set[Tokens] = field(default_factory=set[Tokens])
    best: tuple[Tokens, float] = ((), -2.0)  # run exactly

    def run(self, texts: Iterable[Tokens]) -> None:
        """Run the encoder on texts that it was not run on before, and look at the best again."""
        texts = [text for text in dict.fromkeys(texts) if text not in self.known]
        if not texts:
            return
        vectors = self.encoder.vectors(self._texts(texts), fast=True).cpu()
        cosines = (vectors @ self.goal).tolist()
        self.texts += texts
        self.vectors += vectors.unbind(0)
        self.cosines += cosines
        self.likely += [self.candidates.log_p(text) / (len(text) + 1) for text in texts]
        self.turns += [0] * len(texts)
        self.known.update(texts)
        order = sorted(range(len(texts)), key=cosines.__getitem__, reverse=True)
        close = [k for k in order[:4] if cosines[k] > min(_CLOSE, self.best[1])]
        for text, cosine in zip(*self._exactly([texts[k] for k in close]), strict=True):
            if cosine > self.best[1]:
                self.best = text, cosine

    def _exactly(self, texts: list[Tokens]) -> tuple[list[Tokens], list[float]]:
        if not texts:
            return [], []
        return texts, (self.encoder.vectors(self._texts(texts)).cpu() @ self.goal).tolist()

    def _texts(self, texts: list[Tokens]) -> Texts:
        ids = [self.candidates.ids[list(text)].tolist() for text in texts]
        return Texts.of(ids, max(map(len, ids)), self.encoder.device)

    def arrived(self, within: float) -> bool:
        return self.best[1] > 1 - within

    def parents(self, count: int, back: float, prior: float) -> list[int]:
        """The texts whose turn it is: half by the cosine, half with the n-grams."""
        score = torch.tensor(self.cosines) - back * torch.tensor(self.turns)
        likely = score + prior * torch.tensor(self.likely)
        chosen = score.topk(min(count // 2, len(score))).indices.tolist()
        chosen += likely.topk(min(count, len(score))).indices.tolist()
        return list(dict.fromkeys(chosen))[:count]
