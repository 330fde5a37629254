"""All numbers of a feed-forward layer at once, from a start near by, by variable projection.

Answers `y_n = Z_n·Λ + Σ_k c_k f_k(u_n; θ_k)` are linear in the c_k and in Λ, so these
are eliminated (Golub and Pereyra 1973; the approximation of Kaufman 1975). Since f_k is
a number and y a vector, the Jacobian of unit k is c_k ⊗ D_k, where D_k is ∂f_k/∂θ_k
without what the f_l and Z explain. The normal equations for θ have the matrix

    (c_k·c_l)·D_kᵀD_l,

the Gram matrix of all D_k, which is the same for every number of an answer, times the
products of the c_k. Squaring the condition number costs no digits: residuals are exact,
and steps are repeated.

If the inputs u depend on unknown numbers as well, their Jacobian is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import LinAlgError, least_squares
from keyhole.extract.blocks.units import Units, derivative, with_ones
from keyhole.oracle.block import ACTIVATIONS

_STEPS = 40
_EXACT = 1e-31  # residuals, relative to the squares of the answers


class Inputs(Protocol):
    """The inputs u (n, e) of the units, what is added to the answers, and the extra features Z."""

    @property
    def u(self) -> Tensor: ...

    @property
    def added(self) -> Tensor | float: ...

    @property
    def extra(self) -> Tensor: ...

    def jacobian(self, units: Units) -> Tensor | None:
        """Return that of the answers (n, m, p) by the p numbers that the inputs depend on."""
        ...

    def moved(self, step: Tensor) -> Self: ...


@dataclass(frozen=True)
class Known:
    """Inputs that depend on nothing unknown."""

    u: Tensor
    extra: Tensor
    added: float = 0.0

    def jacobian(self, units: Units) -> None:
        del units

    def moved(self, step: Tensor) -> Self:
        del step
        return self


AnyInputs = TypeVar("AnyInputs", bound=Inputs)


def fit(
    units: Units,
    inputs: AnyInputs,
    y: Tensor,
) -> tuple[Units, AnyInputs, Tensor, float]:
    """Return the units and inputs that explain the answers (n, m), Λ, and the relative error."""
    size = float(y.square().sum())

    def look(units: Units, inputs: AnyInputs) -> tuple[Tensor, Tensor, float]:
        wanted = y - inputs.added
        features = torch.cat([units.features(inputs.u), inputs.extra], 1)
        if not bool(torch.isfinite(features).all() & torch.isfinite(wanted).all()):
            return features, wanted, math.inf
        linear = least_squares(features, wanted)
        rest = wanted - features @ linear
        return linear, rest, float(rest.square().sum()) / size

    width = len(units.A)
    linear, rest, cost = look(units, inputs)
    damping = 1e-6
    best = cost
    for _ in range(_STEPS):
        units = replace(units, C=linear[:width].mT)
        square, slope = _normal(units, inputs, rest)
        scale = square.diagonal().clamp(min=1e-12 * float(square.diagonal().max()))
        while True:
            step = _solved(square, damping * scale, slope)
            tried = _moved(units, step), inputs.moved(step)
            found = look(*tried)
            if found[2] < cost or damping > 1e3:
                break
            damping *= 10
        if not found[2] < cost:
            break
        (units, inputs) = tried
        (linear, rest, cost) = found
        damping = max(damping / 30, 1e-13)
        if cost < _EXACT or (best < 1e-24 and cost > 0.25 * best):
            break
        best = cost
    units = replace(units, C=linear[:width].mT.contiguous())
    return units, inputs, linear[width:], cost**0.5


def expect_fitted(left: float, most: float = 1e-6) -> None:
    """Raise Unsuccessful if a fit has left a relative error above `most`."""
    if left > most:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"no feed-forward layer explains the answers to single tokens: {left:.1e} is left",
        )


def _normal(
    units: Units,
    inputs: Inputs,
    rest: Tensor,
) -> tuple[Tensor, Tensor]:
    u = inputs.u
    z = u @ units.A.mT + units.a
    parts = derivative(units.activation, 1)(z)[:, :, None] * with_ones(u)[:, None]
    if len(units.G):
        gates = u @ units.G.mT + units.g
        inside = ACTIVATIONS[units.activation](z)
        parts = torch.cat(
            [parts * gates[..., None], inside[:, :, None] * with_ones(u)[:, None]], 2
        )
    n, width, size = parts.shape
    Q = torch.linalg.qr(torch.cat([units.features(u), inputs.extra], 1))[0]
    D = parts.flatten(1)
    D = D - Q @ (Q.mT @ D)
    C = units.C.mT
    square = (D.mT @ D).view(width, size, width, size) * (C @ C.mT)[:, None, :, None]
    square = square.view(width * size, -1)
    D = D.view(n, width, size)
    slope = torch.einsum("nks,nk->ks", D, rest @ C.mT).flatten()
    J = inputs.jacobian(units)
    if J is None:
        return square, slope
    flat = J.flatten(1)
    J = (flat - Q @ (Q.mT @ flat)).view_as(J)
    across = torch.cat(
        [D[:, k].mT @ torch.einsum("m,nmp->np", C[k], J) for k in range(width)]
    )
    J = J.flatten(0, 1)
    top = torch.cat([square, across], 1)
    bottom = torch.cat([across.mT, J.mT @ J], 1)
    return torch.cat([top, bottom]), torch.cat([slope, J.mT @ rest.flatten()])


def _solved(
    square: Tensor,
    ridge: Tensor,
    slope: Tensor,
) -> Tensor:
    try:
        lower = torch.linalg.cholesky(square + ridge.diag())
    except LinAlgError:
        return torch.full_like(slope, torch.nan)
    return torch.cholesky_solve(slope[:, None], lower)[:, 0]


def _moved(units: Units, step: Tensor) -> Units:
    width, d = units.A.shape
    size = (d + 1) * (2 if len(units.G) else 1)
    step = step[: width * size].view(width, size)
    moved = replace(units, A=units.A + step[:, :d], a=units.a + step[:, d])
    if not len(units.G):
        return moved
    G = units.G + step[:, d + 1 : 2 * d + 1]
    g = units.g + step[:, -1]
    length = torch.cat([G, g[:, None]], 1).norm(dim=1)
    return replace(moved, G=G / length[:, None], g=g / length)
