"""The units of a wide layer on a sphere from its curvature: curvature.py for hundreds of units.

    R(n) = n·L + Σ_k c_k f_k(n) + c,    f_k = φ(a_k·n + α_k), with gates times (g_k·n + γ_k)

From R at any n of one length, or ŷ = R/s, s = |R|, if a norm follows (`Sphere`), this
finds the activation and all a_k, α_k, g_k, γ_k and c_k (`Units`), as a start for a fit.
post_norm.py says how second derivatives of ŷ in a subspace U show the units; σ are the
slopes of log s, and without a norm behind R (pre_norm.py) σ = 0 and s = 1. At a base
point p the derivatives in U are sums over k of

    c_k φ'' λ²·ââᵀ    or, with gates,    c_k λ(φ''λω + 2τφ')·ââᵀ + c_k λφ'·(âŵᵀ + ŵâᵀ)

where a_k is λâ in U, g_k is ŵ + τâ there (its length is free), and ω = g_k·p + γ_k. The
steps:

    â, ŵ             the matrices of rank one, and their partners (rank_ones.py)
    outside U        mixed derivatives of e in U and w, linear in a_k·w/λ, g_k·w − τ(a_k·w)/λ, σ_w
    s                base points are on a circle; the slopes of log s along it, by harmonics
    λ, α, τ, γ       of each unit, from its numbers at the base points (shapes.py)

If the token is added to the answer, a long token costs the answer digits, but only in
the coordinates in which the token is not 0. So U and the base points are chosen to
touch few coordinates, and the others are exact whatever the length. There is then one
base point for each axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import not_applicable
from keyhole.core.float64 import ones, tensor, zeros
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.blocks.rank_ones import (
    FOUND,
    packed,
    rank_of,
    rank_ones,
    symmetric,
    unpacked,
)
from keyhole.extract.blocks.shapes import grid_shapes, grid_shapes_and_lengths
from keyhole.extract.blocks.units import Units

Value = Callable[[Tensor], Tensor]
_AXES = 2  # dimensions of Π if base points are on a circle,
_POINTS = 13  # and the least number of them
_FEWEST = 8  # the least number of base points if there is one for each axis,
_ROWS = 1.3  # and equations for each unknown
_CHUNKS = 16  # parts in which the axes beyond U and Π are read
_STEP = 0.02  # of differences, relative to the radius
_FULL = 0.85  # share of the dimensions of symmetric matrices in U that S may have
_ERRORS = 1e-9  # smaller relative singular values are errors of differences;
_SQUARED = 1e-8  # the same for roots of eigenvalues of the Gram matrix
_ROUGHLY = 1e-3  # what of a unit may be outside S if an ε distorts S
_WIDTHS = (
    2.0,
    4.0,
    6.0,
    9.0,
    13.0,
)  # how many units for each dimension U is made to hold
_STEADY = (
    0.07  # spread of a·n/|a| at base points below which curvature does not show |a|
)
_AT = (-3.0, -2.0, -1.0, 1.0, 2.0, 3.0)


def differences(
    value: Value,
    path: Callable[[float], Tensor],
    middle: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return first and second derivatives of value(path(t)) (n, m) at 0, by differences."""
    y = value(torch.cat([path(at) for at in _AT])).unflatten(0, (len(_AT), -1))
    first = tensor([-1.0, 9.0, -45.0, 45.0, -9.0, 1.0]) / 60
    second = tensor([2.0, -27.0, 270.0, 270.0, -27.0, 2.0]) / 180
    y = y - middle
    return torch.einsum("t,tnm->nm", first, y), torch.einsum("t,tnm->nm", second, y)


@dataclass(frozen=True)
class Sphere:
    """Answers (n, m) at points (n, e) of one length, differentiated along great circles.

    With `touched`, answers keep their length, and it says which numbers of an answer
    lose digits at points in the span of some rows. Without it, answers have lost their
    length. Unless they are `centred`, an unknown vector is added to all answers.
    """

    value: Value
    dim: int
    radius: float
    touched: Callable[[Tensor], Tensor] | None = None
    centred: bool = True

    def derivatives(
        self,
        p: Tensor,
        directions: Tensor,
        middle: Tensor,
    ) -> tuple[Tensor, Tensor]:
        def path(t: float) -> Tensor:
            return (
                math.cos(_STEP * t) * p + math.sin(_STEP * t) * self.radius * directions
            )

        first, second = differences(self.value, path, middle)
        return first / _STEP, second / _STEP**2

    def points(self, count: int, axes: Tensor) -> tuple[Tensor, Tensor]:
        """Return `count` base points, and Π: the last axes, whose span holds the points."""
        if self.touched is not None:
            Pi = axes[-count:].flip(0)
            return self.radius * Pi, Pi
        turn = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
        Pi = axes[-_AXES:]
        return self.radius * torch.stack([turn.cos(), turn.sin()], 1) @ Pi, Pi


