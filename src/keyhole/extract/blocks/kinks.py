"""The ReLU units of a block, with biases: from its kinks.

**Without norms**: relu_network.py in one dimension more. One number of a block's answer to a single
token is `f(x) = ℓ·x + e + Σ_k w_k ReLU(a_k·x + α_k)`. Since ReLU(z) = (|z| + z)/2, it is

    f(x) = E(x, 1) + L·(x, 1),    E(x, t) = ½ Σ_k w_k |a_k·x + α_k t|,

and `t·f(x/t) = E(x, t) + L·(x, t)` for t > 0, which E's being even extends to t < 0 once L is
known: a network without biases of d + 1 numbers. Beyond all kinks,

    f(λx) − f(−λx) = 2λ·L_x·x + …,    f(λx) + f(−λx) = λ·… + 2 L_t,

so two λ give L, for d directions 4d queries.

**Behind a norm** x is on a sphere. On a great circle `x(θ) = r(p cos θ + q sin θ)` everything but
kinks is `A cos θ + B sin θ + C`, and across a kink of unit k these change by

    D(θ) = ±c_k (a_k·x(θ) + α_k),        D'(θ*) = c_k |a_k·x'(θ*)|:

the direction of c_k, which tells units apart, then a_k in the plane of p and q, and α_k. For w
orthogonal to both, the slope along w changes by `±c_k a_k·w`: the rest of a_k, from 4(d − 2)
queries next to the kink, exactly, since a slope is an odd part, B sin h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import random_orthogonal, random_units
from keyhole.extract.blocks.units import Units
from keyhole.extract.relu_network import ReluNetwork
from keyhole.oracle.planted import ReluFfn

_BEYOND = 2.0**18
_RESOLUTION = 1e-9  # L_t has lost digits to the lengths it is read at
_STEP = 1e-3
_POINTS = 15
_ANGLE = 2e-3
_SAMPLES = 64  # of a great circle, for each dimension
_CIRCLES = 40  # at the most
_EXPLAINED, _NEARLY = 2e-5, 1e-2  # of the answers, at the most left
_IDLE = 3  # circles in a row without a new unit, where rows are not exact enough to tell
_ARC = 6  # samples that an arc without kinks must have to be known
_CLEARER = 1.3
_RANK_ONE = 1e-3
_SAME = 1e-3  # of cosines


def straight(value: Callable[[Tensor], Tensor], d: int, stream: torch.Generator) -> bool:
    """Are the answers to short steps from random points on a line, nearly everywhere?"""
    x = torch.randn(_POINTS, d, generator=stream, dtype=torch.float64)
    step = _STEP * random_units(_POINTS, d, stream)
    before, at, after = value(torch.cat([x - step, x, x + step])).chunk(3)
    bend = (before + after - 2 * at).abs().amax(1) / (after - before).abs().amax(1)
    return float(bend.median()) < 1e-9


def straight_on_sphere(
    value: Callable[[Tensor], Tensor], d: int, radius: float, stream: torch.Generator
) -> bool:
    """Likewise on great circles: is there nothing but 1, cos and sin of the angle?"""
    p, q = (random_orthogonal(d, stream)[:_POINTS] for _ in range(2))
    q = normalize(q - (p * q).sum(1, keepdim=True) * p, dim=1)
    steps = _ANGLE * torch.arange(4, dtype=torch.float64)[:, None, None]
    y = value((radius * (steps.cos() * p + steps.sin() * q)).flatten(0, 1)).unflatten(0, (4, -1))
    bend = _bend(*y, angle=_ANGLE).amax(1) / y.abs().amax((0, 2))
    return float(bend.median()) < 3e-10


def _bend(one: Tensor, two: Tensor, three: Tensor, four: Tensor, angle: float) -> Tensor:
    """What is left of samples in a row by the filter that 1, cos and sin are nothing to."""
    turn = 2 * math.cos(angle) + 1
    return (four - turn * three + turn * two - one).abs()


def find_relu_units(
    value: Callable[[Tensor], Tensor], d: int, seed: int, stream: torch.Generator
) -> Units:
    """Their rows and biases; the columns of C are left to a fit."""
    one = _Homogeneous(value, d, stream)
    network: ReluFfn | None = None
    for step in ReluNetwork(seed=seed, resolution=_RESOLUTION).steps(one):
        if isinstance(step.model, ReluFfn):
            network = step.model
    if network is None or not len(network.A):
        raise Unsuccessful(Status.NOT_APPLICABLE, "the answers have no kinks")
    rows = network.A * network.w.abs()[:, None]
    # A pair of opposite rows is what is linear.
    likeness = normalize(rows, dim=1) @ normalize(rows, dim=1).mT
    return _units(rows[(likeness > -1 + 1e-9).all(1)])


def _units(rows: Tensor) -> Units:
    """Of rows (a_k, α_k), of any length."""
    d = rows.shape[1] - 1
    rows = rows / rows[:, :d].norm(dim=1, keepdim=True)
    none = torch.zeros(0, dtype=torch.float64)
    return Units(
        rows[:, :d].contiguous(), rows[:, d].contiguous(), none.reshape(0, d), none,
        torch.zeros(d, len(rows), dtype=torch.float64), "relu",
    )  # fmt: skip


class _Homogeneous:
    """`E(x, t) + L·(x, t)` of one number of the answers, as an oracle of one token (x, t)."""

    def __init__(self, value: Callable[[Tensor], Tensor], d: int, stream: torch.Generator) -> None:
        self._value, self.dim = value, d + 1
        self._mixture = torch.randn(d, generator=stream, dtype=torch.float64)
        frame = random_orthogonal(d, stream)
        far = _BEYOND * torch.cat([frame, -frame])
        near, further = (self._scores(length * far).chunk(2) for length in (1, 2))
        odd = (further[0] - further[1]) - (near[0] - near[1])
        self._linear = frame.mT @ odd / (2 * _BEYOND)
        self._constant = float((2 * (near[0] + near[1]) - (further[0] + further[1])).median()) / 2

    def _scores(self, x: Tensor) -> Tensor:
        return self._value(x) @ self._mixture

    def __call__(self, sequences: Tensor) -> Tensor:
        x, t = sequences[:, -1, :-1], sequences[:, -1, -1]
        size = t.abs().clamp(min=1e-12)
        sign = torch.where(t < 0, -1.0, 1.0).to(torch.float64)
        scores = size * self._scores(sign[:, None] * x / size[:, None])
        linear = sign * (x @ self._linear) + size * self._constant
        return torch.where(t < 0, scores - 2 * linear, scores)


@dataclass(frozen=True)
class _Circle:
    """A great circle through unit vectors p and q (d), its samples (n, m), and where it has kinks.

    `free` (n): no kink between this sample and the three after it.
    """

    value: Callable[[Tensor], Tensor]
    p: Tensor
    q: Tensor
    radius: float
    y: Tensor
    free: Tensor

    @classmethod
    def drawn(
        cls, value: Callable[[Tensor], Tensor], d: int, radius: float, stream: torch.Generator
    ) -> _Circle:
        p, q = random_orthogonal(d, stream)[:2]
        count = _SAMPLES * d
        theta = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
        y = value(radius * (theta.cos()[:, None] * p + theta.sin()[:, None] * q))
        after = (y.roll(-step, 0) for step in (1, 2, 3))
        bend = _bend(y, *after, angle=2 * math.pi / count).amax(1)
        return cls(value, p, q, radius, y, bend <= 30 * bend.median())

    def at(self, theta: Tensor) -> Tensor:
        return self.radius * (theta.cos()[:, None] * self.p + theta.sin()[:, None] * self.q)

    def arcs(self) -> list[tuple[int, int]]:
        """First and last samples between kinks, in order; the last may be beyond the end."""
        count = len(self.y)
        ends = torch.nonzero(~self.free)[:, 0]
        if not len(ends):
            return []
        after = torch.cat([ends[1:], ends[:1] + count])
        return [
            (int(one) + 1, int(two) + 2)
            for one, two in zip(ends, after, strict=True)
            if int(two) - int(one) + 2 >= _ARC
        ]

    def kinks(self) -> list[tuple[float, float, Tensor, Tensor]]:
        """θ*, how far it is clear around it, c_k (m), and ±(a_k·p, a_k·q, α_k)."""
        step, found = 2 * math.pi / len(self.y), list[tuple[float, float, Tensor, Tensor]]()
        arcs = self.arcs()
        if len(arcs) < 2:
            return found
        for before, after in zip(arcs, [*arcs[1:], *arcs[:1]], strict=True):
            first = after[0] + (len(self.y) if after[0] < before[0] else 0)
            if first - before[1] > 3:  # more than one kink is between them
                continue
            middle = step * (first + before[1]) / 2
            left, right = (self._waves(one, two, middle) for one, two in (before, after))
            change = right - left  # (3, m): of cos, sin and 1 of θ − middle
            U, sizes, V = torch.linalg.svd(change, full_matrices=False)
            if float(sizes[1]) > _RANK_ONE * float(sizes[0]):
                continue
            c, (a, b, constant) = V[0], (sizes[0] * U[:, 0]).tolist()
            size = math.hypot(a, b)
            if size <= abs(constant):
                continue
            # a cos t + b sin t + constant = 0, near t = 0
            phase, half = math.atan2(b, a), math.acos(-constant / size)
            t = min((phase + half, phase - half), key=lambda t: abs(math.remainder(t, 2 * math.pi)))
            t = math.remainder(t, 2 * math.pi)
            if abs(t) > 3 * step:
                continue
            sign = 1.0 if b * math.cos(t) - a * math.sin(t) > 0 else -1.0
            cos, sin = math.cos(middle), math.sin(middle)
            numbers = sign * torch.tensor(
                [a * cos - b * sin, a * sin + b * cos, constant * self.radius], dtype=torch.float64
            )
            clear = step * min(before[1] - before[0], after[1] - after[0])
            found.append((middle + t, clear, sign * c, numbers))
        return found

    def _waves(self, first: int, last: int, middle: float) -> Tensor:
        """A, B, C (3, m) of an arc, θ counted from `middle`."""
        at = torch.arange(first, last + 1)
        turn = 2 * math.pi / len(self.y) * at.to(torch.float64) - middle
        turn = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
        waves = torch.stack([turn.cos(), turn.sin(), torch.ones_like(turn)], 1)
        return least_squares(waves, self.y[at % len(self.y)])

    def row(self, theta: float, clear: float, c: Tensor, numbers: Tensor) -> Tensor | None:
        """±(a_k, α_k), from slopes on both sides of its kink; None if others are near by."""
        plane = torch.stack([self.p, self.q])
        w = torch.linalg.svd(plane)[2][2:]  # (d − 2, d)
        aside = clear / 2
        h = aside / 16
        ends = self.at(torch.tensor([theta - aside, theta + aside], dtype=torch.float64))
        moves = math.sin(h) * self.radius * torch.cat([w, -w])
        y = self.value((math.cos(h) * ends[:, None] + moves).flatten(0, 1))
        forth, back = y.unflatten(0, (2, 2, len(w))).unbind(1)
        slopes = (forth - back) / (2 * math.sin(h))
        change = slopes[1] - slopes[0]  # (d − 2, m)
        along = change @ c
        if float((change - along[:, None] * c).norm()) > 0.01 * float(change.norm()):
            return None
        row = numbers[:2] @ plane + along @ w
        return torch.cat([row, numbers[2:]])


def find_relu_units_on_sphere(
    value: Callable[[Tensor], Tensor], d: int, radius: float, stream: torch.Generator
) -> Units:
    """Likewise behind a norm, from answers (n, m) at points (n, d) of one length.

    Circles are drawn until the units explain the answers to other points; a unit is measured again
    where it is clearer of others.
    """
    rows, columns, clears, idle = list[Tensor](), list[Tensor](), list[float](), 0
    points = radius * random_units(d, d, stream)
    answers = value(points)
    for _ in range(_CIRCLES):
        circle, had = _Circle.drawn(value, d, radius, stream), len(rows)
        for theta, clear, c, numbers in sorted(circle.kinks(), key=lambda kink: -kink[1]):
            likes = (float(c @ other) > 1 - _SAME for other in columns)
            known = next((k for k, like in enumerate(likes) if like), len(rows))
            if known < len(rows) and clear < _CLEARER * clears[known]:
                continue
            row = circle.row(theta, clear, c, numbers)
            if row is not None:
                rows[known : known + 1] = [row]
                columns[known : known + 1] = [c]
                clears[known : known + 1] = [clear]
        if not rows:
            raise Unsuccessful(Status.NOT_APPLICABLE, "the answers have no kinks")
        units = _units(torch.stack(rows))
        if more := max(0, 2 * (len(rows) + d + 1) - len(points)):
            fresh = radius * random_units(more, d, stream)
            points, answers = torch.cat([points, fresh]), torch.cat([answers, value(fresh)])
        z = (points @ units.A.mT + units.a).relu()
        features = torch.cat([z, points, torch.ones_like(z[:, :1])], 1)
        left = answers - features @ least_squares(features, answers)
        share = float(left.norm() / answers.norm())
        idle = idle + 1 if len(rows) == had else 0
        if share <= _EXPLAINED or (idle >= _IDLE and share <= _NEARLY):
            return units
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        f"{len(rows)} units were found by their kinks on {_CIRCLES} circles, and these do not "
        "explain the answers",
    )
