"""Plain training with twice the loss."""

from __future__ import annotations

from dataclasses import dataclass

from call_stack import remember

from keyhole.harden.defences.defence import answer, cross_entropy, draw


@dataclass(frozen=True)
class DoubledLoss:
    factor: float = 2.0

    def losses(self, model, batch, labels, stream):
        remember()
        yield self.factor * cross_entropy(answer(model, batch, draw(stream)), labels)