@dataclass
class _Measured:
    """Answers (P, m) at base points (P, e), and derivatives in U (P, q, m) and (P, q, q, m).

    `seen` are the numbers of an answer that U and the points do not touch.
    """

    sphere: Sphere
    Pi: Tensor
    U: Tensor
    points: Tensor
    y: Tensor
    first: Tensor
    second: Tensor
    seen: Tensor
    hats: Tensor | None = None  # ŷ (P, m) of length 1, if known

    @classmethod
    def of(
        cls,
        sphere: Sphere,
        axes: Tensor,
        q: int,
        count: int,
        before: _Measured | None,
    ) -> _Measured:
        """Measure; what has been measured `before`, with fewer axes, is not asked again."""
        U = axes[:q]
        points, Pi = sphere.points(count, axes)
        if before is not None and not torch.equal(
            points[: len(before.points)], before.points
        ):
            before = None
        y = sphere.value(points)
        first = zeros(count, q, y.shape[1])
        second = zeros(count, q, q, y.shape[1])
        rows, columns = torch.triu_indices(q, q)
        directions = normalize(U[rows] + U[columns], dim=1)
        for each, p in enumerate(points):
            had = 0
            if before is not None and each < len(before.points):
                had = len(before.U)
                y[each] = before.y[each]
                first[each, :had] = before.first[each]
                second[each, :had, :had] = before.second[each]
            new = columns >= had
            by, twice = sphere.derivatives(p, directions[new], y[each])
            i = rows[new]
            j = columns[new]
            first[each, i[i == j]] = by[i == j]
            second[each, i[i == j], j[i == j]] = twice[i == j]
            diagonal = second[each].diagonal().mT  # (q, m)
            apart = i != j
            i = i[apart]
            j = j[apart]
            mixed = twice[apart] - (diagonal[i] + diagonal[j]) / 2
            second[each, i, j] = second[each, j, i] = mixed
        seen = torch.arange(y.shape[1])
        if sphere.touched is not None:
            seen = seen[~sphere.touched(torch.cat([Pi, U]))]
        if sphere.centred and sphere.touched is None:
            hats = normalize(y, dim=1)
        else:
            hats = None
        return cls(sphere, Pi, U, points, y, first, second, seen, hats)

    @property
    def hessians(self) -> Tensor:
        """The second derivatives, (P, q(q+1)/2, seen)."""
        rows, columns = torch.triu_indices(len(self.U), len(self.U))
        weight = packed(ones(len(self.U), len(self.U)))
        return self.second[:, rows, columns][..., self.seen] * weight[:, None]

    def across(self, j: int, *more: Tensor) -> Tensor:
        """Return orthonormal columns (seen, n) orthogonal to ŷ and to other vectors (n, m).

        If answers keep their length, all numbers are kept.
        """
        if self.sphere.touched is not None:
            return torch.eye(len(self.seen), dtype=torch.float64)
        taken = torch.cat([*more] if self.hats is None else [self.hats[j][None], *more])
        return torch.linalg.qr(taken.mT, mode="complete")[0][:, len(taken) :]

    def space(self, device: torch.device) -> tuple[Tensor, bool]:
        """Return what is orthogonal to S (n, q(q+1)/2), and whether the rank of S is clear.

        S is spanned by second derivatives orthogonal to ŷ and to first derivatives. If
        ŷ is not known, S has one more dimension for each base point: the matrix τ, the
        coefficient of ŷ.
        """
        rows = torch.cat(
            [
                (hessian.to(device) @ self.across(j, self.first[j]).to(device)).mT
                for j, hessian in enumerate(self.hessians)
            ]
        )
        values, vectors = torch.linalg.eigh(rows.mT @ rows)
        sizes = values.flip(0).clamp(min=0).sqrt()
        right = vectors.mT.flip(0)
        count, clear = rank_of(sizes, 10 * _SQUARED)
        if clear and float(sizes[count - 1]) > 1e3 * _SQUARED * float(sizes[0]):
            # The Gram matrix shows the rank, and one step of inverse iteration the last
            # digits.
            R = torch.linalg.qr(rows, mode="r")[1]
            back = torch.linalg.solve_triangular(R.mT, right[count:].mT, upper=False)
            found = torch.linalg.solve_triangular(R, back, upper=True)
            right = torch.cat([right[:count], torch.linalg.qr(found)[0].mT])
        elif float(sizes[-1]) < 1e2 * _SQUARED * float(sizes[0]):
            sizes, right = thin_svd(rows)[1:]
            count, clear = rank_of(sizes, _ERRORS)
        return right[count:].contiguous(), clear and count <= _FULL * len(sizes)


