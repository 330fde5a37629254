"""The units of a smooth feed-forward layer, from how its answers bend: a start for `fit.py`.

A layer `F(x) = Lx + Σ_k c_k φ(a_k·x + α_k)` has second derivatives

    D²F_p(e, e') = Σ_k c_k φ''(a_k·p + α_k)·(a_k·e)(a_k·e'),

so whatever the point p and the number of the answer, the Hessian is in the span S of the matrices
a_k a_kᵀ. With many p and all numbers of a vector S is known, its dimension is the number of units,
and the a_k are its matrices of rank one: the maxima, with value 1, of `‖P_S(aaᵀ)‖` for |a| = 1
(the subspace power method, Kileel and Pereira, arXiv 1912.04007). A gated layer
`Σ_k c_k φ(a_k·x + α_k)(g_k·x + γ_k)` brings two matrices for each unit, a_k a_kᵀ and the symmetric
product of a_k and g_k; those of rank one are the a_k a_kᵀ again, and g_k is the other vector w for
which the symmetric product of a_k and w is in S.

Behind a norm x is on a sphere. On a great circle the second derivative has −DF_p(p) added, the same
for all e: one more matrix in S, the identity. To keep S one space, e runs in a subspace U of
dimension q, p in another one, Π, orthogonal to it; where q(q − 1)/2 ≥ dim S is far below d², a
third one, W, is left over.

    in U         a_k up to its length, from S; then c_k φ''(a_k·p + α_k) for every p, linear
    in Π, α_k    the φ for which these numbers, one for each p, are φ''(θ·p + α): a small fit
    length       from the first derivatives, linear
    in W         from D²F_p(e, w), linear

What a unit is, φ(z) or φ(−z), curvature does not tell: for GELU and SiLU the difference is z, a
part of L. Precision is what finite differences leave, about 1e-6.
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
from keyhole.oracle.block import ACTIVATIONS

SMOOTH = ("gelu", "gelu-tanh", "silu")
_STEP = 0.03  # of the radius, for differences of the fourth order
_POINTS = 12
_BEYOND = 1.2  # Hessians for each of their numbers, at least
_AXES, _FEWEST = 3, 2  # of Π
_AXES_OF_SCORES = 5  # one number tells units apart by their φ'' at many points
_ERRORS = 1e-6  # singular values of the Hessians below this, relative, are errors of differences
_CLIFF = 10.0  # how far these stay below those that count, at least
_FULL = 0.9  # of the dimension that S may have for rank one to be rare in it
_STARTS = 256
_ROUNDS = 12
_POWERS = 400
_STEADY = 1e-11
_RANK_ONE = 1e-5  # 1 − ‖P_S(aaᵀ)‖² below this
_NEARLY = 1e-2
_ALONE = 1e-5  # how far from S a plain unit's product with any other vector is
_TURNS = 4
_NEWTON = 20
_SAME = 1e-4  # of cosines
_TRIES = 48  # starts of the fit of one unit's numbers
_DRAWS, _MORE_DRAWS = 64, 8192  # of which each start is the best; for units that miss
_MISSED = 1e-3
_STEPS = 40
_SAMPLE = 8  # units that show the activation


@dataclass(frozen=True)
class Field:
    """A function of vectors (n, d), on a sphere or everywhere, whose units are sought."""

    value: Callable[[Tensor], Tensor]
    dim: int
    sphere: bool
    numbers: int  # in an answer; where they are few, more points are asked
    heads: bool = False  # of attention (heads.py): gated units of σ, few and far from bent

    @property
    def radius(self) -> float:
        return math.sqrt(self.dim)

    @property
    def step(self) -> float:
        return 3 * _STEP if self.heads else _STEP

    def derivatives(self, p: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """First and second ones at points (P, d) along units (n, d) orthogonal to them: (P, n, m).

        On a sphere the second includes −DF_p(p)/radius².
        """
        steps = self.step * torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
        along, back = (steps.sin(), steps.cos()) if self.sphere else (steps, torch.ones_like(steps))
        at = torch.cat([steps[:2], steps[3:]])
        moves = (along[steps != 0, None, None] * self.radius * e)[None]
        points = back[steps != 0].view(1, -1, 1, 1) * p[:, None, None] + moves
        y = self.value(points.flatten(0, 2)).unflatten(0, (len(p), len(at), len(e)))
        middle = self.value(p).unsqueeze(1)
        far, near, near_, far_ = y.unbind(1)
        h = self.step * self.radius
        first = (8 * (near_ - near) - (far_ - far)) / (12 * h)
        second = (16 * (near_ + near) - (far_ + far) - 30 * middle) / (12 * h * h)
        return first, second


@dataclass(frozen=True)
class Units:
    """`A` (width, d), `a`, and for gated units `G`, `g`; `C` (m, width) as curvature shows it."""

    A: Tensor
    a: Tensor
    G: Tensor
    g: Tensor
    C: Tensor
    activation: str

    @property
    def of_length_one(self) -> Units:
        """The same function: rows of G, and of ReLU units those of A, may be multiplied."""
        if len(self.G):
            length = self.G.norm(dim=1)
            free = {"G": self.G / length[:, None], "g": self.g / length}
        elif self.activation == "relu":
            length = self.A.norm(dim=1)
            free = {"A": self.A / length[:, None], "a": self.a / length}
        else:
            return self
        return replace(self, **free, C=self.C * length)


@dataclass(frozen=True)
class _Frame:
    """The three subspaces, as orthonormal rows."""

    U: Tensor
    Pi: Tensor
    W: Tensor


def find_units(field: Field, stream: torch.Generator) -> Units:
    """All units, or Unsuccessful: no curvature, too many of them, or of another kind."""
    d = field.dim
    axes = random_orthogonal(d, stream)
    likely = 0 if field.heads else 2 * d
    scores = field.numbers == 1 and not field.heads and d >= 8 + _AXES_OF_SCORES
    most = _AXES_OF_SCORES if scores else _AXES
    q = min(max(8, math.ceil(1.6 * math.sqrt(2 * likely))), d - most)
    while True:
        frame = _Frame(axes[:q], axes[q : q + most], axes[q + most :])
        bent = _Hessians.measured(field, frame, stream)
        if bent.dimension <= _FULL * q * (q - 1) / 2:
            break
        if q == d - _FEWEST:
            raise Unsuccessful(
                Status.NOT_APPLICABLE,
                f"curvature spans {bent.dimension} dimensions, too many to tell units apart in "
                f"{q}: a layer this wide is not read",
            )
        q = min(q + 1 if scores else math.ceil(1.3 * q), d - _FEWEST)
    count = bent.dimension - field.sphere
    allowed = _RANK_ONE / (1 if field.numbers == 1 else 100)  # by what Hessians are off
    units, partners = rank_ones(unpacked(bent.basis, q), count, stream, allowed)
    if partners is None:
        return _plain(field, frame, bent, units)
    return _gated(field, frame, bent, units, partners)


@dataclass(frozen=True)
class _Hessians:
    """Of all numbers at all points, in U; and the first derivatives there."""

    points: Tensor  # (P, d)
    first: Tensor  # (P, q, m)
    second: Tensor  # (P, m, q(q+1)/2): symmetric matrices with √2 off the diagonal
    basis: Tensor  # (dimension, q(q+1)/2) of S, orthonormal

    @property
    def dimension(self) -> int:
        return len(self.basis)

    @classmethod
    def measured(cls, field: Field, frame: _Frame, stream: torch.Generator) -> _Hessians:
        q = len(frame.U)
        count = max(_POINTS, math.ceil(_BEYOND * q * (q + 1) / 2 / field.numbers))
        xi = torch.randn(count, len(frame.Pi), generator=stream, dtype=torch.float64)
        points = field.radius * normalize(xi, dim=1) @ frame.Pi
        rows, columns = torch.triu_indices(q, q)
        directions = normalize(frame.U[rows] + frame.U[columns], dim=1)
        first, second = field.derivatives(points, directions)
        diagonal = rows == columns
        own = second[:, diagonal]  # in the order of U
        mixed = second - (own[:, rows] + own[:, columns]) / 2
        packed = torch.where(diagonal[:, None], second, math.sqrt(2) * mixed).mT
        sizes, right = torch.linalg.svd(packed.flatten(0, 1), full_matrices=False)[1:]
        if not float(sizes[0]) > 1e-7:
            raise Unsuccessful(Status.NOT_APPLICABLE, "the answers do not bend")
        falls = sizes[:-1] / sizes[1:].clamp(min=_ERRORS * sizes[0])
        count = int(falls.argmax()) + 1
        if float(falls[count - 1]) < _CLIFF:  # a layer wider than what was asked shows
            count = len(sizes)
        return cls(points, first[:, diagonal], packed, right[:count])

    def coefficients(self, products: Tensor) -> Tensor:
        """Of the Hessians in terms of such matrices (r, q(q+1)/2): (P, m, r)."""
        flat = least_squares(products.mT, self.second.flatten(0, 1).mT).mT
        return flat.unflatten(0, self.second.shape[:2])


def symmetric(x: Tensor, y: Tensor) -> Tensor:
    """(x yᵀ + y xᵀ)/2 of vectors (…, q), packed like the Hessians."""
    q = x.shape[-1]
    rows, columns = torch.triu_indices(q, q, device=x.device)
    product = (x[..., rows] * y[..., columns] + x[..., columns] * y[..., rows]) / 2
    return torch.where(rows == columns, product, math.sqrt(2) * product)


def unpacked(packed: Tensor, q: int) -> Tensor:
    rows, columns = torch.triu_indices(q, q, device=packed.device)
    full = packed.new_zeros(*packed.shape[:-1], q, q)
    values = torch.where(rows == columns, packed, packed / math.sqrt(2))
    full[..., rows, columns] = values
    full[..., columns, rows] = values
    return full


def rank_ones(
    basis: Tensor, most: int, stream: torch.Generator, allowed: float = _RANK_ONE / 100
) -> tuple[Tensor, Tensor | None]:
    """Unit vectors a with aaᵀ in the span of matrices (dim S, q, q): `most` of them, or half.

    Of half as many each has a partner w, orthogonal to it, for which awᵀ + waᵀ is in the span too,
    but for `allowed`.
    """
    q = basis.shape[-1]
    plains = gates = torch.empty(0, q, dtype=torch.float64)
    quiet = 0
    for _ in range(_ROUNDS):
        a = normalize(torch.randn(_STARTS, q, generator=stream, dtype=torch.float64), dim=1)
        before = a
        for _ in range(_POWERS):
            at = torch.einsum("sij,nj->nsi", basis, a)
            forms = torch.einsum("nsi,ni->ns", at, a)
            step = torch.einsum("ns,nsi->ni", forms, at)
            a, before = normalize(step + 0.1 * a, dim=1), a
            if float((a - before).abs().max()) < _STEADY:
                break
        plain, gated = _settled(basis, a, before, allowed)
        count = len(gates)
        plains, gates = torch.cat([plains, plain]), torch.cat([gates, gated])
        plains, gates = plains[distinct(plains)], gates[distinct(gates)]
        quiet = quiet + 1 if len(gates) == count else 0
        if len(plains) == most and 2 * len(gates) < most:
            return plains, None
        if quiet >= 2 and 2 * len(gates) >= most:
            break
    if 2 * len(gates) == most:
        return gates, _partners(basis, gates)
    raise Unsuccessful(
        Status.NOT_APPLICABLE,
        f"curvature spans {most} dimensions, but {len(plains)} units were found in it, "
        f"{len(gates)} with gates; a plain layer has {most} and a gated one {most // 2}: try "
        "another seed",
    )


def _outside(basis: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """⟨x∘e_i, (1 − P_S)(y∘e_j)⟩ with x∘y = (xyᵀ + yxᵀ)/2, of vectors (n, q): (n, q, q)."""
    own = (x * y).sum(1)[:, None, None] * torch.eye(x.shape[1], dtype=torch.float64)
    own = (own + y[:, :, None] * x[:, None]) / 2
    at_x, at_y = (torch.einsum("sij,nj->nsi", basis, each) for each in (x, y))
    return own - at_x.mT @ at_y


def _settled(basis: Tensor, a: Tensor, before: Tensor, allowed: float) -> tuple[Tensor, Tensor]:
    """The iterates that are solutions, taken as plain units and as gated ones.

    At a gated unit the maximum is flat: from a towards w, aaᵀ leaves S with the fourth power only.
    But the plane of a and w is known, and in it S has two of the three symmetric matrices, a∘a and
    a∘w. The third, orthogonal to them, is nnᵀ with n orthogonal to a. Newton's method on both
    conditions, a∘a and a∘w in S, does the rest.
    """
    own = torch.einsum("ni,nij,nj->n", a, _outside(basis, a, a), a)
    steady = (a - before).abs().amax(1) < 1e4 * _STEADY
    plain = torch.cat([a[(own < _RANK_ONE) & steady], _hastened(basis, a[~steady])])
    a = a[own < _NEARLY]
    if not len(a):
        return plain, a
    packed = symmetric_basis(basis)
    for _ in range(_TURNS):
        plane = torch.linalg.eigh(_outside(basis, a, a))[1][..., :2].mT  # (n, 2, q)
        first, second = plane.unbind(1)
        products = torch.stack(
            [
                symmetric(first, first),
                math.sqrt(2) * symmetric(first, second),
                symmetric(second, second),
            ],
            1,
        )
        left = products - (products @ packed.mT) @ packed
        form = torch.linalg.eigh(left @ left.mT)[1][..., -1]
        side = form[:, 1] / math.sqrt(2)
        sizes, axes = torch.linalg.eigh(
            torch.stack([form[:, 0], side, side, form[:, 2]], 1).view(-1, 2, 2)
        )
        null = axes[torch.arange(len(a)), :, sizes.abs().argmin(1)]
        a = normalize(torch.einsum("ni,niq->nq", null, plane), dim=1)
    w = _partners(basis, a)
    q = a.shape[1]
    for _ in range(_NEWTON):
        aa, wa = _outside(basis, a, a), _outside(basis, w, a)
        top = torch.cat([4 * aa + _outside(basis, w, w), wa], 2)
        square = torch.cat([top, torch.cat([wa.mT, aa], 2)], 1)
        slope = torch.cat([2 * aa @ a[..., None] + wa @ w[..., None], aa @ w[..., None]], 1)
        ridge = 1e-9 * torch.eye(2 * q, dtype=torch.float64)
        step = torch.linalg.solve(square + ridge, slope)[..., 0]
        a = normalize(a - step[:, :q], dim=1)
        w = w - step[:, q:]
        w = normalize(w - a * (a * w).sum(1, keepdim=True), dim=1)
    both = torch.stack(
        [torch.einsum("ni,nij,nj->n", x, _outside(basis, a, a), x) for x in (a, w)]
    ).amax(0)
    return plain, a[both < allowed]


def _hastened(basis: Tensor, a: Tensor) -> Tensor:
    """Plain units that iterates are on their way to, by Newton's method; no gated ones."""
    ridge = 1e-12 * torch.eye(a.shape[1], dtype=torch.float64)
    for _ in range(_NEWTON):
        form = _outside(basis, a, a)
        square = 4 * form + a[:, :, None] * a[:, None] + ridge
        a = normalize(a - torch.linalg.solve(square, 2 * form @ a[..., None])[..., 0], dim=1)
    form = _outside(basis, a, a)
    own, alone = (a[:, None] @ form @ a[..., None])[:, 0, 0], torch.linalg.eigvalsh(form)[:, 1]
    return a[(own < _RANK_ONE) & (alone > _ALONE)]


