"""The units of a smooth feed-forward layer, from second derivatives: a start for fit.py.

From answers F(x) at any x (`Field`) this finds the activation φ and all a_k, α_k and
c_k (`Units`), to about 1e-6, the precision of finite differences. With L any linear
map,

    F(x) = Lx + Σ_k c_k φ(a_k·x + α_k)

has the second derivatives

    D²F_p(e, e') = Σ_k c_k φ''(a_k·p + α_k)·(a_k·e)(a_k·e'),

so at every point p, and for every number of the answer, the Hessian is in the span S of
the matrices a_k a_kᵀ. Answers of many numbers at many p show S. Its dimension is the
number of units, and its matrices of rank one are the a_k a_kᵀ (rank_ones.py). A layer
with gates, `Σ_k c_k φ(a_k·x + α_k)(g_k·x + γ_k)`, brings two matrices for each unit,
a_k a_kᵀ and the symmetric product of a_k and g_k.

Behind a norm x is on a sphere. On a great circle −DF_p(p) is added to the second
derivative, the same for all e: one more matrix in S, the identity. To keep S one space,
e is in a subspace U of dimension q, and p in another one, Π, orthogonal to it. If q(q −
1)/2 ≥ dim S is far below d², a third subspace, W, remains.

    in U         a_k up to its length, from S; then c_k φ''(a_k·p + α_k) for every p: linear
    in Π, α_k    φ and θ for which these numbers, one for each p, are φ''(θ·p + α) (shapes.py)
    length       from the first derivatives: linear
    in W         from D²F_p(e, w): linear

Whether a unit is φ(z) or φ(−z) does not show (units.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import not_applicable
from keyhole.core.float64 import identity, random_stream, tensor
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.bilinear import random_orthogonal, random_units
from keyhole.extract.blocks.rank_ones import packed, rank_of, rank_ones, symmetric
from keyhole.extract.blocks.shapes import SMOOTH, random_shapes
from keyhole.extract.blocks.units import Units, derivative, with_ones

_STEP = 0.03  # of finite differences of the fourth order, relative to the radius
_POINTS = 12
_BEYOND = 1.2  # Hessians for each of their numbers, at least
# of Π
_AXES = 3
_FEWEST = 2
_AXES_OF_SCORES = 5  # one number tells units apart by their φ'' at many points
_ERRORS = (
    1e-6  # smaller singular values of the Hessians, relative, are errors of differences
)
_FULL = 0.9  # of the dimension that S may have for rank one to be rare in it
_RANK_ONE = (
    1e-4,
    1e-3,
    3e-3,
)  # what of a product may be outside S: Hessians are inexact


@dataclass(frozen=True)
class Field:
    """A function of vectors (n, d), on a sphere or everywhere, whose units are sought."""

    value: Callable[[Tensor], Tensor]
    dim: int
    sphere: bool
    numbers: int  # in an answer; if they are few, more points are asked
    heads: bool = (
        False  # of attention (heads.py): few gated units of σ, with low curvature
    )

    @property
    def radius(self) -> float:
        return math.sqrt(self.dim)

    @property
    def activations(self) -> Sequence[str]:
        return ("sigmoid",) if self.heads else SMOOTH

    def derivatives(self, p: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """Return first and second derivatives at points (P, d), by differences: (P, n, m).

        The directions (n, d) are unit vectors orthogonal to the points. On a sphere the
        second derivative includes −DF_p(p)/radius².
        """
        step = 3 * _STEP if self.heads else _STEP
        steps = step * tensor([-2.0, -1.0, 1.0, 2.0])
        if self.sphere:
            along = steps.sin()
            back = steps.cos()
        else:
            along = steps
            back = torch.ones_like(steps)
        points = (
            back.view(1, -1, 1, 1) * p[:, None, None]
            + along[:, None, None] * self.radius * e
        )
        y = self.value(points.flatten(0, 2)).unflatten(0, points.shape[:3])
        middle = self.value(p).unsqueeze(1)
        y_2, y_1, y1, y2 = y.unbind(1)
        h = step * self.radius
        first = (8 * (y1 - y_1) - (y2 - y_2)) / (12 * h)
        second = (16 * (y1 + y_1) - (y2 + y_2) - 30 * middle) / (12 * h * h)
        return first, second


@dataclass(frozen=True)
class _Frame:
    """The three subspaces, as orthonormal rows."""

    U: Tensor
    Pi: Tensor
    W: Tensor


def find_units(field: Field, stream: torch.Generator) -> Units:
    """Return all units.

    Raise Unsuccessful if the answers have no curvature, or there are too many units, or
    they are of another kind.
    """
    d = field.dim
    axes = random_orthogonal(d, stream)
    likely = 0 if field.heads else 2 * d
    scores = field.numbers == 1 and not field.heads and d >= 8 + _AXES_OF_SCORES
    most = _AXES_OF_SCORES if scores else _AXES
    q = min(max(8, math.ceil(1.6 * math.sqrt(2 * likely))), d - most)
    while True:
        frame = _Frame(axes[:q], axes[q : q + most], axes[q + most :])
        hessians = _Hessians.measured(field, frame, stream)
        if hessians.dimension <= _FULL * q * (q - 1) / 2:
            break
        if q == d - _FEWEST:
            raise not_applicable(
                f"curvature spans {hessians.dimension} dimensions, too many to tell units apart in "
                f"{q}: a layer this wide is not read"
            )
        q = min(q + 1 if scores else math.ceil(1.3 * q), d - _FEWEST)
    count = hessians.dimension - field.sphere
    units, partners = rank_ones(hessians.outside, q, count, stream, allowed=_RANK_ONE)
    if partners is None:
        return _plain(field, frame, hessians, units)
    return _gated(field, frame, hessians, units, partners)


@dataclass(frozen=True)
class _Hessians:
    """The Hessians in U of all numbers at all points, and the first derivatives there."""

    points: Tensor  # (P, d)
    first: Tensor  # (P, q, m)
    second: Tensor  # (P, m, q(q+1)/2), packed
    outside: Tensor  # (n, q(q+1)/2), orthonormal: what is orthogonal to S

    @property
    def dimension(self) -> int:
        return self.outside.shape[1] - len(self.outside)

    @classmethod
    def measured(
        cls,
        field: Field,
        frame: _Frame,
        stream: torch.Generator,
    ) -> _Hessians:
        q = len(frame.U)
        count = max(_POINTS, math.ceil(_BEYOND * q * (q + 1) / 2 / field.numbers))
        points = field.radius * random_units(count, len(frame.Pi), stream) @ frame.Pi
        rows, columns = torch.triu_indices(q, q)
        directions = normalize(frame.U[rows] + frame.U[columns], dim=1)
        first, second = field.derivatives(points, directions)
        diagonal = rows == columns
        own = second[:, diagonal]  # in the order of U
        mixed = second - (own[:, rows] + own[:, columns]) / 2
        second = torch.where(diagonal[:, None], second, math.sqrt(2) * mixed).mT
        sizes, right = thin_svd(second.flatten(0, 1))[1:]
        if not float(sizes[0]) > 1e-7:
            raise not_applicable("the answers have no curvature")
        rank, clear = rank_of(sizes, _ERRORS)
        if not clear:  # the layer is wider than what was asked shows
            rank = len(sizes)
        return cls(points, first[:, diagonal], second, right[rank:])

    def coefficients(self, products: Tensor) -> Tensor:
        """Return those of the Hessians in terms of packed matrices (r, q(q+1)/2): (P, m, r)."""
        flat = least_squares(products.mT, self.second.flatten(0, 1).mT).mT
        return flat.unflatten(0, self.second.shape[:2])


def _identity(field: Field, q: int) -> Tensor:
    """Return the matrix that a sphere adds to S, packed, (1, …); none, (0, …), without a sphere."""
    return packed(identity(q))[None][: int(field.sphere)]


def _rank_one_parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Factor (P, m, r) into σ_kp·ĉ_k: numbers (r, P) and unit vectors (r, m)."""
    left, sizes, right = thin_svd(values.movedim(2, 0))
    return left[..., 0] * sizes[:, :1], right[:, 0]


