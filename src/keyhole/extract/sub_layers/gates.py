"""All logistic gates in a column space: how the heads of a layer are told apart.

Ask `[x_i + τ_i·δ ; x_i]` for N points i and one δ. The two tokens differ by τ_i·δ, so

    y_i − y([x_i]) = Σ_h σ(z_hi)·τ_i·δM_h,    z_hi = τ_i·(x_i Q_h + q_h)(δK_h)ᵀ + κ_hi,

where κ_hi, which does not depend on δ, is what rotary positions add. Divided by τ_i these are the
rows of A·V with A (N×H) of gates and V (H×m) of values. A factorisation A·V is known up to any
invertible H×H matrix only, but with N > H its column space is known, and gates are rare there: z_h
is linear in a few features of the point, `z = Φθ + κ`, p of them if the x_i are from a small
subspace. So the heads are the solutions θ of

    (1 − UUᵀ)·σ(Φθ + κ) = 0,    U an orthonormal basis of the column space,

N − H equations in p unknowns, for which random starts and Levenberg–Marquardt steps are enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 30
ARRIVED = 1e-9  # of a gate's length, outside the column space
_STARTS = 64
_ROUNDS = 48
_TINY = 1e-200
_SAME = 1e-3  # two solutions nearer than this, relative, are one


def column_space(rows: Tensor, heads: int) -> Tensor:
    """An orthonormal basis U (…, N, H) of the columns of A·V."""
    return torch.linalg.svd(rows, full_matrices=False)[0][..., :heads]


def follow_gates(
    U: Tensor, features: Tensor, shift: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Solutions θ (…, S, p) near the starts, and how far outside the column space they end.

    `features` is Φ (N, p), `shift` κ (S, N) or (1, N); U (…, N, H).
    """
    outside = torch.eye(U.shape[-2], dtype=torch.float64) - U @ U.mT

    def look(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates = torch.sigmoid(theta @ features.mT + shift)
        length = torch.linalg.vector_norm(gates, dim=-1, keepdim=True)
        rest = gates @ outside / length
        return gates / length, rest, rest.square().sum(-1)

    theta = starts
    damping = torch.full(theta.shape[:-1], 1e-2, dtype=torch.float64)
    unit, rest, cost = look(theta)
    for _ in range(_STEPS):
        gates = torch.sigmoid(theta @ features.mT + shift)
        slopes = (unit * (1 - gates)).unsqueeze(-1) * features  # of the gate, over its length
        along = (unit.unsqueeze(-1) * slopes).sum(-2, keepdim=True)
        jacobian = outside.unsqueeze(-3) @ slopes - rest.unsqueeze(-1) * along
        # Normal equations: what they lose is made up by the next step, and they are small.
        normal = jacobian.mT @ jacobian
        damped = normal.diagonal(dim1=-2, dim2=-1) * damping.unsqueeze(-1) + _TINY
        wanted = jacobian.mT @ rest.unsqueeze(-1)
        step = torch.linalg.solve_ex(normal + torch.diag_embed(damped), wanted)[0].squeeze(-1)
        step = torch.where(torch.isfinite(step), step, 0.0)
        unit_there, rest_there, cost_there = look(theta - step)
        better = cost_there < cost
        here = better.unsqueeze(-1)
        theta = torch.where(here, theta - step, theta)
        unit, rest = torch.where(here, unit_there, unit), torch.where(here, rest_there, rest)
        cost = torch.where(better, cost_there, cost)
        damping = torch.where(better, damping / 5, damping * 4).clamp(1e-18, 1e12)
    return theta, cost.sqrt()


def find_gates(
    rows: Tensor, features: Tensor, heads: int, stream: torch.Generator
) -> Tensor | None:
    """θ (H, p) of all heads with κ inside the features, or None where not all of them turn up."""
    U = column_space(rows, heads)
    sizes = features.square().mean(0).sqrt()
    none = torch.zeros(1, len(features), dtype=torch.float64)
    solutions = torch.empty(0, features.shape[1], dtype=torch.float64)
    for _ in range(_ROUNDS):
        starts = torch.randn(_STARTS, len(sizes), generator=stream, dtype=torch.float64)
        spread = torch.rand(_STARTS, 1, generator=stream, dtype=torch.float64)
        starts = starts * (0.1 * 40**spread)  # gates between nearly flat and nearly steps
        theta, outside = follow_gates(U, features / sizes, none, starts)
        solutions = distinct(torch.cat([solutions, theta[outside < ARRIVED]]))
        if len(solutions) >= heads:
            break
    return solutions / sizes if len(solutions) == heads else None


def distinct(solutions: Tensor) -> Tensor:
    """Each of the solutions (n, p) once."""
    kept: list[Tensor] = []
    for candidate in solutions:
        if all(float((candidate - other).norm() / other.norm()) > _SAME for other in kept):
            kept.append(candidate)
    return torch.stack(kept) if kept else solutions[:0]
