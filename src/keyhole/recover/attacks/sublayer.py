"""Text from the attention sub-layer's output, before the residual, of one layer of an encoder.

The inversion of one attention layer (keyhole.invert) with the vocabulary as prior. At layer 1 that
is `B = Σ_h softmax(X W_h Xᵀ) X V_h`: as many numbers as the embeddings have, but each position's
output is a mixture of all tokens and holds little of its own. Levenberg–Marquardt from many starts
alone would not know which of the solutions is a text. So the vocabulary is the prior, in two ways,
the cheaper first:

1. as for hidden states (encoder.py): a linear map from outputs to embeddings, learnt from the
   weights, is a start from which gradients find the text. On MiniLM that reads layer 1.
2. the search from the vocabulary's mean, whose prior narrows (search/token_search.py), for
   the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from keyhole.recover.attack import Proposal, Target
from keyhole.recover.attacks.encoder import EncoderStates
from keyhole.recover.leaks import Leak
from keyhole.recover.search.comparison import Comparison
from keyhole.recover.search.token_search import TokenSearch


@dataclass(frozen=True)
class SubLayerOutput:
    """Search the text whose attention gives these outputs; `search` takes what `states` leaves."""

    search: TokenSearch = field(default_factory=TokenSearch)
    states: EncoderStates = field(default_factory=EncoderStates)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        left: list[int] = []
        for number, proposal in self.states(target, leaks):
            comparison = Comparison.of(target, leaks[number])
            ids = torch.tensor([proposal.ids], device=target.parts.device)
            if float(comparison.losses(ids)[0]) <= comparison.tolerance:
                yield number, proposal
            else:
                left.append(number)
        for place, proposal in self.search.each(target, [leaks[number] for number in left]):
            yield left[place], proposal
