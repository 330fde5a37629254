"""L-BFGS over a batch of independent problems, one evaluation of all of them a step.

Nocedal's recursion (`two_loops` in core/numerics.py) with a history for each problem. A step that
makes a problem worse is taken back for that problem alone, which goes a quarter of the way next
time; the others go on. So a step always costs one evaluation, and problems can leave the batch
between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core.numerics import Pair, two_loops

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class BatchedLBFGS:
    """Minimise `objective(z) -> (losses (b,), gradients like z)` from z (b, m)."""

    z: Tensor
    first: float  # length of the first step
    history: int = 20
    loss: Tensor = field(init=False)
    _gradient: Tensor = field(init=False)
    _pairs: list[Pair] = field(init=False, default_factory=list)
    _reach: Tensor = field(init=False)
    _started: bool = field(init=False, default=False)

    def step(self, objective: Objective) -> None:
        """One evaluation; `z` and `loss` are the best so far of each problem."""
        if not self._started:
            self.loss, self._gradient = objective(self.z)
            self._reach = torch.ones_like(self.loss)
            self._started = True
            return
        move = -two_loops(self._gradient, self._pairs, self._scale()) * self._reach[:, None]
        loss, gradient = objective(self.z + move)
        better = (loss < self.loss) & loss.isfinite()
        self._remember(move, gradient - self._gradient, loss.isfinite())
        self._reach = torch.where(better, 1.0, self._reach * 0.25)
        self.z = torch.where(better[:, None], self.z + move, self.z)
        self._gradient = torch.where(better[:, None], gradient, self._gradient)
        self.loss = torch.where(better, loss, self.loss)

    def keep(self, chosen: Tensor) -> None:
        """Let the problems leave that are not `chosen` (b,)."""
        self.z = self.z[chosen]
        if self._started:
            self.loss, self._gradient = self.loss[chosen], self._gradient[chosen]
            self._reach = self._reach[chosen]
            self._pairs = [(s[chosen], y[chosen], r[chosen]) for s, y, r in self._pairs]

    def _remember(self, move: Tensor, change: Tensor, usable: Tensor) -> None:
        curvature = (move * change).sum(-1)
        usable = usable & (curvature > 1e-10 * change.square().sum(-1))
        inverse = torch.where(usable, 1 / curvature, 0.0)
        kept = usable[:, None]
        pair = (torch.where(kept, move, 0.0), torch.where(kept, change, 0.0), inverse)
        self._pairs = [*self._pairs, pair][-self.history :]

    def _scale(self) -> Tensor:
        """The size of the inverse Hessian along the newest usable pair of each problem."""
        scale = self.first / self._gradient.norm(dim=-1).clamp(min=1e-30)
        for _, y, inverse in self._pairs:
            square = y.square().sum(-1)
            scale = torch.where(inverse > 0, 1 / (inverse * square).clamp(min=1e-30), scale)
        return scale
