"""A block with LayerNorms behind its sums, as BERT's, peeled from the outside (ours).

    y = E·N(D·n + C·f(n) + c) + e,    n = N(x + Attention(x) + b)

Every answer has lost its length and its mean, and so has n. Each step is linear algebra:

    E, e        y/E has one sum for all y, and (y − e)/E one length: two linear systems. With an ε
                the second is rough: then e is where lines along ŷ through some y meet (below)
    x₀, M       n([x]) is the direction of (x − x₀)(1 + M), so the derivative of y([x]) is 0 along
                x − x₀ and along 1(1 + M)⁻¹; two points show both. In [x + δ ; x] every head has the
                weight ½ at δ = 0: the derivative by δ is that of y([x]) behind ½·M(1 + M)⁻¹. With a
                bias of positions it has another, and that tells heads apart (position_bias.py)
    units       n is any point of a sphere now. Of ŷ = R/s, s = |R|, the second derivatives are

                    ŷ_ee' + σ_e ŷ_e' + σ_e' ŷ_e + τ_ee' ŷ
                        = (1/s)(Σ_k c_k φ''_k (a_k·e)(a_k·e') − ρ δ_ee')

                with σ and τ from s alone. Across ŷ and all ŷ_e, e in U, these are ŷ_ee': that
                is the span S of units.py again. Outside of S the left side is 0: linear in σ.
                Only e shifts ŷ: with ŷ left in, S has the τ of every point too, and once units
                are known what is left of the equation is τŷ, of rank one, which shows ŷ.
                ReLU units show by their kinks instead (kinks.py)
    the rest    the numbers φ''_k at some points, lengths from first derivatives, and the rows
                outside U from mixed ones (linear, beside σ_w); then all numbers
                (between_norms.py)
    signs       of φ(z) and φ(−z) those for which D is diagonal
    both ε      of the second norm among all numbers, with e and the size of E; of the first from
                sums so short that n is shorter by a factor that they share
    heads       an answer does not show its sum: R takes most values more than once. Two answers
                that share a sum do, and one whose sum is in a known span of few dimensions: that
                is what sub_layer.py asks for. Then all numbers of all heads (all_heads.py)

With an ε in the second norm the direction of ŷ is still R's, but answers have several lengths. Then
e follows from |R|, roughly known (`_origin`), or from where lines along ŷ meet (wide_curvature.py)
and arcs (kinks.py).

Multiplying D, C and c, and with them the root of the second ε, changes nothing: the mean of D² is 1
here. Means of the rows of O and A, of the columns of C, of b and c are 0.
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
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import random_orthogonal, random_units
from keyhole.extract.blocks.all_heads import Sequences, fitted_heads
from keyhole.extract.blocks.between_norms import Layer, fitted, signed
from keyhole.extract.blocks.fit import expect_fitted
from keyhole.extract.blocks.heads import attempted
from keyhole.extract.blocks.kinks import find_relu_units_on_sphere, straight_on_sphere
from keyhole.extract.blocks.position_bias import COPIES, Apart, read_placed, told_apart
from keyhole.extract.blocks.units import Units
from keyhole.extract.blocks.view import WIDE
from keyhole.extract.blocks.wide_curvature import Sphere, Value, differences, find_units
from keyhole.extract.sub_layer import read_attention
from keyhole.extract.sub_layer_values import LostSum, Surroundings
from keyhole.oracle.block import Block
from keyhole.oracle.sub_layer import SubLayer

_SHORT = 0.001  # of a token, for derivatives: scores of real heads bend fast
_SHORTEST = 5e-6  # likewise, so that hardly a kink is that near
_FAR = 2.0**12  # of √d, for sums next to which the first ε is nothing
_PLANES = 2.0**8  # likewise, for tokens that show x₀
_SPARE = 16
_ATTEMPTS = 3
_AROUND = 16  # points for each dimension that show the origin of answers
_SAME = 1e-9  # by which lengths of answers may differ and be one
_FADING = tuple(2.0**-n for n in range(1, 15))  # of √d: sums so short that the first ε shows
_FADED = 0.9  # of its length, that n has left then
_PRECISE = 1e-8  # of what attention adds
_NEWTON = 16
_BATCH = 128
_TOKENS = 12


@dataclass(frozen=True)
class SecondNorm:
    """`y = E·ŷ + e` with ŷ of mean 0 and length √d, or nearly: an ε shortens it."""

    E: Tensor
    e: Tensor
    exact: bool = True  # are all ŷ of one length?

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
        lengths = (z - z0).square().mean(1)
        radius = lengths.mean().sqrt()
        exact = bool((lengths - radius**2).abs().max() < _SAME * radius**2)
        return cls(radius / scale, z0 / scale, exact)

    def moved(self, by: Tensor, share: float = 1.0) -> SecondNorm:
        """For ŷ that are so much less, and divided by `share`."""
        return replace(self, E=share * self.E, e=self.e + self.E * by)

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
    heads: Apart | None = None  # with W = O, where a bias of positions tells them apart

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
    def read(cls, ask: Value, d: int, stream: torch.Generator, step: float = _SHORT) -> FirstSum:
        """`ask` takes sequences (n, tokens, d); derivatives are by steps of such a share."""
        directions = random_orthogonal(d, stream)[:2]
        basis = random_orthogonal(d, stream)
        slopes = partial(_slopes_of_copies, ask, step, basis)
        # Far out the first ε is nothing.
        points = _PLANES * math.sqrt(d) * directions
        planes = [torch.linalg.svd(slopes(x))[0][:, -2:] for x in points]
        cosines = torch.linalg.svdvals(planes[0].mT @ planes[1])
        if float(cosines[0]) < 1 - 1e-6:
            raise Unsuccessful(
                Status.NOT_APPLICABLE,
                "answers to single tokens are not those behind a LayerNorm of one sum",
            )
        points = math.sqrt(d) * directions

        def both(tokens: int = 1, place: int = 0) -> Tensor:
            return torch.cat([slopes(x, tokens, place) for x in points], 1)

        J = both()
        # Along 1(1 + M)⁻¹ nothing shows: it is left out, and the mean of sums is free.
        left, sizes, right = torch.linalg.svd(J, full_matrices=False)
        seen, right = left[:, :-1], right[:-1].mT
        outside = [torch.eye(d, dtype=torch.float64) - p @ p.mT for p in planes]
        wanted = torch.cat([o @ (_PLANES * x) for o, x in zip(outside, points, strict=True)])
        start = seen @ least_squares(torch.cat(outside) @ seen, wanted[:, None])[:, 0]
        heads = None
        if _alike(partial(_slopes_of_copies, ask, step, basis[:1]), points[0]):
            N = 2 * both(2, 1) @ right
        else:
            heads = told_apart(torch.stack([both(*each) @ right for each in COPIES]), stream)
            N = heads.total
        back = seen.mT / sizes[:-1, None]
        R = torch.eye(d, dtype=torch.float64) - N @ back
        T = torch.linalg.inv(R)
        T = T - T.mean(1, keepdim=True)
        if heads is not None:
            heads = replace(heads, W=heads.W @ (back @ T))
        return cls(start, R, T, heads)


def _slopes_of_copies(
    ask: Value, step: float, basis: Tensor, x: Tensor, tokens: int = 1, place: int = 0
) -> Tensor:
    """dy/dδ (d, m), but for a factor, of so many tokens x, one of which is x + δ."""
    steps, copies = step * x.norm() * basis, x.expand(len(basis), tokens, len(x))

    def path(t: float) -> Tensor:
        moved = copies.clone()
        moved[:, -1 - place] += t * steps
        return moved

    return basis.mT @ differences(ask, path, ask(x[None, None]))[0]


def _alike(slopes: Callable[..., Tensor], x: Tensor) -> bool:
    """Do all of three equal tokens have a third of the weight, and two of them one half?"""
    two, *three = (slopes(x, *each) for each in COPIES[:3])
    return all(bool((3 * each - 2 * two).norm() < 1e-6 * two.norm()) for each in three)


def _origin(n: Tensor, y: Tensor) -> Tensor:
    """What answers (n, m) at points of a sphere are around, where an ε makes some of them shorter.

    `|y − z|² = r² − κ/|R|²` is linear in z, r² and κ, of which κ is small. |R| need not be exact
    then: it is that for which |R|·ŷ is affine in n, as nearly as can be.
    """
    hats, ones = normalize(y, dim=1), torch.ones_like(y[:, :1])
    Q = torch.linalg.qr(torch.cat([n, ones], 1))[0]
    across = torch.eye(len(n), dtype=torch.float64) - Q @ Q.mT
    length = torch.linalg.eigh(across * (hats @ hats.mT))[1][:, :1]
    shorter = (length.mean() / length).square()
    system = torch.cat([ones, shorter, 2 * y], 1)
    return least_squares(system, y.square().sum(1, keepdim=True))[2:, 0]


@dataclass(frozen=True)
class PeeledPostNorm:
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
        units, lift = self.units.of_length_one, self.axes
        return Block(
            Q=attention.Q, q=attention.q, K=attention.K, V=attention.V,
            O=(attention.O @ lift.mT).contiguous(), b=lift @ attention.b,
            frequencies=attention.frequencies, places=attention.places,
            A=(units.A @ lift.mT).contiguous(), a=units.a,
            G=units.G.new_zeros(0, self.dim), g=units.g, C=(lift @ units.C).contiguous(),
            c=lift @ self.layer.c, D=self.D, E=self.second.E, e=self.second.e,
            activation=units.activation, norm="behind", epsilon=self.layer.epsilon,
            epsilon_behind=self.layer.epsilon_behind, every_token=self.every_token,
            causal=self.causal,
        )  # fmt: skip

    def attention(self, stream: torch.Generator, reach: float) -> SubLayer:
        """Its heads, from questions of one length."""
        heads = self.first.heads
        if heads is None:
            return read_attention(self.surroundings(), stream, self.total, reach)
        heads = replace(heads, W=heads.W @ self.axes)
        return read_placed(self.surroundings(), self.total, heads, reach, stream)

    def polished(self, attention: SubLayer, stream: torch.Generator) -> SubLayer:
        """All numbers of attention at once."""
        sequences = Sequences.drawn(attention, stream)
        layer, radius = self.layer.to(self.device), math.sqrt(self.dim)
        own = (sequences.asking.flatten(0, 1) @ self.axes).to(self.device)

        def behind(added: Tensor) -> Tensor:
            return radius * normalize(layer(layer.normed(own + added)), dim=1)

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
        made = radius * normalize(self.layer(self.layer.normed(self.sums(x))), dim=1)
        return self._hats(sequences) + (made - self._hats(x.unsqueeze(1)))[of]

    def with_start(self, stream: torch.Generator) -> PeeledPostNorm:
        """x₀ again, now that directions are known: sums `x·T + b` of a few tokens lie on them."""
        d, e = self.axes.shape
        x = math.sqrt(d) * random_orthogonal(d, stream)[: min(_TOKENS, d)]
        moved = x @ (self.first.T @ self.axes)
        b = self._undone(
            self._hats(x.unsqueeze(1))[None], moved[None], torch.eye(e).to(moved), self.b[None]
        )[0]
        return replace(self, first=replace(self.first, start=-(self.axes @ b) @ self.first.R))

    def with_epsilon(self, stream: torch.Generator) -> PeeledPostNorm:
        """The first ε, from sums so short that it shows: n is ν times as long as of others."""
        d, e = self.axes.shape
        n = torch.randn(_TOKENS, e, generator=stream, dtype=torch.float64)
        n = math.sqrt(d) * normalize(n, dim=1)
        share = 1.0
        for length in _FADING:
            hats = self._hats(self.first.tokens(n @ self.axes.mT, length).unsqueeze(1))
            for _ in range(_NEWTON):
                R = self.layer(share * n)
                out, size = normalize(R, dim=1), R.norm(dim=1, keepdim=True)
                slope = self.layer.slopes(share * n, n[..., None])[..., 0] / size
                slope = slope - out * (out * slope).sum(1, keepdim=True)
                off = hats / math.sqrt(d) - out
                share += float((off * slope).sum() / slope.square().sum())
            if not 0 < share < 2:
                break
            if share < _FADED:
                epsilon = length**2 * (share**-2 - 1)
                return replace(self, layer=replace(self.layer, epsilon=epsilon))
        return self

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


def read(ask: Value, d: int, device: torch.device, stream: torch.Generator) -> PeeledPostNorm:
    """`ask` takes sequences (n, tokens, d) to the last token's vectors."""
    return attempted(partial(_read, ask, d, device, stream), 1 if d >= WIDE else _ATTEMPTS)