def symmetric_basis(basis: Tensor) -> Tensor:
    q = basis.shape[-1]
    rows, columns = torch.triu_indices(q, q)
    values = basis[:, rows, columns]
    return torch.where(rows == columns, values, math.sqrt(2) * values)


def _partners(basis: Tensor, units: Tensor) -> Tensor:
    """For each a the unit vector w, orthogonal to a, whose product with a is in the span too."""
    form = _outside(basis, units, units) + units[:, :, None] * units[:, None]
    return torch.linalg.eigh(form)[1][..., 0]


def distinct(vectors: Tensor, same: float = _SAME) -> Tensor:
    """Which are the first of those unit vectors that are alike up to a sign."""
    numbers = torch.arange(len(vectors), device=vectors.device)
    if not len(vectors):
        return numbers
    first = ((vectors @ vectors.mT).abs() > 1 - same).to(torch.int8).argmax(1)
    return numbers[first == numbers]


def _identity(field: Field, q: int) -> Tensor:
    """The matrix that a sphere adds to S, packed."""
    rows, columns = torch.triu_indices(q, q)
    return (rows == columns).to(torch.float64)[None][: int(field.sphere)]


def _rank_one_parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """(P, m, r) as σ_kp·ĉ_k: numbers (r, P) and unit vectors (r, m)."""
    left, sizes, right = torch.linalg.svd(values.movedim(2, 0), full_matrices=False)
    return left[..., 0] * sizes[:, :1], right[:, 0]


