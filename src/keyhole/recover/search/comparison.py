"""How far what a model exposes for some embeddings is from a leak: one number per text.

Hidden states, attention outputs and pooled embeddings are compared in units of the leak's standard
deviation. Maps are compared by their logarithms, less each row's mean: those are the scores
`q·k`, which are nearly linear in the hidden states where the probabilities are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.models.capture import capture
from keyhole.recover.attack import Target
from keyhole.recover.leaks import AttentionMaps, Leak
from keyhole.recover.precision import precision_of
from keyhole.recover.search.map_scores import LogMaps

_BLURRED = 0.1  # the error of a score above which it counts less: scores of tokens differ by more
_SMALLEST = 1e-30
_ARITHMETIC = 1e-7  # the loss that another machine's float32 may leave; a wrong token's is larger


@dataclass(frozen=True, eq=False)
class Comparison:
    """A leak in the numbers it is compared by; `tolerance` is the loss its own error explains."""

    target: Target
    leak: Leak
    expected: Tensor
    weights: Tensor
    tolerance: float

    @classmethod
    def of(cls, target: Target, leak: Leak) -> Comparison:
        device = target.parts.device
        if isinstance(leak, AttentionMaps):
            logs = LogMaps.of(leak, device)
            error = 1.0 / logs.weights.clamp(min=_SMALLEST)
            weights = torch.where(logs.weights > 0, 1.0 / (1.0 + error / _BLURRED**2), 0.0)
            explained = float((weights * error.clamp(max=1.0)).sum() / weights.sum())
            expected = _centred(logs.values, weights)
            return cls(target, leak, expected, weights, 4.0 * explained + _ARITHMETIC)
        values = leak.rows(leak.tensors).to(device)
        known = values.isfinite()
        precision = precision_of(leak)
        scaled = torch.where(known, values, 0.0) / precision.scale
        explained = precision.relative**2
        return cls(target, leak, scaled, known / precision.scale, 4.0 * explained + _ARITHMETIC)

    def loss(self, embeddings: Tensor) -> Tensor:
        """The mean square difference of each text's exposure (b,) from the leak."""
        exposed = capture(self.target.model, self.leak.exposure, embeddings=embeddings)
        if isinstance(self.leak, AttentionMaps):
            scores = _centred(exposed["values"].clamp(min=_SMALLEST).log(), self.weights)
            off = (scores - self.expected).square() * self.weights
            return off.flatten(1).sum(1) / self.weights.sum()
        off = (self.leak.rows(exposed) * self.weights - self.expected).square()
        return off.flatten(1).sum(1) / (self.weights > 0).sum()

    def losses(self, ids: Tensor, tokens_at_once: int = 4096) -> Tensor:
        """The loss of each of many texts (b, n), without gradients."""
        step = max(1, tokens_at_once // ids.shape[1])
        with torch.no_grad():
            return torch.cat([self.loss(self.target.parts.tokens(b)) for b in ids.split(step)])


def _centred(scores: Tensor, weights: Tensor) -> Tensor:
    """Scores less their row's weighted mean: a map leaves each row's constant open."""
    total = weights.sum(-1, keepdim=True).clamp(min=_SMALLEST)
    return scores - (scores * weights).sum(-1, keepdim=True) / total
