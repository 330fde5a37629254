"""The ReLU units of a block, with biases, from its kinks.

**Without norms**: relu_network.py in one dimension more. One number of a block's answer
to a single token is `f(x) = ℓ·x + e + Σ_k w_k ReLU(a_k·x + α_k)`. Since ReLU(z) = (|z|
+ z)/2, it is

    f(x) = E(x, 1) + L·(x, 1),    E(x, t) = ½ Σ_k w_k |a_k·x + α_k t|,

and `t·f(x/t) = E(x, t) + L·(x, t)` for t > 0. E is even, which extends this to t < 0
once L is known: a network without biases, of d + 1 inputs. Beyond all kinks,

    f(λx) − f(−λx) = 2λ·L_x·x + …,    f(λx) + f(−λx) = λ·… + 2 L_t,

so two λ give L: 4d queries for d directions.

**Behind a norm** x is on a sphere. On a great circle `x(θ) = r(p cos θ + q sin θ)` the
answer is `A cos θ + B sin θ + C` between kinks, and at a kink of unit k it changes by

    D(θ) = ±c_k (a_k·x(θ) + α_k),        D'(θ*) = c_k |a_k·x'(θ*)|:

which gives the direction of c_k, which tells units apart, a_k in the plane of p and q,
and α_k. For w orthogonal to both, the slope along w changes by `±c_k a_k·w`: the rest
of a_k, from 4(d − 2) queries next to the kink. This is exact, since a slope is an odd
part, B sin h.

**Between two norms** (post_norm.py) answers `y = e + R/s` have lost the length s of R
as well. Between kinks R(θ) = (cos θ, sin θ, 1)·P, so four consecutive answers are in
three dimensions:

    e         the point in which the spaces e + span P meet, which the answers of each arc show
    s_j       of an arc's answers j, up to one factor: Σ_j q_j s_j (y_j − e) = 0 for every q that is
              orthogonal to cos θ_j, sin θ_j and 1. Then P
    factors   of two arcs, since R is continuous. Outside the span of P the next P' has rank one,
              c_k ⊗ (a_k·p, a_k·q, α_k/r), which is 0 at the kink: P and P' agree there
    slopes    along w are known up to a multiple of R on each side: two more unknowns for each w

Whether units explain the answers at other points is found in the same way as the s_j,
with the features of the units, n and 1 in place of cos, sin and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Unsuccessful, not_applicable
from keyhole.core.float64 import identity, normal, tensor
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.bilinear import random_orthogonal, random_units
from keyhole.extract.blocks.units import Units, with_ones
from keyhole.extract.relu_network import ReluNetwork
from keyhole.oracle.planted import ReluFfn

_BEYOND = 2.0**18
_RESOLUTION = 1e-9  # L_t has lost digits, since it is read from long tokens
_STEP = 1e-3
_POINTS = 15
_ANGLE = 2e-3
_SAMPLES = 64  # of a great circle, for each dimension
_CIRCLES = 40  # at most
_EXPLAINED = 2e-5  # relative error of answers at which all units have been found
_NEARLY = 1e-2  # the same, if rows are inexact: after
_IDLE = 3  # circles in a row without a new unit
_ARC = 6  # samples that an arc without kinks must have to be used
_ENOUGH = 48  # samples of an arc that are used if lengths are sought
_LONGEST = 12  # arcs of a circle that are used for the centre
_SHOWN = 1e-7
_CLEARER = 1.3
_RANK_ONE = 1e-3
_SAME = 1e-3  # of cosines


def straight(
    value: Callable[[Tensor], Tensor],
    d: int,
    stream: torch.Generator,
) -> bool:
    """Return whether answers are linear in short steps from nearly all random points."""
    x = normal(stream, _POINTS, d)
    step = _STEP * random_units(_POINTS, d, stream)
    before, at, after = value(torch.cat([x - step, x, x + step])).chunk(3)
    bend = (before + after - 2 * at).abs().amax(1) / (after - before).abs().amax(1)
    return float(bend.median()) < 1e-9


def straight_on_sphere(
    value: Callable[[Tensor], Tensor],
    d: int,
    radius: float,
    stream: torch.Generator,
    lost: bool = False,
) -> bool:
    """Return the same on great circles: whether answers consist of 1, cos and sin of the angle.

    If answers have `lost` their length: whether four consecutive ones are in three
    dimensions.
    """
    p, q = (random_orthogonal(d, stream)[:_POINTS] for _ in range(2))
    q = normalize(q - (p * q).sum(1, keepdim=True) * p, dim=1)
    steps = _ANGLE * torch.arange(4, dtype=torch.float64)[:, None, None]
    y = value((radius * (steps.cos() * p + steps.sin() * q)).flatten(0, 1)).unflatten(
        0, (4, -1)
    )
    bend = _bend(y, _ANGLE, lost) / y.abs().amax((0, 2))
    return float(bend.median()) < (1e-12 if lost else 3e-10)


def _bend(
    y: Tensor,
    angle: float,
    lost: bool,
) -> Tensor:
    """Return what is left of samples (4, n, m) by a filter that removes 1, cos and sin: (n)."""
    if lost:
        return torch.linalg.svdvals(y.transpose(0, 1))[:, -1]
    turn = 2 * math.cos(angle) + 1
    return (y[3] - turn * y[2] + turn * y[1] - y[0]).abs().amax(1)


def _lengths(features: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Return s (n) such that s·y, y (n, m) of length 1, is linear in features (n, f); the error."""
    across = torch.linalg.qr(features, mode="complete")[0][:, features.shape[1] :]
    system = (across.mT[:, None] * y.mT).flatten(0, 1)
    sizes, right = thin_svd(system)[1:]
    return right[-1] * right[-1].sum().sign(), float(sizes[-1])


