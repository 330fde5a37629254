"""Least squares that gives the same digits every time.

An attack whose questions follow from a solve must ask the same ones when it is run again, or a
ledger pays twice. The default driver of `torch.linalg.lstsq` returns other last digits from call to
call; the one used here does not, but stops the program on NaN, which an oracle may well cause.
"""

from __future__ import annotations

import torch
from torch import Tensor

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


def least_squares(A: Tensor, B: Tensor, rcond: float | None = None) -> Tensor:
    """`X` that minimises `‖AX − B‖`, of least norm; batches are allowed."""
    if not bool(torch.isfinite(A).all() & torch.isfinite(B).all()):
        raise LinAlgError("the answers overflow")
    return torch.linalg.lstsq(A, B, rcond=rcond, driver="gelsd").solution
