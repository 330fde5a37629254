"""A block with LayerNorms behind its sums, as BERT's: everything but the heads (ours).

    y = E·N(D·n + C·f(n) + c) + e,    n = N(x + Attention(x) + b)

From answers y to sequences this reads E, e, D, C, c, the units f and every ε, and
returns an oracle of the attention alone (`PeeledPostNorm`). Every answer has lost its
length and its mean, and so has n. The block is read from the outside in, each step by
linear algebra:

    E, e        y/E has the same sum for all y, and (y − e)/E the same length: two linear systems
    x₀, M       n([x]) is the direction of (x − x₀)(1 + M), so the derivative of y([x]) is 0 along
                x − x₀ and along 1(1 + M)⁻¹; two points show both. In [x + δ ; x] every
                head has the weight ½ at δ = 0: the derivative by δ is that of y([x])
                after ½·M(1 + M)⁻¹. With a position bias the weights differ, which tells
                heads apart (position_bias.py)
    units       n is any point of a sphere now. The second derivatives of ŷ = R/s, s = |R|, are

                    ŷ_ee' + σ_e ŷ_e' + σ_e' ŷ_e + τ_ee' ŷ
                        = (1/s)(Σ_k c_k φ''_k (a_k·e)(a_k·e') − ρ δ_ee')

                with σ and τ from s alone. Orthogonally to ŷ and all ŷ_e, e in U, these
                are ŷ_ee': they show the span S of curvature.py. Orthogonally to S the
                left side is 0, which is linear in σ (wide_curvature.py). ReLU units are
                read from kinks instead (kinks.py)
    the rest    the numbers φ''_k at some points, lengths from first derivatives, the rows outside U
                from mixed derivatives (linear, together with σ_w); then a fit of all
                numbers (between_norms.py)
    signs       of φ(z) and φ(−z) those for which D is diagonal
    both ε      that of the second norm in the fit of all numbers; that of the first from sums so
                short that n is shorter, by a factor that they share
    heads       a sum does not follow from one answer: R takes most values more than once. It does
                from two answers that share a sum, or if the sum is in a known span of
                few dimensions, and sub_layer.py asks for such sums. Then all numbers of
                all heads (all_heads.py)

With an ε in the second norm, ŷ still has the direction of R, but answers have several
lengths, and e is only roughly known at first. Then it follows from |R|, which is
roughly known (`_origin`), or is where lines along ŷ (wide_curvature.py) or arcs
(kinks.py) meet.

Multiplying D, C and c, and with them the root of the second ε, changes nothing: here
the mean of D² is 1. The means of the rows of O and A, of the columns of C, of b and of
c are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Unsuccessful, not_applicable
from keyhole.core.float64 import identity, normal
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.bilinear import max_abs, random_orthogonal, random_units
from keyhole.extract.blocks.all_heads import Sequences, fitted_heads
from keyhole.extract.blocks.between_norms import Layer, fitted, signed
from keyhole.extract.blocks.fit import expect_fitted
from keyhole.extract.blocks.heads import attempted
from keyhole.extract.blocks.kinks import find_relu_units_on_sphere, straight_on_sphere
from keyhole.extract.blocks.position_bias import COPIES, Apart, read_placed, told_apart
from keyhole.extract.blocks.units import Units
from keyhole.extract.blocks.view import WIDE, without_mean
from keyhole.extract.blocks.wide_curvature import Sphere, Value, differences, find_units
from keyhole.extract.sub_layer import read_attention
from keyhole.extract.sub_layer_values import LostSum, Surroundings
from keyhole.oracle.block import Block
from keyhole.oracle.sub_layer import SubLayer

# Steps of differences, relative to a token: scores of real heads have large higher
# derivatives, and with ReLU units hardly any kink is as near as the second step.
_SHORT = 0.001
_SHORTEST = 5e-6
# Lengths relative to √d: of sums for which the first ε is negligible, and of tokens
# that show x₀.
_FAR = 2.0**12
_PLANES = 2.0**8
_SPARE = 16
_ATTEMPTS = 3
_AROUND = 16  # points for each dimension that show the origin of answers
_SAME = 1e-9  # relative difference of lengths that count as equal
_FADING = tuple(2.0**-n for n in range(1, 15))  # lengths of sums that show the first ε
_FADED = 0.9  # the relative length of n at which ε is read
_PRECISE = 1e-8  # of what attention adds
_NEWTON = 16
_BATCH = 128
_TOKENS = 12


@dataclass(frozen=True)
class SecondNorm:
    """`y = E·ŷ + e` with ŷ of mean 0 and length √d, or slightly shorter, with an ε."""

    E: Tensor
    e: Tensor
    exact: bool = True  # whether all ŷ have the same length

    @classmethod
    def read(cls, y: Tensor) -> SecondNorm:
        """Read the norm from answers (n, d), more than d + 2 of them."""
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
        exact = bool(max_abs(lengths - radius**2) < _SAME * radius**2)
        return cls(radius / scale, z0 / scale, exact)

    def moved(self, by: Tensor, share: float = 1.0) -> SecondNorm:
        """Return the norm for ŷ' = (ŷ − by)/share."""
        return replace(self, E=share * self.E, e=self.e + self.E * by)

    def undone(self, y: Tensor) -> Tensor:
        return (y - self.e) / self.E