def find_relu_units(
    value: Callable[[Tensor], Tensor],
    d: int,
    seed: int,
    stream: torch.Generator,
) -> Units:
    """Return the units, with rows and biases only: C is left to a fit."""
    one = _Homogeneous(value, d, stream)
    network: ReluFfn | None = None
    for step in ReluNetwork(seed=seed, resolution=_RESOLUTION).steps(one):
        if isinstance(step.model, ReluFfn):
            network = step.model
    if network is None or not len(network.A):
        raise _no_kinks()
    rows = network.A * network.w.abs()[:, None]
    # A pair of opposite rows is a linear part.
    likeness = normalize(rows, dim=1) @ normalize(rows, dim=1).mT
    return _units(rows[(likeness > -1 + 1e-9).all(1)])


def _units(rows: Tensor) -> Units:
    """Return units of rows (a_k, α_k), which may have any length."""
    d = rows.shape[1] - 1
    rows = rows / rows[:, :d].norm(dim=1, keepdim=True)
    return Units.plain(rows[:, :d], rows[:, d], rows.new_zeros(d, len(rows)), "relu")


class _Homogeneous:
    """`E(x, t) + L·(x, t)` of one number of the answers, as an oracle of one token (x, t)."""

    def __init__(
        self,
        value: Callable[[Tensor], Tensor],
        d: int,
        stream: torch.Generator,
    ) -> None:
        self._value = value
        self.dim = d + 1
        self._mixture = normal(stream, d)
        frame = random_orthogonal(d, stream)
        far = _BEYOND * torch.cat([frame, -frame])
        near, further = (self._scores(length * far).chunk(2) for length in (1, 2))
        odd = (further[0] - further[1]) - (near[0] - near[1])
        self._linear = frame.mT @ odd / (2 * _BEYOND)
        self._constant = (
            float((2 * (near[0] + near[1]) - (further[0] + further[1])).median()) / 2
        )

    def _scores(self, x: Tensor) -> Tensor:
        return self._value(x) @ self._mixture

    def __call__(self, sequences: Tensor) -> Tensor:
        x = sequences[:, -1, :-1]
        t = sequences[:, -1, -1]
        size = t.abs().clamp(min=1e-12)
        sign = torch.where(t < 0, -1.0, 1.0).double()
        scores = size * self._scores(sign[:, None] * x / size[:, None])
        linear = sign * (x @ self._linear) + size * self._constant
        return torch.where(t < 0, scores - 2 * linear, scores)


@dataclass(frozen=True)
class _Kink:
    """θ*, the distance to other kinks, c_k (m), ±(a_k·p, a_k·q, α_k).

    `beside` is R on both sides, at half that distance.
    """

    theta: float
    clear: float
    c: Tensor
    numbers: Tensor
    beside: Tensor


