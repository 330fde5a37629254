"""A wide block with norms in front of its parts, as Llama's: everything but the heads (ours).

    y = h + C·f(N(h)) + c,    h = x + N(x)M + b        (single tokens; M = Σ_h V_h O_h)

If x is long, N(h) = N(x), and y − x is a feed-forward layer on a sphere plus a linear map. The
steps:

    units          from curvature (wide_curvature.py), in the coordinates of an answer in which the
                   token is 0: these are exact, however long the token is
    C, Λ, κ        all numbers of `y − x = u·Λ + C·f(u) + κ`, u = N(x) (descent.py)
    M, b           from shorter tokens, for which N(h) is not N(x). With gates Λ is M; without, the
                   signs of the units, φ(z) or φ(−z) = φ(z) − z, are those for which Λ becomes M
    all numbers    and both ε, from tokens of several lengths (descent.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core.numerics import least_squares
from keyhole.extract.blocks.descent import Numbers, descend, inverse
from keyhole.extract.blocks.fit import expect_fitted
from keyhole.extract.blocks.peeled import Network, Peeled
from keyhole.extract.blocks.units import Units, clear_flips, derivative, with_ones
from keyhole.extract.blocks.view import View, not_a_block
from keyhole.extract.blocks.wide_curvature import Sphere, find_units
from keyhole.oracle.block import ACTIVATIONS

# Lengths of tokens, relative to √d:
_FAR = 2.0**40  # for the units
_LONG = 2.0**16  # for C, Λ and κ
_SHORTER = (256.0, 16.0, 4.0)  # for M
_LENGTHS = (16.0, 4.0, 1.0, 0.25)  # for all numbers
_MORE = 1.5  # answers for each unknown of a fit
_SPARE = 16
_TINY = 1e-7  # a change of ε, to differentiate by it
_ROUGH = 1e-12  # relative squared error of the fits before the last one
_BLOCK = 8  # coordinates that are rotated together


def read(view: View, device: torch.device, stream: torch.Generator) -> Peeled:
    """Return everything but the heads of a block that answers with vectors."""
    axes = view.axes

    def value(u: Tensor) -> Tensor:
        x = _FAR * u @ axes.mT
        return view.ask(x) - x

    def touched(rows: Tensor) -> Tensor:
        return (rows @ axes.mT).abs().amax(0) > 1e-12

    sphere = Sphere(value, axes.shape[1], math.sqrt(view.dim), touched)
    units, *_ = find_units(sphere, _scattered(axes, stream), device, stream)
    fits = _Fits(view, len(units.A), units.activation, device, stream)
    return fits.all(fits.sums(*fits.far(units)))


def _scattered(axes: Tensor, stream: torch.Generator) -> Tensor:
    """Return orthonormal rows in coordinates; the first and the last of them touch few numbers."""
    d, e = axes.shape
    rows = list[Tensor]()
    for block in torch.randperm(d, generator=stream).split(_BLOCK):
        inside = torch.randn(len(block), len(block), generator=stream, dtype=torch.float64)
        if e < d:
            inside[:, 0] = 1
        own = torch.linalg.qr(inside)[0].mT[int(e < d) :]
        full = torch.zeros(len(own), d, dtype=torch.float64)
        full[:, block] = own
        rows.append(full @ axes)
    few = torch.cat(rows)
    rest = torch.linalg.qr(few.mT, mode="complete")[0][:, len(few) :].mT
    return torch.cat([few[len(few) // 2 :], rest, few[: len(few) // 2]])


@dataclass(frozen=True)
class _Fits:
    """Fits of one block. The rows of `A` are those of the units, then those of their gates."""

    view: View
    width: int
    activation: str
    device: torch.device
    stream: torch.Generator

    def normed(self, x: Tensor, epsilon: Tensor | float = 0.0) -> Tensor:
        """Return N(x) in coordinates, with a 1 appended: (n, e + 1)."""
        v = x @ self.view.axes.to(x.device)
        return with_ones(v / (v.square().sum(1, keepdim=True) / self.view.dim + epsilon).sqrt())

    def features(self, A: Tensor, affine: Tensor) -> Tensor:
        z = affine @ A.mT
        inside = ACTIVATIONS[self.activation](z[:, : self.width])
        return inside * z[:, self.width :] if len(A) > self.width else inside

    def inverses(self, numbers: Numbers, affine: Tensor, extra: Tensor) -> Numbers:
        """Return inverses of blocks of the normal equations: of A, and of the linear numbers."""
        A, C = numbers["A"], numbers["linear"][: self.width]
        z = affine @ A.mT
        slopes, gram = derivative(self.activation, 1)(z[:, : self.width]), C @ C.mT
        if len(A) > self.width:
            inside = ACTIVATIONS[self.activation](z[:, : self.width])
            slopes = torch.cat([slopes * z[:, self.width :], inside], 1)
            gram = gram.repeat(2, 2)
        features = torch.cat([self.features(A, affine), extra], 1)
        return {
            "A": inverse(gram * (slopes.mT @ slopes)), "linear": inverse(features.mT @ features)
        }  # fmt: skip

    def asked(self, count: int, lengths: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """Return random tokens of several lengths, and what the block adds to them."""
        each = math.ceil(count / len(lengths)) + _SPARE
        x = torch.cat([self.view.tokens(each, length, self.stream) for length in lengths])
        return x.to(self.device), (self.view.ask(x) - x).to(self.device)

    def far(self, units: Units) -> tuple[Tensor, Tensor]:
        """Return A, and C, Λ and κ as one matrix."""
        d, e = self.view.axes.shape
        A = torch.cat([units.A, units.a[:, None]], 1)
        if len(units.G):
            A = torch.cat([A, torch.cat([units.G, units.g[:, None]], 1)])
        A = A.to(self.device)
        unknowns = A.numel() + (self.width + e + 1) * d
        x, y = self.asked(math.ceil(_MORE * unknowns / d), (_LONG,))
        u = self.normed(x)
        linear = least_squares(torch.cat([self.features(A, u), u], 1), y)

        def model(numbers: Numbers) -> Tensor:
            return torch.cat([self.features(numbers["A"], u), u], 1) @ numbers["linear"]

        numbers, left = descend(
            model, {"A": A, "linear": linear}, y,
            lambda numbers: _applied(self.inverses(numbers, u, u)), _ROUGH,
        )  # fmt: skip
        expect_fitted(left, 1e-3)
        return numbers["A"], numbers["linear"]

    def sums(self, A: Tensor, linear: Tensor) -> Numbers:
        """Return M above b, from shorter and shorter tokens, and the other numbers.

        While the signs of the units are unknown, u(Λ − M) is added to them.
        """
        width, gated = self.width, len(A) > self.width
        C, through, kappa = linear[:width], linear[width:-1], linear[-1]
        M = torch.cat([through if gated else torch.zeros_like(through), 0 * kappa[None]])
        for length in _SHORTER[-1:] if gated else _SHORTER:
            x, y = self.asked(math.ceil(_MORE * len(M)), (length,))
            t = self.normed(x)

            def model(numbers: Numbers, x: Tensor = x, t: Tensor = t) -> Tensor:
                M = numbers["M"]
                u = self.normed(x + t @ M)
                rest = self.features(A, u) @ C + kappa - M[-1]
                return t @ M + (rest if gated else rest + u[:, :-1] @ (through - M[:-1]))

            of_M = _applied({"M": inverse(t.mT @ t)})
            M = descend(model, {"M": M}, y, lambda _, of_M=of_M: of_M, _ROUGH)[0]["M"]
        if not gated:
            A, kappa = _flipped(A, C, through - M[:-1], kappa)
        return {"A": A, "linear": torch.cat([C, (kappa - M[-1])[None]]), "M": M}

    def all(self, numbers: Numbers) -> Peeled:
        """Fit all numbers, ε of both norms among them."""
        unknowns = sum(part.numel() for part in numbers.values())
        numbers = {**numbers, "epsilon": torch.zeros(2, dtype=torch.float64, device=self.device)}
        x, y = self.asked(math.ceil(_MORE * unknowns / self.view.dim), _LENGTHS)

        def inside(numbers: Numbers) -> tuple[Tensor, Tensor, Tensor]:
            first, second = numbers["epsilon"].split(1)
            t = self.normed(x, first)
            added = t @ numbers["M"]
            return t, added, self.normed(x + added, second)

        def model(numbers: Numbers) -> Tensor:
            _, added, u = inside(numbers)
            return added + with_ones(self.features(numbers["A"], u)) @ numbers["linear"]

        def preconditioner(numbers: Numbers) -> Callable[[Numbers], Numbers]:
            t, _, u = inside(numbers)
            made, eye = model(numbers), torch.eye(2, dtype=torch.float64, device=self.device)
            moved = [
                model({**numbers, "epsilon": numbers["epsilon"] + _TINY * axis}) for axis in eye
            ]
            sizes = [((each - made) / _TINY).square().sum() for each in moved]
            of_epsilon = torch.diag(1 / torch.stack(sizes).clamp(min=1e-30))
            blocks = self.inverses(numbers, u, torch.ones_like(u[:, :1]))
            return _applied({**blocks, "M": inverse(t.mT @ t), "epsilon": of_epsilon})

        numbers, left = descend(model, numbers, y, preconditioner)
        expect_fitted(left)
        A, linear, M, epsilon = (
            numbers[name].to("cpu") for name in ("A", "linear", "M", "epsilon")
        )
        rows, gates = A[: self.width], A[self.width :]
        units = Units.plain(rows[:, :-1], rows[:, -1], linear[:-1].mT, self.activation)
        units = replace(units, G=gates[:, :-1].contiguous(), g=gates[:, -1].contiguous())
        first, second = epsilon.clamp(min=0).tolist()
        network = Network(self.view, units, linear[-1], self.view.residual, second)
        return Peeled(self.view, network, M[:-1], M[-1], first, self.device)


def _applied(inverses: Numbers) -> Callable[[Numbers], Numbers]:
    return lambda slope: {name: inverses[name] @ part for name, part in slope.items()}


def _flipped(A: Tensor, C: Tensor, linear: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and c after replacing φ(z) by φ(−z) in units such that `linear` (e, d) cancels.

    As Units.flips, but by Gram matrices: all products of rows and columns would not fit into
    memory.
    """
    rows = A[:, :-1]
    shares = torch.linalg.solve((rows @ rows.mT) * (C @ C.mT), -((rows @ linear) * C).sum(1))
    flips = (shares > 0.5).to(torch.float64)
    rest = linear + rows.mT @ (flips[:, None] * C)
    if not clear_flips(shares, flips, rest, linear):
        raise not_a_block()
    return A * (1 - 2 * flips)[:, None], c + (flips * A[:, -1]) @ C
