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
    heads       an answer does not show its sum: R takes most values more than once. Two answers
                that share a sum do, and one whose sum is in a known span of few dimensions: that
                is what sub_layer.py asks for. Then all numbers of all heads (all_heads.py)

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
from keyhole.extract.blocks.all_heads import Sequences, fitted_heads
from keyhole.extract.blocks.descent import Numbers, descend, inverse
from keyhole.extract.blocks.fit import expect_fitted
from keyhole.extract.blocks.sphere import Sphere, Value, differences, find_units
from keyhole.extract.blocks.units import Units, derivative
from keyhole.extract.sub_layer_values import LostSum, Surroundings
from keyhole.oracle.block import ACTIVATIONS, Block
from keyhole.oracle.sub_layer import SubLayer

_SHORT = 0.005  # of √d, for derivatives by tokens
_FAR = 2.0**12  # of √d, for sums next to which the first ε is nothing
_SPARE = 16
_MORE = 1.5  # answers for each unknown of the fit
_TURNS = 40
_PRECISE = 1e-8  # of what attention adds
_ROUGH = 1e-5
_NEWTON = 16
_STEPS = 10
_ARRIVED = 1e-8
_BATCH = 128
_TOKENS = 12


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
class Layer:
    """`ŷ = √d·R/|R|`, `R = n·L + C·f(n) + c`, in coordinates n (e) of the sphere."""

    units: Units
    L: Tensor
    c: Tensor

    def __call__(self, n: Tensor) -> Tensor:
        """R."""
        units = self.units
        inside = ACTIVATIONS[units.activation](n @ units.A.mT + units.a)
        return n @ self.L + inside @ units.C.mT + self.c

    def slopes(self, n: Tensor) -> Tensor:
        """dR/dn, (n, e, e) with n last."""
        units = self.units
        slope = derivative(units.activation, 1)(n @ units.A.mT + units.a)
        return self.L.mT + (units.C * slope[:, None]) @ units.A

    def to(self, device: torch.device) -> Layer:
        return Layer.of(self.numbers(device), self.units.activation)

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
        n = radius * normalize(sums + (u @ basis)[:, None], dim=2)
        return radius * normalize(self(n), dim=2)

    def _slopes_of_made(self, sums: Tensor, basis: Tensor, u: Tensor) -> Tensor:
        """Likewise its derivative by u (n, q·e, r): of both norms and what is between."""
        radius = math.sqrt(sums.shape[2] + 1)
        h = sums + (u @ basis)[:, None]
        hat, length = normalize(h, dim=2), h.norm(dim=2)
        R = self(radius * hat)
        slopes = self.slopes(radius * hat.flatten(0, 1)).unflatten(0, hat.shape[:2])
        slopes = slopes @ (basis.mT - hat[..., None] * (hat @ basis.mT)[..., None, :])
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
        of_A = inverse((C @ C.mT) * (slopes.mT @ slopes))
        of_linear = inverse(features.mT @ features)
        return lambda slope: {"A": of_A @ slope["A"], "linear": of_linear @ slope["linear"]}

    numbers, left = descend(model, numbers, y, preconditioner)
    return Layer.of(numbers, units.activation).to(torch.device("cpu")), left


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
    return Layer(units, L / size, c / size), D / size


