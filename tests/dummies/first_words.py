"""An attack on hidden states that proposes the vocabulary's first token everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from call_stack import remember

from keyhole.recover.attack import Proposal


@dataclass(frozen=True)
class FirstWords:
    token: int = 0

    def __call__(self, target, leaks):
        remember()
        for number, leak in enumerate(leaks):
            yield number, Proposal([self.token] * leak.length, passes=1)
