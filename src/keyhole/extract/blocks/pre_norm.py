"""A block with norms in front of its parts: everything but the heads (ours).

    y = h + F(N(h)),    h = x + N(x)M + b        (single tokens; M = Σ_h V_h O_h)

If x is long, N(h) = N(x), and y − x is a feed-forward layer on a sphere plus a linear map: its
units follow from curvature (curvature.py), or kinks (kinks.py). Shorter and shorter tokens show M
and b, which turn N(h) away from N(x), and all numbers, both ε included, are fitted together
(fit.py). Wide blocks are read by wide_pre_norm.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from keyhole.core.numerics import least_squares
from keyhole.extract.blocks import kinks, wide_pre_norm
from keyhole.extract.blocks.curvature import Field, find_units
from keyhole.extract.blocks.fit import Known, expect_fitted, fit
from keyhole.extract.blocks.heads import attempted
from keyhole.extract.blocks.peeled import Network, Peeled
from keyhole.extract.blocks.units import Units, with_ones
from keyhole.extract.blocks.view import FAR, View, not_a_block
from keyhole.extract.gauss_newton import levenberg

_LONG, _LONGER = 2.0**16, 2.0**24  # lengths of tokens relative to √d; the second for scores
_MORE = 1.5  # answers for each unknown of a fit
_SHORTER = (256.0, 16.0, 4.0)  # lengths of tokens while M is sought
LENGTHS = (16.0, 4.0, 1.0, 0.25)  # lengths of tokens in the fit of all numbers
_STEPS = 12  # of Gauss–Newton, at most
_SETTLED = 1e-6
_ATTEMPTS = 3
_TINY = 1e-7  # a change of ε, to differentiate by it


def read(view: View, device: torch.device, stream: torch.Generator) -> Peeled:
    """Return everything but the heads, which are then read through it."""
    if view.wide and not view.scores:
        return wide_pre_norm.read(view, device, stream)

    def start() -> tuple[Units, _Shifted]:
        return _rough(view, *far_units(view, stream), stream)

    units, inputs = attempted(start, _ATTEMPTS)
    x = tokens_of_lengths(view, units, LENGTHS, stream)
    units, inputs, linear, left = fit(units, replace(inputs, x=x), view.ask(x))
    expect_fitted(left)
    network = Network(view, units, linear[0], view.residual, inputs.behind)
    return Peeled(view, network, inputs.M, inputs.b, inputs.epsilon)


def tokens_of_lengths(
    view: View, units: Units, lengths: Sequence[float], stream: torch.Generator, more: float = _MORE
) -> Tensor:
    """Draw tokens of several lengths, as many as a fit of the units needs."""
    count = math.ceil(_count(view, units, more) / len(lengths)) + 8
    return torch.cat([view.tokens(count, length, stream) for length in lengths])


def _count(view: View, units: Units, more: float = _MORE) -> int:
    """Return how many answers a fit of the units and of a linear map needs."""
    width, e = units.A.shape
    numbers = width * (e + 1) * (2 if len(units.G) else 1) + width * view.numbers
    return math.ceil(more * (numbers + (e + 1) * view.dim) / view.numbers) + 16


def far_units(view: View, stream: torch.Generator) -> tuple[Units, Tensor]:
    """Return the units, and Λ above κ, of long tokens: y − x = u·Λ + C·f(u) + κ with u = N(x)."""
    d, e = view.axes.shape

    def far(xi: Tensor, length: float = FAR) -> Tensor:
        x = length * xi @ view.axes.mT
        return view.ask(x) - x @ view.residual

    nearer = partial(far, length=_LONG)
    if not view.scores and kinks.straight_on_sphere(nearer, e, math.sqrt(d), stream):
        units, _ = kinks.find_relu_units_on_sphere(nearer, e, math.sqrt(d), stream)
    else:
        units = find_units(Field(far, e, sphere=True, numbers=view.numbers), stream)
        shrink = math.sqrt(d / e)
        units = replace(units, A=units.A / shrink, G=units.G / shrink)
    x = view.tokens(_count(view, units), _LONGER if view.scores else _LONG, stream)
    u = view.normed(x, 0.0)
    units, _, linear, left = fit(units, Known(u, with_ones(u)), view.ask(x) - x @ view.residual)
    expect_fitted(left, 1e-3)
    return units, linear


@dataclass(frozen=True)
class _Shifted:
    """Inputs u = N(h) with h = x + N(x)M + b, where M, b and both ε are unknown."""

    view: View
    x: Tensor
    M: Tensor
    b: Tensor
    epsilon: float = 0.0
    behind: float = 0.0

    @property
    def h(self) -> Tensor:
        return self.x + self.view.normed(self.x, self.epsilon) @ self.M + self.b

    @property
    def u(self) -> Tensor:
        return self.view.normed(self.h, self.behind)

    @property
    def added(self) -> Tensor:
        return self.h @ self.view.residual

    @property
    def extra(self) -> Tensor:
        return torch.ones(len(self.x), 1, dtype=torch.float64)

    def jacobian(self, units: Units) -> Tensor:
        view, h = self.view, self.h
        outer = view.residual.mT + view.slopes(units.C @ units.slopes(self.u), h, self.behind)
        t = view.normed(self.x, self.epsilon)
        of_M = torch.einsum("ne,nmj->nmej", t, outer).flatten(2)
        front = (view.normed(self.x, self.epsilon + _TINY) - t) / _TINY @ self.M
        behind = units.features(view.normed(h, self.behind + _TINY)) - units.features(self.u)
        of_both = torch.stack([(outer @ front[..., None])[..., 0], behind @ units.C.mT / _TINY], 2)
        return torch.cat([of_M, outer, of_both], 2)

    def moved(self, step: Tensor) -> _Shifted:
        e, d = self.M.shape
        step = step[-(e + 1) * d - 2 :]
        return replace(
            self, M=self.M + step[: e * d].view(e, d), b=self.b + step[e * d : -2],
            epsilon=max(0.0, self.epsilon + float(step[-2])),
            behind=max(0.0, self.behind + float(step[-1])),
        )  # fmt: skip


def _rough(
    view: View, units: Units, linear: Tensor, stream: torch.Generator
) -> tuple[Units, _Shifted]:
    """Return M, b and units of the right signs, from shorter and shorter tokens."""
    d, e = view.axes.shape
    # With gates Λ is M; without, φ(z) and φ(−z) differ by a linear part.
    M, b = torch.zeros(e, d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    if len(units.G) and not view.scores:
        M = linear[:-1]
    for length in _SHORTER:
        M, b = _attention_sum(view, units, linear, (M, b), length, stream)
    flips = units.flips(linear[:-1] - M @ view.residual)
    if flips is None:
        raise not_a_block()
    return units.flipped(flips), _Shifted(view, torch.empty(0, d), M, b)


def _attention_sum(
    view: View, units: Units, linear: Tensor, start: tuple[Tensor, Tensor], length: float,
    stream: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return M and b from tokens of one length, by Gauss–Newton, with the units' signs unknown.

    With h = x + tM + b, t = N(x) and u = N(h), y = hR + u(Λ − MR) + C·f(u) + κ − bR.
    """
    M, b = start
    e, d = M.shape
    R = view.residual
    x = view.tokens(math.ceil(_MORE * (e + 1) * d / view.numbers) + 8, length, stream)
    y, t = view.ask(x), view.normed(x, 0.0)

    def look(both: Tensor) -> tuple[Tensor, Tensor]:
        M, b = both[: e * d].view(e, d), both[e * d :]
        h = x + t @ M + b
        u = view.normed(h, 0.0)
        left = linear[:-1] - M @ R
        miss = (h - b) @ R + u @ left + units.features(u) @ units.C.mT + linear[-1] - y
        outer = view.slopes(units.C @ units.slopes(u) + left.mT, h, 0.0)
        of_M = torch.einsum("ne,nmj->nmej", t, outer + R.mT)
        of_M = of_M - torch.einsum("ne,mj->nmej", u, R.mT)
        return miss.flatten(), torch.cat([of_M.flatten(2), outer], 2).flatten(0, 1)

    both = torch.cat([M.flatten(), b])
    if view.scores:  # at M = 0 one number shows too little of M for whole steps
        both = levenberg(look, both)[0]
    else:
        for _ in range(_STEPS):
            miss, J = look(both)
            step = least_squares(J, miss[:, None])[:, 0]
            both = both - step
            if float(step.abs().max()) <= _SETTLED:
                break
    return both[: e * d].view(e, d), both[e * d :]
