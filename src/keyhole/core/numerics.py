"""Least squares with the same digits in every run, and L-BFGS for batches of problems.

An attack whose queries follow from a solve must ask the same ones when it is run again,
or a ledger pays twice. The default driver of `torch.linalg.lstsq` returns different
last digits from call to call. A QR factorisation does not, and is enough for most
systems. Those near rank deficiency go to a driver that is just as deterministic, but
ten times slower, and that crashes on NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Documented under this name, but not listed among the module's exports.
LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
_DEPENDENT = 1e-10


def with_ridge(square: Tensor, share: float = 1e-5) -> Tensor:
    """Return a Gram matrix with `share` of its mean diagonal added to its diagonal.

    If the matrix is zero, 1 is added, so that the solution is 0. That happens if
    nothing differs from its mean, as in a model whose tokens all have the same
    embedding.
    """
    size = share * square.diagonal().mean()
    return square + torch.where(size == 0, 1.0, size) * torch.eye(len(square)).to(
        square
    )


def least_squares(A: Tensor, B: Tensor, rcond: float | None = None) -> Tensor:
    """Return the `X` of least norm that minimises `‖AX − B‖`; batches are allowed."""
    if not bool(torch.isfinite(A).all() & torch.isfinite(B).all()):
        raise LinAlgError("the answers overflow")
    if rcond is None and A.ndim == 2 and A.shape[0] >= A.shape[1] > 0:
        Q, R = torch.linalg.qr(A)
        pivots = R.diagonal().abs()
        if bool(pivots.min() > _DEPENDENT * pivots.max()):
            return torch.linalg.solve_triangular(
                R, Q.mT @ B.reshape(len(A), -1), upper=True
            )
    found = torch.linalg.lstsq(
        A.to("cpu"), B.to("cpu"), rcond=rcond, driver="gelsd"
    ).solution
    return found.to(A.device)  # solved on the CPU because GPUs do not have this driver


# The two-loop recursion of L-BFGS (Nocedal 1980), batched over independent problems.
#
# It computes H ∇, where the pairs s = Δx, y = Δ∇, oldest first, build the estimate H of
# the inverse Hessian from H₀ = scale·I:
#
#     H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ,   ρ = 1 / sᵀy.
#
# A pair of weight ρ = 0 changes nothing, so a problem can skip a pair that others of
# its batch use.

Pair = tuple[Tensor, Tensor, Tensor]  # s (b, m), y (b, m), ρ (b,)


def two_loops(slope: Tensor, pairs: Sequence[Pair], scale: Tensor) -> Tensor:
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


Objective = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class BatchedLBFGS:
    """Minimise `objective(z) -> (losses (b,), gradients like z)` from z (b, m).

    The problems of a batch are independent, and each has its own pairs. A step costs
    one evaluation of the whole batch. If it makes a problem worse, it is undone for
    that problem, whose next step goes a quarter of the way. Problems can leave the
    batch between steps.
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
        """Evaluate once; afterwards `z` and `loss` are the best so far for each problem."""
        if not self._started:
            self.loss, self._gradient = objective(self.z)
            self._reach = torch.ones_like(self.loss)
            self._started = True
            return
        move = (
            -two_loops(self._gradient, self._pairs, self._scale())
            * self._reach[:, None]
        )
        loss, gradient = objective(self.z + move)
        better = (loss < self.loss) & loss.isfinite()
        self._remember(move, gradient - self._gradient, loss.isfinite())
        self._reach = torch.where(better, 1.0, self._reach * 0.25)
        self.z = torch.where(better[:, None], self.z + move, self.z)
        self._gradient = torch.where(better[:, None], gradient, self._gradient)
        self.loss = torch.where(better, loss, self.loss)

    def keep(self, chosen: Tensor) -> None:
        """Keep only the problems that are `chosen` (b,)."""
        self.z = self.z[chosen]
        if self._started:
            self.loss = self.loss[chosen]
            self._gradient = self._gradient[chosen]
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
        """Return the size of the inverse Hessian along each problem's newest usable pair."""
        scale = self.first / self._gradient.norm(dim=-1).clamp(min=1e-30)
        for _, y, inverse in self._pairs:
            square = y.square().sum(-1)
            scale = torch.where(
                inverse > 0, 1 / (inverse * square).clamp(min=1e-30), scale
            )
        return scale
