"""A block with LayerNorms behind its sums, as BERT's, peeled from the outside (ours).

    y = E·N(D·n + C·f(n) + c) + e,    n = N(x + Attention(x) + b)

Every answer has lost its length and its mean, and so has n. Each step is linear algebra:

    E, e        y/E has one sum for all y, and (y − e)/E one length: two linear systems
    x₀, M       n([x]) is the direction of (x − x₀)(1 + M), so the derivative of y([x]) is 0 along
                x − x₀ and along 1(1 + M)⁻¹; two points show both. In [x + δ ; x] every head has
                the weight ½ at δ = 0: the derivative by δ is that of y([x]) behind ½·M(1 + M)⁻¹
    units       n is any point of a sphere now. Of ŷ = R/s, s = |R|, the second derivatives are

                    ŷ_ee' + σ_e ŷ_e' + σ_e' ŷ_e + τ_ee' ŷ
                        = (1/s)(Σ_k c_k φ''_k (a_k·e)(a_k·e') − ρ δ_ee')

                with σ and τ from s alone. Across ŷ and all ŷ_e, e in U, these are ŷ_ee': that
                is the span S of units.py again. Outside of S the left side is 0: linear in σ
    the rest    the numbers φ''_k at some points, lengths from first derivatives, and the rows
                outside U from mixed ones (linear, beside σ_w); then all numbers (descent.py)
    signs       of φ(z) and φ(−z) those for which D is diagonal

Multiplying D, C and c, and with them the root of the second ε, changes nothing: the mean of D² is 1
here. Means of the rows of O and A, of the columns of C, of b and c are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.blocks.descent import Numbers, descend
from keyhole.extract.blocks.rank_ones import rank_ones, unpacked
from keyhole.extract.blocks.units import SMOOTH, Units, derivative, symmetric
from keyhole.extract.gauss_newton import levenberg
from keyhole.extract.sub_layers.surroundings import LostSum, Surroundings
from keyhole.oracle.block import ACTIVATIONS, Block
from keyhole.oracle.sub_layer import SubLayer

_AXES = 2  # of Π
_POINTS = 13  # of a circle in it
_STEP = 0.02  # of the radius
_SHORT = 0.005  # of √d, for derivatives by tokens
_FAR = 2.0**12  # of √d, for sums next to which the first ε is nothing
_SPARE = 16
_MORE = 1.5  # answers for each unknown of the fit
_TURNS = 40
_PATH = (
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.68,
    0.76,
    0.84,
    0.92,
    1.0,
)  # shares of tokens on the way to them
_ARRIVED = 1e-9
_AGREES = 1e-7
_PRECISE = 1e-8  # of what attention adds
_ROUGH = 1e-5
_NEWTON = 16
_BATCH = 512
_TOKENS = 12
_FULL = 0.85  # of the dimensions of symmetric matrices in U that S may have
_ERRORS = 1e-9  # singular values below this, relative, are errors of differences
_CLIFF = 10.0
_WIDTHS = (2.0, 4.0, 6.0, 9.0, 13.0)  # units for each dimension that U is made to hold
_LENGTHS = 10
_SAMPLE = 40  # units that show s and φ

Value = Callable[[Tensor], Tensor]
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
class SecondNorm:
    """`y = E·ŷ + e` with ŷ of mean 0 and length √d."""

    E: Tensor
    e: Tensor

    @classmethod
    def read(cls, y: Tensor) -> SecondNorm:
        """From answers (n, d), more than d + 2 of them."""
        n = len(y)
        ones = torch.ones(n, 1, dtype=torch.float64)
        size = y.std(0)
        null = torch.linalg.svd(torch.cat([y / size, ones], 1))[2][-1]
        scale = null[:-1] / size
        scale = scale * scale.sum().sign()
        z = y * scale
        centre = z.mean(0)
        parts = z - centre
        middle = least_squares(
            2 * parts, (parts.square().sum(1) - parts.square().sum(1).mean())[:, None]
        )[:, 0]
        z0 = centre + middle - middle.mean()
        radius = (z - z0).square().mean().sqrt()
        return cls(radius / scale, z0 / scale)

    def undone(self, y: Tensor) -> Tensor:
        return (y - self.e) / self.E


@dataclass(frozen=True)
class FirstSum:
    """The sum in front of the first norm, but for its mean: `(x − x₀)·T`, of which R is an inverse.

    Attention adds `x·total + b` to single tokens.
    """

    start: Tensor  # x₀
    R: Tensor
    T: Tensor

    @property
    def total(self) -> Tensor:
        return self.T - (torch.eye(len(self.T), dtype=torch.float64) - 1 / len(self.T))

    @property
    def b(self) -> Tensor:
        return -self.start @ self.T

    def tokens(self, n: Tensor, length: float = _FAR) -> Tensor:
        """Single tokens whose sums are these of mean 0, times a length."""
        return self.start + length * n @ self.R

    @classmethod
    def read(cls, ask: Value, d: int, stream: torch.Generator) -> FirstSum:
        """`ask` takes sequences (n, tokens, d)."""
        basis = random_orthogonal(d, stream)
        length = math.sqrt(d)
        singles, pairs, planes, points = [], [], [], []
        for x in length * random_orthogonal(d, stream)[:2]:
            middle = ask(x[None, None])
            at = x.expand_as(basis)

            def moved(t: float, at: Tensor = at) -> Tensor:
                return (at + _SHORT * t * length * basis).unsqueeze(1)

            def one(t: float, at: Tensor = at) -> Tensor:
                return torch.cat([moved(t), at.unsqueeze(1)], 1)

            singles.append(basis.mT @ differences(ask, moved, middle)[0])
            pairs.append(basis.mT @ differences(ask, one, middle)[0])
            planes.append(torch.linalg.svd(singles[-1])[0][:, -2:])
            points.append(x)
        left, cosines, _ = torch.linalg.svd(planes[0].mT @ planes[1])
        if float(cosines[0]) < 1 - 1e-6:
            raise Unsuccessful(
                Status.NOT_APPLICABLE,
                "answers to single tokens are not those behind a LayerNorm of one sum",
            )
        outside = [torch.eye(d, dtype=torch.float64) - p @ p.mT for p in planes]
        wanted = torch.cat([o @ x for o, x in zip(outside, points, strict=True)])
        J, J2 = torch.cat(singles, 1), torch.cat(pairs, 1)
        # Along 1(1 + M)⁻¹ nothing shows: it is left out, and the mean of sums is free.
        unseen = planes[0] @ left[:, 0]
        seen = torch.linalg.svd(unseen[:, None])[0][:, 1:]
        start = seen @ least_squares(torch.cat(outside) @ seen, wanted[:, None])[:, 0]
        N = 2 * (least_squares((seen.mT @ J).mT, J2.mT).mT) @ seen.mT
        R = torch.eye(d, dtype=torch.float64) - N
        T = torch.linalg.inv(R)
        T = T - T.mean(1, keepdim=True)
        return cls(start, R, T)


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
    return activation, *_shapes(numbers * s, along, activation)[:3]


def _shapes(numbers: Tensor, along: Tensor, activation: str) -> tuple[Tensor, ...]:
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


@dataclass(frozen=True)
class Layer:
    """`ŷ = √d·R/|R|`, `R = n·L + C·f(n) + c`, in coordinates n (e) of the sphere."""

    units: Units
    L: Tensor
    c: Tensor

    def numbers(self, device: torch.device) -> Numbers:
        units = self.units
        A = torch.cat([units.A, units.a[:, None]], 1)
        linear = torch.cat([units.C.mT, self.L, self.c[None]])
        return {"A": A.to(device), "linear": linear.to(device)}

    @classmethod
    def of(cls, numbers: Numbers, activation: str) -> Layer:
        A, linear = (part.to("cpu") for part in (numbers["A"], numbers["linear"]))
        none, width = torch.zeros(0, dtype=torch.float64), len(A)
        units = Units(
            A[:, :-1].contiguous(), A[:, -1].contiguous(), none.reshape(0, A.shape[1] - 1), none,
            linear[:width].mT.contiguous(), activation,
        )  # fmt: skip
        return cls(units, linear[width:-1], linear[-1])


def fitted(
    value: Value, units: Units, radius: float, device: torch.device, stream: torch.Generator
) -> tuple[Layer, float]:
    """All numbers of the layer, from those of the units, at as many points as they need."""
    width, e = units.A.shape
    unknowns = width * (e + 1) + (width + e + 1) * e
    count = math.ceil(_MORE * unknowns / (e - 1)) + _SPARE
    n = radius * normalize(torch.randn(count, e, generator=stream, dtype=torch.float64), dim=1)
    y = value(n).to(device)
    n = n.to(device)
    affine = torch.cat([n, torch.ones_like(n[:, :1])], 1)
    activation = ACTIVATIONS[units.activation]
    # What is linear, and the lengths of answers, by turns: few, since both are a start only.
    made = activation(
        affine @ torch.cat([units.A, units.a[:, None]], 1).to(device).mT
    ) @ units.C.mT.to(device)
    Q, R = torch.linalg.qr(affine)
    length = torch.ones_like(y[:, :1])
    sums = made
    for _ in range(_TURNS):
        sums = made + Q @ (Q.mT @ (length * y - made))
        length = (sums * y).sum(1, keepdim=True) / radius**2
    linear = torch.linalg.solve_triangular(R, Q.mT @ (length * y - made), upper=True).to("cpu")
    numbers = Layer(units, linear[:-1], linear[-1]).numbers(device)

    def model(numbers: Numbers) -> Tensor:
        features = torch.cat([activation(affine @ numbers["A"].mT), affine], 1)
        return radius * normalize(features @ numbers["linear"], dim=1)

    def preconditioner(numbers: Numbers) -> Callable[[Numbers], Numbers]:
        z = affine @ numbers["A"].mT
        features = torch.cat([activation(z), affine], 1)
        scale = (features @ numbers["linear"]).norm(dim=1, keepdim=True) / radius
        features, C = features / scale, numbers["linear"][:width]
        slopes = derivative(units.activation, 1)(z) / scale
        of_A = _inverse((C @ C.mT) * (slopes.mT @ slopes))
        of_linear = _inverse(features.mT @ features)
        return lambda slope: {"A": of_A @ slope["A"], "linear": of_linear @ slope["linear"]}

    numbers, left = descend(model, numbers, y, preconditioner)
    return Layer.of(numbers, units.activation), left


def _inverse(gram: Tensor) -> Tensor:
    ridge = (
        1e-10 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    )
    return torch.cholesky_inverse(torch.linalg.cholesky(gram + ridge))


def signed(layer: Layer, axes: Tensor) -> tuple[Layer, Tensor]:
    """The layer with the signs of its units for which D is diagonal; and D (d), of mean square 1.

    `L = axesᵀ·D·axes − Σ_k t_k a_k ⊗ c_k` with t_k 1 or 0, since φ(z) = φ(−z) + z: linear in D, t.
    """
    units = layer.units
    A, C = units.A @ axes.mT, units.C.mT @ axes.mT  # (r, d)
    L = axes @ layer.L @ axes.mT
    d, r = L.shape[0], len(A)
    centre = torch.eye(d, dtype=torch.float64) - 1 / d
    gram = torch.cat([
        torch.cat([(A @ A.mT) * (C @ C.mT), -A * C], 1),
        torch.cat([(-A * C).mT, centre.square()], 1),
    ])  # fmt: skip
    wanted = torch.cat([-((A @ L) * C).sum(1), L.diagonal()])
    solved = torch.linalg.solve(gram, wanted)
    turned, D = solved[:r] > 0.5, solved[r:]
    off = (solved[:r] - turned.to(torch.float64)).abs().max()
    if float(off) > 0.05:
        raise Unsuccessful(Status.NOT_APPLICABLE, "no signs of the units leave a residual alone")
    share = turned.to(torch.float64)
    sign, size = 1 - 2 * share, D.square().mean().sqrt() * D.sum().sign()
    c = layer.c + units.C @ (share * units.a)
    units = replace(units, A=units.A * sign[:, None], a=units.a * sign, C=units.C / size)
    return Layer(units, axes.mT @ (D[:, None] * axes) / size, c / size), D / size


@dataclass(frozen=True)
class Behind:
    """Everything of such a block but its attention, which is asked through it.

    As an oracle it gives what attention adds, in coordinates (e): of pairs exactly, of more tokens
    the direction of the sum alone. The sums of `[x + δ ; x]` and `[x − δ ; x]` differ by δ·M, since
    σ(s) + σ(−s) = 1 in every head: with both directions known that is both lengths.
    """

    ask: Value  # the last token's vectors
    axes: Tensor  # (d, e), orthonormal and of mean 0
    second: SecondNorm
    first: FirstSum
    layer: Layer
    D: Tensor
    device: torch.device
    every_token: bool = False
    causal: bool = False

    def surroundings(self) -> Surroundings:
        def direction(sequences: Tensor) -> tuple[Tensor, Tensor]:
            return self.directions(sequences), sequences[:, -1] @ self.axes + self.b

        return Surroundings(
            self, self.b, every_token=self.every_token, causal=self.causal, precision=_PRECISE,
            direction=direction,
        )  # fmt: skip

    @property
    def units(self) -> Units:
        return self.layer.units

    def block(self, attention: SubLayer) -> Block:
        """With the attention that its answers show."""
        units, lift = self.units, self.axes
        return Block(
            Q=attention.Q, q=attention.q, K=attention.K, V=attention.V,
            O=(attention.O @ lift.mT).contiguous(), b=lift @ attention.b,
            frequencies=attention.frequencies, A=(units.A @ lift.mT).contiguous(), a=units.a,
            G=units.G.new_zeros(0, self.dim), g=units.g, C=(lift @ units.C).contiguous(),
            c=lift @ self.layer.c, D=self.D, E=self.second.E, e=self.second.e,
            activation=units.activation, norm="behind", every_token=self.every_token,
            causal=self.causal,
        )  # fmt: skip

    @property
    def dim(self) -> int:
        return len(self.axes)

    @property
    def total(self) -> Tensor:
        return self.first.total @ self.axes

    @property
    def b(self) -> Tensor:
        return self.first.b @ self.axes

    def __call__(self, sequences: Tensor) -> Tensor:
        x = sequences[:, -1]
        alone = self.sums(x)
        if sequences.shape[1] == 1:
            return alone - x @ self.axes
        if sequences.shape[1] > 2:
            return self.directions(sequences)
        delta = (sequences[:, 0] - x) @ self.total
        mirrored = torch.stack([2 * x - sequences[:, 0], x], 1)
        both = torch.cat([sequences, mirrored])
        n, _ = self._directions(both)
        sums, off = _lengths(*n.chunk(2), delta)
        lost = torch.nonzero(off > _AGREES)[:, 0]
        if len(lost):
            rows = torch.cat([lost, lost + len(x)])
            again, left = _lengths(*self._followed(both[rows]).chunk(2), delta[lost])
            better = left < off[lost]
            sums[lost[better]], off[lost[better]] = again[better], left[better]
        if float(off.max()) > _ROUGH:
            raise LostSum(f"{int((off > _ROUGH).sum())} sums could not be told from answers")
        return sums - x @ self.axes

    def with_start(self, stream: torch.Generator) -> Behind:
        """x₀ again, now that directions are known: sums `x·T + b` of a few tokens lie on them."""
        d, e = self.axes.shape
        x = math.sqrt(d) * random_orthogonal(d, stream)[: min(_TOKENS, d)]
        n, _ = self._directions(x.unsqueeze(1))
        hats = normalize(n, dim=1)
        moved = x @ (self.first.T @ self.axes)
        # b without its parts along each direction: Σ (1 − n̂n̂ᵀ)(b + moved) = 0
        square = len(x) * torch.eye(e, dtype=torch.float64) - hats.mT @ hats
        b = -torch.linalg.solve(square, (moved - (moved * hats).sum(1, keepdim=True) * hats).sum(0))
        return replace(self, first=replace(self.first, start=-(self.axes @ b) @ self.first.R))

    def sums(self, x: Tensor) -> Tensor:
        """In front of the first norm, of single tokens, in coordinates."""
        return (x - self.first.start) @ (self.first.T @ self.axes)

    def directions(self, sequences: Tensor) -> Tensor:
        """n of the sum in front of the first norm, of sequences of any length."""
        n, off = self._directions(sequences)
        lost = torch.nonzero(off > _ARRIVED)[:, 0]
        if len(lost):
            n[lost] = self._followed(sequences[lost])
        return n

    def _directions(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second.undone(self.ask(sequences)) @ self.axes
        return self.undone(y, self._guess(sequences))

    def _guess(self, sequences: Tensor) -> Tensor:
        """The sum if every head looked at all tokens alike, as it does at short ones."""
        x = sequences[:, -1]
        return self.sums(x) + (sequences.mean(1) - x) @ self.total

    def _followed(self, sequences: Tensor) -> Tensor:
        """Likewise, from tokens so short that the sum is known on: a path of questions."""
        before, at, n = None, 0.0, self._guess(_PATH[0] * sequences)
        for share in _PATH:
            y = self.second.undone(self.ask(share * sequences)) @ self.axes
            start = n if before is None else n + (n - before[1]) * (share - at) / (at - before[0])
            before, (n, _) = (at, n) if at else None, self.undone(y, start)
            at = share
        return n

    def undone(self, y: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Points n of the sphere that answer ŷ, by Newton's method: R(n) = s·ŷ, |n|² = d.

        And what is left, relative to R.
        """
        at = self.device
        units, radius = self.layer.units, math.sqrt(self.dim)
        A, a, C, L, c = (p.to(at) for p in (units.A, units.a, units.C, self.layer.L, self.layer.c))
        f, df = ACTIVATIONS[units.activation], derivative(units.activation, 1)
        ends, left = list[Tensor](), list[Tensor]()
        for y_, n in zip(y.split(_BATCH), start.split(_BATCH), strict=True):
            y_, n = y_.to(at), radius * normalize(n.to(at), dim=1)

            def look(n: Tensor, y_: Tensor = y_) -> tuple[Tensor, Tensor]:
                R = n @ L + f(n @ A.mT + a) @ C.mT + c
                s = (R * y_).sum(1) / radius**2
                rest = R - s[:, None] * y_
                return rest, rest.norm(dim=1) / R.norm(dim=1)

            rest, size = look(n)
            for _ in range(_NEWTON):
                slope = L.mT + (C * df(n @ A.mT + a)[:, None]) @ A  # (n, m, e)
                top = torch.cat([slope, -y_[..., None]], 2)
                bottom = torch.cat([n, torch.zeros_like(n[:, :1])], 1)[:, None]
                wanted = torch.cat([rest, torch.zeros_like(n[:, :1])], 1)
                step = torch.linalg.solve_ex(torch.cat([top, bottom], 1), wanted[..., None])[0]
                step = torch.nan_to_num(step[:, :-1, 0])
                share = torch.ones_like(n[:, :1])
                for _ in range(5):
                    tried = radius * normalize(n - share * step, dim=1)
                    new = look(tried)
                    worse = (new[1] > size) & (size > 1e-14)
                    if not bool(worse.any()):
                        break
                    share = torch.where(worse[:, None], share / 4, share)
                done = (new[1] < 1e-10) & (new[1] > 0.5 * size)
                n, rest, size = tried, *new
                if bool((done | (size < 1e-15)).all()):
                    break
            ends.append(n.to("cpu"))
            left.append(size.to("cpu"))
        return torch.cat(ends), torch.cat(left)


