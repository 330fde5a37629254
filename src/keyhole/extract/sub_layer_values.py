"""The values of a sub-layer's heads, and its surroundings: norm, bias, residual connection.

The answer y has m numbers. Head h of H adds `Σ_j a_hj·x_j M_h` with `M_h = V_h O_h` of
rank k; the weights a_hj come from its scores. Asked for in this order by sub_layer.py:

**Surroundings** (`open_surroundings`). An RMS norm in front maps a token x to `t = x /
√(mean(x²) + ε)`. Any t shorter than √d can be reached, by asking `x = t·√(ε / (1 −
mean(t²)))`. With several lengths λ of one token, and r = 1 with a residual connection,
else 0,

    y([λx]) = r·λx + b + t(λx)·Σ_h M_h,

`y([0]) = b`, the growth with λ shows r, and tokens so short that they fade show ε.
Without a norm y([x]) is affine, and single tokens cannot tell a residual connection
from values: this is decided once the values of the heads are known (`find_residual`). d
single tokens show `Σ_h M_h` (`read_total`).

**Gates** (`find_anchor`). Ask `[x_i + τ_i·δ ; x_i]` for N points i and one δ. The two
tokens differ by τ_i·δ, so with the logistic function σ

    y_i − y([x_i]) = Σ_h σ(z_hi)·τ_i·δM_h,    z_hi = τ_i·(x_i Q_h + q_h)(δK_h)ᵀ + κ_hi,

where κ_hi, which does not depend on δ, is what rotary positions add. Divided by τ_i
these are the rows of A·V with A (N×H) of gates and V (H×m) of values δM_h. A
factorisation A·V is known up to any invertible H×H matrix only, but with N > H its
column space is known, and gates are rare there: z_h is linear in p features of the
point, `z = Φθ + κ`, and p is small if the x_i are from a small subspace. So the heads
are the solutions θ of

    (1 − UUᵀ)·σ(Φθ + κ) = 0,    U an orthonormal basis of the column space,

N − H equations in p unknowns, for which random starts and Levenberg–Marquardt steps are
enough.

**Values** (`read_vectors`). So one δ shows one vector `δM_h` of every head. For others
near by, `δ' = δ + η·ω`, the gates are found starting from these, the heads stay
recognisable, and `(δ'M_h − δM_h)/η` are more vectors of the row space of M_h: k of them
span it, and a few more show that they do. Each costs N = H + p + spare queries. The row
spaces split `Σ_h M_h` into V and O (`Values`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import (
    Unsuccessful,
    mismatch,
    not_applicable,
    not_identifiable,
)
from keyhole.core.errors import KeyholeError
from keyhole.core.float64 import identity, normal, zeros
from keyhole.core.least_squares import Options, Point, minimize
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.bilinear import lengths, max_abs, random_orthogonal, random_units
from keyhole.extract.blocks.view import answered_tokens, last
from keyhole.oracle.protocol import Oracle

_AFFINE = 1e-9  # relative: answers to x and 2x that no norm bends
_ALMOST = 1e-5
_FAR = 2.0**30
_FADING = tuple(
    2.0**-n for n in range(5, 45, 5)
)  # shorter and shorter tokens, to see ε
_ATTEMPTS = 4
_AROUND = 0.4  # the spread of the x_i around an axis
_SPARE = 5  # points beyond those that the unknowns need
# Relative singular values of vectors δM_h that count as 0, since gates cost digits; or
# this many times the precision of the answers, if that is more.
_WIDTH = 1e-6
_GROWN = 1e4
_PARTED = 1e8  # the largest condition number of gates that count as different
_STARTS = 3  # for the gates of every head, from one difference to the next
_BATCH = 4  # differences that are asked at once
_STRIDE = 4  # points that are added at a time, until there are enough
_BEYOND = 5 / 4  # vectors for each dimension of a space
_MOST = 64  # heads
_PLACES = 2  # points at which differences are asked to complete the values


class LostSum(KeyholeError):
    """What attention adds does not follow from a block's answers; shorter tokens may help."""