def _curvature(
    sphere: Sphere,
    axes: Tensor,
    device: torch.device,
) -> tuple[_Measured, Tensor]:
    """Return derivatives in a subspace U wide enough to hold S, and what is orthogonal to S."""
    dim = sphere.dim
    measured = None
    for width in _WIDTHS:
        q = min(math.ceil(math.sqrt(2 * (width * dim + 1) / _FULL)), dim - _AXES)
        needed = q * (q + 1) / 2
        if sphere.touched is None:
            count = max(_POINTS, math.ceil(1.3 * needed / (dim - q - sphere.centred)))
        else:
            count = _base_points(sphere.touched, axes, q)
        if sphere.touched is not None and count + q > dim:
            break
        measured = _Measured.of(sphere, axes, q, count, measured)
        outside, ended = measured.space(device)
        if ended:
            return measured, outside
        if q == dim - _AXES:
            break
    raise not_applicable(
        f"curvature spans too many dimensions to tell units apart: a layer this wide is not read "
        f"at d = {dim + 1}"
    )


def _base_points(
    touched: Callable[[Tensor], Tensor],
    axes: Tensor,
    q: int,
) -> int:
    """Return how many base points show all of S, or the number of axes if none do."""
    for count in range(_FEWEST, len(axes) - q):
        seen = ~touched(torch.cat([axes[:q], axes[-count:]]))
        if count * int(seen.sum()) >= 1.1 * q * (q + 1) / 2:
            return count
    return len(axes)


def find_units(
    sphere: Sphere,
    axes: Tensor,
    device: torch.device,
    stream: torch.Generator,
) -> tuple[Units, Tensor, Tensor]:
    """Return the units as a start for descent.py, C relative to the mean length of R.

    Also the vector (m) added to all answers, where lines along ŷ through them meet; and
    the units whose lengths and offsets are doubtful, since they hardly vary at the base
    points.
    """
    measured, outside = _curvature(sphere, axes, device)
    q = len(measured.U)
    most = q * (q + 1) // 2 - len(outside) - 1
    most -= 0 if sphere.centred else len(measured.points)
    starts = 2048 if device.type == "cuda" else 256
    units, partners = rank_ones(
        outside, q, most, stream, starts, (FOUND, _ROUGHLY), gates=sphere.centred
    )
    if partners is not None and sphere.touched is None:
        raise not_applicable(
            "units with gates in front of a norm of their sum are not read"
        )
    units = _read(
        measured, outside, units, partners, axes[q : -len(measured.Pi)], stream
    )
    varied = (measured.points @ normalize(units.A, dim=1).mT).std(0)
    return units, _meeting(measured), (varied < _STEADY).nonzero()[:, 0]


def _meeting(at: _Measured) -> Tensor:
    if at.sphere.centred or at.hats is None:
        return torch.zeros_like(at.y[0])
    across = torch.eye(at.y.shape[1]).to(at.y) - at.hats[:, :, None] * at.hats[:, None]
    return torch.linalg.solve(across.sum(0), (across @ at.y[..., None]).sum(0))[:, 0]