@dataclass(frozen=True)
class FirstSum:
    """The sum in front of the first norm, without its mean: `(x − x₀)·T`; R is an inverse of T.

    Attention adds `x·total + b` to single tokens.
    """

    start: Tensor  # x₀
    R: Tensor
    T: Tensor
    heads: Apart | None = None  # with W = O, if a position bias tells them apart

    @property
    def total(self) -> Tensor:
        return self.T - (identity(len(self.T)) - 1 / len(self.T))

    @property
    def b(self) -> Tensor:
        return -self.start @ self.T

    def tokens(self, n: Tensor, length: float = _FAR) -> Tensor:
        """Return single tokens whose sums are `length` times n, of mean 0."""
        return self.start + length * n @ self.R

    @classmethod
    def read(
        cls,
        ask: Value,
        d: int,
        stream: torch.Generator,
        step: float = _SHORT,
    ) -> FirstSum:
        """Read x₀ and T; `ask` takes sequences (n, tokens, d), `step` is that of differences."""
        directions = random_orthogonal(d, stream)[:2]
        basis = random_orthogonal(d, stream)
        slopes = partial(_slopes_of_copies, ask, step, basis)
        points = _PLANES * math.sqrt(d) * directions
        planes = [torch.linalg.svd(slopes(x))[0][:, -2:] for x in points]
        cosines = torch.linalg.svdvals(planes[0].mT @ planes[1])
        if float(cosines[0]) < 1 - 1e-6:
            raise not_applicable(
                "answers to single tokens are not those behind a LayerNorm of one sum"
            )
        points = math.sqrt(d) * directions

        def both(tokens: int = 1, place: int = 0) -> Tensor:
            return torch.cat([slopes(x, tokens, place) for x in points], 1)

        J = both()
        # 1(1 + M)⁻¹ does not show and is left out: the mean of sums is free.
        left, sizes, right = thin_svd(J)
        seen = left[:, :-1]
        right = right[:-1].mT
        outside = [identity(d) - p @ p.mT for p in planes]
        wanted = torch.cat(
            [o @ (_PLANES * x) for o, x in zip(outside, points, strict=True)]
        )
        start = seen @ least_squares(torch.cat(outside) @ seen, wanted[:, None])[:, 0]
        heads = None
        if _alike(partial(_slopes_of_copies, ask, step, basis[:1]), points[0]):
            N = 2 * both(2, 1) @ right
        else:
            heads = told_apart(
                torch.stack([both(*each) @ right for each in COPIES]), stream
            )
            N = heads.total
        back = seen.mT / sizes[:-1, None]
        R = identity(d) - N @ back
        T = torch.linalg.inv(R)
        T = T - T.mean(1, keepdim=True)
        if heads is not None:
            heads = replace(heads, W=heads.W @ (back @ T))
        return cls(start, R, T, heads)


def _slopes_of_copies(
    ask: Value,
    step: float,
    basis: Tensor,
    x: Tensor,
    tokens: int = 1,
    place: int = 0,
) -> Tensor:
    """Return dy/dδ (d, m), up to a factor, of tokens that are all x, except for one x + δ.

    `place` is counted from the last token.
    """
    steps = step * x.norm() * basis
    copies = x.expand(len(basis), tokens, len(x))

    def path(t: float) -> Tensor:
        moved = copies.clone()
        moved[:, -1 - place] += t * steps
        return moved

    return basis.mT @ differences(ask, path, ask(x[None, None]))[0]


