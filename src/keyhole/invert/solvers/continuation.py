"""Continuation: follow the curve of solutions from the mean field to exact inputs.

At temperature λ the attention map is `Ã = U + (softmax(λS) − U)/λ` (equations.py),
where U is uniform. As λ → 0 the equations have exactly one solution, the mean field
(mean_field.py); λ = 1 is the problem itself. The solutions (X, λ) form curves, and this
module follows the curve that begins at the mean field. Each point where it crosses λ =
1 is an exact input, so the curve may give several.

The curve is followed by its arc length instead of λ, because it turns: at a fold two
solutions meet, and λ decreases for a while. The predictor is the tangent. The corrector
is Newton's method on the equations together with the length of the step (Keller's
pseudo-arclength). The step length adapts to how quickly the corrector converges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core.least_squares import NEWTON, minimize
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian import linearizer
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.mean_field import mean_field

# the λ at which the curve begins: one or two Newton steps correct the mean field
_COLD = 0.02
_HOT = 3.0  # the λ at which it is abandoned
_CORRECTIONS = 6
_CONVERGED = 1e-10
_STRAIGHT = 0.9  # least cosine between the tangents of neighbouring points
_MIN_STRIDE = 1e-5
_MAX_STRIDE = 2.0


def warmed(problem: Problem, guess: Tensor) -> Tensor:
    """Move the mean field towards λ = 1 by Newton steps, as far as the curve does not turn."""
    equations = Equations.of(problem)
    X = guess.unsqueeze(0)
    heat = _COLD
    stride = 0.1
    while heat < 1 and stride > 1e-3:
        ahead = min(1.0, heat + stride)
        moved = solved(replace(equations, temperature=ahead), X)
        if moved is None:
            stride /= 2
        else:
            X = moved
            heat = ahead
            stride = 1.5 * stride
    return X.squeeze(0)


def solved(
    equations: Equations,
    X: Tensor,
    steps: int = 8,
) -> Tensor | None:
    """Solve the equations by Newton's method from (1,n,d); None unless every step converges."""
    square = equations.B.numel() * float(equations.B.abs().max()) ** 2
    options = replace(NEWTON, max_steps=steps, target=1e-24 * square)
    X, loss = minimize(linearizer(equations), X, options)
    return X if float(loss) <= 1e-16 * square else None


@dataclass(frozen=True, eq=False)
class _Point:
    """A point (X, λ) of the curve as one vector, and the tangent there."""

    place: Tensor
    tangent: Tensor

    @property
    def temperature(self) -> float:
        return float(self.place[-1])


def solutions_along_the_curve(
    problem: Problem, *, points: int = 400
) -> Iterator[Tensor]:
    """Yield exact inputs (n×d) in the order in which the curve meets them."""
    guess = mean_field(problem)
    if guess is None:
        return
    equations = Equations.of(problem)
    cold = solved(replace(equations, temperature=_COLD), guess.unsqueeze(0))
    if cold is None:
        return
    curve = _Curve(equations, scale=float(equations.B.abs().max()))
    before: _Point | None = None
    for point in curve.follow(cold, points):
        if (
            before is not None
            and (before.temperature - 1) * (point.temperature - 1) <= 0
        ):
            share = (1 - before.temperature) / (point.temperature - before.temperature)
            near = (before.place + share * (point.place - before.place))[:-1]
            crossing = solved(
                equations, near.reshape(guess.shape).unsqueeze(0), steps=20
            )
            if crossing is not None:
                yield crossing.squeeze(0)
        before = point


@dataclass(frozen=True, eq=False)
class _Curve:
    equations: Equations
    scale: float

    def follow(self, X: Tensor, points: int) -> Iterator[_Point]:
        """Yield points from X at the cold end, until the curve leaves 0 < λ < `_HOT`."""
        place = torch.cat([X.flatten(), X.new_tensor([_COLD])])
        towards_heat = torch.zeros_like(place)
        towards_heat[-1] = 1.0
        point = _Point(place, self._tangent(place, towards_heat))
        stride = 0.1
        yield point
        for _ in range(points):
            ahead, quick = self._next(point, stride)
            while ahead is None and stride > _MIN_STRIDE:
                stride /= 2
                ahead, quick = self._next(point, stride)
            if ahead is None or not _COLD / 2 < ahead.temperature < _HOT:
                return
            point = ahead
            stride = min(_MAX_STRIDE, stride * (1.5 if quick else 1.0))
            yield point

    def _next(self, point: _Point, stride: float) -> tuple[_Point | None, bool]:
        """Return the next point, or None if the stride is too long; and if it converged quickly."""
        place = point.place + stride * point.tangent
        before = torch.inf
        for correction in range(_CORRECTIONS):
            if not float(place[-1]) > _COLD / 4:
                return None, False
            r = self._at(place).residuals(self._input(place)).flatten()
            size = float(r.abs().max())
            if size <= _CONVERGED * self.scale:
                tangent = self._tangent(place, point.tangent)
                straight = float(tangent @ point.tangent) > _STRAIGHT
                return (_Point(place, tangent) if straight else None), correction <= 3
            if not size < 0.7 * before:
                return None, False
            before = size
            system = torch.cat([self._slopes(place), point.tangent.unsqueeze(0)])
            step, _ = torch.linalg.solve_ex(system, torch.cat([r, r.new_zeros(1)]))
            place = place - step
        return None, False

    def _tangent(self, place: Tensor, along: Tensor) -> Tensor:
        """Return the direction of the curve, on the side of the direction `along`."""
        system = torch.cat([self._slopes(place), along.unsqueeze(0)])
        forward = torch.zeros_like(place)
        forward[-1] = 1.0
        tangent, _ = torch.linalg.solve_ex(system, forward)
        return tangent / tangent.norm()

    def _slopes(self, place: Tensor) -> Tensor:
        """Return the derivatives of the equations by X and by λ: (N, N+1)."""
        equations = self._at(place)
        X = self._input(place)
        near = equations.linearised(X)
        temperature = equations.temperature
        # ∂Ã/∂λ = A∘(S − ⟨A,S⟩)/λ − (A − U)/λ². log A is λS up to a constant in each
        # row, which cancels.
        S = near.A.clamp(min=1e-300).log() / temperature
        centred = S - (near.A * S).sum(-1, keepdim=True)
        change = near.A * centred / temperature
        change = change - (near.A - equations.uniform()) / temperature**2
        by_temperature = (change @ near.H).sum(-3).reshape(-1, 1)
        return torch.cat([near.jacobian()[0], by_temperature], 1)

    def _at(self, place: Tensor) -> Equations:
        return replace(self.equations, temperature=float(place[-1]))

    def _input(self, place: Tensor) -> Tensor:
        return place[:-1].reshape(1, self.equations.length, self.equations.dim)