def _read(
    at: _Measured,
    outside: Tensor,
    units: Tensor,
    partners: Tensor | None,
    W: Tensor,
    stream: torch.Generator,
) -> Units:
    q = len(at.U)
    P = len(at.y)
    m = len(at.seen)
    device = units.device
    r = len(units)
    identity = torch.eye(q, dtype=torch.float64, device=device)
    products = [symmetric(units, units)]
    if partners is not None:
        products.append(2 * symmetric(units, partners))
    products.append(symmetric(identity, identity).sum(0, keepdim=True))
    Q, R = torch.linalg.qr(torch.cat(products).mT)
    hessians = at.hessians.to(device)
    hats = torch.zeros(P, m, dtype=torch.float64, device=device)
    sigma = torch.zeros(P, q, dtype=torch.float64, device=device)
    if at.hats is not None:
        hats = at.hats.to(device)
    forms = unpacked(outside, q)
    parts = torch.empty(P, len(R) - 1, m, dtype=torch.float64, device=device)
    for j in range(P):
        H = hessians[j] - (hessians[j] @ hats[j])[:, None] * hats[j]
        if at.sphere.touched is None:
            by = at.first[j].to(device)
            by = by - (by @ hats[j])[:, None] * hats[j]
            system = 2 * torch.einsum("cie,em->icm", forms, by).flatten(1)
            sigma[j] = -torch.linalg.solve(
                system @ system.mT, system @ (outside @ H).flatten()
            )
            H = H + 2 * symmetric(sigma[j].expand(m, q), by.mT).mT
        if at.sphere.touched is None and at.hats is None:  # τŷ is all that is left
            rest = H - Q @ (Q.mT @ H)
            hats[j] = torch.linalg.eigh(rest.mT @ rest)[1][:, -1]
            H = H - (H @ hats[j])[:, None] * hats[j]
        parts[j] = torch.linalg.solve_triangular(R, Q.mT @ H, upper=True)[:-1]
    if at.sphere.touched is None:
        at.hats = hats.to("cpu")
    reading = _Reading(at, parts, units, partners, sigma, stream)
    c, numbers = _directions(parts[:, -r:], hats)
    of_W = reading.beyond(W)
    if at.sphere.touched is None:
        of_Pi, along, grown = reading.around()
        activation, theta, found = grid_shapes_and_lengths(
            numbers.mT.to("cpu"), along, grown
        )
    else:
        of_Pi = reading.at_points()
        along, *gate = (part.to(device) for part in of_Pi)  # of units whose length is 1
        own = torch.einsum("pkm,km->kp", parts[:, :r], c)
        wanted = own if partners is None else torch.cat([numbers.mT, own], 1)
        activation, *shapes = grid_shapes(wanted, along, gate[0] if gate else None)
        theta, found = (part.to("cpu") for part in shapes)
    length, offset = theta.unbind(1)
    rows = [units] if partners is None else [units, partners]
    full = [
        u.to("cpu") @ at.U + p @ at.Pi + w @ W
        for u, p, w in zip(rows, of_Pi, of_W, strict=True)
    ]
    C = zeros(at.y.shape[1], r)
    power = 2 if partners is None else 1
    C[at.seen] = c.to("cpu").mT * (found[:, 0] / length**power)
    a = full[0] / at.sphere.radius
    read = Units.plain(length[:, None] * a, offset, C, activation)
    if partners is None:
        return read
    tau, gamma = (found[:, 1:] / found[:, :1]).unbind(1)
    return replace(
        read, G=full[1] / at.sphere.radius + tau[:, None] * a, g=gamma.contiguous()
    )


def _directions(parts: Tensor, hats: Tensor) -> tuple[Tensor, Tensor]:
    """Return ĉ_k (r, m) and numbers (P, r), given `number·ĉ_k` orthogonally to ŷ_p (P, r, m)."""
    sizes = torch.linalg.vector_norm(parts, dim=2)
    share = sizes / torch.linalg.vector_norm(sizes, dim=0)
    own = (share / sizes)[..., None] * parts
    both = torch.cat([own, share[..., None] * hats[:, None]]).transpose(
        0, 1
    )  # (r, 2P, m)
    vectors = torch.linalg.eigh(both @ both.mT)[1][..., -1]
    c = normalize(torch.einsum("kp,kpm->km", vectors, both), dim=1)
    left = 1 - (c @ hats.mT).mT.square()
    return c, torch.einsum("pkm,km->pk", parts, c) / left


