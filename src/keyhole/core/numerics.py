"""Linear least squares with the same digits in every run.

An attack whose queries follow from a solve must ask the same ones when it is run again,
or a ledger pays twice. The default driver of `torch.linalg.lstsq` returns different
last digits from call to call. A QR factorisation does not, and is enough for most
systems. Those near rank deficiency go to a driver that is just as deterministic, but
ten times slower, and that crashes on NaN.
"""

from __future__ import annotations

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


def least_squares(
    A: Tensor,
    B: Tensor,
    rcond: float | None = None,
) -> Tensor:
    """Return the `X` of least norm that minimises `‖AX − B‖`; batches are allowed."""
    if not (torch.isfinite(A).all() & torch.isfinite(B).all()):
        raise LinAlgError("the answers overflow")
    if rcond is None and A.ndim == 2 and A.shape[0] >= A.shape[1] > 0:
        Q, R = torch.linalg.qr(A)
        pivots = R.diagonal().abs()
        if pivots.min() > _DEPENDENT * pivots.max():
            return torch.linalg.solve_triangular(
                R, Q.mT @ B.reshape(len(A), -1), upper=True
            )
    found = torch.linalg.lstsq(
        A.to("cpu"), B.to("cpu"), rcond=rcond, driver="gelsd"
    ).solution
    return found.to(A.device)  # solved on the CPU because GPUs do not have this driver


def thin_svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, the singular values and Vᵀ, without vectors beyond the smaller side."""
    return torch.linalg.svd(matrices, full_matrices=False)