@dataclass(frozen=True)
class _Circle:
    """A great circle through unit vectors p and q (d), its samples (n, m), and where it has kinks.

    `free` (n) says whether there is no kink between a sample and the three after it. If
    samples have `lost` their length, they have length 1 once a centre is subtracted.
    """

    value: Callable[[Tensor], Tensor]
    p: Tensor
    q: Tensor
    radius: float
    y: Tensor
    free: Tensor
    lost: bool

    @classmethod
    def drawn(
        cls,
        value: Callable[[Tensor], Tensor],
        d: int,
        radius: float,
        lost: bool,
        stream: torch.Generator,
    ) -> _Circle:
        p, q = random_orthogonal(d, stream)[:2]
        count = _SAMPLES * d
        theta = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
        y = value(radius * (theta.cos()[:, None] * p + theta.sin()[:, None] * q))
        rows = torch.stack([y.roll(-step, 0) for step in range(4)])
        bend = _bend(rows, 2 * math.pi / count, lost)
        return cls(value, p, q, radius, y, bend <= 30 * bend.median(), lost)

    def at(self, theta: Tensor) -> Tensor:
        return self.radius * (
            theta.cos()[:, None] * self.p + theta.sin()[:, None] * self.q
        )

    def arcs(self) -> list[tuple[int, int]]:
        """Return first and last samples between kinks, in order; the last may exceed the end."""
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

    def kinks(self, centre: Tensor) -> list[_Kink]:
        step = 2 * math.pi / len(self.y)
        found = list[_Kink]()
        arcs = self.arcs()
        if len(arcs) < 2:
            return found
        for before, after in zip(arcs, [*arcs[1:], *arcs[:1]], strict=True):
            first = after[0] + (len(self.y) if after[0] < before[0] else 0)
            if first - before[1] > 3:  # more than one kink is between them
                continue
            middle = step * (first + before[1]) / 2
            left, right = (
                self._waves(one, two, middle, centre) for one, two in (before, after)
            )
            if self.lost:
                right = right * _factor(left, right)
            change = right - left  # (3, m): of cos, sin and 1 of θ − middle
            U, sizes, V = thin_svd(change)
            if not float(sizes[1]) <= _RANK_ONE * float(sizes[0]):
                continue
            c = V[0]
            (a, b, constant) = (sizes[0] * U[:, 0]).tolist()
            t = _root(a, b, constant)
            if not abs(t) <= 3 * step:
                continue
            sign = 1.0 if b * math.cos(t) - a * math.sin(t) > 0 else -1.0
            cos = math.cos(middle)
            sin = math.sin(middle)
            numbers = sign * tensor(
                [a * cos - b * sin, a * sin + b * cos, constant * self.radius]
            )
            clear = step * min(before[1] - before[0], after[1] - after[0])
            beside = torch.stack(
                [_wave(t - clear / 2) @ left, _wave(t + clear / 2) @ right]
            )
            found.append(_Kink(middle + t, clear, sign * c, numbers, beside))
        return found

    def _waves(
        self,
        first: int,
        last: int,
        middle: float,
        centre: Tensor,
    ) -> Tensor:
        """Return A, B, C (3, m) of an arc, θ relative to `middle`; up to a factor, if `lost`."""
        at = torch.arange(
            first, last + 1, 1 + (last - first) // _ENOUGH if self.lost else 1
        )
        turn = 2 * math.pi / len(self.y) * at.double() - middle
        turn = torch.remainder(turn + math.pi, 2 * math.pi) - math.pi
        waves = torch.stack([turn.cos(), turn.sin(), torch.ones_like(turn)], 1)
        y = self.y[at % len(self.y)] - centre
        if self.lost:
            y = normalize(y, dim=1)
            y = _lengths(waves, y)[0][:, None] * y
        return least_squares(waves, y)

    def row(self, kink: _Kink, centre: Tensor) -> Tensor | None:
        """Return ±(a_k, α_k) from slopes on both sides of a kink; None if other kinks are close."""
        plane = torch.stack([self.p, self.q])
        w = torch.linalg.svd(plane)[2][2:]  # (d − 2, d)
        aside = kink.clear / 2
        h = aside / (64 if self.lost else 16)
        theta = tensor([kink.theta - aside, kink.theta + aside])
        moves = math.sin(h) * self.radius * torch.cat([w, -w])
        y = self.value((math.cos(h) * self.at(theta)[:, None] + moves).flatten(0, 1))
        y = y.unflatten(0, (2, -1))
        known = kink.c[None]
        if self.lost:
            sizes = torch.linalg.vector_norm(kink.beside, dim=1)
            y = sizes[:, None, None] * normalize(y - centre, dim=2)
            known = torch.cat([known, kink.beside])
        forth, back = y.unflatten(1, (2, -1)).unbind(1)
        slopes = (forth - back) / (2 * math.sin(h))
        change = slopes[1] - slopes[0]  # (d − 2, m)
        shares = least_squares(known.mT, change.mT)
        if (change - shares.mT @ known).norm() > 0.01 * float(shares[0].norm()):
            return None
        row = kink.numbers[:2] @ plane + shares[0] @ w
        return torch.cat([row, kink.numbers[2:]])


