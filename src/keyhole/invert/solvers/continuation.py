"""From the mean field to exact inputs along one curve.

At temperature λ the map is `Ã = U + (softmax(λS) − U)/λ` (equations.py). As λ → 0 the equations
have exactly one solution (starts.py); λ = 1 is the problem. The solutions (X, λ) form curves,
and the curve that begins at the mean field is followed by its arc length, not by λ, because it
turns: at a fold two solutions meet and λ runs backwards for a while. Every crossing of λ = 1 is an
exact input, so the curve may bring several. Predictor: the tangent; corrector: Newton on the
equations with the step's length held (Keller's pseudo-arclength). The stride follows how quickly
the corrector converges; everything is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.starts import COLD, mean_field, newton

_CORRECTIONS = 6
_CONVERGED = 1e-10
_STRAIGHT = 0.9  # least cosine between tangents of neighbouring points
_SHORTEST = 1e-5
_LONGEST = 2.0


@dataclass(frozen=True, eq=False)
class _Point:
    """A point (X, λ) of the curve as one vector, with the tangent there."""

    place: Tensor
    tangent: Tensor

    @property
    def temperature(self) -> float:
        return float(self.place[-1])


def solutions_along_the_curve(
    problem: Problem, *, points: int = 400, hottest: float = 3.0
) -> Iterator[Tensor]:
    """Exact inputs (n×d) in the order in which the curve meets them; none if there is no curve."""
    guess = mean_field(problem)
    if guess is None:
        return
    equations = Equations.of([problem])
    cold = newton(replace(equations, temperature=COLD), guess.unsqueeze(0))
    if cold is None:
        return
    curve = _Curve(equations, scale=float(equations.B.abs().max()))
    before: _Point | None = None
    for point in curve.follow(cold, points, hottest):
        if before is not None and (before.temperature - 1) * (point.temperature - 1) <= 0:
            share = (1 - before.temperature) / (point.temperature - before.temperature)
            near = (before.place + share * (point.place - before.place))[:-1]
            crossing = newton(equations, near.reshape(guess.shape).unsqueeze(0), steps=20)
            if crossing is not None:
                yield crossing.squeeze(0)
        before = point


@dataclass(frozen=True, eq=False)
class _Curve:
    equations: Equations
    scale: float

    def follow(self, X: Tensor, points: int, hottest: float) -> Iterator[_Point]:
        """Points from X at the cold end, until the curve leaves 0 < λ < hottest."""
        place = torch.cat([X.flatten(), X.new_tensor([COLD])])
        towards_heat = torch.zeros_like(place)
        towards_heat[-1] = 1.0
        here = _Point(place, self._tangent(place, towards_heat))
        stride = 0.1
        yield here
        for _ in range(points):
            ahead, quick = self._next(here, stride)
            while ahead is None and stride > _SHORTEST:
                stride /= 2
                ahead, quick = self._next(here, stride)
            if ahead is None or not COLD / 2 < ahead.temperature < hottest:
                return
            here = ahead
            stride = min(_LONGEST, stride * (1.5 if quick else 1.0))
            yield here

    def _next(self, here: _Point, stride: float) -> tuple[_Point | None, bool]:
        """The next point, and whether the corrector was quick; None if the stride was too long."""
        place = here.place + stride * here.tangent
        before = torch.inf
        for correction in range(_CORRECTIONS):
            if not float(place[-1]) > COLD / 4:
                return None, False
            r = self._at(place).residuals(self._input(place)).flatten()
            size = float(r.abs().max())
            if size <= _CONVERGED * self.scale:
                tangent = self._tangent(place, here.tangent)
                straight = float(tangent @ here.tangent) > _STRAIGHT
                return (_Point(place, tangent) if straight else None), correction <= 3
            if not size < 0.7 * before:
                return None, False
            before = size
            system = torch.cat([self._slopes(place), here.tangent.unsqueeze(0)])
            step, _ = torch.linalg.solve_ex(system, torch.cat([r, r.new_zeros(1)]))
            place = place - step
        return None, False

    def _tangent(self, place: Tensor, along: Tensor) -> Tensor:
        """The direction of the curve that goes along with the last one."""
        system = torch.cat([self._slopes(place), along.unsqueeze(0)])
        forward = torch.zeros_like(place)
        forward[-1] = 1.0
        tangent, _ = torch.linalg.solve_ex(system, forward)
        return tangent / tangent.norm()

    def _slopes(self, place: Tensor) -> Tensor:
        """Derivatives of the equations by X and by λ: (N, N+1)."""
        equations, X = self._at(place), self._input(place)
        near = equations.linearised(X)
        temperature = equations.temperature
        # ∂Ã/∂λ = A∘(S − ⟨A,S⟩)/λ − (A − U)/λ²; log A stands for λS, rows shifted, which cancels
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