def _plain(
    field: Field,
    frame: _Frame,
    hessians: _Hessians,
    units: Tensor,
) -> Units:
    q = len(frame.U)
    products = torch.cat([symmetric(units, units), _identity(field, q)])
    numbers, directions = _rank_one_parts(
        hessians.coefficients(products)[..., : len(units)]
    )
    places = hessians.points @ frame.Pi.mT
    activation, theta, sizes = random_shapes(numbers, places, 2, field.activations)
    z = with_ones(places) @ theta.mT  # (P, r)
    slopes = derivative(activation, 1)(z)
    features = torch.einsum("pk,kq->pqk", slopes, units).flatten(0, 1)
    weights = _first_order_weights(features, hessians.first)  # c_k·length
    second_order = sizes[:, None] * directions  # c_k·length²
    length = (second_order * weights).sum(1) / weights.square().sum(1)
    a_u = length[:, None] * units
    C = weights / length[:, None]
    A = a_u @ frame.U + theta[:, :-1] @ frame.Pi
    if len(frame.W):
        # a_k in W: linear in the mixed derivatives.
        e, mixed = _mixed(field, frame, hessians, len(a_u))
        along = (e @ frame.U.mT) @ a_u.mT  # (n, r)
        system = torch.einsum("pk,nk,km->pnmk", derivative(activation, 2)(z), along, C)
        A = A + least_squares(system.flatten(0, 2), mixed.flatten(1).mT) @ frame.W
    return Units.plain(A, theta[:, -1], C.mT, activation)


