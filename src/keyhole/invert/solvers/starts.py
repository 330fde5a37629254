"""Where a search begins when there is no prior, and the curve from the mean field.

What the structure suggests comes first (a head that attends to itself, a residual stream: the
output is near the input; small scores: `mean_field`), then small Gaussian inputs:
from there Levenberg–Marquardt succeeds more often than from inputs of full size.
With a residual connection Gaussians of the output's size about the output find more inputs.

Where no start leads to an input, the curve of `solutions_along_the_curve` may: at temperature λ
the map is `Ã = U + (softmax(λS) − U)/λ` (equations.py). As λ → 0 the equations have exactly one
solution, the mean field; λ = 1 is the problem. The solutions (X, λ) form curves, and the curve that
begins at the mean field is followed by its arc length, not by λ, because it turns: at a fold two
solutions meet and λ runs backwards for a while. Every crossing of λ = 1 is an exact input, so the
curve may bring several. Predictor: the tangent; corrector: Newton on the equations with the step's
length held (Keller's pseudo-arclength). The stride follows how quickly the corrector converges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core.numerics import LinAlgError
from keyhole.invert.derivatives.equations import DENSE, Equations, Smooth
from keyhole.invert.problem import Problem

SMALL = 0.2
COLD = 0.02  # where the mean field is exact enough to be corrected in a step or two


def draw(problem: Problem, numbers: Iterable[int], seed: int) -> Tensor:
    """Starts of these numbers: (R,n,d), each the same in any batch."""
    return torch.stack([_start(problem, number, seed) for number in numbers])


def _start(problem: Problem, start: int, seed: int) -> Tensor:
    shape = (problem.length, problem.dim)
    if start == 0 and problem.outputs == problem.dim:
        return problem.unbiased
    affordable = problem.length * problem.dim <= DENSE
    if start == 1 and affordable and (guess := mean_field(problem)) is not None:
        return warmed(problem, guess)
    stream = torch.Generator().manual_seed(hash((seed, 0, start)) & 0x7FFFFFFF)
    noise = torch.randn(shape, generator=stream, dtype=torch.float64).to(problem.B.device)
    if problem.residual:
        return problem.B + problem.B.square().mean().sqrt() * noise
    return SMALL * noise


def warmed(problem: Problem, guess: Tensor) -> Tensor:
    """The mean field carried towards λ = 1 by Newton steps, as far as that goes without turning."""
    equations = Equations.of(problem)
    X, heat, stride = guess.unsqueeze(0), COLD, 0.1
    while heat < 1 and stride > 1e-3:
        ahead = min(1.0, heat + stride)
        moved = newton(replace(equations, temperature=ahead), X)
        if moved is None:
            stride /= 2
        else:
            X, heat, stride = moved, ahead, 1.5 * stride
    return X.squeeze(0)


def newton(equations: Smooth, X: Tensor, steps: int = 8) -> Tensor | None:
    """Plain Newton on square equations from (1,n,d); None unless it converges at once."""
    before = torch.inf
    scale = float(equations.B.abs().max())
    for _ in range(steps):
        r = equations.residuals(X)
        size = float(r.abs().max())
        if size <= 1e-12 * scale:
            return X
        if not size < before:
            return None
        before = size
        J = equations.jacobian(X)
        step, _ = torch.linalg.solve_ex(J, r.reshape(1, -1, 1))
        X = X - step.reshape(X.shape)
    return X if float(equations.residuals(X).abs().max()) <= 1e-8 * scale else None


_ROUNDS = 60  # one bit a step
_NEGLIGIBLE = 1e-10  # directions in which the tokens vary less than this do not count


def mean_field(problem: Problem) -> Tensor | None:
    """The input (n×d) that has this output to first order in the scores; None if there is none.

    Ours; the paper asks for a start close to the truth and is silent about finding one. Let the
    scores be small, so that `softmax(s) ≈ (1 + s − mean s)/n`. With the mean m of the tokens, the
    centred tokens D and their covariance `Σ = DᵀD/n`, attention (with V taken out, reduce.py) is

        y_i = m + Σ (Wᵀx_i + u)          so, centred,        E = D W Σ

    E is known, hence `S = EᵀE/n`, and Σ satisfies `Σ (WᵀΣW) Σ = S`. For a given middle factor P
    the solution of `ΣPΣ = S` is the geometric mean `Σ = P⁻¹ # S`. The iteration

        Σ ← (Wᵀ Σ W)⁻¹ # S

    halves distances in Thompson's metric, in which congruence by W and inversion are isometries
    and `·# S` contracts by ½. So for invertible W there is exactly one positive Σ, it is found
    from anywhere, one bit a step, and `D = E (WΣ)⁻¹`, `m = (I + ΣWᵀ)⁻¹(ȳ − Σu)`. Where the tokens
    span fewer directions than d, all of this happens inside their span.
    """
    if problem.causal or problem.residual or problem.known is not None or problem.heads > 1:
        return None
    if problem.outputs != problem.dim or problem.length == 1:
        return None
    d = problem.dim
    W, V = problem.W.reshape(d, d), problem.V.reshape(d, d)
    try:
        Y = torch.linalg.solve(V, problem.unbiased, left=False)
        centre = Y.mean(0)
        E = Y - centre
        Q = _span(E)
        if not Q.shape[1]:  # all tokens have one output: their scores do not show
            return None
        inside = Q.mT @ W @ Q
        covariance = covariance_of(inside, (E @ Q).mT @ (E @ Q) / problem.length)
        D = torch.linalg.solve(inside @ covariance, E @ Q, left=False) @ Q.mT
        full = Q @ covariance @ Q.mT
        if problem.key_bias is not None:
            centre = centre - full @ problem.key_bias.reshape(d)
        m = torch.linalg.solve(torch.eye(d, dtype=W.dtype, device=W.device) + full @ W.mT, centre)
    except LinAlgError:
        return None
    X = D + m
    return X if bool(X.isfinite().all()) else None


def _span(E: Tensor) -> Tensor:
    """An orthonormal basis of the directions in which the rows of E vary."""
    _, sizes, directions = torch.linalg.svd(E, full_matrices=False)
    return directions[sizes > _NEGLIGIBLE * sizes[0]].mT


def covariance_of(W: Tensor, S: Tensor) -> Tensor:
    """The one positive solution of `Σ (WᵀΣW) Σ = S`, for invertible W and positive S."""
    covariance = torch.eye(len(S), dtype=S.dtype, device=S.device)
    for _ in range(_ROUNDS):
        covariance = geometric_mean(torch.linalg.inv(W.mT @ covariance @ W), S)
    return covariance


def geometric_mean(P: Tensor, S: Tensor) -> Tensor:
    """`P # S = P^½ (P^−½ S P^−½)^½ P^½` of positive matrices: the one Σ with `Σ P⁻¹ Σ = S`."""
    root, inverse_root = _power(P, 0.5), _power(P, -0.5)
    mean = root @ _power(inverse_root @ S @ inverse_root, 0.5) @ root
    return (mean + mean.mT) / 2


def _power(S: Tensor, exponent: float) -> Tensor:
    sizes, directions = torch.linalg.eigh((S + S.mT) / 2)
    least = torch.finfo(S.dtype).eps ** 2 * sizes[-1]
    return directions * sizes.clamp(min=least) ** exponent @ directions.mT


_CORRECTIONS = 6
_CONVERGED = 1e-10
_STRAIGHT = 0.9  # least cosine between tangents of neighbouring points
_SHORTEST = 1e-5
_LONGEST = 2.0
_HOTTEST = 3.0


@dataclass(frozen=True, eq=False)
class _Point:
    """A point (X, λ) of the curve as one vector, with the tangent there."""

    place: Tensor
    tangent: Tensor

    @property
    def temperature(self) -> float:
        return float(self.place[-1])


def solutions_along_the_curve(problem: Problem, *, points: int = 400) -> Iterator[Tensor]:
    """Exact inputs (n×d) in the order in which the curve meets them; none if there is no curve."""
    guess = mean_field(problem)
    if guess is None:
        return
    equations = Equations.of(problem)
    cold = newton(replace(equations, temperature=COLD), guess.unsqueeze(0))
    if cold is None:
        return
    curve = _Curve(equations, scale=float(equations.B.abs().max()))
    before: _Point | None = None
    for point in curve.follow(cold, points):
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

    def follow(self, X: Tensor, points: int) -> Iterator[_Point]:
        """Points from X at the cold end, until the curve leaves 0 < λ < `_HOTTEST`."""
        place = torch.cat([X.flatten(), X.new_tensor([COLD])])
        towards_heat = torch.zeros_like(place)
        towards_heat[-1] = 1.0
        point = _Point(place, self._tangent(place, towards_heat))
        stride = 0.1
        yield point
        for _ in range(points):
            ahead, quick = self._next(point, stride)
            while ahead is None and stride > _SHORTEST:
                stride /= 2
                ahead, quick = self._next(point, stride)
            if ahead is None or not COLD / 2 < ahead.temperature < _HOTTEST:
                return
            point = ahead
            stride = min(_LONGEST, stride * (1.5 if quick else 1.0))
            yield point

    def _next(self, point: _Point, stride: float) -> tuple[_Point | None, bool]:
        """The next point, and whether the corrector was quick; None if the stride was too long."""
        place = point.place + stride * point.tangent
        before = torch.inf
        for correction in range(_CORRECTIONS):
            if not float(place[-1]) > COLD / 4:
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
