"""The activation φ, slope and offset of each unit, from its second derivatives at some base points.

At base points p, a unit `φ(a·p + α)` shows numbers `size·φ''(a·p + α)`. One with a
gate, whose partner is known up to a multiple τ of a, shows (see wide_curvature.py for
the symbols)

    size·φ'(λt + α)    and    size·(λφ''(λt + α)·(t_w + τt + γ) + 2τφ'(λt + α))

at places t along a and t_w along the partner. Each unit is a small least-squares
problem, linear in all but θ = (λ, α) or (a, α). Levenberg–Marquardt solves it from many
starts for θ; the rest is eliminated (variable projection, Golub and Pereyra 1973). All
units and starts are one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core.least_squares import Options, Point, minimize
from keyhole.extract.blocks.units import derivative, with_ones
from keyhole.extract.gauss_newton import levenberg

SMOOTH = ("gelu", "gelu-tanh", "silu")
_OPTIONS = Options(max_steps=40, rtol=1e-3, patience=10)
_TRIES = 48  # random starts for each unit
# how many θ each start is the best of; for units that miss
_DRAWS = 64
_MORE_DRAWS = 8192
_SAMPLE = 8  # units that decide on the activation
_MISSED = 1e-3
# On a grid: lengths; the largest offset, and how many offsets.
_GRID = (10, 3.0, 37)
_FINE_GRID = (20, 9.0, 145)
_GRID_SAMPLE = 40  # units that decide on the activation and on s
_GRID_MISSED = 10.0  # relative to the median miss


@dataclass(frozen=True)
class _Shapes:
    """Numbers of units (r, P), or with `gates` (r, 2P), at places `at` (r, P, p).

    Places have a 1 as their last coordinate; `gates` (r, P) are the t_w.
    """

    numbers: Tensor
    at: Tensor
    activation: str
    order: int
    gates: Tensor | None = None

    def some(self, which: Tensor | slice) -> _Shapes:
        gates = None if self.gates is None else self.gates[which]
        return replace(
            self, numbers=self.numbers[which], at=self.at[which], gates=gates
        )

    @cached_property
    def wanted(self) -> Tensor:
        return normalize(self.numbers, dim=1)

    def _shape(self, theta: Tensor, which: Tensor) -> Tensor:
        """Return what is linear at θ (n, p), for some units: (n, numbers, l)."""
        z = (self.at[which] @ theta[..., None])[..., 0]
        f = derivative(self.activation, self.order)(z)
        if self.gates is None:
            return f[..., None]
        df = derivative(self.activation, self.order + 1)(z)
        t = self.at[which][..., 0]
        return _gated(self.gates[which], t, f, theta[:, :1] * df, f)

    def _slopes(self, theta: Tensor, which: Tensor) -> Tensor:
        """Return the derivatives of `_shape` by θ, (n, numbers, l, p)."""
        at = self.at[which]
        z = (at @ theta[..., None])[..., 0]
        df = derivative(self.activation, self.order + 1)(z)
        if self.gates is None:
            return (df[..., None] * at)[:, :, None]
        ddf = derivative(self.activation, self.order + 2)(z)
        t = at[..., 0]
        length = theta[:, :1]
        gates = self.gates[which]
        by_length = _gated(gates, t, t * df, length * t * ddf + df, t * df)
        by_offset = _gated(gates, t, df, length * ddf, df)
        return torch.stack([by_length, by_offset], 3)

    def _point(self, theta: Tensor, which: Tensor) -> tuple[Point, Tensor]:
        """Return the residuals at θ of some units, and the linear numbers (n, l)."""
        shape = self._shape(theta, which)
        gram = shape.mT @ shape
        ridge = 1e-13 * gram.diagonal(dim1=1, dim2=2).sum(1) + 1e-100
        gram = gram + ridge[:, None, None] * torch.eye(gram.shape[1]).to(gram)
        wanted = self.wanted[which]
        linear = torch.linalg.solve(gram, shape.mT @ wanted[..., None])[..., 0]

        def jacobian() -> Tensor:
            slopes = self._slopes(theta, which)
            J = torch.einsum("nalp,nl->nap", slopes, linear)
            return J - shape @ torch.linalg.solve(gram, shape.mT @ J)

        residuals = (shape @ linear[..., None])[..., 0] - wanted
        return Point(theta, residuals, jacobian), linear

    def fitted(self, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return θ (r, p), linear numbers (r, l) and residuals (r), from starts (r, many, p)."""
        r, many = starts.shape[:2]

        def linearize(theta: Tensor, rows: Tensor) -> Point:
            return self._point(theta, rows // many)[0]

        theta, loss = minimize(linearize, starts.flatten(0, 1), _OPTIONS)
        units = torch.arange(r, device=theta.device)
        best = loss.view(r, many).argmin(1) + many * units
        linear = self._point(theta[best], units)[1]
        size = torch.linalg.vector_norm(self.numbers, dim=1, keepdim=True)
        return theta[best], linear * size, loss[best].sqrt()

    def random_starts(self, draws: int) -> Tensor:
        """Return starts (r, _TRIES, p), each the most like the numbers of so many random θ."""
        at = self.at[0]
        stream = torch.Generator().manual_seed(at.shape[1] - 1)
        spread = 4 * torch.rand(_TRIES, draws, 1, generator=stream, dtype=torch.float64)
        theta = torch.randn(
            _TRIES, draws, at.shape[1], generator=stream, dtype=torch.float64
        )
        theta = spread * theta / at.square().mean(0).sqrt()
        shapes = normalize(
            derivative(self.activation, self.order)(theta @ at.mT), dim=2
        )
        best = torch.einsum("tsp,rp->rts", shapes, self.wanted).abs().argmax(2)
        return theta[torch.arange(_TRIES), best]

    def grid_starts(
        self,
        count: int,
        furthest: float,
        many: int,
    ) -> Tensor:
        """Return starts (r, lengths, 2): for each of `count` lengths the best of `many` offsets."""
        r = len(self.numbers)
        device = self.numbers.device
        scale = self.at[..., 0].square().mean(1).sqrt()
        lengths = torch.logspace(-1.2, 0.7, count).to(self.numbers)
        if self.gates is not None:  # φ'' of the activations is even, φ' is not
            lengths = torch.cat([lengths, -lengths])
        offsets = torch.linspace(-furthest, furthest, many).to(self.numbers)
        which = torch.arange(r, device=device).repeat(many)
        starts = list[Tensor]()
        for each in lengths:
            tried = torch.stack(
                [(each / scale).repeat(many), offsets.repeat_interleave(r)], 1
            )
            best = self._point(tried, which)[0].loss.view(many, r).argmin(0)
            starts.append(torch.stack([each / scale, offsets[best]], 1))
        return torch.stack(starts, 1)


def _gated(
    gates: Tensor, t: Tensor, first: Tensor, second: Tensor, twice: Tensor
) -> Tensor:
    """Return the numbers of gated units (n, 2P, l) from what stands for φ' and φ''."""
    inner = torch.stack([gates, t, torch.ones_like(t)], 2)
    zero = torch.zeros_like(t)
    upper = torch.stack([first, zero, zero], 2)
    lower = second[..., None] * inner
    lower[..., 1] += 2 * twice
    return torch.cat([upper, lower], 1)


def random_shapes(
    numbers: Tensor,
    places: Tensor,
    order: int,
    activations: Sequence[str],
) -> tuple[str, Tensor, Tensor]:
    """Return the activation, θ (r, p + 1) and sizes (r) of `size·φ⁽ᵒʳᵈᵉʳ⁾(θ·(place, 1))`.

    `numbers` are (r, P), at places (P, p).
    """

    def shapes(activation: str) -> _Shapes:
        return _Shapes(
            numbers, with_ones(places).expand(len(numbers), -1, -1), activation, order
        )

    def miss(activation: str) -> float:
        some = shapes(activation).some(slice(0, _SAMPLE))
        return float(some.fitted(some.random_starts(_DRAWS))[2].median())

    all_units = shapes(
        min(activations, key=miss) if len(activations) > 1 else activations[0]
    )
    theta, sizes, misses = all_units.fitted(all_units.random_starts(_DRAWS))
    missed = misses > _MISSED
    if bool(missed.any()):
        some = all_units.some(missed)
        theta[missed], sizes[missed] = some.fitted(some.random_starts(_MORE_DRAWS))[:2]
    return all_units.activation, theta, sizes[:, 0]


def _grid_shapes(shapes: _Shapes) -> tuple[Tensor, Tensor, Tensor]:
    """Return θ, linear numbers and misses; units that miss are fitted again from more starts."""
    found = shapes.fitted(shapes.grid_starts(*_GRID))
    missed = (found[2] > _GRID_MISSED * found[2].median()).nonzero()[:, 0]
    if len(missed):
        some = shapes.some(missed)
        again = some.fitted(some.grid_starts(*_FINE_GRID))
        better = again[2] < found[2][missed]
        for part, new in zip(found, again, strict=True):
            part[missed[better]] = new[better]
    return found


def grid_shapes(
    numbers: Tensor,
    along: Tensor,
    gates: Tensor | None,
) -> tuple[str, Tensor, Tensor]:
    """Return the activation, θ = (length, offset) of units, and their linear numbers.

    `along` (r, P) is where units of length 1 are at the base points, `gates` likewise.
    """
    at = torch.stack([along, torch.ones_like(along)], 2)

    def shapes(activation: str) -> _Shapes:
        return _Shapes(numbers, at, activation, 2 if gates is None else 1, gates)

    def miss(activation: str) -> float:
        some = shapes(activation).some(slice(0, _GRID_SAMPLE))
        return float(some.fitted(some.grid_starts(*_GRID))[2].median())

    activation = min(SMOOTH, key=miss)
    return activation, *_grid_shapes(shapes(activation))[:2]


def grid_shapes_and_lengths(
    numbers: Tensor,
    along: Tensor,
    lengths: Tensor,
) -> tuple[str, Tensor, Tensor]:
    """Return likewise the shapes of numbers that the `lengths` s (P) of answers have divided.

    s is roughly known; it follows from some units that are fitted well, together with
    them.
    """
    at = torch.stack([along, torch.ones_like(along)], 2)
    best = math.inf, SMOOTH[0], lengths
    for activation in SMOOTH:
        shapes = _Shapes(numbers * lengths, at, activation, 2)
        theta, _, misses = shapes.fitted(shapes.grid_starts(*_GRID))
        chosen = misses.argsort()[:_GRID_SAMPLE]
        found, left = _with_lengths(
            numbers[chosen], along[chosen], theta[chosen], lengths, activation
        )
        best = min(best, (left, activation, found), key=lambda each: each[0])
    _, activation, lengths = best
    return activation, *_grid_shapes(_Shapes(numbers * lengths, at, activation, 2))[:2]


def _with_lengths(
    numbers: Tensor,
    along: Tensor,
    theta: Tensor,
    s: Tensor,
    activation: str,
) -> tuple[Tensor, float]:
    """Return s (P), of mean 1, fitted together with some units; and what is left."""
    r, P = numbers.shape
    wanted = normalize(numbers, dim=1)
    f = derivative(activation, 2)
    df = derivative(activation, 3)
    length, offset = theta.unbind(1)
    shape = f(length[:, None] * along + offset[:, None])
    sizes = (wanted * s * shape).sum(1) / shape.square().sum(1)
    rows = torch.arange(r).repeat_interleave(P)
    columns = torch.arange(P).repeat(r)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        length, offset, size, log_s = x.split([r, r, r, P])
        z = length[:, None] * along + offset[:, None]
        over = torch.exp(-log_s)
        value = f(z) * over
        slope = df(z) * over * size[:, None]
        J = torch.zeros(r, P, 3 * r + P, dtype=torch.float64)
        J[rows, columns, rows] = (slope * along).flatten()
        J[rows, columns, rows + r] = slope.flatten()
        J[rows, columns, rows + 2 * r] = value.flatten()
        J[rows, columns, columns + 3 * r] = -(size[:, None] * value).flatten()
        return (size[:, None] * value - wanted).flatten(), J.flatten(0, 1)

    point, left = levenberg(model, torch.cat([length, offset, sizes, s.log()]), 200)
    s = point[3 * r :].exp()
    return s / s.mean(), left