def _read(ask: Value, d: int, device: torch.device, stream: torch.Generator) -> PeeledPostNorm:
    tokens = torch.randn(2 * d + _SPARE, 1, d, generator=stream, dtype=torch.float64)
    second = SecondNorm.read(ask(tokens))

    def undone(sequences: Tensor) -> Tensor:
        return second.undone(ask(sequences))

    radius = math.sqrt(d)
    kinked = straight_on_sphere(
        lambda x: undone(_FAR * x.unsqueeze(1)), d, radius, stream, lost=True
    )
    first = FirstSum.read(undone, d, stream, _SHORTEST if kinked else _SHORT)
    ones = torch.ones(d, 1, dtype=torch.float64)
    axes = torch.linalg.qr(torch.cat([ones, random_orthogonal(d, stream)[:, 1:]], 1))[0][:, 1:]

    def value(n: Tensor) -> Tensor:
        return undone(first.tokens(n @ axes.mT).unsqueeze(1)) @ axes

    def found_units(centred: bool) -> tuple[Units, Tensor, Tensor]:
        sphere = Sphere(value, d - 1, radius, centred=centred)
        return find_units(sphere, random_orthogonal(d - 1, stream), device, stream)

    if kinked:
        units, centre = find_relu_units_on_sphere(value, d - 1, radius, stream, lost=True)
        doubtful = torch.zeros(0, dtype=torch.long)
    elif second.exact or d >= WIDE:
        units, centre, doubtful = found_units(second.exact)
    else:
        n = radius * random_units(_AROUND * d, d - 1, stream)
        second = second.moved(axes @ _origin(n, value(n)))
        try:
            units, centre, doubtful = found_units(True)
        except Unsuccessful:
            units, centre, doubtful = found_units(False)
    second = second.moved(axes @ centre)
    found = fitted(value, units, doubtful, radius, device, stream, second.exact)
    expect_fitted(found.left)
    second = second.moved(axes @ found.centre, found.share)
    layer, D = signed(found.layer.to(torch.device("cpu")), axes)
    made = PeeledPostNorm(ask, axes, second, first, layer, D, device)
    try:
        return made.with_epsilon(stream).with_start(stream).with_epsilon(stream)
    except LostSum as lost:
        raise Unsuccessful(Status.NOT_APPLICABLE, str(lost)) from lost
