"""What a causal model itself expects of two tokens that stand together: a prior without a corpus.

Every token is run alone, once. Its last state h gives log p(b | a) = (W h_a)_b − log Σ exp for
every b, so for a place between two known tokens, or at the beginning, the tokens can be put in the
order in which the model finds them likely there.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from keyhole.models.capture import Exposure, capture
from keyhole.models.next_token import unembedding
from keyhole.recover.embedding.scoring import Encoder, Texts

_AT_ONCE = 512  # tokens: each takes as many numbers as there are tokens


class Bigrams:
    """`states` (v, d) are the last states of each token alone, behind what begins every text."""

    def __init__(self, encoder: Encoder) -> None:
        device, count = encoder.device, encoder.target.vocabulary
        head = unembedding(encoder.target.model)
        self._weight, self._bias = head.weight.detach(), cast("Any", head).bias
        last = Exposure("pooled", pooling="last", normalised=False)
        parts: list[Tensor] = []
        sums: list[Tensor] = []
        total = torch.zeros(count, dtype=torch.float64, device=device)
        with torch.no_grad():
            for tokens in torch.arange(count, device=device).split(_AT_ONCE):
                ids, mask = encoder.framed(Texts(tokens[:, None], torch.ones_like(tokens)))
                states = capture(encoder.target.model, last, ids=ids, mask=mask)["values"]
                parts.append(states)
                logits = self._logits(states).float()
                sums.append(logits.logsumexp(-1))
                total += logits.softmax(-1).sum(0)
        encoder.passes += count
        self.states, self._sums = torch.cat(parts), torch.cat(sums)
        self.share = (total / count).clamp(min=1e-30).log().float()  # (v,): log p of each token

    def after(self, tokens: Tensor) -> Tensor:
        """log p(· | t) (b, v) for tokens (b,)."""
        return self._logits(self.states[tokens]) - self._sums[tokens][:, None]

    def before(self, tokens: Tensor) -> Tensor:
        """log p(t | ·) (b, v) for tokens (b,): how well each would stand before them."""
        logits = self.states @ self._weight[tokens].T
        if self._bias is not None:
            logits = logits + self._bias[tokens]
        return (logits - self._sums[:, None]).T

    def between(self, ids: Tensor, place: int) -> Tensor:
        """Scores (b, v) of every token at a place of texts (b, n), by its neighbours."""
        scores = self.after(ids[:, place - 1]) if place else self.share.expand(len(ids), -1)
        if place + 1 < ids.shape[1]:
            scores = scores + self.before(ids[:, place + 1])
        return scores

    def _logits(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, self._weight, self._bias)
