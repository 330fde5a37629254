"""Text from the attention sub-layer's output, before the residual, of one layer of an encoder.

ALGORITHMS.md, Part II: "Part I with the vocabulary as prior". At layer 1 that is
`B = Σ_h softmax(X W_h Xᵀ) X V_h`: as many numbers as the embeddings have, but each position's
output is a mixture of all tokens and hardly holds its own. Part I alone (Levenberg–Marquardt from
many starts) would not know which of the solutions is a text; with the vocabulary as a prior the
start is its mean, and the solutions that are no text are out of reach. Deeper layers are the same
with the layers below in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from keyhole.invert.leaks import Leak
from keyhole.invert.text.attack import Proposal, Target
from keyhole.invert.text.token_search import TokenSearch


@dataclass(frozen=True)
class SubLayerOutput:
    """Search the text whose attention gives these outputs."""

    search: TokenSearch = field(default_factory=TokenSearch)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        yield from self.search.each(target, leaks)
