"""L-BFGS (Nocedal 1980), batched over independent problems.

The two-loop recursion computes H ∇, where the pairs s = Δx, y = Δ∇, oldest first, build
the estimate H of the inverse Hessian from H₀ = scale·I:

    H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ,   ρ = 1 / sᵀy.

A pair of weight ρ = 0 changes nothing, so a problem can skip a pair that others of its
batch use. Pairs without positive curvature are skipped, so every direction goes downhill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_SHORTEST = 1e-8  # share of a whole step; a shorter one no longer changes the loss

Pair = tuple[Tensor, Tensor, Tensor]  # s (b, m), y (b, m), ρ (b,)
Objective = Callable[[Tensor], tuple[Tensor, Tensor]]  # x to losses (b,) and gradients


def two_loops(
    slope: Tensor,
    pairs: Sequence[Pair],
    scale: Tensor,
) -> Tensor:
    """Return the estimated inverse Hessian times `slope` (b, m); `pairs` are the oldest first."""
    q = slope
    shares: list[Tensor] = []
    for s, y, weight in reversed(pairs):
        shares.append(weight * (s * q).sum(-1))
        q = q - shares[-1][:, None] * y
    q = q * scale[:, None]
    for (s, y, weight), share in zip(pairs, reversed(shares), strict=True):
        q = q + (share - weight * (y * q).sum(-1))[:, None] * s
    return q


@dataclass(frozen=True, eq=False)
class LBFGS:
    """The state of a search: the best x (b, m) so far of each problem, and its pairs.

    A step costs one evaluation of the whole batch; the first is where the search begins. A
    step that makes a problem worse is not taken, and the next one of this problem is a
    quarter as long. Problems can leave the batch between steps.
    """

    x: Tensor
    loss: Tensor
    slope: Tensor
    share: Tensor  # of a whole step that the next one is
    first: float  # length of the first step
    history: int = 20
    pairs: tuple[Pair, ...] = ()

    @classmethod
    def begin(
        cls,
        x: Tensor,
        first: float,
        history: int = 20,
    ) -> LBFGS:
        whole = x.new_ones(len(x))
        return cls(x, torch.inf * whole, torch.zeros_like(x), whole, first, history)

    @property
    def finished(self) -> Tensor:
        return self.share < _SHORTEST

    def step(self, objective: Objective) -> LBFGS:
        direction = two_loops(self.slope, self.pairs, self._scale())
        move = -self.share[:, None] * direction
        ahead = self.x + move
        loss, slope = objective(ahead)
        better = (loss < self.loss) & loss.isfinite()
        pair = _pair(move, slope - self.slope, loss.isfinite())
        return replace(
            self,
            x=torch.where(better[:, None], ahead, self.x),
            loss=torch.where(better, loss, self.loss),
            slope=torch.where(better[:, None], slope, self.slope),
            share=torch.where(better, 1.0, self.share / 4),
            pairs=(*self.pairs, pair)[-self.history :],
        )

    def keep(self, chosen: Tensor) -> LBFGS:
        """Return the search of the problems that are `chosen` (b,)."""
        return replace(
            self,
            x=self.x[chosen],
            loss=self.loss[chosen],
            slope=self.slope[chosen],
            share=self.share[chosen],
            pairs=tuple((s[chosen], y[chosen], r[chosen]) for s, y, r in self.pairs),
        )

    def _scale(self) -> Tensor:
        """Return the size of the inverse Hessian along each problem's newest usable pair."""
        scale = self.first / self.slope.norm(dim=-1).clamp(min=1e-30)
        for _, y, inverse in self.pairs:
            square = y.square().sum(-1)
            along = 1 / (inverse * square).clamp(min=1e-30)
            scale = torch.where(inverse > 0, along, scale)
        return scale


def _pair(
    move: Tensor,
    change: Tensor,
    usable: Tensor,
) -> Pair:
    curvature = (move * change).sum(-1)
    usable = usable & (curvature > 1e-10 * change.square().sum(-1))
    inverse = torch.where(usable, 1 / curvature, 0.0)
    kept = usable[:, None]
    return torch.where(kept, move, 0.0), torch.where(kept, change, 0.0), inverse
