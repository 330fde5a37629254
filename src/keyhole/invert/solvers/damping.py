"""Damping that adapts: what Levenberg–Marquardt and Newton–CG do around a proposed step.

A step that lowers the loss is taken and α shrinks; any other is not, and α grows until the start
gives up. The methods differ only in how they find the step for a given α.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import Smooth
from keyhole.invert.solvers.multistart import State

LEAST = 1e-16
_GAVE_UP = 1e12
_NOTHING = 1e-15  # relative to X: a step that rounding swallows


def damped_start(equations: Smooth, X: Tensor, damping: float) -> State:
    r = equations.residuals(X)
    loss = equations.loss_of(r, X)
    memory = {"r": r, "alpha": torch.full_like(loss, damping)}
    return State(X, loss, torch.zeros_like(loss, dtype=torch.bool), memory)


def damped_step(equations: Smooth, state: State, p: Tensor, solved: Tensor | None = None) -> State:
    """Take the step p where it came true; `solved` is False in rows whose system could not be."""
    X, r, alpha = state.X, state.memory["r"], state.memory["alpha"]
    ahead = X + p
    r_ahead = equations.residuals(ahead)
    loss = equations.loss_of(r_ahead, ahead)
    better = loss < state.loss
    better = better if solved is None else better & solved
    wide = better[:, None, None]
    alpha = torch.where(better, (alpha / 5).clamp(min=LEAST), alpha * 3)
    tiny = p.abs().amax((-2, -1)) <= _NOTHING * X.abs().amax((-2, -1))
    return State(
        torch.where(wide, ahead, X),
        torch.where(better, loss, state.loss),
        (alpha > _GAVE_UP) | (tiny & ~better),
        {"r": torch.where(wide, r_ahead, r), "alpha": alpha},
    )