def _plain(field: Field, frame: _Frame, bent: _Hessians, units: Tensor) -> Units:
    q = len(frame.U)
    products = torch.cat([symmetric(units, units), _identity(field, q)])
    numbers, directions = _rank_one_parts(bent.coefficients(products)[..., : len(units)])
    places = bent.points @ frame.Pi.mT
    activation, theta, sizes = _fitted(field, numbers, places, 2)
    alpha, beta = theta[:, :-1], theta[:, -1]
    z = places @ alpha.mT + beta  # (P, r)
    slopes = derivative(activation, 1)(z)
    features = torch.einsum("pk,kq->pqk", slopes, units).flatten(0, 1)
    weights = _beside_linear(features, bent.first)  # c_k·length
    bending = sizes[:, None] * directions  # c_k·length²
    length = (bending * weights).sum(1) / weights.square().sum(1)
    a_u = length[:, None] * units
    C = weights / length[:, None]
    A = a_u @ frame.U + alpha @ frame.Pi
    if len(frame.W):
        A = A + _beyond_plain(field, frame, bent, a_u, C, derivative(activation, 2)(z)) @ frame.W
    none = torch.zeros(0, dtype=torch.float64)
    return Units(A, beta, none.reshape(0, field.dim), none, C.mT.contiguous(), activation)


