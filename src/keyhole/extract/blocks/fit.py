"""All numbers of a feed-forward layer at once, from a start near by, by variable projection.

Answers `y_n = Z_n·Λ + Σ_k c_k f_k(u_n; θ_k)` are linear in the c_k and in what stands beside the
units, so these are eliminated (Golub and Pereyra 1973; the approximation of Kaufman 1975). With f_k
a number and y a vector the Jacobian of unit k is c_k ⊗ D_k, D_k = ∂f_k/∂θ_k without what the f_l
and Z explain, and the matrix of the normal equations for θ is

    (c_k·c_l)·D_kᵀD_l,

the Gram matrix of all D_k, which is the same for every number of an answer, times numbers. Squared
condition costs no digits: residuals are exact, and steps are repeated.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keyhole.core.numerics import LinAlgError, least_squares
from keyhole.extract.blocks.units import Units, derivative
from keyhole.oracle.block import ACTIVATIONS

_STEPS = 40
_EXACT = 1e-31  # of the squares of the answers


def values(units: Units, u: Tensor) -> Tensor:
    """f_k(u_n), (n, width)."""
    inside = ACTIVATIONS[units.activation](u @ units.A.mT + units.a)
    return inside * (u @ units.G.mT + units.g) if len(units.G) else inside


def fit(units: Units, u: Tensor, beside: Tensor, y: Tensor) -> tuple[Units, Tensor, float]:
    """Units that explain answers (n, m) at inputs (n, d) beside features (n, z), with their Λ.

    Also what is left: the root of the mean square, relative to the answers.
    """
    size = float(y.square().sum())

    def look(units: Units) -> tuple[Tensor, Tensor, float]:
        features = torch.cat([values(units, u), beside], 1)
        linear = least_squares(features, y)
        rest = y - features @ linear
        return linear, rest, float(rest.square().sum()) / size

    linear, rest, cost = look(units)
    damping, best = 1e-6, cost
    for _ in range(_STEPS):
        square, slope = _normal(units, linear, rest, u, beside)
        scale = square.diagonal().clamp(min=1e-12 * float(square.diagonal().max()))
        while True:
            step = _solved(square, damping * scale, slope)
            tried = _moved(units, step)
            found = look(tried)
            if found[2] < cost or damping > 1e3:
                break
            damping *= 10
        if not found[2] < cost:
            break
        units, (linear, rest, cost), damping = tried, found, max(damping / 30, 1e-13)
        if cost < _EXACT or (best < 1e-24 and cost > 0.25 * best):
            break
        best = cost
    width = len(units.A)
    return replace(units, C=linear[:width].mT.contiguous()), linear[width:], cost**0.5


def _normal(
    units: Units, linear: Tensor, rest: Tensor, u: Tensor, beside: Tensor
) -> tuple[Tensor, Tensor]:
    affine = torch.cat([u, torch.ones_like(u[:, :1])], 1)
    z = u @ units.A.mT + units.a
    slopes = derivative(units.activation, 1)(z)
    parts = slopes[:, :, None] * affine[:, None]
    if len(units.G):
        gates = u @ units.G.mT + units.g
        inside = ACTIVATIONS[units.activation](z)
        parts = torch.cat([parts * gates[..., None], inside[:, :, None] * affine[:, None]], 2)
    n, width, size = parts.shape
    D = parts.flatten(1)
    Q = torch.linalg.qr(torch.cat([values(units, u), beside], 1))[0]
    D = D - Q @ (Q.mT @ D)
    C = linear[:width]
    square = (D.mT @ D).view(width, size, width, size) * (C @ C.mT)[:, None, :, None]
    slope = torch.einsum("nks,nk->ks", D.view(n, width, size), rest @ C.mT)
    return square.view(width * size, -1), slope.flatten()


def _solved(square: Tensor, ridge: Tensor, slope: Tensor) -> Tensor:
    try:
        lower = torch.linalg.cholesky(square + ridge.diag())
    except LinAlgError:
        return torch.full_like(slope, torch.nan)
    return torch.cholesky_solve(slope[:, None], lower)[:, 0]


def _moved(units: Units, step: Tensor) -> Units:
    width, d = units.A.shape
    step = step.view(width, -1)
    moved = replace(units, A=units.A + step[:, :d], a=units.a + step[:, d])
    if not len(units.G):
        return moved
    G, g = units.G + step[:, d + 1 : 2 * d + 1], units.g + step[:, -1]
    length = torch.cat([G, g[:, None]], 1).norm(dim=1)
    return replace(moved, G=G / length[:, None], g=g / length)
