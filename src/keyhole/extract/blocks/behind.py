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
from keyhole.extract.blocks.descent import Numbers, descend, inverse
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
# Shares of tokens on the way to them.
_PATH = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.68, 0.76, 0.84, 0.92, 1.0)
_ARRIVED = 1e-9
_AGREES = 1e-7
_PRECISE = 1e-8  # of what attention adds
_ROUGH = 1e-5
_NEWTON = 16
_BATCH = 512
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
        of_A = inverse((C @ C.mT) * (slopes.mT @ slopes))
        of_linear = inverse(features.mT @ features)
        return lambda slope: {"A": of_A @ slope["A"], "linear": of_linear @ slope["linear"]}

    numbers, left = descend(model, numbers, y, preconditioner)
    return Layer.of(numbers, units.activation), left


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
        sums, off = _lengths(n, delta)
        lost = torch.nonzero(off > _AGREES)[:, 0]
        if len(lost):
            rows = torch.cat([lost, lost + len(x)])
            again, left = _lengths(self._followed(both[rows]), delta[lost])
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
                tried = radius * normalize(n - step, dim=1)
                new = look(tried)
                for _ in range(4):
                    worse = (new[1] > size) & (size > 1e-14)
                    if not bool(worse.any()):
                        break
                    share = torch.where(worse[:, None], share / 4, share)
                    tried = radius * normalize(n - share * step, dim=1)
                    new = look(tried)
                done = (new[1] < 1e-10) & (new[1] > 0.5 * size)
                n, rest, size = tried, *new
                if bool((done | (size < 1e-15)).all()):
                    break
            ends.append(n.to("cpu"))
            left.append(size.to("cpu"))
        return torch.cat(ends), torch.cat(left)


def _lengths(both: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """The first of two sums that differ by delta, from their directions; and how far these fail."""
    forth, back = both.chunk(2)
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

    sphere = Sphere(value, d - 1, math.sqrt(d))
    units = find_units(sphere, random_orthogonal(d - 1, stream), device, stream)
    layer, left = fitted(value, units, math.sqrt(d), device, stream)
    if left > 1e-6:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            f"no feed-forward layer explains the answers to single tokens: {left:.1e} is left",
        )
    layer, D = signed(layer, axes)
    return Behind(ask, axes, second, first, layer, D, device).with_start(stream)
