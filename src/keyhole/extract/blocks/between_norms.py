"""The feed-forward layer between two norms, all numbers fitted at once (ours): L, C, A, a, c of

    ŷ = √d·R/√(|R|² + d·ε₂),    R(n) = n·L + C·φ(A·n + a) + c,    |n| = √d

From answers ŷ, which have lost the length of R, and units near by (wide_curvature.py),
this makes the `Layer` that explains them, by least squares (descent.py). Layers of
trained models need three things more:

    doubtful    a unit whose row is orthogonal to the plane of the base points has the same
                curvature at all of them, whatever its length. It is read on the great
                circle through its own row: answers show the direction ŷ of `R(n) +
                c_k·φ(a_k·n + α_k)`, with R known up to an affine function, so `(1 −
                ŷŷᵀ)·R(n) = −(1 − ŷŷᵀ)·c_k·φ(a_k·n + α_k)`
    rare        a unit that is off nearly everywhere, |α| ≫ |a|, does not show its row at random
                points: more are drawn, at which many such units are on at once
    slow        conjugate gradients converge slowly if parameters of a unit have nearly the same
                effect: see `_Preconditioner`
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.extract.bilinear import random_units
from keyhole.extract.blocks.descent import Params, descend, inverse
from keyhole.extract.blocks.units import Units, derivative, with_ones
from keyhole.extract.blocks.wide_curvature import Value
from keyhole.extract.gauss_newton import levenberg
from keyhole.oracle.block import ACTIVATIONS

_MORE = 1.5  # answers for each unknown of the fit
_SPARE = 16
_TURNS = 40
_RARELY = 2.5  # |α|/|a| from which a unit is nearly always off, or on
_REACHED = 0.8  # |α|/|a|, relative to the radius, up to which it changes anywhere
_SPREAD = 1.0  # of `a·n + α` at points drawn for such units
_SHARED = 0.5  # share of the squared radius that is spent on such units at one point
_RIDGE = 1e-12  # a ReLU unit's length and the size of its column are one number
_ROUGH = 1e-5
_NEWTON = 16
_STEPS = 10
_ARRIVED = 1e-8
_ANGLES = torch.linspace(-0.4, 0.4, 161, dtype=torch.float64)
_NEAR = 0.5  # what a unit may add, relative to R
_FEWEST = 16  # the least number of angles at which it adds no more
_OFFSETS = [z / 2 for z in range(-7, 5)]
_SLOPES = [2.0 ** (n / 2) for n in range(15)]
_STARTS = 24
_ALIKE = 1e-4  # relative error of the fit of one unit that is good enough


@dataclass(frozen=True)
class Layer:
    """`ŷ = √d·R/√(|R|² + d·ε₂)`, `R = n·L + C·f(n) + c`, `n = √d·h/√(|h|² + d·ε)`.

    In coordinates (e). Without ε₂ only the direction of ŷ counts.
    """

    units: Units
    L: Tensor
    c: Tensor
    epsilon: float = 0.0
    epsilon_behind: float = 0.0

    def normed(self, h: Tensor) -> Tensor:
        """Return n."""
        d = h.shape[-1] + 1
        return (
            math.sqrt(d)
            * h
            / (h.square().sum(-1, keepdim=True) + d * self.epsilon).sqrt()
        )

    def __call__(self, n: Tensor) -> Tensor:
        """Return R."""
        return n @ self.L + self.units.features(n) @ self.units.C.mT + self.c

    def hats(self, h: Tensor) -> Tensor:
        """Return ŷ of sums h, without ε₂."""
        return math.sqrt(h.shape[-1] + 1) * normalize(self(self.normed(h)), dim=-1)

    def slopes(self, n: Tensor, along: Tensor) -> Tensor:
        """Return dR/dn (n, e, r) along columns (n, e, r)."""
        units = self.units
        slope = derivative(units.activation, 1)(n @ units.A.mT + units.a)
        return self.L.mT @ along + units.C @ (slope[..., None] * (units.A @ along))

    def to(self, device: torch.device) -> Layer:
        made = Layer.of(self.numbers(device), self.units.activation)
        return replace(made, epsilon=self.epsilon, epsilon_behind=self.epsilon_behind)

    def undone(
        self,
        hats: Tensor,
        sums: Tensor,
        basis: Tensor,
        start: Tensor,
    ) -> Tensor:
        """Return u (n, r) such that sums `sums + u·basis` give `hats` (n, q, e), or NaN.

        By Gauss–Newton steps. There must be more equations than unknowns: several
        answers that share one u, or a u of few numbers. A sum does not follow from one
        answer: in trained layers dR/dn is singular on a surface close to any point, and
        R takes most values more than once.
        """
        u = start.clone()
        size = (self._made(sums, basis, u) - hats).square().sum((1, 2))
        going = torch.arange(len(u), device=u.device)
        for _ in range(_NEWTON):
            if not len(going):
                break
            of = sums[going]
            wanted = hats[going]
            at = u[going]
            before = size[going]
            J = self._slopes_of_made(of, basis, at)
            factor = torch.linalg.cholesky_ex(J.mT @ J)[0]
            share = torch.ones_like(at[:, :1])
            left = before
            rest = (self._made(of, basis, at) - wanted).flatten(1)
            # Slopes are expensive: one serves for several steps.
            for _ in range(_STEPS):
                step = torch.cholesky_solve(J.mT @ rest[..., None], factor)[..., 0]
                tried = at - share * step
                off = (self._made(of, basis, tried) - wanted).flatten(1)
                better = (off.square().sum(1) < left)[:, None]
                at = torch.where(better, tried, at)
                rest = torch.where(better, off, rest)
                share = torch.where(better, (2 * share).clamp(max=1), share / 4)
                left = rest.square().sum(1)
            u[going] = at
            size[going] = left
            near = left < _ARRIVED**2 * wanted.square().sum((1, 2))
            going = going[(left < before / 4) & ~(near & (share[:, 0] < 1))]
        right = size < _ROUGH**2 * hats.square().sum((1, 2))
        return torch.where(right[:, None], u, math.nan)

    def _made(
        self,
        sums: Tensor,
        basis: Tensor,
        u: Tensor,
    ) -> Tensor:
        """Return the output of the second norm (n, q, e)."""
        return self.hats(sums + (u @ basis)[:, None])

    def _slopes_of_made(
        self,
        sums: Tensor,
        basis: Tensor,
        u: Tensor,
    ) -> Tensor:
        """Return its derivative by u (n, q·e, r), through both norms and the layer."""
        radius = math.sqrt(sums.shape[2] + 1)
        h = sums + (u @ basis)[:, None]
        hat = self.normed(h) / radius
        length = h.norm(dim=2) / hat.norm(dim=2)
        R = self(radius * hat)
        turned = basis.mT - hat[..., None] * (hat @ basis.mT)[..., None, :]
        slopes = self.slopes(radius * hat.flatten(0, 1), turned.flatten(0, 1))
        slopes = slopes.unflatten(0, hat.shape[:2])
        out = normalize(R, dim=2)[..., None]
        scale = radius**2 / (length * R.norm(dim=2))
        return ((slopes - out * (out.mT @ slopes)) * scale[..., None, None]).flatten(
            1, 2
        )

    def numbers(self, device: torch.device) -> Params:
        units = self.units
        A = torch.cat([units.A, units.a[:, None]], 1)
        linear = torch.cat([units.C.mT, self.L, self.c[None]])
        return {"A": A.to(device), "linear": linear.to(device)}

    @classmethod
    def of(cls, numbers: Params, activation: str) -> Layer:
        A = numbers["A"]
        linear = numbers["linear"]
        units = Units.plain(A[:, :-1], A[:, -1], linear[: len(A)].mT, activation)
        return cls(units, linear[len(A) : -1], linear[-1])


@dataclass(frozen=True)
class Fitted:
    """A layer that answers `share·ŷ + centre`, and the relative error left.

    The numbers include `norm`, (ε₂ over the mean square of R, share − 1), and `centre`,
    unless these are known to be 0.
    """

    numbers: Params
    activation: str
    radius: float
    size: Tensor  # the mean square of R
    left: float = math.inf

    @classmethod
    def started(
        cls,
        units: Units,
        n: Tensor,
        y: Tensor,
        radius: float,
        exact: bool,
    ) -> Fitted:
        """Return a start: linear numbers and lengths of answers, fitted in turns."""
        affine = with_ones(n)
        A = torch.cat([units.A, units.a[:, None]], 1).to(n.device)
        made = ACTIVATIONS[units.activation](affine @ A.mT) @ units.C.mT.to(n.device)
        Q, R = torch.linalg.qr(affine)
        length = torch.ones_like(y[:, :1])
        sums = made
        for _ in range(_TURNS):
            sums = made + Q @ (Q.mT @ (length * y - made))
            length = (sums * y).sum(1, keepdim=True) / radius**2
        linear = torch.linalg.solve_triangular(
            R, Q.mT @ (length * y - made), upper=True
        ).to("cpu")
        numbers = Layer(units, linear[:-1], linear[-1]).numbers(n.device)
        if not exact:
            numbers |= {
                "norm": torch.zeros_like(y[0, :2]),
                "centre": torch.zeros_like(y[0]),
            }
        return cls(numbers, units.activation, radius, sums.square().sum(1).mean())

    @property
    def layer(self) -> Layer:
        """The layer with ε₂ as fitted, on the device of the fit."""
        epsilon = self.numbers["norm"][0] * self.size if "norm" in self.numbers else 0.0
        made = Layer.of(self.numbers, self.activation)
        return replace(made, epsilon_behind=max(0.0, float(epsilon) / self.radius**2))

    @property
    def centre(self) -> Tensor:
        return self.numbers.get(
            "centre", torch.zeros_like(self.numbers["linear"][0])
        ).to("cpu")

    @property
    def share(self) -> float:
        return 1 + float(self.numbers["norm"][1]) if "norm" in self.numbers else 1.0

    def sums(self, affine: Tensor, numbers: Params) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features, R, and the length of R with ε₂."""
        inside = ACTIVATIONS[self.activation](affine @ numbers["A"].mT)
        features = torch.cat([inside, affine], 1)
        R = features @ numbers["linear"]
        square = R.square().sum(1, keepdim=True)
        if "norm" in numbers:
            square = square + self.size * numbers["norm"][0]
        return features, R, square.sqrt()

    def shown(self, value: Value, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return R as fitted, and ŷ of length 1 as answers show it."""
        R = self.layer(n.to(self.size.device)).to("cpu")
        return R, normalize(value(n) - self.centre, dim=1)

    def descended(self, n: Tensor, y: Tensor) -> Fitted:
        affine = with_ones(n)

        def model(numbers: Params) -> Tensor:
            _, R, length = self.sums(affine, numbers)
            hats = self.radius * R / length
            if "norm" not in numbers:
                return hats
            return (1 + numbers["norm"][1]) * hats + numbers["centre"]

        preconditioner = partial(_Preconditioner.of, self, affine)
        numbers, left = descend(model, self.numbers, y, preconditioner)
        return replace(self, numbers=numbers, left=left)


@dataclass(frozen=True)
class _Preconditioner:
    """An approximate inverse of JᵀJ, the sum of those of three parts.

    rows      A and L, and likewise a and c: inputs are evenly spread, so one matrix serves for
              all columns of A, the Gram matrix of φ'(z_k)·c_k and of constants
    features  C, L and c: one matrix serves for all numbers of an answer, that of φ(z), n and 1
    shapes    if a unit varies little, φ(z) is nearly a parabola. Then its length, its offset, the
              size of c_k, L along a_k ⊗ c_k and c have nearly the same effect: c_k
              times functions of t = a_k·n/|a_k|, φ'(z)·t, φ'(z), φ(z), t and 1. So have
              `centre`, which is nearly c, and `norm`. The equations for all of these
              are solved together

    Answers show R/s, s = |R|, orthogonally to ŷ. So functions F times columns c_k have
    the Gram matrix (CᵀC) ∘ (FᵀF) − HᵀH with H_nk = F_nk·(c_k·ŷ_n), F divided by s.
    """

    axis: Tensor  # (r, e)
    C: Tensor  # (r, m)
    rows: Tensor
    features: Tensor
    factor: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, fit: Fitted, affine: Tensor, numbers: Params) -> _Preconditioner:
        A = numbers["A"]
        C = numbers["linear"][: len(numbers["A"])]
        r = len(A)
        z = affine @ A.mT
        length = A[:, :-1].norm(dim=1)
        t = (z - A[:, -1]) / length
        slope = derivative(fit.activation, 1)(z)
        features, R, size = fit.sums(affine, numbers)
        hats = R / size
        size = size / fit.radius
        F = torch.cat([slope, slope * t, ACTIVATIONS[fit.activation](z), t], 1) / size
        along = F * (hats @ C.mT).repeat(1, 4)
        eye = torch.eye(C.shape[1]).to(C)
        over = 1 / size

        def with_units(weight: Tensor) -> Tensor:
            return (F.mT @ weight) * C.repeat(4, 1) - along.mT @ (weight * hats)

        def of_constants(weight: Tensor) -> Tensor:
            return weight.sum() * eye - hats.mT @ (weight * hats)

        of_units = F.mT @ F * (C @ C.mT).repeat(4, 4) - along.mT @ along
        upper = [[of_units, with_units(over)], [of_constants(over.square())]]
        rows = _joined([[of_units[:r, :r], upper[0][1][:r]], upper[1][:1]])
        if "norm" in numbers:
            longer = fit.radius * hats
            beside = torch.stack(
                [-fit.size / (2 * (fit.radius * size).square()) * longer, longer]
            )
            square = beside.flatten(1) @ beside.flatten(1).mT
            none = F.new_zeros(4 * r, 2)
            upper[0] += [with_units(torch.ones_like(over)), none]
            upper[1] += [of_constants(over), none[: len(eye)]]
            upper += [[len(affine) * eye, beside.sum(1).mT], [square]]
        gram = _joined(upper)
        sizes = gram.diagonal().sqrt()
        gram = gram / sizes / sizes[:, None]
        gram.diagonal().add_(_RIDGE)
        return cls(
            A[:, :-1] / length[:, None],
            C,
            inverse(rows),
            inverse((features / size).mT @ (features / size)),
            torch.linalg.cholesky(gram),
            sizes,
        )

    def __call__(self, slope: Params) -> Params:
        A = slope["A"]
        linear = slope["linear"]
        r, m = self.C.shape
        x = torch.cat(
            [
                A[:, -1],
                (A[:, :-1] * self.axis).sum(1),
                (linear[:r] * self.C).sum(1),
                ((self.axis @ linear[r:-1]) * self.C).sum(1),
                linear[-1],
                *(slope[name] for name in ("centre", "norm") if name in slope),
            ]
        )
        x = (
            torch.cholesky_solve((x / self.sizes)[:, None], self.factor)[:, 0]
            / self.sizes
        )
        offset, along, size, turned = (part[:, None] for part in x[: 4 * r].split(r))
        c, *rest = x[4 * r :].split([m, m, 2] if "norm" in slope else [m])
        rows = self.rows @ torch.cat([A, linear[r:].mT])
        linear = self.features @ linear + torch.cat(
            [
                size * self.C,
                (turned * self.axis).mT @ self.C + rows[r:, :-1].mT,
                c[None] + rows[r:, -1:].mT,
            ]
        )
        found = {
            "A": rows[:r] + torch.cat([along * self.axis, offset], 1),
            "linear": linear,
        }
        found |= dict(zip(("centre", "norm"), rest, strict=False))
        return {name: found[name] for name in slope}


def _joined(upper: list[list[Tensor]]) -> Tensor:
    """Return a symmetric matrix, given the blocks of its upper half."""
    return torch.cat(
        [
            torch.cat([*(upper[j][i - j].mT for j in range(i)), *row], 1)
            for i, row in enumerate(upper)
        ]
    )


def fitted(
    value: Value,
    units: Units,
    doubtful: Tensor,
    radius: float,
    device: torch.device,
    stream: torch.Generator,
    exact: bool = False,
) -> Fitted:
    """Fit all numbers of the layer, starting from the units.

    The lengths and offsets of the units `doubtful` (indices) are read again first. If ŷ
    are `exact`, they have the same length and no centre.
    """
    width, e = units.A.shape
    unknowns = width * (e + 1) + (width + e + 2) * e + 2
    count = math.ceil(_MORE * unknowns / (e - 1)) + _SPARE
    n = radius * random_units(count, e, stream)
    y = value(n).to(device)
    n = n.to(device)
    fit = Fitted.started(units, n, y, radius, exact)
    if len(doubtful):
        units = _reshaped(fit, units, doubtful, value, stream)
        fit = Fitted.started(units, n, y, radius, exact)
    return fit.descended(*_with_rare(fit, n, y, value, stream))


def _reshaped(
    fit: Fitted,
    units: Units,
    doubtful: Tensor,
    value: Value,
    stream: torch.Generator,
) -> Units:
    """Return the units with lengths and offsets from a great circle through each unit's own row.

    The linear numbers were fitted with the unit as it was, and may be off by an affine
    function.
    """
    A = units.A.clone()
    a = units.a.clone()
    C = units.C.clone()
    affine = torch.stack([torch.ones_like(_ANGLES), _ANGLES.sin(), _ANGLES.cos()], 1)
    for k in doubtful.tolist():
        axis = normalize(A[k], dim=0)
        c = C[:, k]
        up = torch.randn(len(axis), generator=stream, dtype=torch.float64)
        up = normalize(up - (up @ axis) * axis, dim=0)
        circle = fit.radius * (
            _ANGLES.cos()[:, None] * up + _ANGLES.sin()[:, None] * axis
        )
        R, hats = fit.shown(value, circle)
        R = R - ACTIVATIONS[fit.activation](circle @ A[k] + a[k])[:, None] * c
        near = _across(R, hats).norm(dim=1) < _NEAR * R.norm(dim=1)
        if int(near.sum()) < _FEWEST:
            continue
        offset, slope, size = _fit(
            affine[near, 1], _amounts(R, hats, c)[near], fit.activation, affine[near]
        )
        A[k] = slope / fit.radius * axis
        a[k] = offset
        C[:, k] = size * c
    return replace(units, A=A, a=a, C=C)


def _with_rare(
    fit: Fitted,
    n: Tensor,
    y: Tensor,
    value: Value,
    stream: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return n and y with more points, at which units that are nearly always off, or on, change.

    A row has e numbers, so each unit needs more than e such points; many units share
    them.
    """
    units = fit.layer.units
    radius = fit.radius
    A = units.A.to("cpu")
    a = units.a.to("cpu")
    length = A.norm(dim=1)
    e = A.shape[1]
    far = a.abs() / length
    rare = (far > _RARELY) & (far < _REACHED * radius)
    if not rare.any():
        return n, y
    A = A[rare]
    a = a[rare]
    length = length[rare]
    chance = min(1.0, _SHARED * radius**2 / float(far[rare].square().sum()))
    count = math.ceil(_MORE * e / chance)
    chosen = torch.rand(count, len(A), generator=stream, dtype=torch.float64) < chance
    random = torch.randn(count, len(A) + e, generator=stream, dtype=torch.float64)
    # Rows are nearly orthogonal: what the other units of a point add to a·n only
    # spreads it.
    wanted = (_SPREAD * random[:, : len(A)] - a) / length
    along = torch.where(chosen, wanted, 0.0) @ (A / length[:, None])
    along = along * (_REACHED * radius / along.norm(dim=1, keepdim=True)).clamp(max=1)
    axis = normalize(along, dim=1)
    across = random[:, len(A) :]
    across = across - (across * axis).sum(1, keepdim=True) * axis
    rest = (radius**2 - along.square().sum(1, keepdim=True)).sqrt()
    more = along + rest * normalize(across, dim=1)
    return torch.cat([n, more.to(n)]), torch.cat([y, value(more).to(y)])


def signed(layer: Layer, axes: Tensor) -> tuple[Layer, Tensor]:
    """Return the layer with those signs of its units for which D is diagonal, and D (d).

    D has the mean square 1. `L = axesᵀ·D·axes − Σ_k t_k a_k ⊗ c_k` with t_k 1 or 0,
    since φ(z) = φ(−z) + z: linear in D, t.
    """
    units = layer.units
    # (r, d)
    A = units.A @ axes.mT
    C = units.C.mT @ axes.mT
    L = axes @ layer.L @ axes.mT
    d = L.shape[0]
    r = len(A)
    centre = torch.eye(d, dtype=torch.float64) - 1 / d
    gram = torch.cat(
        [
            torch.cat([(A @ A.mT) * (C @ C.mT), -A * C], 1),
            torch.cat([(-A * C).mT, centre.square()], 1),
        ]
    )
    wanted = torch.cat([-((A @ L) * C).sum(1), L.diagonal()])
    solved = torch.linalg.solve(gram, wanted)
    turned = solved[:r] > 0.5
    D = solved[r:]
    off = (solved[:r] - turned.to(torch.float64)).abs().max()
    if float(off) > 0.05:
        raise Unsuccessful(
            Status.NOT_APPLICABLE, "no signs of the units leave a residual alone"
        )
    share = turned.to(torch.float64)
    sign = 1 - 2 * share
    size = D.square().mean().sqrt() * D.sum().sign()
    # What D leaves of L stays in the layer, whose answers remain as fitted.
    L = layer.L + units.A.mT @ (share[:, None] * units.C.mT)
    c = layer.c + units.C @ (share * units.a)
    units = replace(
        units, A=units.A * sign[:, None], a=units.a * sign, C=units.C / size
    )
    epsilon = layer.epsilon_behind / float(size) ** 2
    return Layer(units, L / size, c / size, layer.epsilon, epsilon), D / size


def _across(R: Tensor, hats: Tensor) -> Tensor:
    """Return −R without its part along the answers (n, m)."""
    return (R * hats).sum(1, keepdim=True) * hats - R


def _amounts(
    R: Tensor,
    hats: Tensor,
    c: Tensor,
) -> Tensor:
    """Return how much of c the sums have in addition to R (n)."""
    own = c - (hats @ c)[:, None] * hats
    return (_across(R, hats) * own).sum(1) / own.square().sum(1)


def _fit(
    sines: Tensor,
    wanted: Tensor,
    activation: str,
    affine: Tensor,
) -> Tensor:
    """Return offset, slope and size such that `size·φ(offset + slope·sine)` is near `wanted` (n).

    Up to the columns `affine`; by Levenberg–Marquardt, from the best of some starts.
    """
    f = ACTIVATIONS[activation]
    df = derivative(activation, 1)
    scale = wanted.norm()
    steps = torch.stack([torch.ones_like(sines), sines], 1)
    Q = torch.linalg.qr(affine)[0]

    def across(columns: Tensor) -> Tensor:
        return columns - Q @ (Q.mT @ columns)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        z = steps @ x[:2]
        made = f(z)
        slopes = x[2] * df(z)[:, None] * steps
        off = across(x[2] * made - wanted)
        return off / scale, across(torch.cat([slopes, made[:, None]], 1)) / scale

    def start(offset: float, slope: float) -> Tensor:
        made = across(f(offset + slope * sines))
        return torch.tensor([offset, slope, float((made @ wanted) / (made @ made))]).to(
            made
        )

    tried = [start(offset, slope) for offset in _OFFSETS for slope in _SLOPES]
    tried = sorted(tried, key=lambda x: float(model(x)[0].norm()))[:_STARTS]
    best = tried[0]
    least = math.inf
    for x in tried:
        end, left = levenberg(model, x)
        best, least = (end, left) if left < least else (best, least)
        if least < _ALIKE:
            break
    return best
