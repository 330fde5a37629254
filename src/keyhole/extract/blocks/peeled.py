"""What a block's attention adds to the last token x, once everything behind attention is known.

    y = h + F(N(h)),    h = x + Attention(…)

The answer y is solved for h, by the contraction h ← y − F(N(h)) and Newton's method; h
− x is what attention has added. So the block becomes an oracle of its attention alone
(`Peeled`), which extract/sub_layer.py reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core.least_squares import NEWTON, Damped, Point, divided, minimize
from keyhole.extract.blocks.all_heads import Sequences, fitted_heads
from keyhole.extract.blocks.units import Units
from keyhole.extract.blocks.view import View, last
from keyhole.extract.sub_layer import read_attention
from keyhole.extract.sub_layer_values import Surroundings
from keyhole.oracle.block import Block
from keyhole.oracle.sub_layer import SubLayer

MANY = 12_000  # numbers of attention: more are fitted by conjugate gradients


def _contraction(point: Point) -> Damped:
    """Take the step of a block without F."""
    return divided(-point.residuals)


_CONTRACTION = replace(NEWTON, solver=_contraction, max_steps=100, rtol=0.5)
_NEWTON = replace(NEWTON, max_steps=60, grow=5.0, most=1e3, floor=1e-24)
_BATCH = 64
_ARRIVED = 4e-15  # relative
# The precision of what attention adds: narrow layers are fitted to the last digits.
_PRECISELY = 1e-11
_ROUGHLY = 1e-9
_LENGTH = 64.0  # of the last token behind norms, relative to √d


@dataclass(frozen=True)
class Network:
    """`h ↦ h·R + C·f(N(h)) + c`, with f in the coordinates of the view."""

    view: View
    units: Units
    c: Tensor
    R: Tensor
    epsilon: float = 0.0

    def __call__(self, h: Tensor) -> Tensor:
        inside = self.units.features(self.view.normed(h, self.epsilon))
        return h @ self.R + inside @ self.units.C.mT + self.c

    def slopes(self, h: Tensor) -> Tensor:
        """Return dy/dh, (n, m, d)."""
        by_normed = self.units.C @ self.units.slopes(self.view.normed(h, self.epsilon))
        return self.R.mT + self.view.slopes(by_normed, h, self.epsilon)

    def inverse(self, y: Tensor, h: Tensor) -> Tensor:
        """Return an h for each answer y, from a start near by.

        The iteration h ← y − F(N(h)) is used where it is a contraction, as for long h;
        then Newton's method.
        """
        parts = zip(y.split(_BATCH), h.split(_BATCH), strict=True)
        return torch.cat([self._inverse(*part) for part in parts])

    def _inverse(self, y: Tensor, h: Tensor) -> Tensor:
        scale = y.abs().amax(1, keepdim=True).clamp(min=1e-300)

        def linearize(x: Tensor, rows: Tensor) -> Point:
            h = scale[rows] * x
            residuals = (self(h) - y[rows]) / scale[rows]
            return Point(x, residuals, lambda: self.slopes(h))

        x = h / scale
        target = x.shape[1] * _ARRIVED**2
        if self.view.norm != "none" and not self.view.scores:
            x, _ = minimize(linearize, x, replace(_CONTRACTION, target=target))
        x, _ = minimize(linearize, x, replace(_NEWTON, target=target))
        return scale * x


@dataclass(frozen=True)
class Peeled:
    """An oracle of what attention adds to the last token.

    Tokens are in the coordinates of the view. `y = h + F(N(h))` may have several
    solutions h, unless x is long compared with what attention adds. Behind a norm the
    last token can be that long, since all tokens of one direction are the same to
    attention.
    """

    view: View
    network: Network
    M: Tensor  # (e, d): attention adds N(x)M + b to single tokens x
    b: Tensor
    epsilon: float = 0.0
    device: torch.device | str = "cpu"

    @property
    def dim(self) -> int:
        return self.view.axes.shape[1]

    @property
    def units(self) -> Units:
        return self.network.units

    @property
    def total(self) -> Tensor:
        """Σ_h M_h, for tokens behind an RMS norm of the e coordinates."""
        d, e = self.view.axes.shape
        return self.M * math.sqrt(d / e)

    def added_alone(self, x: Tensor) -> Tensor:
        """Return h of single tokens (n, d)."""
        return x + self.view.normed(x, self.epsilon) @ self.M + self.b

    def surroundings(self) -> Surroundings:
        d, e = self.view.axes.shape
        plain = Surroundings(
            self,
            self.b,
            every_token=self.view.every_token,
            causal=self.view.causal,
            precision=_ROUGHLY if self.view.wide else _PRECISELY,
        )
        if self.view.norm == "none":
            return plain
        # A LayerNorm of d numbers is an RMS norm of e = d − 1 coordinates, times
        # √(d/e).
        epsilon = self.epsilon * d / e
        left = max(epsilon / _LENGTH**2, 1e-12)
        return replace(plain, epsilon=epsilon, last_norm=math.sqrt(e * (1 - left)))

    def block(self, layer: SubLayer) -> Block:
        view = self.view
        lift = self.view.axes
        (d, e) = self.view.axes.shape
        units = self.units.of_length_one
        scale = math.sqrt(e / d)  # an RMS norm of e coordinates relative to that of d
        Q, K, V = (scale * lift @ part for part in (layer.Q, layer.K, layer.V))
        return Block(
            Q=Q.contiguous(),
            q=layer.q,
            K=K.contiguous(),
            V=V.contiguous(),
            O=layer.O,
            b=layer.b,
            frequencies=layer.frequencies,
            A=(units.A @ lift.mT).contiguous(),
            a=units.a,
            G=(units.G @ lift.mT).contiguous(),
            g=units.g,
            C=units.C.contiguous(),
            c=self.network.c,
            norm=view.norm,
            w=view.residual[:, 0] if view.scores else torch.zeros_like(units.a[:0]),
            activation=units.activation,
            epsilon=(layer.epsilon or 0.0) * e / d,
            epsilon_behind=self.network.epsilon,
            every_token=view.every_token,
            causal=view.causal,
        )

    def attention(self, stream: torch.Generator, reach: float) -> SubLayer:
        return read_attention(self.surroundings(), stream, self.total, reach)

    def polished(self, attention: SubLayer, stream: torch.Generator) -> SubLayer:
        """Fit all numbers of an attention that is too large for a dense Jacobian (block.py)."""
        around = self.surroundings()
        numbers = sum(getattr(attention, name).numel() for name in attention.NAMES)
        if around.last_norm is None or numbers <= MANY:
            return attention
        sequences = Sequences.drawn(attention, stream, around.last_norm)
        sums = around.answer(sequences.tokens) + around.b
        return fitted_heads(
            attention, sequences, sums, lambda added: added, self.device, stream
        )

    def __call__(self, sequences: Tensor) -> Tensor:
        tokens = sequences @ self.view.axes.mT
        y = last(self.view.oracle, tokens)
        t = self.view.normed(tokens.flatten(0, 1), self.epsilon).unflatten(
            0, tokens.shape[:2]
        )
        x = tokens[:, -1]
        if self.view.norm != "none":
            # The network's error for the last token alone: it is nearly the same for
            # sums near by.
            alone, of = torch.unique(x, dim=0, return_inverse=True)
            y = y + (self.network(self.added_alone(alone)) - self.view.ask(alone))[of]
        return self.network.inverse(y, x + t.mean(1) @ self.M + self.b) - x