@dataclass(frozen=True)
class Surroundings:
    """A sub-layer that is asked by what its norm puts out, t; it answers for the last token only.

    `last_norm` is the length of the last token, if answers can be used for one length
    only.
    """

    oracle: Oracle
    b: Tensor
    epsilon: float | None = None
    residual: bool = False
    every_token: bool = False
    causal: bool = False
    last_norm: float | None = None
    precision: float = 1e-11  # of answers, relative
    # What the other tokens add to the last one, as a function of the tokens and of rows
    # whose span holds the result. Only for blocks whose answers to more than two tokens
    # are not such sums.
    within: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def dim(self) -> int:
        return self.oracle.dim

    @property
    def radius(self) -> float:
        """All tokens t are shorter than this."""
        return math.inf if self.epsilon is None else math.sqrt(self.dim)

    def answer(self, tokens: Tensor) -> Tensor:
        """`Σ_h Σ_j a_hj·t_j M_h` for the last of the tokens (batch, n, d)."""
        if self.epsilon is not None:
            left = 1 - tokens.square().mean(-1, keepdim=True)
            tokens = tokens * (self.epsilon / left).sqrt()
        answers = last(self.oracle, tokens) - self.b
        return answers - tokens[:, -1] if self.residual else answers


def open_surroundings(oracle: Oracle, stream: torch.Generator) -> Surroundings:
    """Find out which tokens have answers, whether there is a norm, its ε, and the residual."""
    d = oracle.dim
    x = math.sqrt(d) * random_units(1, d, stream)[0]
    answers, every_token, causal = answered_tokens(oracle, x)
    if answers.ndim not in (2, 3):
        shape = tuple(answers.shape[1:])
        raise not_applicable(f"expected vectors, got answers of shape {shape}")
    b, near, twice = last(oracle, torch.stack([0 * x, x, 2 * x]).unsqueeze(1))
    plain = Surroundings(oracle, b, every_token=every_token, causal=causal)
    size = max_abs(torch.stack([b, near, twice]))
    if not size:
        raise not_identifiable("every answer is zero")
    if max_abs(twice - 2 * near + b) <= _AFFINE * size:
        return plain
    far, further = last(oracle, _FAR * torch.stack([x, 2 * x]).unsqueeze(1))
    growth = (further - far) / _FAR
    residual = len(growth) == d and _same(growth, x, _ALMOST)
    if not residual and max_abs(growth) > _ALMOST:
        raise _another_kind()
    return replace(plain, epsilon=_epsilon(plain, x, near, residual), residual=residual)


def _epsilon(
    plain: Surroundings,
    x: Tensor,
    near: Tensor,
    residual: bool,
) -> float:
    """Return the ε of an RMS norm, from short tokens; x has a mean square of 1."""
    added = x if residual else torch.zeros_like(near)
    ordinary = near - plain.b - added  # √(1 + ε) times shorter than for long tokens
    for short in _FADING:
        faded = last(plain.oracle, short * x[None, None])[0] - plain.b - short * added
        ratio = float(faded @ ordinary / (ordinary @ ordinary))
        if max_abs(faded - ratio * ordinary) > _ALMOST * max_abs(ordinary):
            break
        if ratio < 1 / 2:  # (1 + ε)·short² = ratio²·(short² + ε)
            return short**2 * (1 - ratio**2) / (ratio**2 - short**2)
    raise _another_kind()


def _same(
    one: Tensor,
    other: Tensor,
    allowed: float,
) -> bool:
    return max_abs(one - other) <= allowed * max_abs(other)


def out_of_range() -> Unsuccessful:
    return mismatch("the answers leave the range that attention weights allow")


def _another_kind() -> Unsuccessful:
    return not_applicable(
        "answers to longer and longer tokens are neither those of attention alone nor of attention "
        "behind an RMS norm: a norm behind a sub-layer removes the length of every answer"
    )


def read_total(
    view: Surroundings,
    length: float,
    stream: torch.Generator,
) -> Tensor:
    """Return `Σ_h M_h` (d×m), plus 1 with a residual connection: one query for each row."""
    d = view.dim
    rows = view.answer(length * identity(d)[:, None]) / length
    x = length * random_units(1, d, stream)
    apart = view.answer(x[None]) - x @ rows
    if max_abs(apart) > 1e-6 * length * max_abs(rows):
        raise not_applicable("single tokens are not answered by a linear map")
    return rows


