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

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.least_squares import Options, Point, minimize
from keyhole.core.numerics import least_squares
from keyhole.extract.blocks.units import Units, derivative, with_ones
from keyhole.oracle.block import ACTIVATIONS

_OPTIONS = Options(max_steps=60, damping=1e-6, least=1e-13, most=1e3)
# Squares of residuals, relative to those of the answers.
_EXACT = 1e-31
_ROUNDED = 1e-24


class Inputs(Protocol):
    """The inputs u (n, e) of the units, what is added to the answers, and the extra features Z."""

    @property
    def u(self) -> Tensor: ...

    @property
    def added(self) -> Tensor | float: ...

    @property
    def extra(self) -> Tensor: ...

    @property
    def unknowns(self) -> int:
        """How many numbers the inputs depend on, p."""
        ...

    def jacobian(self, units: Units) -> Tensor | None:
        """Return that of the answers (n, m, p) by these numbers."""
        ...

    def moved(self, step: Tensor) -> Self: ...


@dataclass(frozen=True)
class Known:
    """Inputs that depend on nothing unknown."""

    u: Tensor
    extra: Tensor
    added: float = 0.0
    unknowns: int = 0

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
    rows = [units.A, units.a[:, None]]
    if len(units.G):
        rows += [units.G, units.g[:, None]]
    own = torch.cat(rows, 1)
    columns = [part.shape[1] for part in rows]
    start = torch.cat([own.flatten(), own.new_zeros(inputs.unknowns)])

    def at(x: Tensor) -> _Eliminated[AnyInputs]:
        parts = x[0, : own.numel()].view_as(own).split(columns, 1)
        A, a, G, g = parts if len(units.G) else (*parts, units.G, units.g[:, None])
        placed = replace(units, A=A, a=a[:, 0], G=G, g=g[:, 0])
        return _Eliminated(x, placed, inputs.moved(x[0, own.numel() :]), y)

    size = float(y.square().sum())
    options = replace(_OPTIONS, target=_EXACT * size, floor=_ROUNDED * size)
    x, loss = minimize(lambda x, _: at(x), start[None], options)
    end = at(x)
    rest = end.linear[len(units.A) :]
    return end.units, end.inputs, rest, (float(loss) / size) ** 0.5


def expect_fitted(left: float, most: float = 1e-6) -> None:
    """Raise Unsuccessful if a fit has left a relative error above `most`."""
    if left > most:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"no feed-forward layer explains the answers to single tokens: {left:.1e} is left",
        )


class _Eliminated(Point, Generic[AnyInputs]):
    """The answers' residuals at some θ, with the c_k and Λ that explain them best."""

    def __init__(self, x: Tensor, units: Units, inputs: AnyInputs, y: Tensor) -> None:
        self.inputs = inputs
        self._units = units
        self._features = torch.cat([units.features(inputs.u), inputs.extra], 1)
        self._wanted = y - inputs.added
        self._Q = torch.linalg.qr(self._features)[0]
        super().__init__(x, -self._across(self._wanted)[None])

    def _across(self, columns: Tensor) -> Tensor:
        """Return what the features do not explain."""
        return columns - self._Q @ (self._Q.mT @ columns)

    @cached_property
    def linear(self) -> Tensor:
        """The c_k above Λ."""
        return least_squares(self._features, self._wanted)

    @property
    def units(self) -> Units:
        C = self.linear[: len(self._units.A)].mT
        return replace(self._units, C=C.contiguous())

    @cached_property
    def _equations(self) -> tuple[Tensor, Tensor]:
        """JᵀJ and Jᵀr."""
        units = self.units
        u = self.inputs.u
        residuals = self.residuals.view_as(self._wanted)
        z = u @ units.A.mT + units.a
        affine = with_ones(u)[:, None]
        parts = derivative(units.activation, 1)(z)[:, :, None] * affine
        if len(units.G):
            gates = u @ units.G.mT + units.g
            inside = ACTIVATIONS[units.activation](z)
            by_gates = inside[:, :, None] * affine
            parts = torch.cat([parts * gates[..., None], by_gates], 2)
        D = self._across(parts.flatten(1))
        C = units.C.mT
        inner = (D.mT @ D).view(*parts.shape[1:], *parts.shape[1:])
        normal = (inner * (C @ C.mT)[:, None, :, None]).view(D.shape[1], -1)
        D = D.view_as(parts)
        slope = torch.einsum("nks,nk->ks", D, residuals @ C.mT).flatten()
        J = self.inputs.jacobian(units)
        if J is None:
            return normal[None], slope[None]
        J = self._across(J.flatten(1)).view_as(J)
        beside = [D[:, k].mT @ torch.einsum("m,nmp->np", c, J) for k, c in enumerate(C)]
        across = torch.cat(beside)
        J = J.flatten(0, 1)
        top = torch.cat([normal, across], 1)
        bottom = torch.cat([across.mT, J.mT @ J], 1)
        slope = torch.cat([slope, J.mT @ residuals.flatten()])
        return torch.cat([top, bottom])[None], slope[None]

    @cached_property
    def normal(self) -> Tensor:
        return self._equations[0]

    def backward(self, r: Tensor) -> Tensor:
        del r  # those at this point
        return self._equations[1]
