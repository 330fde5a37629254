"""A solver that stays where it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from call_stack import remember

from keyhole.invert.solvers.multistart import Solver, State


@dataclass(frozen=True)
class StandingStill(Solver):
    def begin(self, equations, X):
        remember()
        losses = equations.residuals(X).flatten(1).square().sum(1)
        return State(X, losses, torch.zeros(len(X), dtype=torch.bool))

    def step(self, equations, state):
        return replace(state, stalled=torch.ones(len(state.X), dtype=torch.bool))