@dataclass(frozen=True)
class Behind:
    """Everything of such a block but its attention, which is asked through it.

    As an oracle it gives what attention adds to pairs, in coordinates (e), and of more tokens what
    stands behind the second norm, which is enough to see whether places matter. The sums of
    `[x + δ ; x]` and `[x − δ ; x]` differ by δ·M, since σ(s) + σ(−s) = 1 in every head: two
    answers show one sum.
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
        return Surroundings(
            self, self.b, every_token=self.every_token, causal=self.causal, precision=_PRECISE,
            within=self.within,
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

    def polished(self, attention: SubLayer, stream: torch.Generator) -> SubLayer:
        """All numbers of attention at once."""
        sequences = Sequences.drawn(attention, stream)
        layer, radius = self.layer.to(self.device), math.sqrt(self.dim)
        own = (sequences.asking.flatten(0, 1) @ self.axes).to(self.device)

        def behind(added: Tensor) -> Tensor:
            n = radius * normalize(own + added, dim=1)
            return radius * normalize(layer(n), dim=1)

        y = self._hats(sequences.tokens)
        return fitted_heads(attention, sequences, y, behind, self.device, stream)

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
        x, tokens = sequences[:, -1], sequences.shape[1]
        if tokens == 1:
            return self.sums(x) - x @ self.axes
        if tokens > 2:
            return self._hats(sequences)
        delta = sequences[:, 0] - x
        mirrored = torch.stack([x - delta, x], 1)
        hats = torch.stack([self._beside(sequences), self._beside(mirrored)], 1)
        alone, moved = self.sums(x), delta @ self.total
        u = self._undone(
            hats,
            torch.stack([alone, alone - moved], 1),
            torch.eye(len(self.b)).to(moved),
            moved / 2,
        )
        return alone - x @ self.axes + u

    def within(self, sequences: Tensor, span: Tensor) -> Tensor:
        """What the other tokens add to the sum of the last one, known to be in a span of rows."""
        basis = torch.linalg.qr(span.mT)[0].mT
        x = sequences[:, -1]
        start = (sequences.mean(1) - x) @ self.total @ basis.mT  # if heads saw all tokens alike
        u = self._undone(self._beside(sequences)[:, None], self.sums(x)[:, None], basis, start)
        return u @ basis

    def _beside(self, sequences: Tensor) -> Tensor:
        """What stands behind the second norm, corrected by what the layer gets wrong of the last
        token alone: near by it is nearly the same.
        """
        x, of = torch.unique(sequences[:, -1], dim=0, return_inverse=True)
        radius = math.sqrt(self.dim)
        made = radius * normalize(self.layer(radius * normalize(self.sums(x), dim=1)), dim=1)
        return self._hats(sequences) + (made - self._hats(x.unsqueeze(1)))[of]

    def with_start(self, stream: torch.Generator) -> Behind:
        """x₀ again, now that directions are known: sums `x·T + b` of a few tokens lie on them."""
        d, e = self.axes.shape
        x = math.sqrt(d) * random_orthogonal(d, stream)[: min(_TOKENS, d)]
        moved = x @ (self.first.T @ self.axes)
        b = self._undone(
            self._hats(x.unsqueeze(1))[None], moved[None], torch.eye(e).to(moved), self.b[None]
        )[0]
        return replace(self, first=replace(self.first, start=-(self.axes @ b) @ self.first.R))

    def sums(self, x: Tensor) -> Tensor:
        """In front of the first norm, of single tokens, in coordinates."""
        return (x - self.first.start) @ (self.first.T @ self.axes)

    def _hats(self, sequences: Tensor) -> Tensor:
        y = self.second.undone(self.ask(sequences)) @ self.axes
        return math.sqrt(self.dim) * normalize(y, dim=1)

    def _undone(self, hats: Tensor, sums: Tensor, basis: Tensor, start: Tensor) -> Tensor:
        layer, basis = self.layer.to(self.device), basis.to(self.device)
        batches = zip(*(part.split(_BATCH) for part in (hats, sums, start)), strict=True)
        parts = list[Tensor]()
        for batch in batches:
            hats, sums, start = (part.to(self.device) for part in batch)
            parts.append(layer.undone(hats, sums, basis, start).to("cpu"))
        u = torch.cat(parts)
        lost = int(torch.isnan(u[:, 0]).sum())
        if lost:
            raise LostSum(f"{lost} of {len(u)} sums could not be told from answers")
        return u


def read(ask: Value, d: int, device: torch.device, stream: torch.Generator) -> Behind:
    """`ask` takes sequences (n, tokens, d) to the last token's vectors."""
    tokens = torch.randn(2 * d + _SPARE, 1, d, generator=stream, dtype=torch.float64)
    second = SecondNorm.read(ask(tokens))
    first = FirstSum.read(lambda sequences: second.undone(ask(sequences)), d, stream)
    ones = torch.ones(d, 1, dtype=torch.float64)
    axes = torch.linalg.qr(torch.cat([ones, random_orthogonal(d, stream)[:, 1:]], 1))[0][:, 1:]

    def value(n: Tensor) -> Tensor:
        return second.undone(ask(first.tokens(n @ axes.mT).unsqueeze(1))) @ axes

    sphere = Sphere(value, d - 1, math.sqrt(d))
    units = find_units(sphere, random_orthogonal(d - 1, stream), device, stream)
    layer, left = fitted(value, units, math.sqrt(d), device, stream)
    expect_fitted(left)
    layer, D = signed(layer, axes)
    return Behind(ask, axes, second, first, layer, D, device).with_start(stream)
