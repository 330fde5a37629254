"""A block with norms in front of its parts, as Llama's: everything but the heads (ours).

    y = h + F(N(h)),    h = x + N(x)M + b        (single tokens; M = Σ_h V_h O_h)
    F(u) = C·f(u) + c

From answers y to single tokens x (`View`) this reads F, M, b and every ε, and returns
an oracle of the attention alone (`Peeled`). If x is long, N(h) = N(x), and y − x is a
feed-forward layer on a sphere plus a linear map. The steps:

    units          from curvature (curvature.py), or kinks (kinks.py), of long tokens
    C, Λ, κ        all numbers of `y − x = u·Λ + C·f(u) + κ`, u = N(x)
    M, b           from shorter tokens, for which N(h) is not N(x). With gates Λ is M; without, the
                   signs of the units, φ(z) or φ(−z) = φ(z) − z, are those for which Λ
                   becomes M
    all numbers    and both ε, from tokens of several lengths

Fits of narrow blocks are those of fit.py, by variable projection. In wide blocks the
units are read in those coordinates of an answer in which the token is 0
(wide_curvature.py): these are exact, however long the token is. Their fits are by
conjugate gradients (descent.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from keyhole.core.numerics import least_squares
from keyhole.extract.blocks import kinks, wide_curvature
from keyhole.extract.blocks.curvature import Field, find_units
from keyhole.extract.blocks.descent import Params, descend, inverse
from keyhole.extract.blocks.fit import Known, expect_fitted, fit
from keyhole.extract.blocks.heads import attempted
from keyhole.extract.blocks.peeled import Network, Peeled
from keyhole.extract.blocks.units import Units, derivative, with_ones
from keyhole.extract.blocks.view import FAR, View, not_a_block
from keyhole.extract.gauss_newton import levenberg
from keyhole.oracle.block import ACTIVATIONS

# lengths of tokens relative to √d; the second for scores
_LONG = 2.0**16
_LONGER = 2.0**24
_MORE = 1.5  # answers for each unknown of a fit
_SHORTER = (256.0, 16.0, 4.0)  # lengths of tokens while M is sought
LENGTHS = (16.0, 4.0, 1.0, 0.25)  # lengths of tokens in the fit of all numbers
_ATTEMPTS = 3
_TINY = 1e-7  # a change of ε, to differentiate by it
# In wide blocks:
_FAR = 2.0**40  # length of tokens for the units
_SPARE = 16
_ROUGH = 1e-12  # relative squared error of the fits before the last one
_BLOCK = 8  # coordinates that are rotated together


def read(
    view: View,
    device: torch.device,
    stream: torch.Generator,
) -> Peeled:
    """Return everything but the heads, which are then read through it."""
    if view.wide and not view.scores:
        return _read_wide(view, device, stream)

    def start() -> tuple[Units, _Shifted]:
        return _rough(view, *far_units(view, stream), stream)

    units, inputs = attempted(start, _ATTEMPTS)
    x = tokens_of_lengths(view, units, LENGTHS, stream)
    units, inputs, linear, left = fit(units, replace(inputs, x=x), view.ask(x))
    expect_fitted(left)
    network = Network(view, units, linear[0], view.residual, inputs.behind)
    return Peeled(view, network, inputs.M, inputs.b, inputs.epsilon)


def tokens_of_lengths(
    view: View,
    units: Units,
    lengths: Sequence[float],
    stream: torch.Generator,
    more: float = _MORE,
) -> Tensor:
    """Draw tokens of several lengths, as many as a fit of the units needs."""
    count = math.ceil(_count(view, units, more) / len(lengths)) + 8
    return torch.cat([view.tokens(count, length, stream) for length in lengths])


def _count(
    view: View,
    units: Units,
    more: float = _MORE,
) -> int:
    """Return how many answers a fit of the units and of a linear map needs."""
    width, e = units.A.shape
    numbers = width * (e + 1) * (2 if len(units.G) else 1) + width * view.numbers
    return math.ceil(more * (numbers + (e + 1) * view.dim) / view.numbers) + 16


def far_units(view: View, stream: torch.Generator) -> tuple[Units, Tensor]:
    """Return the units, and Λ above κ, of long tokens: y − x = u·Λ + C·f(u) + κ with u = N(x)."""
    d, e = view.axes.shape

    def far(xi: Tensor, length: float = FAR) -> Tensor:
        x = length * xi @ view.axes.mT
        return view.ask(x) - x @ view.residual

    nearer = partial(far, length=_LONG)
    if not view.scores and kinks.straight_on_sphere(nearer, e, math.sqrt(d), stream):
        units, _ = kinks.find_relu_units_on_sphere(nearer, e, math.sqrt(d), stream)
    else:
        units = find_units(Field(far, e, sphere=True, numbers=view.numbers), stream)
        shrink = math.sqrt(d / e)
        units = replace(units, A=units.A / shrink, G=units.G / shrink)
    x = view.tokens(_count(view, units), _LONGER if view.scores else _LONG, stream)
    u = view.normed(x, 0.0)
    units, _, linear, left = fit(
        units, Known(u, with_ones(u)), view.ask(x) - x @ view.residual
    )
    expect_fitted(left, 1e-3)
    return units, linear


@dataclass(frozen=True)
class _Shifted:
    """Inputs u = N(h) with h = x + N(x)M + b, where M, b and both ε are unknown."""

    view: View
    x: Tensor
    M: Tensor
    b: Tensor
    epsilon: float = 0.0
    behind: float = 0.0

    @property
    def h(self) -> Tensor:
        return self.x + self.view.normed(self.x, self.epsilon) @ self.M + self.b

    @property
    def u(self) -> Tensor:
        return self.view.normed(self.h, self.behind)

    @property
    def added(self) -> Tensor:
        return self.h @ self.view.residual

    @property
    def extra(self) -> Tensor:
        return torch.ones(len(self.x), 1, dtype=torch.float64)

    @property
    def unknowns(self) -> int:
        return self.M.numel() + len(self.b) + 2

    def jacobian(self, units: Units) -> Tensor:
        view = self.view
        h = self.h
        outer = view.residual.mT + view.slopes(
            units.C @ units.slopes(self.u), h, self.behind
        )
        t = view.normed(self.x, self.epsilon)
        of_M = torch.einsum("ne,nmj->nmej", t, outer).flatten(2)
        front = (view.normed(self.x, self.epsilon + _TINY) - t) / _TINY @ self.M
        behind = units.features(view.normed(h, self.behind + _TINY)) - units.features(
            self.u
        )
        of_both = torch.stack(
            [(outer @ front[..., None])[..., 0], behind @ units.C.mT / _TINY], 2
        )
        return torch.cat([of_M, outer, of_both], 2)

    def moved(self, step: Tensor) -> _Shifted:
        e, d = self.M.shape
        return replace(
            self,
            M=self.M + step[: e * d].view(e, d),
            b=self.b + step[e * d : -2],
            epsilon=max(0.0, self.epsilon + float(step[-2])),
            behind=max(0.0, self.behind + float(step[-1])),
        )


def _rough(
    view: View,
    units: Units,
    linear: Tensor,
    stream: torch.Generator,
) -> tuple[Units, _Shifted]:
    """Return M, b and units of the right signs, from shorter and shorter tokens."""
    d, e = view.axes.shape
    # With gates Λ is M; without, φ(z) and φ(−z) differ by a linear part.
    M = torch.zeros(e, d, dtype=torch.float64)
    b = torch.zeros(d, dtype=torch.float64)
    if len(units.G) and not view.scores:
        M = linear[:-1]
    for length in _SHORTER:
        M, b = _attention_sum(view, units, linear, (M, b), length, stream)
    flips = units.flips(linear[:-1] - M @ view.residual)
    if flips is None:
        raise not_a_block()
    return units.flipped(flips), _Shifted(view, torch.empty(0, d), M, b)


def _attention_sum(
    view: View,
    units: Units,
    linear: Tensor,
    start: tuple[Tensor, Tensor],
    length: float,
    stream: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return M and b from tokens of one length, with the units' signs unknown.

    With h = x + tM + b, t = N(x) and u = N(h), y = hR + u(Λ − MR) + C·f(u) + κ − bR.
    """
    M, b = start
    e, d = M.shape
    R = view.residual
    x = view.tokens(math.ceil(_MORE * (e + 1) * d / view.numbers) + 8, length, stream)
    y = view.ask(x)
    t = view.normed(x, 0.0)

    def model(both: Tensor) -> tuple[Tensor, Tensor]:
        M = both[: e * d].view(e, d)
        b = both[e * d :]
        h = x + t @ M + b
        u = view.normed(h, 0.0)
        rest = linear[:-1] - M @ R
        made = (h - b) @ R + u @ rest + units.features(u) @ units.C.mT + linear[-1]
        outer = view.slopes(units.C @ units.slopes(u) + rest.mT, h, 0.0)
        of_M = torch.einsum("ne,nmj->nmej", t, outer + R.mT)
        of_M = of_M - torch.einsum("ne,mj->nmej", u, R.mT)
        J = torch.cat([of_M.flatten(2), outer], 2)
        return (made - y).flatten(), J.flatten(0, 1)

    both, _ = levenberg(model, torch.cat([M.flatten(), b]))
    return both[: e * d].view(e, d), both[e * d :]


