"""Least squares that gives the same digits every time.

An attack whose questions follow from a solve must ask the same ones when it is run again, or a
ledger pays twice. The default driver of `torch.linalg.lstsq` returns other last digits from call to
call. A QR factorisation does not, and is all that most systems need; those near rank deficiency
go to a driver that is as steady but ten times slower, and stops the program on NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Documented under this name, but not listed among the module's exports.
LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
_DEPENDENT = 1e-10


def with_ridge(square: Tensor, share: float) -> Tensor:
    """A Gram matrix with `share` of its mean diagonal added, or 1 if it is zero.

    Where nothing differs from its mean, as in a model whose tokens all have one embedding, the
    matrix is zero, and so is any share of it. With 1 the solution is 0: nothing is explained.
    """
    size = share * square.diagonal().mean()
    return square + torch.where(size == 0, 1.0, size) * torch.eye(len(square)).to(square)


def least_squares(A: Tensor, B: Tensor, rcond: float | None = None) -> Tensor:
    """`X` that minimises `‖AX − B‖`, of least norm; batches are allowed."""
    if not bool(torch.isfinite(A).all() & torch.isfinite(B).all()):
        raise LinAlgError("the answers overflow")
    if rcond is None and A.ndim == 2 and A.shape[0] >= A.shape[1] > 0:
        Q, R = torch.linalg.qr(A)
        pivots = R.diagonal().abs()
        if bool(pivots.min() > _DEPENDENT * pivots.max()):
            return torch.linalg.solve_triangular(R, Q.mT @ B.reshape(len(A), -1), upper=True)
    found = torch.linalg.lstsq(A.to("cpu"), B.to("cpu"), rcond=rcond, driver="gelsd").solution
    return found.to(A.device)  # a driver that GPUs do not have


# The two-loop recursion of L-BFGS (Nocedal 1980), batched over independent problems.
#
#     H ∇ for the inverse Hessian's estimate H that the pairs s = Δx, y = Δ∇ build from H₀ =
# scale·I:     H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ,   ρ = 1 / sᵀy,   oldest pair first.
#
# A pair of weight ρ = 0 changes nothing, so each problem of a batch may leave out pairs of its own.

Pair = tuple[Tensor, Tensor, Tensor]  # s (b, m), y (b, m), ρ (b,)


def two_loops(slope: Tensor, pairs: Sequence[Pair], scale: Tensor) -> Tensor:
    """The inverse Hessian's estimate times the slope (b, m), for `pairs` from oldest to newest."""
    q = slope
    shares: list[Tensor] = []
    for s, y, weight in reversed(pairs):
        shares.append(weight * (s * q).sum(-1))
        q = q - shares[-1][:, None] * y
    q = q * scale[:, None]
    for (s, y, weight), share in zip(pairs, reversed(shares), strict=True):
        q = q + (share - weight * (y * q).sum(-1))[:, None] * s
    return q


Objective = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class BatchedLBFGS:
    """Minimise `objective(z) -> (losses (b,), gradients like z)` from z (b, m).

    Each of a batch of independent problems has its own pairs. A step that makes a problem worse is
    taken back for that problem alone, which goes a quarter of the way next time; the others go on.
    So a step costs one evaluation of all of them, and problems can leave the batch between steps.
    """

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
