"""The normals of the hyperplanes where the far field jumps, to the few digits that masks need.

At a crossing all other gates are saturated, so with the cells on both
sides known

    (φ − cell before) / (cell after − cell before) = σ(gᵀδ),

and d answers around it give g. Only the direction and rough length of g are wanted here
(masks.py isolates the head afterwards, and everything is measured again in the near field). The
probes' length is tiny beside |δ*|, so the cells' values at δ* serve for all of them and their
linear maps are never measured: d queries a head instead of 3d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.heads.far_field import (
    FAR,
    Circle,
    Probe,
    Unlucky,
    best_circle,
    saturation_radius,
)

_ISOLATED = 400.0  # radius of a crossing, in saturation radii per gap: other gates at |z| > 5000
_PARALLEL = 0.9995  # cosine above which two normals are one line's
_MIDDLE = 0.18  # a ratio between this and 1 − this lies well inside the transition
_SCOUTS = 6  # directions that set the step before the others are asked


@dataclass(frozen=True)
class Lines:
    """The hyperplanes at one asking token: a head's `W x` is along ±g of one of them.

    `slow` is the slope of the slowest head on the line relative to |g| (several may share it), and
    `scale` the size of the values.
    """

    g: Tensor  # (L, d)
    slow: Tensor  # (L,)
    scale: float

    @classmethod
    def none(cls, dim: int) -> Lines:
        empty = torch.zeros(0, dim, dtype=torch.float64)
        return cls(empty, empty.sum(1), 0.0)

    def scaled(self, factor: float) -> Lines:
        return Lines(factor * self.g, self.slow, self.scale)

    def union(self, other: Lines) -> Lines:
        """Lines of both, parallel ones once."""
        unit = self.g / torch.linalg.vector_norm(self.g, dim=1, keepdim=True)
        others = other.g / torch.linalg.vector_norm(other.g, dim=1, keepdim=True)
        known = ((others @ unit.mT).abs() > _PARALLEL).any(1)
        return Lines(
            torch.cat([self.g, other.g[~known]]),
            torch.cat([self.slow, other.slow[~known]]),
            max(self.scale, other.scale),
        )


def find_lines(probe: Probe, stream: torch.Generator) -> Lines:
    """Every hyperplane that answers of length two show."""
    radius = saturation_radius(probe, stream)
    return Lines.none(len(probe.x)) if radius is None else _lines(probe, radius, stream)


def find_hidden_lines(probe: Probe, stream: torch.Generator) -> Lines:
    """Hyperplanes as a third token shows them, which parts heads that cancel in length two."""
    away = torch.randn(len(probe.x), generator=stream, dtype=torch.float64)
    away = away / torch.linalg.vector_norm(away)
    radius = saturation_radius(Probe(probe.oracle, probe.x, probe.v, away), stream)
    if radius is None:
        return Lines.none(len(probe.x))
    return _lines(probe.hiding(away, FAR * radius), radius, stream)


def _lines(probe: Probe, radius: float, stream: torch.Generator) -> Lines:
    circle = best_circle(probe, FAR * radius, stream)
    if circle is None:
        return Lines.none(len(probe.x))
    rho = _ISOLATED * radius / circle.gaps().clamp(max=0.3)
    theta, slope = _refine(probe, circle, rho)
    slow = _slowest(probe, circle, theta, slope, rho)
    g = _normals(probe, circle, theta, slope, rho, stream)
    if not bool((torch.linalg.vector_norm(g, dim=1) > 0).all()):
        raise Unlucky(Status.MISMATCH, "a jump of the far field has no normal")
    # Where several gates share a line, g stands for the slowest, and that is only a guess.
    return Lines(g * slow.unsqueeze(1), torch.where(slow < 1, 0.7, 1.0).double(), circle.scale)


def _refine(probe: Probe, circle: Circle, rho: Tensor) -> tuple[Tensor, Tensor]:
    """The angle where the ratio is ½ at radius ρ, and dz/dθ there."""

    def ratio(theta: Tensor, rows: Tensor) -> Tensor:
        return circle.ratio(rows, theta, probe(circle.points(theta), rho[rows]))

    def inside(r: Tensor) -> Tensor:
        return (r > _MIDDLE) & (r < 1 - _MIDDLE)

    every = torch.arange(len(rho))
    lo, hi = circle.left.clone(), circle.right.clone()
    r_lo, r_hi = ratio(torch.cat([lo, hi]), every.repeat(2)).chunk(2)
    for _ in range(8):  # ½ must lie between the ends
        rows = ((r_lo > 0.5) == (r_hi > 0.5)).nonzero().squeeze(1)
        if not len(rows):
            break
        width = 2 * (hi - lo)[rows]
        lo[rows], hi[rows] = lo[rows] - width, hi[rows] + width
        ends = ratio(torch.cat([lo[rows], hi[rows]]), rows.repeat(2))
        r_lo[rows], r_hi[rows] = ends.chunk(2)
    for _ in range(60):
        rows = (~(inside(r_lo) & inside(r_hi)) & (hi - lo > 1e-15)).nonzero().squeeze(1)
        if not len(rows):
            break
        mid = (lo + hi)[rows] / 2
        r = ratio(mid, rows)
        high = (r > 0.5) == (r_hi[rows] > 0.5)
        hi[rows[high]], r_hi[rows[high]] = mid[high], r[high]
        lo[rows[~high]], r_lo[rows[~high]] = mid[~high], r[~high]
    slope = (_logit(r_hi) - _logit(r_lo)) / (hi - lo)
    if not bool((inside(r_lo) & inside(r_hi) & (slope != 0)).all()):
        raise Unlucky(Status.MISMATCH, "a jump of the far field has no smooth transition")
    return (lo + hi) / 2 - _logit((r_lo + r_hi) / 2) / slope, slope


def _slowest(probe: Probe, circle: Circle, theta: Tensor, slope: Tensor, rho: Tensor) -> Tensor:
    """The slope of the slowest gate at each crossing relative to the central one: 1 if alone.

    A gate that is not one logistic shows at z = ±4, ±9; its slowest part is where it settles.
    """

    def ratio(rows: Tensor, z: Tensor) -> Tensor:
        t = theta[rows, None] + z / slope[rows, None].abs()
        flat, radii = t.reshape(-1), rho[rows].repeat_interleave(len(z))
        index = rows.repeat_interleave(len(z))
        return circle.ratio(index, flat, probe(circle.points(flat), radii)).view_as(t)

    z = torch.tensor([-9.0, -4.0, 4.0, 9.0], dtype=torch.float64)
    r = ratio(torch.arange(len(theta)), z)
    wanted = z * slope.sign().unsqueeze(1)
    single = ((r > 0) & (r < 1) & ((_logit(r) - wanted).abs() < 0.05 * z.abs())).all(1)
    slow = torch.ones_like(theta)
    rows = (~single).nonzero().squeeze(1)
    if len(rows):
        far = 2.0 ** torch.arange(11, dtype=torch.float64)
        far = torch.cat([-far.flip(0), far])
        r = ratio(rows, far)
        unsettled = torch.minimum(r.abs(), (r - 1).abs()) > 1e-3
        reach = (unsettled * far.abs()).amax(1).clamp(min=1.0)
        slow[rows] = (3.5 / reach).clamp(1e-3, 0.999)
    return slow


def _normals(
    probe: Probe, circle: Circle, theta: Tensor, slope: Tensor, rho: Tensor, stream: torch.Generator
) -> Tensor:
    """g of each crossing, from σ(z* + τgᵀu_i) in d directions.

    A few directions first set the step τ; ratios out of the middle are asked again with τ/6.
    """
    crossings, d = len(theta), len(probe.x)
    U = random_orthogonal(d, stream)
    centre = circle.points(theta)
    r0 = circle.ratio(torch.arange(crossings), theta, probe(centre, rho))
    step = (0.25 / slope.abs()).unsqueeze(1).repeat(1, d)  # in units of ρ
    r = torch.full_like(step, torch.nan)
    for turn in range(12):
        bad = ~((r > 0.05) & (r < 0.95))
        if turn == 1:  # carry over what the first directions say; the good ones are done
            step[bad[:, :_SCOUTS].any(1), _SCOUTS:] /= 6
        if turn:
            step = torch.where(bad & ~r.isnan(), step / 6, step)
        else:
            bad[:, _SCOUTS:] = False
        if not bool(bad.any()):
            break
        line, k = bad.nonzero().unbind(1)
        y = probe(centre[line] + step[line, k, None] * U[k], rho[line])
        r[line, k] = circle.ratio(line, theta[line], y)
    r, r0 = r.nan_to_num(0.5), r0.unsqueeze(1)
    logistic = ((torch.cat([r, r0], 1) - 0.5).abs() < 0.499).all(1, keepdim=True)
    z = torch.where(logistic, _logit(r) - _logit(r0), 4 * (r - r0))
    return z / (step * rho.unsqueeze(1)) @ U


def _logit(r: Tensor) -> Tensor:
    return torch.logit(r.nan_to_num(0.5), eps=1e-6)