def _wave(t: float) -> Tensor:
    return tensor([math.cos(t), math.sin(t), 1.0])


def _root(
    a: float,
    b: float,
    constant: float,
) -> float:
    """Return the t next to 0 with a cos t + b sin t + constant = 0, or NaN."""
    size = math.hypot(a, b)
    if not size > abs(constant):
        return math.nan
    phase = math.atan2(b, a)
    half = math.acos(-constant / size)
    return min(
        (math.remainder(phase + sign * half, 2 * math.pi) for sign in (1, -1)), key=abs
    )


def _factor(left: Tensor, right: Tensor) -> float:
    """Return the factor for the waves (3, m) after a kink that makes R continuous there."""
    Q = torch.linalg.qr(left.mT)[0]
    t = _root(*torch.linalg.svd(right - right @ Q @ Q.mT)[0][:, 0].tolist())
    if math.isnan(t):
        return t
    before = _wave(t) @ left
    after = _wave(t) @ right
    return float(before @ after / (after @ after))


def _meeting(circles: list[_Circle]) -> Tensor:
    """Return the centre (m) of all arcs; parts of it that they do not show are 0."""
    systems = list[Tensor]()
    wanted = list[Tensor]()
    for circle in circles:
        arcs = sorted(circle.arcs(), key=lambda arc: arc[0] - arc[1])
        for first, last in arcs[:_LONGEST]:
            y = circle.y[torch.arange(first, last + 1) % len(circle.y)]
            span = thin_svd(y - y.mean(0))[2][:3]
            systems.append(identity(y.shape[1]) - span.mT @ span)
            wanted.append(systems[-1] @ y.mean(0))
    if not systems:
        raise _no_kinks()
    return torch.linalg.pinv(torch.cat(systems), rtol=_SHOWN) @ torch.cat(wanted)


def _no_kinks() -> Unsuccessful:
    return not_applicable("the answers have no kinks")


def find_relu_units_on_sphere(
    value: Callable[[Tensor], Tensor],
    d: int,
    radius: float,
    stream: torch.Generator,
    lost: bool = False,
) -> tuple[Units, Tensor]:
    """Return the units, from answers (n, m) at points (n, d) of one length; and the centre (m).

    Circles are drawn until the units explain the answers at other points. A unit is
    measured again at a kink that is farther from others. The centre is 0 unless answers
    have lost their length.
    """
    rows = list[Tensor]()
    kinks = list[_Kink]()
    idle = 0
    points = radius * random_units(d, d, stream)
    answers = value(points)
    centre = torch.zeros_like(answers[0])
    ahead = list[_Circle]()
    if lost:
        ahead = [_Circle.drawn(value, d, radius, lost, stream) for _ in range(2)]
        centre = _meeting(ahead)
    for _ in range(_CIRCLES):
        circle = ahead.pop() if ahead else _Circle.drawn(value, d, radius, lost, stream)
        had = len(rows)
        for kink in sorted(circle.kinks(centre), key=lambda kink: -kink.clear):
            likes = (float(kink.c @ other.c) > 1 - _SAME for other in kinks)
            known = next((k for k, like in enumerate(likes) if like), len(rows))
            if known < len(rows) and kink.clear < _CLEARER * kinks[known].clear:
                continue
            row = circle.row(kink, centre)
            if row is not None:
                rows[known : known + 1] = [row]
                kinks[known : known + 1] = [kink]
        if not rows:
            raise _no_kinks()
        units = _units(torch.stack(rows))
        if more := max(0, 2 * (len(rows) + d + 1) - len(points)):
            fresh = radius * random_units(more, d, stream)
            points = torch.cat([points, fresh])
            answers = torch.cat([answers, value(fresh)])
        features = torch.cat([units.features(points), with_ones(points)], 1)
        made = answers
        if lost:
            made = normalize(answers - centre, dim=1)
            made = _lengths(features, made)[0][:, None] * made
        linear = least_squares(features, made)
        share = float((made - features @ linear).norm() / made.norm())
        idle = idle + 1 if len(rows) == had else 0
        if share <= _EXPLAINED or (idle >= _IDLE and share <= _NEARLY):
            return replace(units, C=linear[: len(rows)].mT.contiguous()), centre
    raise not_applicable(
        f"{len(rows)} units were found by their kinks on {_CIRCLES} circles, and these do not "
        "explain the answers"
    )