def _beside_linear(features: Tensor, first: Tensor) -> Tensor:
    """Weights (r, m) of features (P·q, r) in first derivatives, beside any linear map."""
    points, q, _ = first.shape
    linear = torch.eye(q, dtype=torch.float64).repeat(points, 1)
    return least_squares(torch.cat([features, linear], 1), first.flatten(0, 1))[: features.shape[1]]


def _mixed(field: Field, frame: _Frame, bent: _Hessians, count: int) -> tuple[Tensor, Tensor]:
    """e (n, d) in U, and D²F_p(e, w) of all of them with each w of W: (|W|, P, n, m)."""
    q = len(frame.U)
    stream = torch.Generator().manual_seed(q)
    e = random_orthogonal(q, stream)[:count] @ frame.U
    w, each = frame.W.repeat_interleave(len(e), 0), e.repeat(len(frame.W), 1)
    plus, minus = (
        field.derivatives(bent.points, (each + sign * w) / math.sqrt(2))[1] for sign in (1, -1)
    )
    mixed = (plus - minus) / 2
    return e, mixed.unflatten(1, (len(frame.W), len(e))).transpose(0, 1)


def _count(unknowns: int, bent: _Hessians, q: int) -> int:
    points, m = bent.second.shape[:2]
    return min(q, math.ceil(1.5 * unknowns / (points * m)) + 1)


