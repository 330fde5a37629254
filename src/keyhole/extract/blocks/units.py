"""The units of a feed-forward layer: what they compute, and which of φ(z) and φ(−z) each one is.

    f_k(u) = φ(a_k·u + α_k)                       or, with gates,
    f_k(u) = φ(a_k·u + α_k)·(g_k·u + γ_k)         and the layer is Σ_k c_k f_k(u)

For ReLU, GELU and SiLU, φ(z) = φ(−z) + z: neither curvature nor kinks tell the two
apart, since the difference is linear. So the right signs are those for which nothing
linear is left next to the units that has no explanation. This is a subset sum, which is
unique in general position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import not_applicable
from keyhole.core.float64 import normal, random_stream, tensor, zeros
from keyhole.extract.bilinear import max_abs
from keyhole.oracle.block import ACTIVATIONS

_SIGN = 0.05  # how far from 0 or 1 the solution for a sign may be
_LEFT_OVER = 1e-2  # how large a linear part the signs may leave
_MOST = 40  # vectors in a subset sum
_NEIGHBOURS = 16


def with_ones(rows: Tensor) -> Tensor:
    """Return vectors (n, d) with a 1 appended to each, (n, d + 1)."""
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)


def derivative(activation: str, order: int) -> Callable[[Tensor], Tensor]:
    """Return the derivative of an activation of this order; order 0 is the activation itself."""
    function = ACTIVATIONS[activation]

    def differentiated(z: Tensor) -> Tensor:
        at = z.detach().requires_grad_()
        with torch.enable_grad():
            value = function(at)
            for _ in range(order):
                value = torch.autograd.grad(value.sum(), at, create_graph=True)[0]
        return value.detach()

    return differentiated


@dataclass(frozen=True)
class Units:
    """`A` (width, d) and `a` (width); `G` and `g` of gated units, else empty; `C` (m, width)."""

    A: Tensor
    a: Tensor
    G: Tensor
    g: Tensor
    C: Tensor
    activation: str

    @classmethod
    def plain(
        cls,
        A: Tensor,
        a: Tensor,
        C: Tensor,
        activation: str,
    ) -> Units:
        return cls(
            A.contiguous(),
            a.contiguous(),
            A.new_zeros(0, A.shape[1]),
            A.new_zeros(0),
            C.contiguous(),
            activation,
        )

    def features(self, u: Tensor) -> Tensor:
        """Return f_k(u_n), (n, width)."""
        inside = ACTIVATIONS[self.activation](u @ self.A.mT + self.a)
        return inside * (u @ self.G.mT + self.g) if len(self.G) else inside

    def slopes(self, u: Tensor) -> Tensor:
        """Return the derivatives of f_k at u_n, (n, width, d)."""
        z = u @ self.A.mT + self.a
        slope = derivative(self.activation, 1)(z)
        if not len(self.G):
            return slope[..., None] * self.A
        gates = u @ self.G.mT + self.g
        inside = ACTIVATIONS[self.activation](z)
        return (slope * gates)[..., None] * self.A + inside[..., None] * self.G

    @property
    def of_length_one(self) -> Units:
        """The same function, with rows of G, or of A for ReLU units, scaled to length 1."""
        if len(self.G):
            length = self.G.norm(dim=1)
            scaled = {"G": self.G / length[:, None], "g": self.g / length}
        elif self.activation == "relu":
            length = self.A.norm(dim=1)
            scaled = {"A": self.A / length[:, None], "a": self.a / length}
        else:
            return self
        return replace(self, **scaled, C=self.C * length)

    def flipped(self, flips: Tensor) -> Units:
        """Replace φ(z) by φ(−z) where `flips` is 1: `(a_k·u + α_k)·c_k` becomes a linear part."""
        sign = 1 - 2 * flips
        return replace(self, A=self.A * sign[:, None], a=self.a * sign)

    def flips(self, linear: Tensor) -> Tensor | None:
        """Return which units to flip, 1 or 0, so that the map `linear` (d, m) cancels.

        None if no choice of signs does it.
        """
        A = self.A
        C = self.C.mT
        shares = torch.zeros_like(self.a)
        if not len(self.G) and linear.numel() < len(A):
            products = (A[:, :, None] * C[:, None]).flatten(1)  # a_k ⊗ c_k
            shares = subset_sum(products, -linear.flatten())
        elif not len(
            self.G
        ):  # by Gram matrices: products of a wide layer would not fit in memory
            gram = (A @ A.mT) * (C @ C.mT)
            shares = torch.linalg.solve_ex(gram, -((A @ linear) * C).sum(1))[0]
        flips = (shares > 0.5).double()
        rest = linear + A.mT @ (flips[:, None] * C)
        most = _LEFT_OVER * (1 + max_abs(linear))
        clear = max_abs(shares - flips) <= _SIGN and max_abs(rest) <= most
        return flips if clear else None


def subset_sum(vectors: Tensor, total: Tensor) -> Tensor:
    """Return 1 for those of the vectors (n, e) that add up to `total` (e), and 0 for the others.

    Meet in the middle: the sums of all subsets of either half are sorted along a random
    direction, and each sum of one half is compared with its neighbours of the other.
    """
    n = len(vectors)
    if n > _MOST:
        raise not_applicable(
            f"the signs of {n} units do not follow from answers of one number: at most {_MOST} can "
            "be told"
        )
    halves = vectors[: n // 2], vectors[n // 2 :]
    first, second = (_subset_sums(half) for half in halves)
    stream = random_stream(n)
    along = normal(stream, len(total))
    order = (second @ along).argsort()
    place = torch.searchsorted((second @ along)[order], total @ along - first @ along)
    best = torch.inf
    pair = (0, 0)
    for shift in range(-_NEIGHBOURS, _NEIGHBOURS):
        other = order[(place + shift).clamp(0, len(order) - 1)]
        off = (first + second[other] - total).abs().amax(1)
        at = int(off.argmin())
        if float(off[at]) < best:
            best = float(off[at])
            pair = (at, int(other[at]))
    bits = [
        number >> k & 1
        for number, half in zip(pair, halves, strict=True)
        for k in range(len(half))
    ]
    return tensor(bits)


def _subset_sums(vectors: Tensor) -> Tensor:
    """Return the sums of all subsets (2ⁿ, e); bit k of a sum's number says if vector k is in it."""
    sums = zeros(1, vectors.shape[1])
    for vector in vectors:
        sums = torch.cat([sums, sums + vector])
    return sums
