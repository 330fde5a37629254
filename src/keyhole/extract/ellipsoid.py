"""A last layer up to a rotation, from the norm in front of it (after arXiv 2606.06854).

*The Geometry of Last-Layer Model Stealing* reads the attack of output_layer.py as geometry: answers
satisfy linear equations, which the singular values show, and one quadratic equation, since the
final norm puts all states on an ellipsoid. With n(x) the normalised state, |n|² = d, G the gain of
the norm and B the basis that was found,

    y = W (G n + β) = B z,    z = c + C n,    (z − c)ᵀ N (z − c) = 1,    N⁻¹ = d·C Cᵀ.

N and c are linear in answers: d(d + 1)/2 unknowns (and d more where answers share a constant), one
equation an answer. Then W G = B C is B·(N⁻¹/d)^½ up to a rotation, and with it the lengths, cosines
and inner products of its rows; the rotation itself is a symmetry of everything before, and no
answer tells it. It applies where the norm's ε is nothing next to a state, the states fill the
ellipsoid (the equations have full rank: the paper's conditions of regularity), and d is small
enough to be asked for: 166,176 answers at d = 576. Answers that were kept apart say whether it is
one. We had the paper's abstract and introduction, not its whole text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.core.machine import expect_memory

KEPT = 16  # answers that the fit does not see
SPARE = 1.25  # equations for each unknown
_REGULAR = 1e-9  # of the largest pivot: where the equations leave nothing open


def equations(dim: int, shifted: bool) -> int:
    """How many answers it takes."""
    return int(SPARE * (dim * (dim + 1) // 2 + shifted * dim)) + 2 * KEPT


def ellipsoid(z: Tensor, width: int, shifted: bool) -> tuple[Tensor, float] | None:
    """(C Cᵀ)^½ from coordinates (n, r) of answers, and how far those kept apart are off |n|² = d.

    None where the equations are not regular, or their solution is no ellipsoid.
    """
    expect_memory(3 * 8 * len(z) * z.shape[1] ** 2 // 2, f"an ellipsoid in {z.shape[1]} dimensions")
    white = torch.linalg.cholesky(torch.linalg.inv(z.mT @ z / len(z)))
    u = z @ white
    rows, columns = torch.triu_indices(u.shape[1], u.shape[1])
    terms = u[:, rows] * u[:, columns] * torch.where(rows == columns, 1.0, 2.0)
    if shifted:
        terms = torch.cat([terms, u], 1)
    fitted, ones = terms[:-KEPT], torch.ones(len(u) - KEPT, 1, dtype=torch.float64)
    Q, R = torch.linalg.qr(fitted)
    pivots = R.diagonal().abs()
    if not float(pivots.min()) > _REGULAR * float(pivots.max()):
        return None
    solution = torch.linalg.solve_triangular(R, Q.mT @ ones, upper=True)[:, 0]
    M = torch.zeros(u.shape[1], u.shape[1], dtype=torch.float64)
    M[rows, columns] = M[columns, rows] = solution[: len(rows)]
    centre = torch.zeros(u.shape[1], dtype=torch.float64)
    if shifted:
        centre = torch.linalg.solve(M, -0.5 * solution[len(rows) :])
    N = white @ M @ white.mT / (1 + centre @ M @ centre)
    axes, sides = torch.linalg.eigh(N)
    if not float(axes[0]) > 0:
        return None
    off = float((terms[-KEPT:] @ solution - 1).abs().max())
    return (sides / (width * axes).sqrt()) @ sides.mT, off
