"""The layer between two norms, R(n) = n·L + C·f(n) + c with n on a sphere, fitted as a whole.

descent.py starts from what curvature shows of the units (sphere.py). A unit that is off nearly
everywhere, `|α| ≫ |a|`, hardly shows at random points: some are drawn where it is not. And around
the points whose curvature is read it may not show at all: so does 1 of MPNet's 3,072, with
α/|a| = −4.8. Yet of thousands of random points it is on at a few, where the fit is off most. The
sum there is `R(n) + c·φ(a·n + α)`, R known, and the answer shows its direction ŷ:

    (1 − ŷŷᵀ)·R(n) = −(1 − ŷŷᵀ)·c·φ(a·n + α)

c is the left side at the point p that is off most. The slope there, on the sphere, is along a; and
on the great circle through p towards it `a·n + α = z + μ(cos θ − 1) + ν sin θ`, a small fit (ours).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.extract.blocks.descent import Numbers, descend, inverse
from keyhole.extract.blocks.sphere import Value, differences
from keyhole.extract.blocks.units import Units, derivative
from keyhole.extract.gauss_newton import levenberg
from keyhole.oracle.block import ACTIVATIONS

_MORE = 1.5  # answers for each unknown of the fit
_SPARE = 16
_TURNS = 40
_RARELY = 3.0  # of |a|, an offset with which a unit is rarely both on and off
_REACHED = 0.8  # of the radius times |a|: beyond, a unit is never both
_SPREAD = 1.5  # of `a·n + α` at such points
_AROUND = 32  # points for such a unit
_MISSED = 4  # units that curvature does not show, at most
_ROUGH = 1e-5
_NEWTON = 16
_STEPS = 10
_ARRIVED = 1e-8
_ANGLE = 0.01
_ANGLES = torch.linspace(-0.4, 0.4, 161, dtype=torch.float64)
_NEAR = 0.5  # of R, that a unit may add
_OFFSETS = [z / 2 for z in range(-7, 5)]
_SLOPES = [2.0 ** (n / 2) for n in range(15)]
_COSINE = 3.0
_STARTS = 24
_ALIKE = 1e-4  # what a fit of one unit may leave
_REFINED = 4


@dataclass(frozen=True)
class Layer:
    """`ŷ = √d·R/√(|R|² + d·ε₂)`, `R = n·L + C·f(n) + c`, `n = √d·h/√(|h|² + d·ε)`.

    In coordinates (e). The direction of ŷ is enough where ε₂ is not known.
    """

    units: Units
    L: Tensor
    c: Tensor
    epsilon: float = 0.0
    epsilon_behind: float = 0.0

    def normed(self, h: Tensor) -> Tensor:
        """n."""
        d = h.shape[-1] + 1
        return math.sqrt(d) * h / (h.square().sum(-1, keepdim=True) + d * self.epsilon).sqrt()

    def __call__(self, n: Tensor) -> Tensor:
        """R."""
        units = self.units
        inside = ACTIVATIONS[units.activation](n @ units.A.mT + units.a)
        return n @ self.L + inside @ units.C.mT + self.c

    def slopes(self, n: Tensor, along: Tensor) -> Tensor:
        """dR/dn (n, e, r) along columns (n, e, r)."""
        units = self.units
        slope = derivative(units.activation, 1)(n @ units.A.mT + units.a)
        return self.L.mT @ along + units.C @ (slope[..., None] * (units.A @ along))

    def to(self, device: torch.device) -> Layer:
        made = Layer.of(self.numbers(device), self.units.activation)
        return replace(made, epsilon=self.epsilon, epsilon_behind=self.epsilon_behind)

    def undone(self, hats: Tensor, sums: Tensor, basis: Tensor, start: Tensor) -> Tensor:
        """u (n, r) for which `sums + u·basis` make `hats` (n, q, e), by Gauss–Newton steps; or NaN.

        Several answers share one u, or it has few numbers: there must be more equations than
        unknowns. Of one answer its sum does not follow: in real layers dR/dn is singular on a
        surface that is not far from any point, and R takes most of its values more than once.
        """
        u = start.clone()
        size = (self._made(sums, basis, u) - hats).square().sum((1, 2))
        going = torch.arange(len(u), device=u.device)
        for _ in range(_NEWTON):
            if not len(going):
                break
            of, wanted, at, before = sums[going], hats[going], u[going], size[going]
            J = self._slopes_of_made(of, basis, at)
            factor = torch.linalg.cholesky_ex(J.mT @ J)[0]
            share, left = torch.ones_like(at[:, :1]), before
            rest = (self._made(of, basis, at) - wanted).flatten(1)
            # Slopes are dear: they serve for several steps.
            for _ in range(_STEPS):
                step = torch.cholesky_solve(J.mT @ rest[..., None], factor)[..., 0]
                tried = at - share * step
                off = (self._made(of, basis, tried) - wanted).flatten(1)
                better = (off.square().sum(1) < left)[:, None]
                at, rest = torch.where(better, tried, at), torch.where(better, off, rest)
                share = torch.where(better, (2 * share).clamp(max=1), share / 4)
                left = rest.square().sum(1)
            u[going], size[going] = at, left
            near = left < _ARRIVED**2 * wanted.square().sum((1, 2))
            going = going[(left < before / 4) & ~(near & (share[:, 0] < 1))]
        right = size < _ROUGH**2 * hats.square().sum((1, 2))
        return torch.where(right[:, None], u, math.nan)

    def _made(self, sums: Tensor, basis: Tensor, u: Tensor) -> Tensor:
        """What stands behind the second norm (n, q, e)."""
        radius = math.sqrt(sums.shape[2] + 1)
        return radius * normalize(self(self.normed(sums + (u @ basis)[:, None])), dim=2)

    def _slopes_of_made(self, sums: Tensor, basis: Tensor, u: Tensor) -> Tensor:
        """Likewise its derivative by u (n, q·e, r): of both norms and what is between."""
        radius = math.sqrt(sums.shape[2] + 1)
        h = sums + (u @ basis)[:, None]
        hat = self.normed(h) / radius
        length = h.norm(dim=2) / hat.norm(dim=2)
        R = self(radius * hat)
        turned = basis.mT - hat[..., None] * (hat @ basis.mT)[..., None, :]
        slopes = self.slopes(radius * hat.flatten(0, 1), turned.flatten(0, 1))
        slopes = slopes.unflatten(0, hat.shape[:2])
        out, scale = normalize(R, dim=2)[..., None], radius**2 / (length * R.norm(dim=2))
        return ((slopes - out * (out.mT @ slopes)) * scale[..., None, None]).flatten(1, 2)

    def numbers(self, device: torch.device) -> Numbers:
        units = self.units
        A = torch.cat([units.A, units.a[:, None]], 1)
        linear = torch.cat([units.C.mT, self.L, self.c[None]])
        return {"A": A.to(device), "linear": linear.to(device)}

    @classmethod
    def of(cls, numbers: Numbers, activation: str) -> Layer:
        A, linear = numbers["A"], numbers["linear"]
        none, width = A.new_zeros(0), len(A)
        units = Units(
            A[:, :-1].contiguous(), A[:, -1].contiguous(), none.reshape(0, A.shape[1] - 1), none,
            linear[:width].mT.contiguous(), activation,
        )  # fmt: skip
        return cls(units, linear[width:-1], linear[-1])


@dataclass(frozen=True)
class Fitted:
    """A layer that answers with `share·ŷ + centre`, and the relative error left.

    Among the numbers, unless they stay 0, are `norm`, which is ε₂ over the mean square of R and the
    share less 1, and `centre`.
    """

    numbers: Numbers
    activation: str
    radius: float
    size: Tensor  # of R, a mean square
    left: float = math.inf

    @classmethod
    def started(
        cls, units: Units, n: Tensor, y: Tensor, radius: float, exact: bool
    ) -> Fitted:  # fmt: skip
        """What is linear, and the lengths of answers, by turns: few, since both are a start."""
        affine = torch.cat([n, torch.ones_like(n[:, :1])], 1)
        A = torch.cat([units.A, units.a[:, None]], 1).to(n.device)
        made = ACTIVATIONS[units.activation](affine @ A.mT) @ units.C.mT.to(n.device)
        Q, R = torch.linalg.qr(affine)
        length, sums = torch.ones_like(y[:, :1]), made
        for _ in range(_TURNS):
            sums = made + Q @ (Q.mT @ (length * y - made))
            length = (sums * y).sum(1, keepdim=True) / radius**2
        linear = torch.linalg.solve_triangular(R, Q.mT @ (length * y - made), upper=True).to("cpu")
        numbers = Layer(units, linear[:-1], linear[-1]).numbers(n.device)
        if not exact:
            numbers |= {"norm": torch.zeros_like(y[0, :2]), "centre": torch.zeros_like(y[0])}
        return cls(numbers, units.activation, radius, sums.square().sum(1).mean())

    @property
    def layer(self) -> Layer:
        """ε₂ as fitted, on the device of the fit."""
        epsilon = self.numbers["norm"][0] * self.size if "norm" in self.numbers else 0.0
        made = Layer.of(self.numbers, self.activation)
        return replace(made, epsilon_behind=max(0.0, float(epsilon) / self.radius**2))

    @property
    def centre(self) -> Tensor:
        return self.numbers.get("centre", torch.zeros_like(self.numbers["linear"][0])).to("cpu")

    @property
    def share(self) -> float:
        return 1 + float(self.numbers["norm"][1]) if "norm" in self.numbers else 1.0

    def _sums(self, affine: Tensor, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
        """Features, R, and its length with ε₂."""
        inside = ACTIVATIONS[self.activation](affine @ numbers["A"].mT)
        features = torch.cat([inside, affine], 1)
        R = features @ numbers["linear"]
        square = R.square().sum(1, keepdim=True)
        if "norm" in numbers:
            square = square + self.size * numbers["norm"][0]
        return features, R, square.sqrt()

    def _answers(self, affine: Tensor, numbers: Numbers) -> Tensor:
        _, R, length = self._sums(affine, numbers)
        hats = self.radius * R / length
        return (1 + numbers["norm"][1]) * hats + numbers["centre"] if "norm" in numbers else hats

    def off(self, n: Tensor, y: Tensor) -> Tensor:
        """By how much answers are (n)."""
        return (self._answers(_affine(n), self.numbers) - y).norm(dim=1)

    def shown(self, value: Value, n: Tensor) -> tuple[Tensor, Tensor]:
        """R as fitted, and ŷ as answers show it, of length 1."""
        R = self.layer(n.to(self.size.device)).to("cpu")
        return R, normalize(value(n) - self.centre, dim=1)

    def with_unit(self, a: Tensor, offset: Tensor, c: Tensor) -> Fitted:
        A, linear = self.numbers["A"], self.numbers["linear"]
        row = torch.cat([a, offset[None]])[None].to(A)
        grown = {"A": torch.cat([A, row]), "linear": torch.cat(
            [linear[: len(A)], c[None].to(A), linear[len(A) :]])}  # fmt: skip
        return replace(self, numbers=self.numbers | grown)

    def descended(self, n: Tensor, y: Tensor) -> Fitted:
        affine = _affine(n)

        def preconditioner(numbers: Numbers) -> Callable[[Numbers], Numbers]:
            features, R, length = self._sums(affine, numbers)
            scale = length / self.radius
            slopes = derivative(self.activation, 1)(affine @ numbers["A"].mT) / scale
            features, C = features / scale, numbers["linear"][: len(numbers["A"])]
            hats = R / scale
            beside = torch.stack([-self.size / 2 * hats / length.square(), hats]).flatten(1)
            right = {
                "A": inverse((C @ C.mT) * (slopes.mT @ slopes)),
                "linear": inverse(features.mT @ features),
                "norm": inverse(beside @ beside.mT),
            }
            return lambda slope: {
                name: part / len(n) if name == "centre" else right[name] @ part
                for name, part in slope.items()
            }

        def model(numbers: Numbers) -> Tensor:
            return self._answers(affine, numbers)

        numbers, left = descend(model, self.numbers, y, preconditioner)
        return replace(self, numbers=numbers, left=left)


def _affine(n: Tensor) -> Tensor:
    return torch.cat([n, torch.ones_like(n[:, :1])], 1)


def fitted(
    value: Value, units: Units, doubtful: Tensor, radius: float, device: torch.device,
    stream: torch.Generator, exact: bool = False,
) -> Fitted:  # fmt: skip
    """All numbers of the layer, from those of the units, at as many points as they need.

    Of some units (indices) lengths and offsets are in doubt. Where ŷ are `exact`, of one length and
    without a centre, those stay as they are.
    """
    width, e = units.A.shape
    unknowns = width * (e + 1) + (width + e + 2) * e + 2
    count = math.ceil(_MORE * unknowns / (e - 1)) + _SPARE
    n = radius * normalize(torch.randn(count, e, generator=stream, dtype=torch.float64), dim=1)
    y = value(n).to(device)
    n = n.to(device)
    fit = Fitted.started(units, n, y, radius, exact)
    if len(doubtful):
        units = _reshaped(fit, units, doubtful, value, stream)
        fit = Fitted.started(units, n, y, radius, exact)
    tried = fit
    for _ in range(_MISSED + 1):
        rare = _where_rare(tried.layer.units, radius, stream)
        at, wanted = n, y
        if len(rare):
            at, wanted = torch.cat([n, rare.to(device)]), torch.cat([y, value(rare).to(device)])
        tried = tried.descended(at, wanted)
        if not tried.left < fit.left / 2:
            break
        fit = tried
        if fit.left < _ARRIVED:
            break

        furthest = n[int(fit.off(n, y).argmax())].to("cpu")
        tried = fit.with_unit(*missed_unit(partial(fit.shown, value), furthest, fit.activation))
    return fit


def _reshaped(
    fit: Fitted, units: Units, doubtful: Tensor, value: Value, stream: torch.Generator
) -> Units:
    """With lengths and offsets from answers on a great circle through each unit's own row.

    What is linear was fitted with the unit as it was: it may be off by what is affine.
    """
    A, a, C = units.A.clone(), units.a.clone(), units.C.clone()
    steps = torch.stack([torch.ones_like(_ANGLES), _ANGLES.sin(), _ANGLES.cos() - 1], 1)
    for k in doubtful.tolist():
        axis, c = normalize(A[k], dim=0), C[:, k]
        up = torch.randn(len(axis), generator=stream, dtype=torch.float64)
        up = normalize(up - (up @ axis) * axis, dim=0)
        circle = fit.radius * (_ANGLES.cos()[:, None] * up + _ANGLES.sin()[:, None] * axis)
        R, hats = fit.shown(value, circle)
        R = R - ACTIVATIONS[fit.activation](circle @ A[k] + a[k])[:, None] * c
        near = _across(R, hats).norm(dim=1) < _NEAR * R.norm(dim=1)
        offset, slope, size = _fit(
            steps[near, :2], _amounts(R, hats, c)[near], fit.activation, affine=steps[near]
        )
        A[k], a[k], C[:, k] = slope / fit.radius * axis, offset, size * c
    return replace(units, A=A, a=a, C=C)


def _where_rare(units: Units, radius: float, stream: torch.Generator) -> Tensor:
    """Points (n, e) of the sphere where units that are rarely both on and off are either."""
    A, a = units.A.to("cpu"), units.a.to("cpu")
    length, e = A.norm(dim=1), A.shape[1]
    rare = (a.abs() > _RARELY * length) & (a.abs() < _REACHED * radius * length)
    A, a, length = (part[rare].repeat_interleave(_AROUND, 0) for part in (A, a, length))
    random = torch.randn(len(A), e + 1, generator=stream, dtype=torch.float64)
    along = ((_SPREAD * random[:, -1] - a) / length).clamp(-radius, radius)[
        :, None
    ]  # of n, by the unit
    axis = A / length[:, None]
    across = random[:, :-1] - (random[:, :-1] * axis).sum(1, keepdim=True) * axis
    return along * axis + (radius**2 - along.square()).sqrt() * normalize(across, dim=1)


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
    # What D leaves of L stays: with it the layer answers as it was fitted to.
    L = layer.L + units.A.mT @ (share[:, None] * units.C.mT)
    c = layer.c + units.C @ (share * units.a)
    units = replace(units, A=units.A * sign[:, None], a=units.a * sign, C=units.C / size)
    epsilon = layer.epsilon_behind / float(size) ** 2
    return Layer(units, L / size, c / size, layer.epsilon, epsilon), D / size


def missed_unit(
    shown: Callable[[Tensor], tuple[Tensor, Tensor]], p: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """a (e), α and c (m). `shown` takes points (n, e) to R and ŷ (n, m), the latter of length 1."""
    radius, e = float(p.norm()), len(p)
    basis = torch.linalg.qr(torch.cat([p[:, None], torch.eye(e).to(p)], 1))[0].mT
    up, tangents = p / radius, basis[1:]
    c = normalize(_across(*shown(p[None]))[0], dim=0)

    def path(t: float) -> Tensor:
        return radius * (math.cos(_ANGLE * t) * up + math.sin(_ANGLE * t) * tangents)

    def amount(n: Tensor) -> Tensor:
        return _amounts(*shown(n), c)[:, None]

    towards = normalize(differences(amount, path, amount(p[None]))[0][:, 0] @ tangents, dim=0)
    circle = radius * (_ANGLES.cos()[:, None] * up + _ANGLES.sin()[:, None] * towards)
    R, hats = shown(circle)
    near = _across(R, hats).norm(dim=1) < _NEAR * R.norm(dim=1)
    angles, R, hats = _ANGLES[near], R[near], hats[near]
    steps = torch.stack([torch.ones_like(angles), angles.sin(), angles.cos() - 1], 1)
    x = _fit(steps, _amounts(R, hats, c), activation)
    for _ in range(_REFINED):
        made = x[3] * ACTIVATIONS[activation](steps @ x[:3])
        weighted = made[:, None] * hats
        square = made.square().sum() * torch.eye(len(c)).to(c) - weighted.mT @ weighted
        c = torch.linalg.solve(square, made @ _across(R, hats))
        x = _fit(steps, _amounts(R, hats, c), activation, x)
    z, sine, cosine, share = x
    return (cosine * up + sine * towards) / radius, z - cosine, share * c


def _across(R: Tensor, hats: Tensor) -> Tensor:
    return (R * hats).sum(1, keepdim=True) * hats - R


def _amounts(R: Tensor, hats: Tensor, c: Tensor) -> Tensor:
    """Of c (n) in the sums."""
    own = c - (hats @ c)[:, None] * hats
    return (_across(R, hats) * own).sum(1) / own.square().sum(1)


def _fit(
    steps: Tensor, wanted: Tensor, activation: str, before: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x and a size for which `size·φ(steps·x)` (n) is wanted, or that and columns of `affine`.

    The first column of steps is 1, the second a sine, and the third is small next to both.
    """
    f, df, scale = ACTIVATIONS[activation], derivative(activation, 1), wanted.norm()
    Q = torch.zeros_like(steps[:, :1]) if affine is None else torch.linalg.qr(affine)[0]

    def across(columns: Tensor) -> Tensor:
        return columns - Q @ (Q.mT @ columns)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        z = steps @ x[:-1]
        made, slopes = f(z), x[-1] * df(z)[:, None] * steps
        return across(x[-1] * made - wanted) / scale, (
            across(torch.cat([slopes, made[:, None]], 1)) / scale
        )

    def start(z: float, slope: float) -> Tensor:
        x = torch.tensor([z, slope, _COSINE, 1.0], dtype=torch.float64)[[*range(len(steps[0])), 3]]
        made = across(f(steps @ x[:-1]))
        x[-1] = (made @ wanted) / (made @ made)
        return x

    tried = [before] if before is not None else [start(z, s) for z in _OFFSETS for s in _SLOPES]
    tried = sorted(tried, key=lambda x: float(model(x)[0].norm()))[:_STARTS]
    best, least = tried[0], math.inf
    for x in tried:
        end, left = levenberg(model, x)
        best, least = (end, left) if left < least else (best, least)
        if least < _ALIKE:
            break
    return best