def _alike(slopes: Callable[..., Tensor], x: Tensor) -> bool:
    """Return whether two equal tokens have half of the weight each, and three of them a third."""
    two, *three = (slopes(x, *each) for each in COPIES[:3])
    return all(bool((3 * each - 2 * two).norm() < 1e-6 * two.norm()) for each in three)


def _origin(n: Tensor, y: Tensor) -> Tensor:
    """Return the centre z of answers (n, m) at points of a sphere, some shortened by an ε.

    `|y − z|² = r² − κ/|R|²` is linear in z, r² and κ. Since κ is small, |R| need not be
    exact: it is taken to be the one for which |R|·ŷ is closest to an affine function of
    n.
    """
    hats = normalize(y, dim=1)
    ones = torch.ones_like(y[:, :1])
    Q = torch.linalg.qr(torch.cat([n, ones], 1))[0]
    across = identity(len(n)) - Q @ Q.mT
    length = torch.linalg.eigh(across * (hats @ hats.mT))[1][:, :1]
    shorter = (length.mean() / length).square()
    system = torch.cat([ones, shorter, 2 * y], 1)
    return least_squares(system, y.square().sum(1, keepdim=True))[2:, 0]


@dataclass(frozen=True)
class PeeledPostNorm:
    """An oracle of what attention adds to the last token, through everything behind attention.

    For pairs of tokens it returns what attention adds, in coordinates (e): the sums of
    `[x + δ ; x]` and `[x − δ ; x]` differ by δ·M, since σ(s) + σ(−s) = 1 in every head,
    so two answers show one sum. For longer sequences it returns the output of the
    second norm, which is enough to see whether places matter.
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
            self,
            self.b,
            every_token=self.every_token,
            causal=self.causal,
            precision=_PRECISE,
            within=self.within,
        )

    @property
    def units(self) -> Units:
        return self.layer.units

    def block(self, attention: SubLayer) -> Block:
        units = self.units.of_length_one
        lift = self.axes
        return Block(
            Q=attention.Q,
            q=attention.q,
            K=attention.K,
            V=attention.V,
            O=(attention.O @ lift.mT).contiguous(),
            b=lift @ attention.b,
            frequencies=attention.frequencies,
            places=attention.places,
            A=(units.A @ lift.mT).contiguous(),
            a=units.a,
            G=units.G.new_zeros(0, self.dim),
            g=units.g,
            C=(lift @ units.C).contiguous(),
            c=lift @ self.layer.c,
            D=self.D,
            E=self.second.E,
            e=self.second.e,
            activation=units.activation,
            norm="behind",
            epsilon=self.layer.epsilon,
            epsilon_behind=self.layer.epsilon_behind,
            every_token=self.every_token,
            causal=self.causal,
        )

    def attention(self, stream: torch.Generator, reach: float) -> SubLayer:
        """Read the heads; the last token is `reach` times as long as the others."""
        heads = self.first.heads
        if heads is None:
            return read_attention(self.surroundings(), stream, self.total, reach)
        heads = replace(heads, W=heads.W @ self.axes)
        return read_placed(self.surroundings(), self.total, heads, reach, stream)

    def polished(self, attention: SubLayer, stream: torch.Generator) -> SubLayer:
        """Fit all numbers of attention at once."""
        sequences = Sequences.drawn(attention, stream)
        layer = self.layer.to(self.device)
        y = self._hats(sequences.tokens)
        own = (sequences.x.flatten(0, 1) @ self.axes).to(self.device)
        return fitted_heads(
            attention,
            sequences,
            y,
            lambda added: layer.hats(own + added),
            self.device,
            stream,
        )

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
        tokens = sequences.shape[1]
        if tokens == 1:
            return self.sums(x) - x @ self.axes
        if tokens > 2:
            return self._hats(sequences)
        delta = sequences[:, 0] - x
        mirrored = torch.stack([x - delta, x], 1)
        hats = torch.stack([self._corrected(sequences), self._corrected(mirrored)], 1)
        alone = self.sums(x)
        moved = delta @ self.total
        u = self._undone(
            hats,
            torch.stack([alone, alone - moved], 1),
            torch.eye(len(self.b)).to(moved),
            moved / 2,
        )
        return alone - x @ self.axes + u

    def within(self, sequences: Tensor, span: Tensor) -> Tensor:
        """Return what the other tokens add to the last one's sum, which is in a span of rows."""
        basis = torch.linalg.qr(span.mT)[0].mT
        x = sequences[:, -1]
        start = (
            (sequences.mean(1) - x) @ self.total @ basis.mT
        )  # as if all weights were equal
        u = self._undone(
            self._corrected(sequences)[:, None], self.sums(x)[:, None], basis, start
        )
        return u @ basis

    def _corrected(self, sequences: Tensor) -> Tensor:
        """Return the output of the second norm, minus the layer's error for the last token alone.

        That error is nearly the same for sums near by.
        """
        x, of = torch.unique(sequences[:, -1], dim=0, return_inverse=True)
        made = self.layer.hats(self.sums(x))
        return self._hats(sequences) + (made - self._hats(x.unsqueeze(1)))[of]

    def with_start(self, stream: torch.Generator) -> PeeledPostNorm:
        """Return the block with x₀ read again from the sums `x·T + b` of a few tokens."""
        d, e = self.axes.shape
        x = math.sqrt(d) * random_orthogonal(d, stream)[: min(_TOKENS, d)]
        moved = x @ (self.first.T @ self.axes)
        b = self._undone(
            self._hats(x.unsqueeze(1))[None],
            moved[None],
            torch.eye(e).to(moved),
            self.b[None],
        )[0]
        return replace(
            self, first=replace(self.first, start=-(self.axes @ b) @ self.first.R)
        )

    def with_epsilon(self, stream: torch.Generator) -> PeeledPostNorm:
        """Return the block with the first ε, from sums so short that it shortens n."""
        d, e = self.axes.shape
        n = math.sqrt(d) * random_units(_TOKENS, e, stream)
        share = 1.0
        for length in _FADING:
            hats = self._hats(self.first.tokens(n @ self.axes.mT, length).unsqueeze(1))
            for _ in range(_NEWTON):
                R = self.layer(share * n)
                out = normalize(R, dim=1)
                size = R.norm(dim=1, keepdim=True)
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
        """Return the sums of single tokens in front of the first norm, in coordinates."""
        return (x - self.first.start) @ (self.first.T @ self.axes)

    def _hats(self, sequences: Tensor) -> Tensor:
        y = self.second.undone(self.ask(sequences)) @ self.axes
        return math.sqrt(self.dim) * normalize(y, dim=1)

    def _undone(
        self,
        hats: Tensor,
        sums: Tensor,
        basis: Tensor,
        start: Tensor,
    ) -> Tensor:
        layer = self.layer.to(self.device)
        basis = basis.to(self.device)
        batches = zip(
            *(part.split(_BATCH) for part in (hats, sums, start)), strict=True
        )
        parts = list[Tensor]()
        for batch in batches:
            hats, sums, start = (part.to(self.device) for part in batch)
            parts.append(layer.undone(hats, sums, basis, start).to("cpu"))
        u = torch.cat(parts)
        lost = int(torch.isnan(u[:, 0]).sum())
        if lost:
            raise LostSum(f"{lost} of {len(u)} sums do not follow from the answers")
        return u