def _beyond_plain(
    field: Field, frame: _Frame, bent: _Hessians, a_u: Tensor, C: Tensor, bends: Tensor
) -> Tensor:
    """a_k in W (r, |W|): linear in the mixed derivatives."""
    e, mixed = _mixed(field, frame, bent, _count(len(a_u), bent, len(frame.U)))
    along = (e @ frame.U.mT) @ a_u.mT  # (n, r)
    system = torch.einsum("pk,nk,km->pnmk", bends, along, C).flatten(0, 2)
    return least_squares(system, mixed.flatten(1).mT)


def _gated(field: Field, frame: _Frame, bent: _Hessians, units: Tensor, gates: Tensor) -> Units:
    q, r = len(frame.U), len(units)
    products = torch.cat(
        [symmetric(units, units), 2 * symmetric(units, gates), _identity(field, q)]
    )
    both = bent.coefficients(products)
    numbers, directions = _rank_one_parts(both[..., r : 2 * r])
    places = bent.points @ frame.Pi.mT
    activation, theta, sizes = _fitted(field, numbers, places, 1)
    alpha, beta = theta[:, :-1], theta[:, -1]
    z = places @ alpha.mT + beta
    value, slope, bend = (derivative(activation, order)(z) for order in (0, 1, 2))
    weight = sizes[:, None] * directions  # c_k·length of a_k in U, with g_k of length 1 in U
    own = torch.einsum("pmk,km->kp", both[..., :r], weight) / weight.square().sum(1, keepdim=True)
    affine = torch.cat([places, torch.ones_like(places[:, :1])], 1)
    system = torch.cat([bend.mT[..., None] * affine, 2 * slope.mT[..., None]], 2)
    solved = torch.linalg.lstsq(system, own[..., None]).solution[..., 0]
    inner, part = (
        solved[:, :-1],
        solved[:, -1:],
    )  # g_k in Π and γ_k, times the length; g_k along a_k
    g_u = gates + part * units
    pi = affine @ inner.mT  # (P, r)
    features = torch.einsum("pk,kq->pqk", slope * pi, units) + torch.einsum(
        "pk,kq->pqk", value, g_u
    )
    over = _beside_linear(features.flatten(0, 1), bent.first)
    length = weight.square().sum(1) / (weight * over).sum(1)
    a_u, C = length[:, None] * units, weight / length[:, None]
    inner = inner / length[:, None]
    A = a_u @ frame.U + alpha @ frame.Pi
    G = g_u @ frame.U + inner[:, :-1] @ frame.Pi
    if len(frame.W):
        e, mixed = _mixed(field, frame, bent, _count(2 * r, bent, q))
        on_a, on_g = ((e @ frame.U.mT) @ part.mT for part in (a_u, g_u))
        pi = affine @ inner.mT
        of_a = (bend * pi)[:, None] * on_a + slope[:, None] * on_g  # (P, n, r)
        of_g = slope[:, None] * on_a
        system = torch.cat([of_a, of_g], 2)[:, :, None] * torch.cat([C, C]).mT
        solved = least_squares(system.flatten(0, 2), mixed.flatten(1).mT)
        A, G = A + solved[:r] @ frame.W, G + solved[r:] @ frame.W
    return Units(A, beta, G, inner[:, -1].contiguous(), C.mT.contiguous(), activation)