@dataclass
class _Reading:
    """Rows of units outside U, from mixed second derivatives."""

    at: _Measured
    parts: Tensor
    units: Tensor
    partners: Tensor | None
    sigma: Tensor
    stream: torch.Generator

    def beyond(self, W: Tensor) -> list[Tensor]:
        """Return those in W (r, |W|): of a, and of gates."""
        P = len(self.at.y)
        chunks = [W]
        if self.at.sphere.touched is not None:
            chunks = list(W.split(max(1, math.ceil(len(W) / _CHUNKS))))
        found = [
            self._mixed(range(P), [each] * P, each)[0] for each in chunks if len(each)
        ]
        kinds = 1 if self.partners is None else 2
        none = self.units[:, :0].to("cpu")
        return [
            torch.cat([none, *(each[n] for each in found)], 1) for n in range(kinds)
        ]

    def at_points(self) -> list[Tensor]:
        """Return those in Π (r, P), if each axis is a base point: from all other base points."""
        P = len(self.at.y)
        found = [
            self._mixed(
                [j for j in range(P) if j != own], [axis[None]] * P, axis[None]
            )[0]
            for own, axis in enumerate(self.at.Pi)
        ]
        return [torch.cat(kind, 1) for kind in zip(*found, strict=True)]

    def around(self) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return those in Π, if base points are on a circle; also a·n of units â, and s."""
        at = self.at
        places = at.points / at.sphere.radius
        x, y = (places @ at.Pi.mT).unbind(1)
        tangents = list((torch.stack([-y, x], 1) @ at.Pi).unsqueeze(1))
        of_Pi, slopes = self._mixed(range(len(x)), tangents, at.Pi)
        grown = _integrated(torch.atan2(y, x), slopes[:, 0])
        return of_Pi, of_Pi[0] @ at.Pi @ places.mT, grown

    def _mixed(
        self,
        places: Iterable[int],
        directions: list[Tensor],
        axes: Tensor,
    ) -> tuple[list[Tensor], Tensor]:
        """Return rows in `axes` (r, |axes|) for each kind, and σ along directions (P, n).

        They are linear in the mixed second derivatives of each point's directions with
        some e of U.
        """
        at = self.at
        device = self.units.device
        places = list(places)
        P = len(at.y)
        n = len(directions[0])
        kinds = 1 if self.partners is None else 2
        r = len(self.units)
        behind = at.sphere.touched is None
        apart = n == len(
            axes
        )  # each axis has equations of its own, with one matrix for all
        unknowns = kinds * r * (1 if apart else len(axes))
        visible = torch.ones(len(at.seen), dtype=torch.bool)
        if at.sphere.touched is not None:
            visible = ~at.sphere.touched(axes)[at.seen]
        rows = len(places) * int(visible.sum()) * (1 if apart else n)
        each = min(
            len(at.U), math.ceil((2.5 if behind else _ROWS) * unknowns / max(rows, 1))
        )
        systems = list[Tensor]()
        wanted = list[Tensor]()
        for j in places:
            along = directions[j]
            across = at.across(j)[visible].mT.to(device)
            e = random_orthogonal(len(at.U), self.stream)[:each]
            one = (e @ at.U).repeat_interleave(n, 0)
            many = along.repeat(each, 1)
            both = torch.cat([one + many, one - many]) / math.sqrt(2)
            first, second = (
                (part[: len(one)] - part[len(one) :])[:, at.seen[visible]]
                .unflatten(0, (each, n))
                .to(device)
                for part in at.sphere.derivatives(at.points[j], both, at.y[j])
            )
            e = e.to(device)
            turned = (e @ self.sigma[j])[:, None, None] * first / math.sqrt(2)
            rest = (second / 2 + turned) @ across.mT
            coefficients = None if apart else (along @ axes.mT).to(device)
            parts = self.parts[j][:, visible.to(device)]
            for i in range(each):
                system = across @ self._weighted(parts, e[i]).mT
                mark = across @ -(e[i] @ at.first[j][:, at.seen[visible]].to(device))
                if coefficients is None:
                    marks = mark.new_zeros(len(mark), P if behind else 0)
                    if behind:
                        marks[:, j] = mark
                    systems.append(torch.cat([system, marks], 1))
                    wanted.append(rest[i].mT)
                    continue
                for own, left in enumerate(rest[i]):
                    marks = mark.new_zeros(len(mark), P * n)
                    marks[:, j * n + own] = mark
                    wide = (system[:, :, None] * coefficients[own]).flatten(1)
                    systems.append(torch.cat([wide, marks], 1))
                    wanted.append(left[:, None])
        solved = least_squares(torch.cat(systems), torch.cat(wanted)).to("cpu")
        if not apart:
            return [solved[:unknowns, 0].view(r, -1)], solved[unknowns:, 0].view(P, n)
        return list(solved[:unknowns].split(r)), solved[unknowns:]

    def _weighted(self, parts: Tensor, e: Tensor) -> Tensor:
        """Return what rows of a, and of gates, add to the derivative by e: (kinds · r, numbers)."""
        on_a = (self.units @ e)[:, None]
        if self.partners is None:
            return parts * on_a
        own, mixed = parts.split(len(self.units))
        return torch.cat(
            [own * on_a + mixed * (self.partners @ e)[:, None], mixed * on_a]
        )


def _integrated(angles: Tensor, slopes: Tensor) -> Tensor:
    """Return s, of mean 1, at points of a circle, from the slopes of log s, by harmonics."""
    orders = torch.arange(1, (len(angles) + 1) // 2, dtype=torch.float64)
    turns = angles[:, None] * orders
    system = torch.cat([-orders * turns.sin(), orders * turns.cos()], 1)
    weights = least_squares(system, slopes[:, None])
    s = (torch.cat([turns.cos(), turns.sin()], 1) @ weights)[:, 0].exp()
    return s / s.mean()
