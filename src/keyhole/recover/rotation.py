"""Vectors that were rotated, or sent through a linear map, before they were stored: undone.

A secret orthogonal R keeps every distance, so a search works on f R as on f, and an encoder's owner
may hope that R hides the texts. Whoever knows m texts whose stored vectors he can tell has pairs
X R = Y of m vectors each. With U S Wᵀ the singular value decomposition of XᵀY, the orthogonal
matrix that comes nearest is U Wᵀ (Schönemann, 1966). It is unique only on what the pairs span: with
r of the singular values above rounding, the r numbers y W_r are f U_r, exactly, for every other
vector as well, and of the rest of f nothing but the length is known. So m pairs give m numbers of
every stored vector, as if it had been cut to m dimensions; a text can be judged by those alone.

A general linear map A keeps nothing that is not in the span of the known vectors: Y = X A has one
solution from m = d pairs on, Y⁺ X then undoes it, and less than that gives the nearest map of
smallest norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import InputError

_ROUNDING = 1e-11  # of the largest singular value of XᵀY, a product of two float32 matrices


@dataclass(frozen=True, eq=False)
class Alignment:
    """Directions (d, r) of stored vectors y and of those behind them, f: y `stored` = f `own`."""

    stored: Tensor
    own: Tensor

    def numbers(self, vectors: Tensor) -> Tensor:
        """What is known (b, r) of the vectors behind stored ones (b, d)."""
        return vectors.to(self.stored) @ self.stored

    def undo(self, vectors: Tensor) -> Tensor:
        """The vectors (b, d) behind stored ones, 0 in the directions that nobody knows."""
        return self.numbers(vectors) @ self.own.T


def undo_rotation(known: Tensor, stored: Tensor) -> Alignment:
    """What m pairs (m, d) of vectors tell of a rotation between them."""
    _expect_pairs(known, stored)
    u, s, wt = torch.linalg.svd(known.double().T @ stored.double())
    rank = int((s > _ROUNDING * s[0]).sum())
    return Alignment(wt[:rank].T, u[:, :rank])


def undo_linear(known: Tensor, stored: Tensor) -> Tensor:
    """The matrix (d, d) that stored vectors are multiplied by to undo a linear map."""
    _expect_pairs(known, stored)
    return torch.linalg.lstsq(stored.double(), known.double(), driver="gelsd").solution


def _expect_pairs(known: Tensor, stored: Tensor) -> None:
    if known.shape != stored.shape or known.ndim != 2 or not len(known):
        raise InputError(
            f"expected as many known vectors as stored ones, of the same width, "
            f"got {tuple(known.shape)} and {tuple(stored.shape)}"
        )
    if not bool((known.isfinite() & stored.isfinite()).all()):
        raise InputError("expected finite vectors, got infinity or NaN")
