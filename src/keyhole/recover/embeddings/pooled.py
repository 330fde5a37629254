"""Text from a pooled sentence embedding without a corpus: a baseline.

One vector of d numbers for a whole text: the embeddings that give it fill a space of (n − 1)·d
dimensions, so everything hangs on the prior. The token search of the layers is run for each length
that the text may have where that did not leak, within a bound; the text with the smallest loss is
proposed, and the judge says what it is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from keyhole.core.errors import InputError
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.layers.token_search import TokenSearch, Vocabulary
from keyhole.recover.layers.trials import Comparison
from keyhole.recover.leaks import Leak, Pooled


@dataclass(frozen=True)
class PooledEmbedding:
    """Search a text of known length, or of the best among `lengths` (special tokens included)."""

    search: TokenSearch = field(default_factory=TokenSearch)
    lengths: tuple[int, ...] = (8, 12, 16, 24, 32)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InputError(f"lengths must be positive: got {self.lengths}")

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        vocabulary = Vocabulary.of(target)
        for number, leak in enumerate(leaks):
            pooled = cast("Pooled", leak)
            comparison = Comparison.of(target, pooled)
            guesses = [n for n in self.lengths if n <= target.parts.max_length]
            lengths = guesses if pooled.tokens is None else [pooled.tokens]
            best: Proposal | None = None
            least, passes, forwards = float("inf"), 0, 0
            for length in lengths:
                proposal = self.search(comparison, vocabulary, target.framed(length))
                passes, forwards = passes + proposal.passes, forwards + proposal.forwards
                if proposal.loss < least:
                    best, least = proposal, proposal.loss
                if least <= comparison.tolerance:
                    break
            if best is not None:
                yield number, replace(best, passes=passes, forwards=forwards)