def _first_order_weights(features: Tensor, first: Tensor) -> Tensor:
    """Return weights (r, m) of features (P·q, r) in first derivatives, next to any linear map."""
    points, q, _ = first.shape
    linear = identity(q).repeat(points, 1)
    return least_squares(torch.cat([features, linear], 1), first.flatten(0, 1))[
        : features.shape[1]
    ]


def _mixed(
    field: Field,
    frame: _Frame,
    hessians: _Hessians,
    unknowns: int,
) -> tuple[Tensor, Tensor]:
    """Return some e (n, d) in U, and D²F_p(e, w) for each w of W: (|W|, P, n, m).

    There are as many e as the unknowns of each w need.
    """
    q = len(frame.U)
    points, m = hessians.second.shape[:2]
    count = min(q, math.ceil(1.5 * unknowns / (points * m)) + 1)
    e = random_orthogonal(q, random_stream(q))[:count] @ frame.U
    w = frame.W.repeat_interleave(len(e), 0)
    each = e.repeat(len(frame.W), 1)
    plus, minus = (
        field.derivatives(hessians.points, (each + sign * w) / math.sqrt(2))[1]
        for sign in (1, -1)
    )
    mixed = (plus - minus) / 2
    return e, mixed.unflatten(1, (len(frame.W), len(e))).transpose(0, 1)


def _gated(
    field: Field,
    frame: _Frame,
    hessians: _Hessians,
    units: Tensor,
    gates: Tensor,
) -> Units:
    q = len(frame.U)
    r = len(units)
    products = [
        symmetric(units, units),
        2 * symmetric(units, gates),
        _identity(field, q),
    ]
    both = hessians.coefficients(torch.cat(products))
    numbers, directions = _rank_one_parts(both[..., r : 2 * r])
    places = hessians.points @ frame.Pi.mT
    activation, theta, sizes = random_shapes(numbers, places, 1, field.activations)
    z = with_ones(places) @ theta.mT
    value, slope, bend = (derivative(activation, order)(z) for order in (0, 1, 2))
    weight = (
        sizes[:, None] * directions
    )  # c_k·length of a_k in U, with g_k of length 1 in U
    own = torch.einsum("pmk,km->kp", both[..., :r], weight) / weight.square().sum(
        1, keepdim=True
    )
    system = torch.cat(
        [bend.mT[..., None] * with_ones(places), 2 * slope.mT[..., None]], 2
    )
    solved = torch.linalg.lstsq(system, own[..., None]).solution[..., 0]
    # (g_k in Π, γ_k) times the length, and g_k along a_k.
    inner = solved[:, :-1]
    part = solved[:, -1:]
    g_u = gates + part * units
    pi = with_ones(places) @ inner.mT  # (P, r)
    features = torch.einsum("pk,kq->pqk", slope * pi, units)
    features = features + torch.einsum("pk,kq->pqk", value, g_u)
    over = _first_order_weights(features.flatten(0, 1), hessians.first)
    length = weight.square().sum(1) / (weight * over).sum(1)
    a_u = length[:, None] * units
    C = weight / length[:, None]
    inner = inner / length[:, None]
    A = a_u @ frame.U + theta[:, :-1] @ frame.Pi
    G = g_u @ frame.U + inner[:, :-1] @ frame.Pi
    if len(frame.W):
        e, mixed = _mixed(field, frame, hessians, 2 * r)
        on_a, on_g = ((e @ frame.U.mT) @ part.mT for part in (a_u, g_u))
        pi = with_ones(places) @ inner.mT
        of_a = (bend * pi)[:, None] * on_a + slope[:, None] * on_g  # (P, n, r)
        of_g = slope[:, None] * on_a
        system = torch.cat([of_a, of_g], 2)[:, :, None] * torch.cat([C, C]).mT
        solved = least_squares(system.flatten(0, 2), mixed.flatten(1).mT)
        A = A + solved[:r] @ frame.W
        G = G + solved[r:] @ frame.W
    return Units(
        A, theta[:, -1], G, inner[:, -1].contiguous(), C.mT.contiguous(), activation
    )
