"""The far field of many heads: linear cells, and the hyperplanes between them.

Fix the asking token x and put `g_h = W_h x`:

    φ(δ) = f([x+δ ; x]) − vᵀx = Σ_h σ(g_hᵀδ)·v_hᵀδ.

Far out every gate is 0 or 1, so φ is linear on cells and jumps by `v_hᵀδ` across `g_hᵀδ = 0`. On a
half circle `δ(θ) = ρ(a cos θ + b sin θ)` each head crosses once. Three neighbouring samples of one
cell, being of the form `p cos θ + q sin θ`, satisfy

    φ(θ_1) sin(θ_3 − θ_2) − φ(θ_2) sin(θ_3 − θ_1) + φ(θ_3) sin(θ_2 − θ_1) = 0;

intervals that lie in no such triple are divided until only crossings are left (crossings.py reads
the normals there).

Heads W and −W with equal v cancel in every answer of length two: σ(z) + σ(−z) = 1. A third token
`x + D`, D a thousand times as long as δ, takes the whole attention of heads with `gᵀD > 0` and none
of the others', so that one of the two is left and the same search finds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import ask_scores
from keyhole.oracle.protocol import Oracle

FAR = 1e10  # of the radius where gates saturate: transitions stay narrower than `_WIDTH`
_WIDTH = 1e-7  # crossings are isolated to this angle
_EXACT = 1e-10  # jumps below this share of the answers are not seen
_BEYOND = 1e3  # |D| / |δ| of the third token
_SAMPLES = 25  # on the half circle, to begin with
_PARTS = 8  # a doubtful interval is divided into
_MOST = 8192  # samples on a circle: more cells than that are no heads
_TRIES = 4
_GAP, _JUMP = 3e-3, 0.01  # between crossings, and at them, of a circle that needs no better one


class Unlucky(Unsuccessful):
    """This x will not do; another may."""


@dataclass(frozen=True)
class Probe:
    """`φ(ρ·point) / ρ` at one asking token; `away` is the direction of D, if there is a D."""

    oracle: Oracle
    x: Tensor
    v: Tensor
    away: Tensor | None = None
    drift: float = field(default=0.0)  # what the heads that sit on D add, per unit of ρ

    def hiding(self, away: Tensor, rho: float) -> Probe:
        """The same with a third token; its constant part is measured once, at radius ρ."""
        probe = Probe(self.oracle, self.x, self.v, away)
        drift = float(probe(torch.zeros_like(away).unsqueeze(0), torch.tensor([rho]))[0])
        return Probe(self.oracle, self.x, self.v, away, drift)

    def __call__(self, points: Tensor, rho: Tensor) -> Tensor:
        rho = rho.to(torch.float64).unsqueeze(-1)
        tokens = [self.x + rho * points]
        if self.away is not None:
            tokens.append(self.x + (_BEYOND * rho * self.away).expand_as(points))
        tokens.append(self.x.expand_as(points))
        answers = ask_scores(self.oracle, torch.stack(tokens, 1))
        return (answers - self.v @ self.x) / rho.squeeze(-1) - self.drift


def saturation_radius(probe: Probe, stream: torch.Generator) -> float | None:
    """The largest radius where some gate on two random rays is still open; None if none ever is.

    `φ(tu)/t` goes from ½vᵀu to its limit; the slowest gate of a ray has |z| about 14 there.
    """
    u = torch.randn(2, len(probe.x), generator=stream, dtype=torch.float64)
    u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True)
    t = 8.0 ** torch.arange(-12, 18, dtype=torch.float64)
    each = t.repeat_interleave(2)
    psi = probe(u.repeat(len(t), 1), each).view(-1, 2)
    scale = psi[t >= 1].abs().max()
    noise = 1e-13 * (
        torch.linalg.vector_norm(probe.v) * torch.linalg.vector_norm(probe.x) / t + scale
    )
    is_open = ((psi - psi[-1]).abs() > (1e-6 * scale + 100 * noise).unsqueeze(1)).any(1)
    if not bool(is_open.any()):
        return None
    last = int(is_open.nonzero().max())
    if last + 2 >= len(t):
        raise Unsuccessful(Status.MISMATCH, "the answers do not become linear far out")
    return float(t[last])


@dataclass(frozen=True)
class Circle:
    """The crossings on one half circle, each between two angles, and the cells around them."""

    a: Tensor
    b: Tensor
    left: Tensor  # (C,) crossing c lies between left and right
    right: Tensor
    cells: Tensor  # (C+1, 2): p and q of each cell
    scale: float  # the largest |φ|/ρ

    def points(self, theta: Tensor) -> Tensor:
        return points(self.a, self.b, theta)

    def ratio(self, crossing: Tensor, theta: Tensor, y: Tensor) -> Tensor:
        """(φ − cell before) / (cell after − cell before): σ(z) where a single head crosses."""
        wave = torch.stack([torch.cos(theta), torch.sin(theta)], -1)
        before = (wave * self.cells[crossing]).sum(-1)
        after = (wave * self.cells[crossing + 1]).sum(-1)
        return (y - before) / (after - before)

    @property
    def middle(self) -> Tensor:
        return (self.left + self.right) / 2

    def gaps(self) -> Tensor:
        """From each crossing to the nearest other one; θ + π is the same hyperplane again."""
        mid = self.middle
        around = torch.cat([mid[-1:] - math.pi, mid, mid[:1] + math.pi])
        step = around.diff()
        return torch.minimum(step[1:], step[:-1])

    def quality(self) -> float:
        """1 for a circle that needs no better one."""
        wave = torch.stack([torch.cos(self.middle), torch.sin(self.middle)], -1)
        jumps = (wave * self.cells.diff(dim=0)).sum(-1).abs() / self.scale
        return min(float(self.gaps().min()) / _GAP, float(jumps.min()) / _JUMP, 1.0)


def points(a: Tensor, b: Tensor, theta: Tensor) -> Tensor:
    return torch.cos(theta).unsqueeze(-1) * a + torch.sin(theta).unsqueeze(-1) * b


def best_circle(probe: Probe, rho: float, stream: torch.Generator) -> Circle | None:
    """Of a few circles the one with most crossings, then widest gaps and largest jumps, if any."""
    best: Circle | None = None
    reached = (0, 0.0)
    for _ in range(_TRIES):
        circle = _search(probe, rho, stream)
        if circle is None:
            continue
        merit = (len(circle.left), circle.quality())
        if merit > reached:
            best, reached = circle, merit
        if merit[1] == 1.0:
            break
    return best


def _search(probe: Probe, rho: float, stream: torch.Generator) -> Circle | None:
    """All crossings on a random half circle; None if there are none or two are too close."""
    plane = torch.randn(len(probe.x), 2, generator=stream, dtype=torch.float64)
    a, b = torch.linalg.qr(plane).Q.mT
    theta = torch.linspace(0.0, math.pi, _SAMPLES, dtype=torch.float64)
    y = _sample(probe, rho, a, b, theta)
    inner = torch.arange(1, _PARTS, dtype=torch.float64) / _PARTS
    while True:
        clear = _clear(theta, y, _EXACT * float(y.abs().max()))
        doubtful = (~clear & (theta.diff() > _WIDTH)).nonzero().squeeze(1)
        if not len(doubtful):
            return _assemble(a, b, theta, y, clear)
        if len(theta) + (_PARTS - 1) * len(doubtful) > _MOST:
            raise Unsuccessful(Status.MISMATCH, "the far field is not linear on a few cells")
        new = (theta[doubtful, None] + theta.diff()[doubtful, None] * inner).reshape(-1)
        theta, order = torch.cat([theta, new]).sort()
        y = torch.cat([y, _sample(probe, rho, a, b, new)])[order]


def _sample(probe: Probe, rho: float, a: Tensor, b: Tensor, theta: Tensor) -> Tensor:
    return probe(points(a, b, theta), torch.full_like(theta, rho))


def _clear(theta: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """Which intervals between samples lie in a triple of neighbours that one cell explains.

    Triples of very unequal spacing are not believed: they would hide a jump.
    """
    gap = theta.diff()
    first, second = gap[:-1], gap[1:]
    even = (first <= 8 * second) & (second <= 8 * first)
    both = torch.sin(first + second)
    miss = y[:-2] * torch.sin(second) - y[1:-1] * both + y[2:] * torch.sin(first)
    explained = (miss.abs() <= tolerance * both) & even
    clear = torch.zeros(len(theta) - 1, dtype=torch.bool)
    clear[:-1] |= explained
    clear[1:] |= explained
    return clear


def _assemble(a: Tensor, b: Tensor, theta: Tensor, y: Tensor, clear: Tensor) -> Circle | None:
    """Neighbouring clear intervals are a cell; what separates two cells is a crossing."""
    edge = torch.zeros(1, dtype=torch.long)
    change = torch.cat([edge, clear.long(), edge]).diff()
    first, last = (change == 1).nonzero().squeeze(1), (change == -1).nonzero().squeeze(1)
    if len(first) < 2 or int(first[0]) != 0 or int(last[-1]) != len(clear):
        return None
    left, right = theta[last[:-1]], theta[first[1:]]
    if bool((theta[last] - theta[first] < 1e-5).any()) or bool((right - left > 1e-6).any()):
        return None
    three = torch.stack([first, (first + last) // 2, last], 1)  # of each cell
    wave = torch.stack([torch.cos(theta[three]), torch.sin(theta[three])], 2)
    cells = least_squares(wave, y[three].unsqueeze(2)).squeeze(2)
    return Circle(a, b, left, right, cells, float(y.abs().max()))
