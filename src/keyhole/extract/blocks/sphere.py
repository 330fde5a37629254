"""The units of a layer whose answers have lost their length, ŷ = R/s on a sphere (behind.py).

`R(n) = n·L + Σ_k c_k φ(a_k·n + α_k) + c`, s = |R|. behind.py says how second derivatives show the
units in a subspace U, and σ, the slopes of log s. From these:

    outside U        mixed derivatives of e in U and w, linear in a_k·w and σ_w
    s                base points are on a circle; the slopes of log s along it, by harmonics
    length, offset   of each unit, from its numbers φ''(length·t + offset)/s at these points
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
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.blocks.rank_ones import rank_ones
from keyhole.extract.blocks.units import SMOOTH, Units, derivative, symmetric, unpacked
from keyhole.extract.gauss_newton import levenberg

Value = Callable[[Tensor], Tensor]
_AXES = 2  # of Π
_POINTS = 13  # of a circle in it
_STEP = 0.02  # of the radius
_FULL = 0.85  # of the dimensions of symmetric matrices in U that S may have
_ERRORS = 1e-9  # singular values below this, relative, are errors of differences
_CLIFF = 10.0
_WIDTHS = (2.0, 4.0, 6.0, 9.0, 13.0)  # units for each dimension that U is made to hold
_LENGTHS = 10
_SAMPLE = 40  # units that show s and φ
_AT = (-3.0, -2.0, -1.0, 1.0, 2.0, 3.0)


def differences(
    value: Value, path: Callable[[float], Tensor], middle: Tensor
) -> tuple[Tensor, Tensor]:
    """First and second derivatives at 0 of value(path(t)) (n, m), by differences of order 6."""
    y = value(torch.cat([path(at) for at in _AT])).unflatten(0, (len(_AT), -1))
    first = torch.tensor([-1.0, 9.0, -45.0, 45.0, -9.0, 1.0], dtype=torch.float64) / 60
    second = torch.tensor([2.0, -27.0, 270.0, 270.0, -27.0, 2.0], dtype=torch.float64) / 180
    y = y - middle
    return torch.einsum("t,tnm->nm", first, y), torch.einsum("t,tnm->nm", second, y)


@dataclass(frozen=True)
class Sphere:
    """ŷ (n, m) of points (n, e) of one length, differentiated along great circles, by angles."""

    value: Value
    dim: int
    radius: float

    def derivatives(self, p: Tensor, directions: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
        def path(t: float) -> Tensor:
            return math.cos(_STEP * t) * p + math.sin(_STEP * t) * self.radius * directions

        first, second = differences(self.value, path, middle)
        return first / _STEP, second / _STEP**2


@dataclass
class _Measured:
    """At points of a circle in Π: ŷ (P, m), its derivatives in U (P, q, m) and (P, q, q, m)."""

    sphere: Sphere
    Pi: Tensor
    U: Tensor
    points: Tensor
    y: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def of(
        cls, sphere: Sphere, Pi: Tensor, U: Tensor, count: int, before: _Measured | None
    ) -> _Measured:
        """What was measured before, of fewer axes, is not asked again."""
        q, m = len(U), sphere.dim
        if before is None or len(before.points) != count:
            turn = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
            points = sphere.radius * torch.stack([turn.cos(), turn.sin()], 1) @ Pi
            before, had, y = None, 0, sphere.value(points)
        else:
            points, had, y = before.points, len(before.U), before.y
        first = torch.zeros(count, q, m, dtype=torch.float64)
        second = torch.zeros(count, q, q, m, dtype=torch.float64)
        if before is not None:
            first[:, :had], second[:, :had, :had] = before.first, before.second
        rows, columns = torch.triu_indices(q, q)
        directions = normalize(U[rows] + U[columns], dim=1)
        for each, (p, middle) in enumerate(zip(points, y, strict=True)):
            new = columns >= had
            by, twice = sphere.derivatives(p, directions[new], middle)
            i, j = rows[new], columns[new]
            first[each, i[i == j]] = by[i == j]
            second[each, i, j] = twice
        diagonal = second.diagonal(dim1=1, dim2=2).mT.clone()  # (P, q, m)
        for each in range(count):
            new = (columns >= had) & (rows != columns)
            i, j = rows[new], columns[new]
            mixed = second[each, i, j] - (diagonal[each, i] + diagonal[each, j]) / 2
            second[each, i, j] = second[each, j, i] = mixed
        return cls(sphere, Pi, U, points, y, first, second)

    @property
    def packed(self) -> Tensor:
        """(P, q(q+1)/2, m)."""
        q = len(self.U)
        rows, columns = torch.triu_indices(q, q)
        weight = torch.where(rows == columns, 1.0, math.sqrt(2)).to(torch.float64)
        return self.second[:, rows, columns] * weight[:, None]

    def space(self, device: torch.device) -> tuple[Tensor, bool]:
        """S, from second derivatives across ŷ and its first ones; and whether it has an end."""
        across: list[Tensor] = []
        for y, first, packed in zip(self.y, self.first, self.packed, strict=True):
            frame = torch.linalg.qr(torch.cat([y[None], first]).mT.to(device), mode="complete")[0]
            across.append((packed.to(device) @ frame[:, len(first) + 1 :]).mT)
        rows = torch.cat(across)
        sizes, right = torch.linalg.svd(rows, full_matrices=False)[1:]
        falls = sizes[:-1] / sizes[1:].clamp(min=_ERRORS * sizes[0])
        count = int(falls.argmax()) + 1
        ended = float(falls[count - 1]) > _CLIFF and count <= _FULL * rows.shape[1]
        return right[:count], ended


def _curvature(sphere: Sphere, axes: Tensor, device: torch.device) -> tuple[_Measured, Tensor]:
    """Second derivatives in a subspace U that is wide enough to hold S, and S."""
    dim = sphere.dim
    measured, most = None, dim - _AXES
    for width in _WIDTHS:
        q = min(math.ceil(math.sqrt(2 * (width * dim + 1) / _FULL)), most)
        count = max(_POINTS, math.ceil(1.3 * q * (q + 1) / 2 / (dim - q - 1)))
        U = axes[_AXES : _AXES + q]
        measured = _Measured.of(sphere, axes[:_AXES], U, count, measured)
        basis, ended = measured.space(device)
        if ended:
            return measured, basis
        if q == most:
            break
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        f"curvature spans too many dimensions to tell units apart: a layer this wide is not read "
        f"at d = {dim + 1}",
    )


def find_units(
    value: Value, dim: int, radius: float, device: torch.device, stream: torch.Generator
) -> Units:
    """A start for descent.py; C as seen next to the length of answers on average."""
    sphere = Sphere(value, dim, radius)
    axes = random_orthogonal(dim, stream)
    measured, basis = _curvature(sphere, axes, device)
    q = len(measured.U)
    units = rank_ones(basis, q, len(basis) - 1, stream, 2048 if device.type == "cuda" else 256)
    if len(units) != len(basis) - 1:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"curvature spans {len(basis)} dimensions, but {len(units)} units were found in it: "
            f"a layer of one kind of unit has {len(basis) - 1}",
        )
    return _read(measured, basis, units, axes[_AXES + q :], stream)


def _read(at: _Measured, basis: Tensor, units: Tensor, W: Tensor, stream: torch.Generator) -> Units:
    q, (P, m) = len(at.U), at.y.shape
    device = basis.device
    identity = torch.eye(q, dtype=torch.float64, device=device)
    S = torch.linalg.qr(basis.mT)[0]
    outside = torch.linalg.svd(S)[0][:, S.shape[1] :].mT
    forms = unpacked(outside, q)
    products = torch.cat(
        [symmetric(units, units), symmetric(identity, identity).sum(0, keepdim=True)]
    )
    solve = torch.linalg.pinv(products.mT)
    packed, first, y = (part.to(device) for part in (at.packed, at.first, at.y))
    hats = normalize(y, dim=1)
    sigma = torch.empty(P, q, dtype=torch.float64, device=device)
    parts = torch.empty(P, len(units), m, dtype=torch.float64, device=device)
    for j in range(P):
        H = packed[j] - (packed[j] @ hats[j])[:, None] * hats[j]
        by = first[j] - (first[j] @ hats[j])[:, None] * hats[j]
        system = 2 * torch.einsum("cie,em->icm", forms, by).flatten(1)
        sigma[j] = -torch.linalg.solve(system @ system.mT, system @ (outside @ H).flatten())
        H = H + 2 * symmetric(sigma[j].expand(m, q), by.mT).mT
        parts[j] = (solve @ H)[:-1]
    c, numbers = _directions(parts, hats)
    of_W, _ = _mixed(
        at, [W] * P, torch.eye(len(W), dtype=torch.float64), parts, units, sigma, stream
    )
    x, y_ = (at.points @ at.Pi.mT / at.sphere.radius).unbind(1)
    tangents = list((torch.stack([-y_, x], 1) @ at.Pi).unsqueeze(1))
    of_Pi, slopes = _mixed(at, tangents, at.Pi, parts, units, sigma, stream)
    places = at.points / at.sphere.radius
    along = of_Pi.to("cpu") @ at.Pi @ places.mT  # (r, P): where units stand, for a length of 1
    grown = _integrated(torch.atan2(y_, x), slopes[:, 0].to("cpu"))
    activation, length, offset, sizes = _numbers(numbers.mT.to("cpu"), along, grown)
    A = units.to("cpu") @ at.U + of_Pi.to("cpu") @ at.Pi + of_W.to("cpu") @ W
    A = length[:, None] * A / at.sphere.radius
    C = c.to("cpu").mT * (sizes / length.square())
    none = torch.zeros(0, dtype=torch.float64)
    return Units(A, offset, none.reshape(0, A.shape[1]), none, C.contiguous(), activation)


def _directions(parts: Tensor, hats: Tensor) -> tuple[Tensor, Tensor]:
    """ĉ_k (r, m) and numbers (P, r) from `number·ĉ_k` without its part along ŷ_p (P, r, m)."""
    sizes = torch.linalg.vector_norm(parts, dim=2)
    share = sizes / torch.linalg.vector_norm(sizes, dim=0)
    own = (share / sizes)[..., None] * parts
    both = torch.cat([own, share[..., None] * hats[:, None]]).transpose(0, 1)  # (r, 2P, m)
    vectors = torch.linalg.eigh(both @ both.mT)[1][..., -1]
    c = normalize(torch.einsum("kp,kpm->km", vectors, both), dim=1)
    left = 1 - (c @ hats.mT).mT.square()
    return c, torch.einsum("pkm,km->pk", parts, c) / left


def _mixed(
    at: _Measured, directions: list[Tensor], axes: Tensor, parts: Tensor, units: Tensor,
    sigma: Tensor, stream: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows of units in `axes` next to those in U (r, |axes|), and σ along directions (P, n).

    Linear in the mixed second derivatives of each point's directions with some e of U.
    """
    (P, m), r, device = at.y.shape, len(units), units.device
    n, unknowns = len(directions[0]), r if len(directions[0]) == len(axes) else r * len(axes)
    if not n:
        return units[:, :0], sigma[:, :0]
    each = max(1, math.ceil(2.5 * unknowns / (P * m * (1 if unknowns == r else n))))
    systems, wanted = list[Tensor](), list[Tensor]()
    for j, along in enumerate(directions):
        hat = normalize(at.y[j], dim=0).to(device)
        across = torch.linalg.qr(hat[:, None], mode="complete")[0][:, 1:].mT  # (m − 1, m)
        e = random_orthogonal(len(at.U), stream)[:each]
        one = (e @ at.U).repeat_interleave(n, 0)
        many = along.repeat(each, 1)
        both = torch.cat([one + many, one - many]) / math.sqrt(2)
        first, second = (
            (part[: len(one)] - part[len(one) :]).unflatten(0, (each, n)).to(device)
            for part in at.sphere.derivatives(at.points[j], both, at.y[j])
        )
        e = e.to(device)
        rest = (second / 2 + (e @ sigma[j])[:, None, None] * first / math.sqrt(2)) @ across.mT
        coefficients = (along @ axes.mT).to(device) if unknowns > r else None
        for i in range(each):
            system = across @ (parts[j] * (units @ e[i])[:, None]).mT  # (m − 1, r)
            mark = across @ -(e[i] @ at.first[j].to(device))
            if coefficients is None:
                marks = torch.zeros(m - 1, P, dtype=torch.float64, device=device)
                marks[:, j] = mark
                systems.append(torch.cat([system, marks], 1))
                wanted.append(rest[i].mT)
                continue
            for own, left in enumerate(rest[i]):
                marks = torch.zeros(m - 1, P * n, dtype=torch.float64, device=device)
                marks[:, j * n + own] = mark
                wide = (system[:, :, None] * coefficients[own]).flatten(1)
                systems.append(torch.cat([wide, marks], 1))
                wanted.append(left[:, None])
    solved = least_squares(torch.cat(systems), torch.cat(wanted))
    if unknowns > r:
        return solved[:unknowns, 0].view(r, -1), solved[unknowns:, 0].view(P, n)
    return solved[:r], solved[r:]