@dataclass(frozen=True)
class Probe:
    """The points x_i, from a small subspace, and the τ_i, at which every difference is asked.

    Differences are orthogonal to the subspace, which bounds the length of tokens x +
    τ·δ. If the x_i have the largest possible length, they are close to the subspace's
    first axis, differences point inwards, and only τ > 0 is asked. Otherwise the x_i
    are up to `reach` times as long as differences, which costs as many digits.
    """

    view: Surroundings
    total: Tensor  # of what [x] answers
    subspace: Tensor  # (s, d), orthonormal
    length: float
    positions: bool
    reach: float = 1.0

    @property
    def arrived(self) -> float:
        """How far outside the column space a solution for gates may be."""
        return max(ARRIVED, 10 * self.view.precision) * self.reach

    @property
    def aside(self) -> float:
        """η: it is small unless positions make heads recognisable by their κ."""
        return 1.0 if self.positions else 0.2

    def points(
        self,
        count: int,
        stream: torch.Generator,
        axes: int,
    ) -> tuple[Tensor, Tensor]:
        """Coordinates (count, axes) of points, and factors τ up to 1."""
        xi = normal(stream, count, axes)
        uniform = torch.rand(2, count, generator=stream, dtype=torch.float64)
        share, tau = 0.4 + 0.6 * uniform
        if self.view.last_norm is not None:
            xi = torch.cat([torch.ones_like(xi[:, :1]), _AROUND * xi[:, 1:]], 1)
            return self.view.last_norm * normalize(xi, dim=1), tau
        xi = self.reach * self.length * share[:, None] * normalize(xi, dim=1)
        signs = 2 * torch.randint(0, 2, (count,), generator=stream) - 1
        return xi, signs * tau

    def difference(self, stream: torch.Generator, near: Tensor | None = None) -> Tensor:
        """Draw a random difference, orthogonal to `near` if that is given."""
        delta = normal(stream, self.view.dim)
        delta = delta - self.subspace.mT @ (self.subspace @ delta)
        if near is not None:
            near = near - self.subspace.mT @ (self.subspace @ near)
            delta = delta - near * (near @ delta) / (near @ near)
        elif self.view.last_norm is not None:
            delta = normalize(delta, dim=0) - self.subspace[0]
        return self.length * normalize(delta, dim=0)

    def rows(
        self,
        deltas: Tensor,
        xi: Tensor,
        tau: Tensor,
    ) -> Tensor:
        """Return A·V (…, N, m) of differences (…, d)."""
        points = xi @ self.subspace[: xi.shape[1]]
        shifted = points + tau[:, None] * deltas[..., None, :]
        pairs = torch.stack([shifted, points.expand_as(shifted)], -2)
        answers = self.view.answer(pairs.flatten(0, -3))
        answers = answers.unflatten(0, shifted.shape[:-1])
        return (answers - points @ self.total) / tau[:, None]


def linear_features(xi: Tensor, tau: Tensor) -> Tensor:
    """Return the features of a difference's score: 1 and the coordinates of x, times τ."""
    return tau[:, None] * torch.cat([torch.ones_like(xi[:, :1]), xi], 1)


def all_features(
    xi: Tensor,
    tau: Tensor,
    positions: bool,
) -> Tensor:
    """Return all features: with positions also quadratic ones, as the two tokens' places differ."""
    linear = linear_features(xi, tau)
    if not positions:
        return linear
    first, second = torch.triu_indices(xi.shape[1], xi.shape[1])
    return torch.cat([linear, xi, xi[:, first] * xi[:, second]], 1)


@dataclass(frozen=True)
class Anchor:
    """The heads at one difference δ: their values, and their gates at the points of a design."""

    delta: Tensor
    values: Tensor  # (H, m)
    xi: Tensor
    tau: Tensor
    shift: Tensor  # κ (H, N)
    theta: Tensor  # (H, p), of the linear features

    @property
    def features(self) -> Tensor:
        return linear_features(self.xi, self.tau)

    @property
    def scores(self) -> Tensor:
        """The scores of the difference alone, (H, N)."""
        return self.theta @ self.features.mT


