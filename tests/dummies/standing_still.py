"""A solver that stays where it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from call_stack import remember

from keyhole.invert.solvers.multistart import Iterate, Solver


@dataclass(frozen=True)
class StandingStill(Solver):
    def begin(self, equations, X):
        remember()
        losses = equations.residuals(X).flatten(1).square().sum(1)
        return Iterate(X, losses, torch.zeros(len(X), dtype=torch.bool))

    def step(self, equations, state):
        return replace(state, finished=torch.ones(len(state.x), dtype=torch.bool))
