"""Attention of a block that gives scores, `s = w·h + C·f(N(h)) + c` (block.py), head by head.

A last token λx so long that N(h) is nearly N(x) makes what stands behind attention linear in h, but
for λ⁻²: next to one other token t, as its norm leaves it, the score is

    w·Σ_h σ(κ_h·(t − t_x))·(t − t_x)M_h,      κ_h = W_h t_x + c_h,  t_x = N(λx)

beside numbers that do not depend on t. That is a feed-forward layer whose gated units are the heads
and whose activation is σ: units.py finds κ_h and M_h·w. The norm lets through every t shorter than
√d. σ(−z) = 1 − σ(z) leaves the signs open, and a sum of some of the M_h·w beside the units tells
them. κ_h is linear in t_x: W_h and c_h follow by least squares, from x near by, then from all.
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

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import LinAlgError
from keyhole.extract.blocks.fit import Known, fit
from keyhole.extract.blocks.units import Field, find_units
from keyhole.extract.gauss_newton import refined
from keyhole.oracle.planted import BiasedHeads

T = TypeVar("T")
_SHARE = 0.6  # of the radius, for points around which answers bend
_WIDEST = 0.9  # of the radius, for other tokens
_ATTEMPTS = 3
_MORE = 1.5  # answers for each unknown
_AROUND = (0.4, math.inf)  # how far from the first x others are, next to its length
_FITTED = 1e-3  # of answers: what N(h) is off N(x)
_MOST = 40  # vectors among which some are chosen
_NEIGHBOURS = 16


def read_heads(
    value: Callable[[Tensor, Tensor], Tensor], dim: int, radius: float, stream: torch.Generator
) -> BiasedHeads:
    """`value` takes t and t_x (n, dim), |t| < |t_x| = radius, to scores (n, 1) that are 0 at t_x.

    The tokens of these heads are t.
    """
    x, model = attempted(lambda: _at_one(value, dim, radius, stream), _ATTEMPTS)
    heads, total = len(model.v), model.v.sum(0)
    for around in _AROUND:
        count = math.ceil(_MORE * heads * dim * (dim + 2)) + 16
        moved = torch.randn(count, dim, generator=stream, dtype=torch.float64) / math.sqrt(dim)
        near = moved if math.isinf(around) else x / radius + around * moved
        asking, t = radius * normalize(near, dim=1), _inside(count, dim, radius, stream)
        y = value(t, asking)[:, 0] + asking @ total
        model = refined(
            model, ["W", "v", "c"], [(torch.stack([t, asking], 1), y, torch.ones_like(y))]
        )
    return model


def attempted(start: Callable[[], T], times: int) -> T:
    """The first start that succeeds, each with random numbers of its own."""
    for _ in range(times - 1):
        with suppress(Unsuccessful, LinAlgError):
            return start()
    return start()


def _at_one(
    value: Callable[[Tensor, Tensor], Tensor], dim: int, radius: float, stream: torch.Generator
) -> tuple[Tensor, BiasedHeads]:
    """Heads that answer alike at one x, which comes with them."""
    x = radius * normalize(torch.randn(dim, generator=stream, dtype=torch.float64), dim=0)
    scale = _SHARE * radius / math.sqrt(dim)
    field = Field(
        lambda at: value(scale * at, x.expand_as(at)), dim, sphere=False, numbers=1, heads=True
    )
    units = find_units(field, stream)
    heads = len(units.A)
    if not len(units.G):
        raise Unsuccessful(Status.NOT_APPLICABLE, "what another token changes is not attention")
    t = _inside(math.ceil(_MORE * heads * (2 * dim + 3)) + 2 * dim, dim, radius, stream)
    beside = torch.cat([t, torch.ones_like(t[:, :1])], 1)
    units, _, linear, left = fit(
        replace(units, A=units.A / scale, G=units.G / scale), Known(t, beside),
        value(t, x.expand_as(t)),
    )  # fmt: skip
    keys, v = units.A, units.G * units.C.mT
    sign = (1 - 2 * chosen(v, -linear[:-1, 0]))[:, None]
    keys, v = sign * keys, sign * v
    off = float((sign[:, 0] * units.a + keys @ x).abs().max())
    if left > _FITTED or off > 0.1 * float(1 + units.a.abs().max()):
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            "what another token changes is not attention without positions",
        )
    W = keys[:, :, None] * x / radius**2
    none = torch.zeros(1, dtype=torch.float64)
    return x, BiasedHeads(W, v.contiguous(), torch.zeros_like(v), none)


def _inside(count: int, dim: int, radius: float, stream: torch.Generator) -> Tensor:
    xi = torch.randn(count, dim, generator=stream, dtype=torch.float64)
    length = 0.3 + 0.7 * torch.rand(count, 1, generator=stream, dtype=torch.float64)
    return _WIDEST * radius * length * normalize(xi, dim=1)


def chosen(vectors: Tensor, total: Tensor) -> Tensor:
    """Which of the vectors (n, e) add up to the total (e), 1 or 0: more of them than numbers.

    All sums of either half, sorted along one direction, meet in the middle.
    """
    n = len(vectors)
    if n > _MOST:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"the signs of {n} units do not follow from answers of one number: {_MOST} would do",
        )
    parts = vectors[: n // 2], vectors[n // 2 :]
    halves = [_sums(part) for part in parts]
    stream = torch.Generator().manual_seed(n)
    along = torch.randn(len(total), generator=stream, dtype=torch.float64)
    first, second = (sums @ along for sums in halves)
    order = second.argsort()
    place = torch.searchsorted(second[order], total @ along - first)
    best, pair = torch.inf, (0, 0)
    for shift in range(-_NEIGHBOURS, _NEIGHBOURS):
        other = order[(place + shift).clamp(0, len(order) - 1)]
        off = (halves[0] + halves[1][other] - total).abs().amax(1)
        at = int(off.argmin())
        if float(off[at]) < best:
            best, pair = float(off[at]), (at, int(other[at]))
    bits = [_bits(number, len(part)) for number, part in zip(pair, parts, strict=True)]
    return torch.cat(bits)


def _sums(vectors: Tensor) -> Tensor:
    """Of all subsets (2ⁿ, e), the first vector in every other one."""
    sums = torch.zeros(1, vectors.shape[1], dtype=torch.float64)
    for vector in vectors:
        sums = torch.cat([sums, sums + vector])
    return sums


def _bits(number: int, count: int) -> Tensor:
    return torch.tensor([number >> i & 1 for i in range(count)], dtype=torch.float64)