def _lengths(forth: Tensor, back: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """The first of two sums that differ by delta, from their directions; and how far these fail."""
    pair = torch.stack([forth, -back], 2)
    gram = pair.mT @ pair
    lengths = torch.linalg.solve(gram, pair.mT @ delta[..., None])
    off = ((pair @ lengths)[..., 0] - delta).norm(dim=1) / delta.norm(dim=1)
    return lengths[:, 0] * forth, torch.where((lengths[..., 0] > 0).all(1), off, math.inf)


def read(ask: Value, d: int, device: torch.device, stream: torch.Generator) -> Behind:
    """`ask` takes sequences (n, tokens, d) to the last token's vectors."""
    tokens = torch.randn(2 * d + _SPARE, 1, d, generator=stream, dtype=torch.float64)
    second = SecondNorm.read(ask(tokens))
    first = FirstSum.read(lambda sequences: second.undone(ask(sequences)), d, stream)
    ones = torch.ones(d, 1, dtype=torch.float64)
    axes = torch.linalg.qr(torch.cat([ones, random_orthogonal(d, stream)[:, 1:]], 1))[0][:, 1:]

    def value(n: Tensor) -> Tensor:
        return second.undone(ask(first.tokens(n @ axes.mT).unsqueeze(1))) @ axes

    units = find_units(value, d - 1, math.sqrt(d), device, stream)
    layer, left = fitted(value, units, math.sqrt(d), device, stream)
    if left > 1e-6:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"no feed-forward layer explains the answers to single tokens: {left:.1e} is left",
        )
    layer, D = signed(layer, axes)
    return Behind(ask, axes, second, first, layer, D, device).with_start(stream)
