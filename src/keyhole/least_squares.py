"""Least squares that gives the same digits every time.

An attack whose questions follow from a solve must ask the same ones when it is run again, or a
ledger pays twice. The default driver of `torch.linalg.lstsq` returns other last digits from call to
call. A QR factorisation does not, and is all that most systems need; those near rank deficiency
go to a driver that is as steady but ten times slower, and stops the program on NaN.
"""

from __future__ import annotations

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
    return torch.linalg.lstsq(A, B, rcond=rcond, driver="gelsd").solution