def derivative(activation: str, order: int) -> Callable[[Tensor], Tensor]:
    """φ, φ' or φ'' of an activation."""
    function = ACTIVATIONS[activation]

    def differentiated(z: Tensor) -> Tensor:
        at = z.detach().requires_grad_()
        with torch.enable_grad():
            value = function(at)
            for _ in range(order):
                value = torch.autograd.grad(value.sum(), at, create_graph=True)[0]
        return value.detach()

    return differentiated


def _fitted(
    field: Field, numbers: Tensor, places: Tensor, order: int
) -> tuple[str, Tensor, Tensor]:
    """The activation whose derivative gives every unit's numbers (r, P); θ (r, π + 1) and sizes."""

    def off(activation: str) -> float:
        return float(fit_numbers(numbers[:_SAMPLE], places, activation, order)[2].median())

    activation = "sigmoid" if field.heads else min(SMOOTH, key=off)
    theta, sizes, misses = fit_numbers(numbers, places, activation, order)
    bad = misses > _MISSED
    if bool(bad.any()):
        again = fit_numbers(numbers[bad], places, activation, order, _MORE_DRAWS)
        theta[bad], sizes[bad] = again[:2]
    return activation, theta, sizes


def fit_numbers(
    numbers: Tensor, places: Tensor, activation: str, order: int, draws: int = _DRAWS
) -> tuple[Tensor, Tensor, Tensor]:
    """Each unit's `size·φ⁽ᵒʳᵈᵉʳ⁾(θ·p + α)`, from many starts: θ and α, sizes, misses."""
    (r, _), axes = numbers.shape, places.shape[1]
    stream = torch.Generator().manual_seed(axes)
    affine = torch.cat([places, torch.ones_like(places[:, :1])], 1)
    scale = affine.square().mean(0).sqrt()
    unit = numbers / torch.linalg.vector_norm(numbers, dim=1, keepdim=True)
    wanted = unit.repeat_interleave(_TRIES, 0)
    f, df = derivative(activation, order), derivative(activation, order + 1)
    spread = 4 * torch.rand(_TRIES, draws, 1, generator=stream, dtype=torch.float64)
    starts = torch.randn(_TRIES, draws, axes + 1, generator=stream, dtype=torch.float64)
    starts = spread * starts / scale
    likeness = torch.einsum("tsp,rp->rts", normalize(f(starts @ affine.mT), dim=2), unit).abs()
    theta = starts[torch.arange(_TRIES), likeness.argmax(2)].flatten(0, 1)

    def look(theta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Unit vectors, the size that suits, what is left and its square."""
        shape = f(theta @ affine.mT)
        length = torch.linalg.vector_norm(shape, dim=1, keepdim=True).clamp(min=1e-100)
        shape = shape / length
        size = (shape * wanted).sum(1, keepdim=True)
        rest = size * shape - wanted
        return shape, size / length, rest, rest.square().sum(1)

    damping = torch.full((len(theta),), 1e-2, dtype=torch.float64)
    shape, size, rest, cost = look(theta)
    for _ in range(_STEPS):
        slope = size[..., None] * df(theta @ affine.mT)[..., None] * affine
        slope = slope - shape[..., None] * (shape[..., None] * slope).sum(1, keepdim=True)
        gram = slope.mT @ slope
        ridge = damping[:, None] * gram.diagonal(dim1=1, dim2=2) + 1e-14
        step = torch.linalg.solve(gram + torch.diag_embed(ridge), slope.mT @ rest[..., None])
        tried = theta - step[..., 0]
        new = look(tried)
        better = new[3] < cost
        theta = torch.where(better[:, None], tried, theta)
        shape, size, rest = (
            torch.where(better[:, None], n, o)
            for n, o in zip(new[:3], (shape, size, rest), strict=True)
        )
        cost = torch.where(better, new[3], cost)
        damping = torch.where(better, damping / 4, damping * 4).clamp(1e-9, 1e9)
    best = cost.view(r, -1).argmin(1)
    rows = torch.arange(r) * _TRIES + best
    sizes = size[rows, 0] * torch.linalg.vector_norm(numbers, dim=1)
    return theta[rows], sizes, cost[rows].sqrt()