def read(
    ask: Value,
    d: int,
    device: torch.device,
    stream: torch.Generator,
) -> PeeledPostNorm:
    """Return everything but the heads; `ask` maps sequences (n, tokens, d) to the last vectors."""
    return attempted(
        partial(_read, ask, d, device, stream), 1 if d >= WIDE else _ATTEMPTS
    )


def _read(
    ask: Value,
    d: int,
    device: torch.device,
    stream: torch.Generator,
) -> PeeledPostNorm:
    tokens = normal(stream, 2 * d + _SPARE, 1, d)
    second = SecondNorm.read(ask(tokens))

    def undone(sequences: Tensor) -> Tensor:
        return second.undone(ask(sequences))

    radius = math.sqrt(d)
    kinked = straight_on_sphere(
        lambda x: undone(_FAR * x.unsqueeze(1)), d, radius, stream, lost=True
    )
    first = FirstSum.read(undone, d, stream, _SHORTEST if kinked else _SHORT)
    axes = without_mean(d, stream)

    def value(n: Tensor) -> Tensor:
        return undone(first.tokens(n @ axes.mT).unsqueeze(1)) @ axes

    def found_units(centred: bool) -> tuple[Units, Tensor, Tensor]:
        sphere = Sphere(value, d - 1, radius, centred=centred)
        return find_units(sphere, random_orthogonal(d - 1, stream), device, stream)

    if kinked:
        units, centre = find_relu_units_on_sphere(
            value, d - 1, radius, stream, lost=True
        )
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
        raise not_applicable(str(lost)) from lost
