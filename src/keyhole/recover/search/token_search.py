"""Relax, snap, try: text from a leak that no closed form reads.

The embeddings are found by `relaxation`, the tokens that agree best are tried by `substitution`,
and where the text so found does not explain the leak, the prior narrows to the candidates and it
begins again. Bounded: `rounds` times at most `passes` passes and `sweeps` sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.recover.attack import Proposal, Target
from keyhole.recover.leaks import Leak
from keyhole.recover.search.comparison import Comparison
from keyhole.recover.search.relaxation import Prior, Vocabulary, relax
from keyhole.recover.search.substitution import Tried, substitute


@dataclass(frozen=True)
class TokenSearch:
    """How long to search: `rounds` of at most `passes` passes, each followed by trials.

    `candidates` tokens are tried at each position, at most `sweeps` times; `narrowed` tokens at
    each position make the next round's prior, weighed by `sharpness` times their agreement, which
    grows by `growth` with each round. The search ends when a round gives the text of the last.
    """

    rounds: int = 8
    passes: int = 60
    candidates: int = 24
    narrowed: int = 384
    sweeps: int = 4
    sharpness: float = 30.0
    growth: float = 1.3

    def each(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        """Every leak by itself, with the special tokens where the tokenizer puts them."""
        vocabulary = Vocabulary.of(target)
        for number, leak in enumerate(leaks):
            known = target.framed(leak.length or 0)
            yield number, self(Comparison.of(target, leak), vocabulary, known)

    def __call__(self, comparison: Comparison, vocabulary: Vocabulary, known: Tensor) -> Proposal:
        """The text of `known.shape` tokens (-1: unknown) that explains the leak best."""
        prior = Prior.whole(vocabulary, len(known))
        best = Tried(known.clamp(min=0), float("inf"), 0)
        before = best.ids
        passes = forwards = 0
        for number in range(self.rounds):
            relaxed, spent = relax(comparison, prior, known, self.passes)
            agreement = vocabulary.agreement(relaxed, self.sharpness * self.growth**number)
            wide = agreement.topk(min(self.narrowed, agreement.shape[-1]), -1).indices.T
            ids = torch.where(known >= 0, known, wide[0])
            # Once directions say nothing new, the best text is repaired with all candidates.
            stuck = torch.equal(ids, before)
            start, candidates = (best.ids, wide) if stuck else (ids, wide[: self.candidates])
            tried = substitute(comparison, start, candidates, known, self.sweeps)
            passes, forwards, before = passes + spent, forwards + tried.forwards, ids
            best = min(best, tried, key=lambda text: text.loss)
            if stuck or best.loss <= comparison.tolerance:
                break
            prior = Prior.among(vocabulary, agreement, self.narrowed)
        return Proposal(
            best.ids.tolist(),
            passes=passes + forwards,
            forwards=forwards,
            note=f"loss {best.loss:.1e} in {passes} passes and {forwards} trials",
            loss=best.loss,
        )