def _read_wide(
    view: View,
    device: torch.device,
    stream: torch.Generator,
) -> Peeled:
    """Return everything but the heads of a wide block that answers with vectors."""
    axes = view.axes

    def value(u: Tensor) -> Tensor:
        x = _FAR * u @ axes.mT
        return view.ask(x) - x

    def touched(rows: Tensor) -> Tensor:
        return (rows @ axes.mT).abs().amax(0) > 1e-12

    sphere = wide_curvature.Sphere(value, axes.shape[1], math.sqrt(view.dim), touched)
    rows = _scattered(axes, stream)
    units, *_ = wide_curvature.find_units(sphere, rows, device, stream)
    fits = _Fits(view, len(units.A), units.activation, device, stream)
    return fits.all(fits.sums(*fits.far(units)))


def _scattered(axes: Tensor, stream: torch.Generator) -> Tensor:
    """Return orthonormal rows in coordinates; the first and the last of them touch few numbers."""
    d, e = axes.shape
    rows = list[Tensor]()
    for block in torch.randperm(d, generator=stream).split(_BLOCK):
        inside = torch.randn(
            len(block), len(block), generator=stream, dtype=torch.float64
        )
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
        return with_ones(
            v / (v.square().sum(1, keepdim=True) / self.view.dim + epsilon).sqrt()
        )

    def features(self, A: Tensor, affine: Tensor) -> Tensor:
        z = affine @ A.mT
        inside = ACTIVATIONS[self.activation](z[:, : self.width])
        return inside * z[:, self.width :] if len(A) > self.width else inside

    def inverses(self, numbers: Params, affine: Tensor, extra: Tensor) -> Params:
        """Return inverses of blocks of the normal equations: of A, and of the linear numbers."""
        A = numbers["A"]
        C = numbers["linear"][: self.width]
        z = affine @ A.mT
        slopes = derivative(self.activation, 1)(z[:, : self.width])
        gram = C @ C.mT
        if len(A) > self.width:
            inside = ACTIVATIONS[self.activation](z[:, : self.width])
            slopes = torch.cat([slopes * z[:, self.width :], inside], 1)
            gram = gram.repeat(2, 2)
        features = torch.cat([self.features(A, affine), extra], 1)
        return {
            "A": inverse(gram * (slopes.mT @ slopes)),
            "linear": inverse(features.mT @ features),
        }

    def asked(self, count: int, lengths: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """Return random tokens of several lengths, and what the block adds to them."""
        each = math.ceil(count / len(lengths)) + _SPARE
        x = torch.cat(
            [self.view.tokens(each, length, self.stream) for length in lengths]
        )
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

        def model(numbers: Params) -> Tensor:
            return torch.cat([self.features(numbers["A"], u), u], 1) @ numbers["linear"]

        numbers, left = descend(
            model,
            {"A": A, "linear": linear},
            y,
            lambda numbers: _applied(self.inverses(numbers, u, u)),
            _ROUGH,
        )
        expect_fitted(left, 1e-3)
        return numbers["A"], numbers["linear"]

    def sums(self, A: Tensor, linear: Tensor) -> Params:
        """Return M above b, from shorter and shorter tokens, and the other numbers.

        While the signs of the units are unknown, u(Λ − M) is added to them.
        """
        width = self.width
        gated = len(A) > self.width
        C = linear[:width]
        through = linear[width:-1]
        kappa = linear[-1]
        M = torch.cat(
            [through if gated else torch.zeros_like(through), 0 * kappa[None]]
        )
        for length in _SHORTER[-1:] if gated else _SHORTER:
            x, y = self.asked(math.ceil(_MORE * len(M)), (length,))
            t = self.normed(x)

            def model(numbers: Params, x: Tensor = x, t: Tensor = t) -> Tensor:
                M = numbers["M"]
                u = self.normed(x + t @ M)
                rest = self.features(A, u) @ C + kappa - M[-1]
                return t @ M + (
                    rest if gated else rest + u[:, :-1] @ (through - M[:-1])
                )

            of_M = _applied({"M": inverse(t.mT @ t)})
            M = descend(model, {"M": M}, y, lambda _, of_M=of_M: of_M, _ROUGH)[0]["M"]
        if not gated:
            a = A[:, -1]
            units = Units.plain(A[:, :-1], a, C.mT, self.activation)
            flips = units.flips(through - M[:-1])
            if flips is None:
                raise not_a_block()
            A = A * (1 - 2 * flips)[:, None]
            kappa = kappa + (flips * a) @ C
        return {"A": A, "linear": torch.cat([C, (kappa - M[-1])[None]]), "M": M}

    def all(self, numbers: Params) -> Peeled:
        """Fit all numbers, ε of both norms among them."""
        unknowns = sum(part.numel() for part in numbers.values())
        numbers = {
            **numbers,
            "epsilon": torch.zeros(2, dtype=torch.float64, device=self.device),
        }
        x, y = self.asked(math.ceil(_MORE * unknowns / self.view.dim), LENGTHS)

        def inside(numbers: Params) -> tuple[Tensor, Tensor, Tensor]:
            first, second = numbers["epsilon"].split(1)
            t = self.normed(x, first)
            added = t @ numbers["M"]
            return t, added, self.normed(x + added, second)

        def model(numbers: Params) -> Tensor:
            _, added, u = inside(numbers)
            return added + with_ones(self.features(numbers["A"], u)) @ numbers["linear"]

        def preconditioner(numbers: Params) -> Callable[[Params], Params]:
            t, _, u = inside(numbers)
            made = model(numbers)
            eye = torch.eye(2, dtype=torch.float64, device=self.device)
            moved = [
                model({**numbers, "epsilon": numbers["epsilon"] + _TINY * axis})
                for axis in eye
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
        rows = A[: self.width]
        gates = A[self.width :]
        units = Units.plain(rows[:, :-1], rows[:, -1], linear[:-1].mT, self.activation)
        units = replace(
            units, G=gates[:, :-1].contiguous(), g=gates[:, -1].contiguous()
        )
        first, second = epsilon.clamp(min=0).tolist()
        network = Network(self.view, units, linear[-1], self.view.residual, second)
        return Peeled(self.view, network, M[:-1], M[-1], first, self.device)


def _applied(inverses: Params) -> Callable[[Params], Params]:
    return lambda slope: {name: inverses[name] @ part for name, part in slope.items()}
