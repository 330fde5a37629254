"""What a causal model itself expects of two tokens that stand together: a prior without a corpus.

Every token is run once behind a common one. Its last state h gives log p(b | a) = (W h_a)_b − log Σ
exp for every b, so the tokens can be put in the order in which the model finds them likely between
two neighbours. The common token matters: states at the very first position say next to nothing of
their token (SmolLM2 expects a hyphen after nearly every one).
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.models.next_token import unembedding

_AT_ONCE = 512  # tokens: each takes as many numbers as there are tokens


class Bigrams:
    """`states` (v, d) are the last states of each token behind a common one.

    `starts` (s, d) are those of tokens that texts begin or end with: what follows them on average
    is what a text begins with.
    """

    def __init__(self, model: nn.Module, states: Tensor, starts: Tensor) -> None:
        head = unembedding(model)
        self._weight, self._bias = head.weight.detach(), cast("Any", head).bias
        self._states = states
        self._sums = torch.cat(
            [self._logits(part).logsumexp(-1) for part in states.split(_AT_ONCE)]
        )
        self._first = self._logits(starts).log_softmax(-1).logsumexp(0) - math.log(len(starts))

    def after(self, tokens: Tensor) -> Tensor:
        """log p(· | t) (b, v) for tokens (b,)."""
        return self._logits(self._states[tokens]) - self._sums[tokens][:, None]

    def before(self, tokens: Tensor) -> Tensor:
        """log p(t | ·) (b, v) for tokens (b,): how well each would stand before them."""
        logits = self._states @ self._weight[tokens].T
        if self._bias is not None:
            logits = logits + self._bias[tokens]
        return (logits - self._sums[:, None]).T

    def between(self, ids: Tensor, place: int) -> Tensor:
        """Scores (b, v) of every token at a place of texts (b, n), by its neighbours."""
        scores = self.after(ids[:, place - 1]) if place else self._first.expand(len(ids), -1)
        if place + 1 < ids.shape[1]:
            scores = scores + self.before(ids[:, place + 1])
        return scores

    def _logits(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, self._weight, self._bias)
