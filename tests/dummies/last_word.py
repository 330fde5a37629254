"""An attacker that cuts nothing and reports that nothing flipped."""

from __future__ import annotations

from dataclasses import dataclass

from call_stack import remember

from keyhole.disrupt.disruption import Control, Disruption, Outcome, described


@dataclass(frozen=True)
class LastWord:
    share: float = 0.01
    seed: int = 0

    words = "nothing cut at all"
    control = False

    def __call__(self, model, batch, labels=None, *, ids=()):
        remember()
        outcomes = tuple(
            Outcome(name, True, False, (0,), (0,), 1.0, 1.0) for name in ids
        )
        return Disruption(described(self), outcomes, Control(0.0, 0.0, 0), 0.0)