def find_anchor(
    probe: Probe,
    stream: torch.Generator,
    delta: Tensor | None = None,
) -> Anchor:
    """Find the heads at one difference, from random starts; try others if not all are found."""
    axes = 3 if probe.positions else len(probe.subspace)
    heads = 0
    for _ in range(_ATTEMPTS):
        delta = probe.difference(stream) if delta is None else delta
        xi, tau, rows, heads = _enough_points(probe, delta, stream, axes)
        features = all_features(xi, tau, probe.positions)
        theta = find_gates(rows, features, heads, stream, probe.arrived)
        if theta is not None:
            return _anchored(probe, delta, rows, (xi, tau), theta, stream)
        delta = None
    raise not_applicable(
        f"the answers to one difference have rank {heads}, but no {heads} logistic gates explain "
        "them"
    )


def _enough_points(
    probe: Probe,
    delta: Tensor,
    stream: torch.Generator,
    axes: int,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return points, factors and rows, more than heads and features, and the number of heads."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    while True:
        fresh = probe.points(_STRIDE, stream, axes)
        parts.append((*fresh, probe.rows(delta, *fresh)))
        xi, tau, rows = (torch.cat(part) for part in zip(*parts, strict=True))
        sizes = torch.linalg.svdvals(rows)
        heads = int((sizes > probe.view.precision * probe.reach * sizes[0]).sum())
        if len(xi) >= heads + all_features(xi, tau, probe.positions).shape[1] + _SPARE:
            return xi, tau, rows, heads
        if heads > _MOST:
            raise not_applicable(f"more than {_MOST} heads")


def _anchored(
    probe: Probe,
    delta: Tensor,
    rows: Tensor,
    at: tuple[Tensor, Tensor],
    theta: Tensor,
    stream: torch.Generator,
) -> Anchor:
    """Return the heads at δ, with κ for every point.

    With positions, a gate's logit is z(τ) = τ·s + κ: two τ at the same points show s
    and κ.
    """
    xi, tau = at
    heads = len(theta)
    gates = torch.sigmoid(all_features(xi, tau, probe.positions) @ theta.mT)
    values = least_squares(gates, rows)
    if not probe.positions:
        count = heads + theta.shape[1] + _SPARE
        shift = zeros(heads, count)
        return Anchor(delta, values, xi[:count], tau[:count], shift, theta)
    # Points in more dimensions separate the gates better.
    axes = len(probe.subspace)
    xi, tau = probe.points(heads + axes + 1 + _SPARE, stream, axes)
    other = -1 if probe.view.last_norm is None else 0.5
    both = torch.cat([probe.rows(delta, xi, tau), probe.rows(delta, xi, other * tau)])
    z = torch.logit(both @ torch.linalg.pinv(values)).mT.unflatten(1, (2, -1))
    if not z.isfinite().all():
        raise out_of_range()
    linear = z[:, 0] - z[:, 1]
    rest = z[:, 1] - other * z[:, 0]
    slopes = least_squares(linear_features(xi, tau), (linear / (1 - other)).mT).mT
    return Anchor(delta, values, xi, tau, rest / (1 - other), slopes)


def strengthened(
    probe: Probe,
    anchor: Anchor,
    stream: torch.Generator,
) -> Probe:
    """Return a probe whose points have large scores although a norm bounds them: d − 1 queries.

    In random directions scores are √d times smaller than in the heads' own directions
    `Q_h(δK_h)ᵀ`, which span the new subspace. They show in the gates at d − 1 points:
    the values at δ are known, so the answers give the gates. κ is ignored. If points
    have one length, they stay close to the subspace's first axis.
    """
    d = probe.view.dim
    kept = probe.subspace[: int(probe.view.last_norm is not None)]
    basis = random_orthogonal(d, stream)
    basis[: 1 + len(kept)] = torch.cat([kept, anchor.delta[None]])
    basis = torch.linalg.qr(basis.mT)[0].mT[1 + len(kept) :]
    points = probe.length * basis
    if probe.view.last_norm is not None:
        points = probe.view.last_norm * normalize(kept + basis, dim=1)
    rows = probe.view.answer(torch.stack([points + anchor.delta, points], 1))
    gates = (rows - points @ probe.total) @ torch.linalg.pinv(anchor.values)
    along = torch.logit(gates, eps=1e-6)
    if len(kept):
        along = along - along.mean(0)
    left = thin_svd(normalize(along, dim=0))[0]
    combined = left[:, : len(probe.subspace) - len(kept)].mT @ basis
    return replace(probe, subspace=torch.cat([kept, combined]))


def follow(
    probe: Probe,
    anchor: Anchor,
    stream: torch.Generator,
) -> Tensor:
    """Return `ωM_h` (some ω, H, m), from differences as long as δ, `(δ + η·ω) / √(1 + η²)`."""
    omega = torch.stack([probe.difference(stream, anchor.delta) for _ in range(_BATCH)])
    deltas = (anchor.delta + probe.aside * omega) / math.hypot(1, probe.aside)
    rows = probe.rows(deltas, anchor.xi, anchor.tau)
    theta, outside = follow_gates(
        column_space(rows, len(anchor.values))[:, None],
        anchor.features,
        anchor.shift,
        _starts(anchor, probe.aside, stream),
    )
    vectors = [rows[:0, : len(anchor.values)]]
    settled = _nearest if probe.positions else _matched
    for each, far, Y in zip(theta, outside, rows, strict=True):
        values = settled(anchor, each, far * ARRIVED / probe.arrived, Y)
        # None: a gate was not found, or two solutions are the same
        if values is not None:
            aside = values * math.hypot(1, probe.aside) - anchor.values
            vectors.append(aside[None] / probe.aside)
    return torch.cat(vectors)


def _starts(
    anchor: Anchor,
    spread: float,
    stream: torch.Generator,
) -> Tensor:
    """Return θ of the anchor and others around it, (ω, starts, H, p)."""
    around = normal(stream, _BATCH, _STARTS, *anchor.theta.shape)
    around[:, 0] = 0
    return anchor.theta + spread * anchor.theta.square().mean(0).sqrt() * around


def _nearest(
    anchor: Anchor,
    theta: Tensor,
    outside: Tensor,
    rows: Tensor,
) -> Tensor | None:
    """Return values if κ identifies heads: the best of each head's own solutions."""
    best = outside.argmin(0)
    heads = torch.arange(len(best))
    if outside[best, heads].max() > ARRIVED:
        return None
    return _values(anchor, theta[best, heads], rows)


def _matched(
    anchor: Anchor,
    theta: Tensor,
    outside: Tensor,
    rows: Tensor,
) -> Tensor | None:
    """Return values if κ does not identify heads: all solutions, in the order of the anchor's."""
    solutions = distinct(theta[outside < ARRIVED])
    if len(solutions) != len(anchor.values):
        return None
    values = _values(anchor, solutions, rows)
    if values is None:
        return None
    likeness = normalize(values, dim=1) @ normalize(anchor.values, dim=1).mT
    order = likeness.argmax(0)
    return values[order] if len(order.unique()) == len(order) else None


def _values(
    anchor: Anchor,
    theta: Tensor,
    rows: Tensor,
) -> Tensor | None:
    gates = torch.sigmoid(theta @ anchor.features.mT + anchor.shift).mT
    if torch.linalg.cond(gates) < _PARTED:
        return least_squares(gates, rows)
    return None


def read_vectors(
    probe: Probe,
    anchor: Anchor,
    stream: torch.Generator,
) -> tuple[Tensor, int]:
    """Return `ωM_h` (n, H, m) of enough ω, and the dimension k of each head's row space."""
    heads, m = anchor.values.shape
    # The others are orthogonal to the anchor's: narrow layers need it.
    vectors = anchor.values[None]
    for _ in range(3 * (m // heads) // _BATCH + 4):
        vectors = torch.cat([vectors, follow(probe, anchor, stream)])
        sizes = torch.linalg.svdvals(vectors.transpose(0, 1))
        noise = max(_WIDTH, _GROWN * probe.view.precision)
        ranks = (sizes > noise * probe.reach * sizes[:, :1]).sum(1)
        k = int(ranks.max())
        if len(vectors) >= max(_BEYOND * k, k + 2):
            if (ranks == k).all() and heads * k <= m + 1:
                return vectors, k
            break
    raise not_applicable(
        f"the {heads} heads do not write into spaces of one dimension that are independent"
    )


def find_residual(
    view: Surroundings,
    total: Tensor,
    anchor: Anchor,
) -> tuple[Surroundings, Tensor]:
    """Find out whether the input is added: the heads' values then do not add up to the answers."""
    delta = anchor.delta
    values = anchor.values.sum(0)
    if _same(values, delta @ total, 1e-6):
        return view, total
    if len(values) == len(delta) and _same(delta @ total - values, delta, 1e-6):
        return replace(view, residual=True), total - identity(view.dim)
    raise not_applicable(
        "answers to single tokens are neither the heads' values nor these "
        "plus the input"
    )


# All logistic gates in a column space (above).

_BY_GATES = Options(damping=1e-2, max_steps=30, target=1e-30)
ARRIVED = 1e-9  # of a gate's length, outside the column space
_GATES_STARTS = 64
_ROUNDS = 48
_ONE = 1e-3  # two solutions nearer than this, relative, are one


def column_space(rows: Tensor, heads: int) -> Tensor:
    """Return an orthonormal basis U (…, N, H) of the columns of A·V."""
    return thin_svd(rows)[0][..., :heads]


def follow_gates(
    U: Tensor,
    features: Tensor,
    shift: Tensor,
    starts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return θ (…, S, p) near the starts, and how far outside the column space their gates are.

    `features` is Φ (N, p), `shift` κ (S, N) or (1, N); U (…, N, H).
    """
    shape = starts.shape
    each = U.shape[-2:]
    spaces = U.expand(*shape[:-2], *each).reshape(shape[:-2].numel(), *each)
    shifts = shift.expand(shape[-2], -1)

    def linearize(theta: Tensor, rows: Tensor) -> Point:
        space = spaces[rows // shape[-2]]
        gates = torch.sigmoid(theta @ features.mT + shifts[rows % shape[-2]])
        unit = (gates / lengths(gates)[:, None])[..., None]
        residuals = _outside(space, unit)

        def jacobian() -> Tensor:
            # over the gate's length
            slopes = unit * (1 - gates)[..., None] * features
            return _outside(space, slopes) - residuals * (unit.mT @ slopes)

        return Point(theta, residuals, jacobian)

    theta, loss = minimize(linearize, starts.reshape(-1, shape[-1]), _BY_GATES)
    return theta.view(shape), loss.sqrt().view(shape[:-1])


def _outside(U: Tensor, columns: Tensor) -> Tensor:
    return columns - U @ (U.mT @ columns)


def find_gates(
    rows: Tensor,
    features: Tensor,
    heads: int,
    stream: torch.Generator,
    arrived: float = ARRIVED,
) -> Tensor | None:
    """Return θ (H, p) of all heads, with κ among the features, or None if not all are found."""
    U = column_space(rows, heads)
    sizes = features.square().mean(0).sqrt()
    none = zeros(1, len(features))
    solutions = zeros(0, len(sizes))
    for _ in range(_ROUNDS):
        starts = normal(stream, _GATES_STARTS, len(sizes))
        spread = torch.rand(_GATES_STARTS, 1, generator=stream, dtype=torch.float64)
        # gates between nearly flat and nearly steps
        starts = starts * (0.1 * 40**spread)
        theta, outside = follow_gates(U, features / sizes, none, starts)
        solutions = distinct(torch.cat([solutions, theta[outside < arrived]]))
        if len(solutions) >= heads:
            break
    return solutions / sizes if len(solutions) == heads else None


def distinct(solutions: Tensor) -> Tensor:
    kept = solutions[:0]
    for candidate in solutions:
        if (lengths(candidate - kept) > _ONE * lengths(kept)).all():
            kept = torch.cat([kept, candidate[None]])
    return kept


# If the spaces that the heads write into are independent (H·k ≤ m), `Σ_h M_h` falls
# into the heads' own parts row by row, and that is all of V and O up to a k×k matrix of
# each head. Heads whose parts are read from one space share their values (grouped
# queries, arXiv 2305.13245).

_SHARED = 1e-3  # cosines of two spaces that are one differ from 1 by less


@dataclass(frozen=True)
class Values:
    """`V` (G, d, k) and `O` (H, k, m): what is read and written, by groups of heads.

    `groups` are the numbers of the heads that share a V; `O` is in the order of the
    anchor.
    """

    V: Tensor
    O: Tensor  # noqa: E741
    groups: list[list[int]]

    @classmethod
    def of(
        cls,
        total: Tensor,
        vectors: Tensor,
        k: int,
    ) -> Values:
        """Return all values, given `ωM_h` of some ω and `Σ_h M_h`.

        In a group `ωM_h = (ωV)·O_h` with the same ωV for all heads, so the O_h of a
        group are one factor of rank k; `Σ_h M_h` is then solved for the V of all
        groups.
        """
        right = thin_svd(vectors.transpose(0, 1))[2]
        spaces = right[:, :k]
        apart = torch.linalg.pinv(spaces.flatten(0, 1)).unflatten(1, (len(spaces), k))
        groups = _sharing(torch.einsum("dm,mhk->hdk", total, apart))
        O = torch.empty_like(spaces)  # noqa: E741
        for group in groups:
            joint = vectors[:, group].flatten(1)
            right = thin_svd(joint)[2][:k]
            O[group] = right.unflatten(1, (len(group), -1)).transpose(0, 1)
        sums = torch.cat([O[group].sum(0) for group in groups])
        V = (total @ torch.linalg.pinv(sums)).unflatten(1, (len(groups), k))
        return cls(V.transpose(0, 1).contiguous(), O, groups)

    def completed(self, probe: Probe, stream: torch.Generator) -> Values:
        """Return all values if the row spaces have one dimension too many, as behind a norm.

        With Σ_h n_h O_h = 0, `V_h + f n_h` give the same answers to single tokens, for
        any vector f. Two pairs for each of d differences δ show f·δ: they are answered
        with `Σ_h a_h·δV_h O_h + b_h·n_h O_h`, where b_h is (f·δ)·a_h plus a number that
        is the same for all heads.
        """
        heads, k, m = self.O.shape
        if heads * k <= m:
            return self
        if len(self.groups) < heads:
            raise not_applicable(
                "heads that share values have more numbers than an answer"
            )
        null = torch.linalg.svd(self.O.flatten(0, 1))[0][:, -1].view(heads, k)
        kept = torch.einsum("hk,hkm->hm", null, self.O)
        deltas = probe.length * random_orthogonal(probe.view.dim, stream)
        xi, tau = probe.points(_PLACES, stream, len(probe.subspace))
        rows = probe.rows(deltas, xi, tau)  # (d, places, m)
        V = self.of_heads  # groups hold one head each
        written = torch.einsum("nd,hdk,hkm->nhm", deltas, V, self.O)
        system = torch.cat([written, kept.expand_as(written)], 1).mT  # (d, m, 2H)
        solved = torch.linalg.pinv(system, rtol=1e-12) @ rows.mT
        gates, others = (
            part - part.mean(1, keepdim=True) for part in solved.split(heads, 1)
        )
        along = (gates * others).sum((1, 2)) / gates.square().sum((1, 2))
        f = deltas.mT @ along / probe.length**2
        completed = V + f[:, None] * null[:, None]
        return replace(self, V=completed[[head for (head,) in self.groups]])

    @property
    def of_heads(self) -> Tensor:
        """`V` (H, d, k) of every head."""
        each = zeros(len(self.O), *self.V.shape[1:])
        for group, V in zip(self.groups, self.V, strict=True):
            each[group] = V
        return each


def _sharing(values: Tensor) -> list[list[int]]:
    """Group the heads that share values; none do if groups would have different sizes."""
    bases = torch.linalg.qr(values)[0]
    groups: list[list[int]] = []
    for head in range(len(values)):
        for group in groups:
            cosines = torch.linalg.svdvals(bases[group[0]].mT @ bases[head])
            if cosines.min() > 1 - _SHARED:
                group.append(head)
                break
        else:
            groups.append([head])
    even = len({len(group) for group in groups}) == 1
    return groups if even else [[head] for head in range(len(values))]