def _integrated(angles: Tensor, slopes: Tensor) -> Tensor:
    """s at points of a circle, from its logarithm's slopes: by harmonics, of mean 1."""
    orders = torch.arange(1, (len(angles) + 1) // 2, dtype=torch.float64)
    turns = angles[:, None] * orders
    system = torch.cat([-orders * turns.sin(), orders * turns.cos()], 1)
    weights = least_squares(system, slopes[:, None])
    s = (torch.cat([turns.cos(), turns.sin()], 1) @ weights)[:, 0].exp()
    return s / s.mean()


def _numbers(numbers: Tensor, along: Tensor, s: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
    """φ, lengths, offsets and sizes for numbers (r, P), `size·φ''(length·along + offset)/s`.

    Some units that are fitted well show s; the others follow, one by one.
    """
    best = math.inf, SMOOTH[0], s
    for activation in SMOOTH:
        length, offset, _, miss = _shapes(numbers * s, along, activation)
        chosen = miss.argsort()[:_SAMPLE]
        found, left = _together(
            numbers[chosen], along[chosen], (length[chosen], offset[chosen], s), activation
        )
        best = min(best, (left, activation, found), key=lambda each: each[0])
    _, activation, s = best
    length, offset, size, _ = _shapes(numbers * s, along, activation)
    return activation, length, offset, size


def _shapes(
    numbers: Tensor, along: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each unit's length, offset, size and relative miss: the best of some starts.

    These are the best offsets of a grid for each of some lengths; then Levenberg–Marquardt.
    """
    f, df = derivative(activation, 2), derivative(activation, 3)
    scale = along.square().mean(1).sqrt()
    wanted = normalize(numbers, dim=1)
    lengths = torch.logspace(-1.2, 0.7, _LENGTHS, dtype=torch.float64)
    offsets = torch.linspace(-3, 3, 37, dtype=torch.float64)
    at = (along / scale[:, None])[None] * lengths[:, None, None]  # (lengths, r, P)
    fits = torch.stack([(normalize(f(at + o), dim=2) * wanted).sum(2).abs() for o in offsets])
    offset = offsets[fits.argmax(0)].flatten()  # (lengths · r)
    length = (lengths[:, None] / scale).flatten()
    along, wanted = along.repeat(_LENGTHS, 1), wanted.repeat(_LENGTHS, 1)
    damping = torch.full_like(length, 1e-3)

    def look(length: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = f(length[:, None] * along + offset[:, None])
        norm = torch.linalg.vector_norm(shape, dim=1, keepdim=True).clamp(min=1e-100)
        size = (shape * wanted).sum(1, keepdim=True) / norm.square()
        rest = size * shape - wanted
        return shape / norm, size, rest, rest.square().sum(1)

    unit, size, rest, cost = look(length, offset)
    for _ in range(40):
        slope = size * df(length[:, None] * along + offset[:, None])
        J = torch.stack([slope * along, slope], 2)
        J = J - unit[..., None] * (unit[..., None] * J).sum(1, keepdim=True)
        gram = J.mT @ J
        ridge = damping[:, None] * gram.diagonal(dim1=1, dim2=2) + 1e-14
        step = torch.linalg.solve(gram + torch.diag_embed(ridge), J.mT @ rest[..., None])[..., 0]
        tried = length - step[:, 0], offset - step[:, 1]
        new = look(*tried)
        better = new[3] < cost
        length, offset = (
            torch.where(better, tried[0], length),
            torch.where(better, tried[1], offset),
        )
        unit, size, rest = (
            torch.where(better[:, None], n, o)
            for n, o in zip(new[:3], (unit, size, rest), strict=True)
        )
        cost = torch.where(better, new[3], cost)
        damping = torch.where(better, damping / 4, damping * 4).clamp(1e-12, 1e9)
    best = cost.view(_LENGTHS, -1).argmin(0) * len(numbers) + torch.arange(len(numbers))
    size = size[best, 0] * torch.linalg.vector_norm(numbers, dim=1)
    return length[best], offset[best], size, cost[best].sqrt()


def _together(
    numbers: Tensor, along: Tensor, start: tuple[Tensor, Tensor, Tensor], activation: str
) -> tuple[Tensor, float]:
    """s (P), of mean 1, from some units whose numbers are fitted with it; and what is left."""
    r, P = numbers.shape
    wanted = normalize(numbers, dim=1)
    f, df = derivative(activation, 2), derivative(activation, 3)
    length, offset, s = start
    sizes = (wanted * s * f(length[:, None] * along + offset[:, None])).sum(1)
    sizes = sizes / f(length[:, None] * along + offset[:, None]).square().sum(1)
    rows, columns = torch.arange(r).repeat_interleave(P), torch.arange(P).repeat(r)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        length, offset, size, log_s = x.split([r, r, r, P])
        z = length[:, None] * along + offset[:, None]
        over = torch.exp(-log_s)
        value, slope = f(z) * over, df(z) * over * size[:, None]
        J = torch.zeros(r, P, 3 * r + P, dtype=torch.float64)
        at = rows, columns
        J[(*at, rows)] = (slope * along).flatten()
        J[(*at, rows + r)] = slope.flatten()
        J[(*at, rows + 2 * r)] = value.flatten()
        J[(*at, columns + 3 * r)] = -(size[:, None] * value).flatten()
        return (size[:, None] * value - wanted).flatten(), J.flatten(0, 1)

    point, left = levenberg(model, torch.cat([length, offset, sizes, s.log()]), 200)
    s = point[3 * r :].exp()
    return s / s.mean(), left
