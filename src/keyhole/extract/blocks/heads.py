"""The heads of a block that answers with scores, `s = w·h + C·f(N(h)) + c` (block.py).

If the last token λx is so long that N(h) is nearly N(x), what follows attention is
linear in h up to 1/λ². With one other token, t as its norm leaves it, the score is

    w·Σ_h σ(κ_h·(t − t_x))·(t − t_x)M_h,      κ_h = W_h t_x + c_h,  t_x = N(λx),

up to numbers that do not depend on t. This is a feed-forward layer with gates: its
units are the heads, its activation is σ, and curvature.py finds κ_h and M_h·w. The norm
leaves any t shorter than √d. Since σ(−z) = 1 − σ(z), the signs of the units are free; a
sum of some of the M_h·w, which is left as a linear part, shows them. κ_h is linear in
t_x, so W_h and c_h follow by least squares, first from x near by, then from all x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Unsuccessful, not_applicable
from keyhole.core.float64 import normal, zeros
from keyhole.core.numerics import LinAlgError
from keyhole.extract.bilinear import max_abs
from keyhole.extract.blocks.curvature import Field, find_units
from keyhole.extract.blocks.fit import Known, fit
from keyhole.extract.blocks.units import subset_sum, with_ones
from keyhole.extract.gauss_newton import refined
from keyhole.oracle.planted import BiasedHeads

T = TypeVar("T")
_SHARE = 0.6  # of the radius: the length of points at which curvature is measured
_WIDEST = 0.9  # of the radius: the largest length of other tokens
_ATTEMPTS = 3
_MORE = 1.5  # answers for each unknown
_AROUND = (0.4, math.inf)  # how far from the first x others are, relative to its length
_FITTED = 1e-3  # relative error of the first fit: N(h) is not quite N(x)


def read_heads(
    value: Callable[[Tensor, Tensor], Tensor],
    dim: int,
    radius: float,
    stream: torch.Generator,
) -> BiasedHeads:
    """Return the heads, whose tokens are t.

    `value` maps t and t_x (n, dim), |t| < |t_x| = radius, to scores (n, 1), which are 0
    at t = t_x.
    """
    x, model = attempted(lambda: _at_one(value, dim, radius, stream), _ATTEMPTS)
    heads = len(model.v)
    total = model.v.sum(0)
    for around in _AROUND:
        count = math.ceil(_MORE * heads * dim * (dim + 2)) + 16
        moved = normal(stream, count, dim) / math.sqrt(dim)
        near = moved if math.isinf(around) else x / radius + around * moved
        last = radius * normalize(near, dim=1)
        t = _inside(count, dim, radius, stream)
        y = value(t, last)[:, 0] + last @ total
        model = refined(
            model, ["W", "v", "c"], [(torch.stack([t, last], 1), y, torch.ones_like(y))]
        )
    return model


def attempted(start: Callable[[], T], times: int) -> T:
    """Return the first result of `start` that does not fail; each try draws new random numbers."""
    for _ in range(times - 1):
        with suppress(Unsuccessful, LinAlgError):
            return start()
    return start()


def _at_one(
    value: Callable[[Tensor, Tensor], Tensor],
    dim: int,
    radius: float,
    stream: torch.Generator,
) -> tuple[Tensor, BiasedHeads]:
    """Return a random x, and heads that give the right answers at this x only."""
    x = radius * normalize(normal(stream, dim), dim=0)
    scale = _SHARE * radius / math.sqrt(dim)
    field = Field(
        lambda at: value(scale * at, x.expand_as(at)),
        dim,
        sphere=False,
        numbers=1,
        heads=True,
    )
    units = find_units(field, stream)
    heads = len(units.A)
    if not len(units.G):
        raise not_applicable("what another token changes is not attention")
    t = _inside(math.ceil(_MORE * heads * (2 * dim + 3)) + 2 * dim, dim, radius, stream)
    units = replace(units, A=units.A / scale, G=units.G / scale)
    units, _, linear, left = fit(
        units, Known(t, with_ones(t)), value(t, x.expand_as(t))
    )
    keys = units.A
    v = units.G * units.C.mT
    sign = (1 - 2 * subset_sum(v, -linear[:-1, 0]))[:, None]
    keys = sign * keys
    v = sign * v
    off = max_abs(sign[:, 0] * units.a + keys @ x)
    if left > _FITTED or off > 0.1 * (1 + max_abs(units.a)):
        raise not_applicable(
            "what another token changes is not attention without positions"
        )
    W = keys[:, :, None] * x / radius**2
    zero = zeros(1)
    return x, BiasedHeads(W, v.contiguous(), torch.zeros_like(v), zero)


def _inside(
    count: int,
    dim: int,
    radius: float,
    stream: torch.Generator,
) -> Tensor:
    xi = normal(stream, count, dim)
    length = 0.3 + 0.7 * torch.rand(count, 1, generator=stream, dtype=torch.float64)
    return _WIDEST * radius * length * normalize(xi, dim=1)
