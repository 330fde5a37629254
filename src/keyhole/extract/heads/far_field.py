"""The far field of many heads: linear regions, and the hyperplanes between them.

From answers of f of multi_head.py to `[x+δ ; x]`, for one last token x, this finds the
directions of all `g_h = W_h x`, up to sign (`Lines`). With `v = Σ_h v_h`,

    φ(δ) = f([x+δ ; x]) − vᵀx = Σ_h σ(g_hᵀδ)·v_hᵀδ.

For long δ every gate σ is 0 or 1, so φ is linear on regions and jumps by `v_hᵀδ` where
`g_hᵀδ = 0`. On a half circle `δ(θ) = ρ(a cos θ + b sin θ)` each head has one such
crossing. On one region φ has the form `p cos θ + q sin θ`, so three neighbouring
samples of a region satisfy

    φ(θ_1) sin(θ_3 − θ_2) − φ(θ_2) sin(θ_3 − θ_1) + φ(θ_3) sin(θ_2 − θ_1) = 0.

Intervals that are in no such triple are divided until only crossings are left. At each
of them, the normal g_h is measured (`_Crossings`).

Heads W and −W with equal v cancel in every answer of length two, since σ(z) + σ(−z) =
1. A third token `x + D`, D a thousand times as long as δ, takes all the attention of
heads with `gᵀD > 0` and none of the others', so that one of the two is left and the
same search finds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, mismatch
from keyhole.core.float64 import Stream, arange, normal, tensor, zeros
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import (
    ask_scores,
    lengths,
    max_abs,
    normalized,
    random_orthogonal,
    random_units,
)
from keyhole.oracle.protocol import Oracle

# ρ in saturation radii: transitions from one region to the next are within `_WIDTH`
FAR = 1e10
_WIDTH = 1e-7  # the angle to which crossings are isolated
_MIN_JUMP = 1e-10  # the smallest jump that is found, relative to the largest answer
_BEYOND = 1e3  # |D| / |δ| of the third token
_SAMPLES = 25  # on the half circle, to begin with
_PARTS = 8  # into which an interval with a crossing is divided
_MAX_SAMPLES = 8192  # on a circle: heads do not make more regions than that
_CIRCLES = 4  # that are compared
# least gaps and jumps of a circle that is good enough
_GAP = 3e-3
_JUMP = 0.01


class BadToken(Unsuccessful):
    """The attack fails with this x, but may succeed with another."""


@dataclass(frozen=True)
class Probe:
    """`φ(ρ·point) / ρ` at one last token; `away` is the direction of D, if there is a D."""

    oracle: Oracle
    x: Tensor
    v: Tensor
    away: Tensor | None = None
    drift: float = 0.0  # what the heads that attend to D add, per unit of ρ

    def __call__(self, points: Tensor, rho: Tensor | float) -> Tensor:
        rho = torch.as_tensor(rho, dtype=torch.float64)
        far = rho[..., None]
        tokens = [self.x + far * points]
        if self.away is not None:
            tokens.append(self.x + (_BEYOND * far * self.away).expand_as(points))
        tokens.append(self.x.expand_as(points))
        answers = ask_scores(self.oracle, torch.stack(tokens, 1))
        return (answers - self.v @ self.x) / rho - self.drift


def saturation_radius(probe: Probe, stream: Stream) -> float | None:
    """Return the largest radius where a gate on two random rays is open; None if none ever is.

    A gate is open while σ(z) is not yet 0 or 1. On a ray tu, φ(tu)/t goes from ½vᵀu to
    its limit; at the radius returned, the gate that closes last has |z| about 14.
    """
    u = random_units(2, len(probe.x), stream)
    t = 8.0 ** arange(-12, 18)
    ratio = probe(u.repeat(len(t), 1), t.repeat_interleave(2)).view(-1, 2)  # φ(tu)/t
    scale = max_abs(ratio[t >= 1])
    noise = 1e-13 * (lengths(probe.v) * lengths(probe.x) / t + scale)
    allowed = (1e-6 * scale + 100 * noise)[:, None]
    is_open = ((ratio - ratio[-1]).abs() > allowed).any(1)
    if not is_open.any():
        return None
    last = int(is_open.nonzero().max())
    if last + 2 >= len(t):
        raise mismatch("the answers do not become linear far out")
    return float(t[last])


@dataclass(frozen=True)
class Circle:
    """The crossings on one half circle, each between two angles, and the regions around them."""

    axes: Tensor  # (2, d): a and b
    left: Tensor  # (C,) crossing c lies between left and right
    right: Tensor
    regions: Tensor  # (C+1, 2): p and q of each region
    scale: float  # the largest |φ|/ρ

    def ratio(
        self,
        crossing: Tensor,
        theta: Tensor,
        y: Tensor,
    ) -> Tensor:
        """Return (φ − φ before) / (φ after − φ before): σ(z) if a single head crosses."""
        wave = _wave(theta)
        before = (wave * self.regions[crossing]).sum(-1)
        after = (wave * self.regions[crossing + 1]).sum(-1)
        return (y - before) / (after - before)

    @property
    def middle(self) -> Tensor:
        return (self.left + self.right) / 2

    def gaps(self) -> Tensor:
        """Return the angle from each crossing to the nearest other one, modulo π."""
        mid = self.middle
        around = torch.cat([mid[-1:] - math.pi, mid, mid[:1] + math.pi])
        step = around.diff()
        return torch.minimum(step[1:], step[:-1])

    def quality(self) -> float:
        """Return 1 for a circle that is good enough, and less for others."""
        jumps = (_wave(self.middle) * self.regions.diff(dim=0)).sum(-1).abs()
        gap = float(self.gaps().min())
        return min(gap / _GAP, float((jumps / self.scale).min()) / _JUMP, 1.0)


def _wave(theta: Tensor) -> Tensor:
    """Return (cos θ, sin θ) for each angle."""
    return torch.stack([torch.cos(theta), torch.sin(theta)], -1)


def points(axes: Tensor, theta: Tensor) -> Tensor:
    """Return a cos θ + b sin θ for each angle."""
    a, b = axes
    return torch.cos(theta)[..., None] * a + torch.sin(theta)[..., None] * b


def best_circle(
    probe: Probe,
    rho: float,
    stream: Stream,
) -> Circle | None:
    """Return, of a few circles, one with most crossings, then widest gaps and largest jumps."""
    best: Circle | None = None
    best_merit = (0, 0.0)
    for _ in range(_CIRCLES):
        circle = _search(probe, rho, stream)
        if circle is None:
            continue
        merit = (len(circle.left), circle.quality())
        if merit > best_merit:
            best = circle
            best_merit = merit
        if merit[1] == 1.0:
            break
    return best


def _search(
    probe: Probe,
    rho: float,
    stream: Stream,
) -> Circle | None:
    """Return all crossings on a random half circle; None if there are none or two are too close."""
    axes = torch.linalg.qr(normal(stream, len(probe.x), 2)).Q.mT
    theta = torch.linspace(0.0, math.pi, _SAMPLES, dtype=torch.float64)
    y = probe(points(axes, theta), rho)
    inner = arange(1, _PARTS) / _PARTS
    while True:
        clear = _clear(theta, y, _MIN_JUMP * max_abs(y))
        doubtful = (~clear & (theta.diff() > _WIDTH)).nonzero()[:, 0]
        if not len(doubtful):
            return _assemble(axes, theta, y, clear)
        if len(theta) + (_PARTS - 1) * len(doubtful) > _MAX_SAMPLES:
            raise mismatch("the far field is not linear on a few regions")
        steps = theta.diff()[doubtful, None] * inner
        new = (theta[doubtful, None] + steps).flatten()
        y = torch.cat([y, probe(points(axes, new), rho)])
        theta, order = torch.cat([theta, new]).sort()
        y = y[order]


def _clear(
    theta: Tensor,
    y: Tensor,
    tolerance: float,
) -> Tensor:
    """Return which intervals between samples are in a triple of neighbours in one region.

    Triples of very unequal spacing do not count: they could hide a jump.
    """
    gap = theta.diff()
    first = gap[:-1]
    second = gap[1:]
    even = (first <= 8 * second) & (second <= 8 * first)
    both = torch.sin(first + second)
    residual = y[:-2] * torch.sin(second) - y[1:-1] * both + y[2:] * torch.sin(first)
    explained = (residual.abs() <= tolerance * both) & even
    clear = torch.zeros_like(gap, dtype=torch.bool)
    clear[:-1] |= explained
    clear[1:] |= explained
    return clear


def _assemble(
    axes: Tensor,
    theta: Tensor,
    y: Tensor,
    clear: Tensor,
) -> Circle | None:
    """Join neighbouring clear intervals to regions; what separates two regions is a crossing."""
    edge = torch.zeros(1, dtype=torch.long)
    change = torch.cat([edge, clear.long(), edge]).diff()
    first = (change == 1).nonzero()[:, 0]
    last = (change == -1).nonzero()[:, 0]
    if len(first) < 2 or first[0] != 0 or last[-1] != len(clear):
        return None
    left = theta[last[:-1]]
    right = theta[first[1:]]
    if (theta[last] - theta[first]).min() < 1e-5 or (right - left).max() > 1e-6:
        return None
    samples = torch.stack([first, (first + last) // 2, last], 1)  # three of each region
    regions = least_squares(_wave(theta[samples]), y[samples, None])[..., 0]
    return Circle(axes, left, right, regions, max_abs(y))


# The normals of the hyperplanes where the far field jumps, to the few digits that masks
# need.
#
# At a crossing δ* all other gates are saturated, so if the regions on both sides are
# known,
#
#     (φ − region before) / (region after − region before) = σ(gᵀδ),
#
# and d answers around it give g. Only the direction and rough length of g are needed:
# masks.py then isolates the head, and everything is measured again in the near field.
# The probes differ from δ* by so little that the regions' values at δ* can be used for
# all of them, and the linear maps of the regions are never measured: d queries a head
# instead of 3d.

# ρ at a crossing, times its gap, in saturation radii: others have |z| > 5000
_ISOLATED = 400.0
_PARALLEL = 0.9995  # with a larger cosine, two normals belong to one line
_MIDDLE = 0.18  # a ratio between this and 1 − this is well inside the transition
# about |z| of the slowest gate at the saturation radius: it is from 1 to 14
_OPEN = 4.0
_SCOUTS = 6  # directions that determine the step before the others are measured
_GUESS = 0.7  # the slowest slope that is stated with a g that is only a guess


@dataclass(frozen=True)
class Lines:
    """The hyperplanes at one last token: a head's `W x` has the direction ±g of one of them.

    Several heads may share a line: `slow` is |W x| of the slowest, relative to |g|.
    `scale` is the size of the values.
    """

    g: Tensor  # (L, d)
    slow: Tensor  # (L,)
    scale: float

    @classmethod
    def none(cls, dim: int) -> Lines:
        return cls(zeros(0, dim), zeros(0), 0.0)

    def scaled(self, factor: float) -> Lines:
        return replace(self, g=factor * self.g)

    def union(self, other: Lines) -> Lines:
        """Return the lines of both, parallel ones once."""
        cosines = normalized(other.g) @ normalized(self.g).mT
        new = ~(cosines.abs() > _PARALLEL).any(1)
        return Lines(
            torch.cat([self.g, other.g[new]]),
            torch.cat([self.slow, other.slow[new]]),
            max(self.scale, other.scale),
        )


def find_hidden_lines(probe: Probe, stream: Stream) -> Lines:
    """Return the hyperplanes that a third token shows: it separates heads that cancel otherwise."""
    (away,) = random_units(1, len(probe.x), stream)
    return find_lines(replace(probe, away=away), stream)


def find_lines(probe: Probe, stream: Stream) -> Lines:
    """Return every hyperplane that answers of length two show, or three if the probe has a D."""
    d = len(probe.x)
    radius = saturation_radius(probe, stream)
    if radius is None:
        return Lines.none(d)
    rho = FAR * radius
    if probe.away is not None:
        probe = replace(probe, drift=float(probe(zeros(1, d), rho)))
    if d == 1:  # one line, and nothing but its slope to find
        ends = tensor([[1.0], [-1.0]])
        scale = max_abs(probe(ends, rho))
        slow = torch.full((1,), _GUESS).double()
        return Lines(_OPEN / radius * ends[:1], slow, scale)
    circle = best_circle(probe, rho, stream)
    if circle is None:
        return Lines.none(d)
    isolated = _ISOLATED * radius / circle.gaps().clamp(max=0.3)
    crossings = _Crossings(probe, circle, isolated)
    theta, slope = crossings.half_open()
    slow = crossings.slowest(theta, slope)
    g = crossings.normals(theta, slope, stream)
    if not (lengths(g) > 0).all():
        raise BadToken(Status.MISMATCH, "a jump of the far field has no normal")
    # If several gates share a line, g is that of the slowest, and only a guess.
    stated = torch.where(slow < 1, _GUESS, 1.0).double()
    return Lines(g * slow[:, None], stated, circle.scale)


@dataclass(frozen=True)
class _Crossings:
    """The crossings of a circle, measured at a radius `rho` for each."""

    probe: Probe
    circle: Circle
    rho: Tensor

    def ratio(self, crossing: Tensor, theta: Tensor) -> Tensor:
        """Return the ratios σ(z) of crossings at angles near theirs, in the shape of `theta`."""
        crossing = crossing.expand_as(theta)
        on_circle = points(self.circle.axes, theta)
        y = self.probe(on_circle.flatten(0, -2), self.rho[crossing].flatten())
        return self.circle.ratio(crossing, theta, y.view_as(theta))

    def half_open(self) -> tuple[Tensor, Tensor]:
        """Bisect for the angle where the ratio σ(z) is ½ at radius ρ; return it and dz/dθ there."""

        def inside(ratio: Tensor) -> Tensor:
            """Return where the ratios (2, C) at both ends are well inside the transition."""
            return ((ratio > _MIDDLE) & (ratio < 1 - _MIDDLE)).all(0)

        ends = torch.stack([self.circle.left, self.circle.right])
        ratio = self.ratio(torch.arange(len(self.rho)), ends)
        outwards = tensor([[-1.0], [1.0]])
        for _ in range(8):  # ½ must lie between the ends
            rows = ((ratio[0] > 0.5) == (ratio[1] > 0.5)).nonzero()[:, 0]
            if not len(rows):
                break
            ends[:, rows] += outwards * (2 * ends.diff(dim=0)[0, rows])
            ratio[:, rows] = self.ratio(rows, ends[:, rows])
        for _ in range(60):
            wide = ends.diff(dim=0)[0] > 1e-15
            rows = (~inside(ratio) & wide).nonzero()[:, 0]
            if not len(rows):
                break
            middle = ends[:, rows].sum(0) / 2
            at_middle = self.ratio(rows, middle)
            side = ((at_middle > 0.5) == (ratio[1, rows] > 0.5)).long()
            ends[side, rows] = middle
            ratio[side, rows] = at_middle
        slope = (_logit(ratio).diff(dim=0) / ends.diff(dim=0))[0]
        if not (inside(ratio) & (slope != 0)).all():
            raise BadToken(
                Status.MISMATCH, "a jump of the far field has no smooth transition"
            )
        return ends.sum(0) / 2 - _logit(ratio.sum(0) / 2) / slope, slope

    def slowest(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Return the slope of the slowest gate at each crossing, relative to `slope` at its middle.

        It is 1 if one logistic explains the answers at z = ±4, ±9. If not, several
        gates cross here, and the distance at which the ratio settles gives the slope of
        the slowest.
        """

        def ratio(rows: Tensor, z: Tensor) -> Tensor:
            angles = theta[rows, None] + z / slope[rows, None].abs()
            return self.ratio(rows[:, None], angles)

        z = tensor([-9.0, -4.0, 4.0, 9.0])
        r = ratio(torch.arange(len(theta)), z)
        residual = _logit(r) - z * slope.sign()[:, None]
        is_single = (r > 0) & (r < 1) & (residual.abs() < 0.05 * z.abs())
        slow = torch.ones_like(theta)
        rows = (~is_single.all(1)).nonzero()[:, 0]
        if len(rows):
            far = 2.0 ** arange(0, 11)
            far = torch.cat([-far.flip(0), far])
            r = ratio(rows, far)
            unsettled = torch.minimum(r.abs(), (r - 1).abs()) > 1e-3
            reach = (unsettled * far.abs()).amax(1).clamp(min=1.0)
            slow[rows] = (3.5 / reach).clamp(1e-3, 0.999)
        return slow

    def normals(
        self,
        theta: Tensor,
        slope: Tensor,
        stream: Stream,
    ) -> Tensor:
        """Return g of each crossing δ*, from ratios σ(z* + τgᵀu_i) at δ* + τu_i in d directions.

        A few directions first determine the step τ; ratios far from ½ are measured
        again with τ/6.
        """
        d = len(self.probe.x)
        U = random_orthogonal(d, stream)
        centre = points(self.circle.axes, theta)
        r0 = self.ratio(torch.arange(len(theta)), theta)[:, None]
        step = (0.25 / slope.abs())[:, None].repeat(1, d)  # in units of ρ
        r = torch.full_like(step, torch.nan)
        for attempt in range(12):
            bad = ~((r > 0.05) & (r < 0.95))
            if attempt == 0:
                bad[:, _SCOUTS:] = False  # these are not measured yet
            if attempt == 1:  # the first directions determine the step of the others
                step[bad[:, :_SCOUTS].any(1), _SCOUTS:] /= 6
            if attempt:
                step = torch.where(bad & ~r.isnan(), step / 6, step)
            if not bad.any():
                break
            line, k = bad.nonzero().unbind(1)
            aside = centre[line] + step[line, k, None] * U[k]
            y = self.probe(aside, self.rho[line])
            r[line, k] = self.circle.ratio(line, theta[line], y)
        r = r.nan_to_num(0.5)
        logistic = ((r - 0.5).abs() < 0.499).all(1, keepdim=True)
        logistic &= (r0 - 0.5).abs() < 0.499
        # σ has the slope ¼ at 0.
        z = torch.where(logistic, _logit(r) - _logit(r0), 4 * (r - r0))
        return z / (step * self.rho[:, None]) @ U


def _logit(r: Tensor) -> Tensor:
    return torch.logit(r.nan_to_num(0.5), eps=1e-6)
