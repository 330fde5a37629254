"""Where a search begins when there is no prior.

What the structure suggests comes first (a head that attends to itself, a residual stream: the
output is near the input; small scores: `mean_field`), then small Gaussian inputs:
from there Levenberg–Marquardt succeeds more often than from inputs of full size.
With a residual connection Gaussians of the output's size about the output find more inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from keyhole.core.numerics import LinAlgError
from keyhole.invert.derivatives.equations import DENSE, Equations, Smooth
from keyhole.invert.problem import Problem

SMALL = 0.2
COLD = 0.02  # where the mean field is exact enough to be corrected in a step or two


def draw(problems: Sequence[Problem], numbers: Sequence[tuple[int, int]], seed: int) -> Tensor:
    """Start number k of problem p, for each (p, k): (R,n,d), the same whoever asks."""
    return torch.stack([_start(problems[p], p, k, seed) for p, k in numbers])


def _start(problem: Problem, number: int, start: int, seed: int) -> Tensor:
    shape = (problem.length, problem.dim)
    if start == 0 and problem.outputs == problem.dim:
        return problem.B if problem.output_bias is None else problem.B - problem.output_bias
    affordable = problem.length * problem.dim <= DENSE
    if start == 1 and affordable and (guess := mean_field(problem)) is not None:
        return warmed(problem, guess)
    stream = torch.Generator().manual_seed(hash((seed, number, start)) & 0x7FFFFFFF)
    noise = torch.randn(shape, generator=stream, dtype=torch.float64).to(problem.B.device)
    if problem.residual:
        return problem.B + problem.B.square().mean().sqrt() * noise
    return SMALL * noise


def warmed(problem: Problem, guess: Tensor) -> Tensor:
    """The mean field carried towards λ = 1 by Newton steps, as far as that goes without turning."""
    equations = Equations.of([problem])
    X, temperature, stride = guess.unsqueeze(0), COLD, 0.1
    while temperature < 1 and stride > 1e-3:
        ahead = min(1.0, temperature + stride)
        moved = newton(replace(equations, temperature=ahead), X)
        if moved is None:
            stride /= 2
        else:
            X, temperature, stride = moved, ahead, 1.5 * stride
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
        J = equations.linearised(X).jacobian()
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
    B = problem.B if problem.output_bias is None else problem.B - problem.output_bias
    try:
        Y = torch.linalg.solve(V, B, left=False)
        centre = Y.mean(0)
        E = Y - centre
        Q = _span(E)
        if not Q.shape[1]:  # all tokens have one output: their scores do not show
            return None
        inside = Q.mT @ W @ Q
        covariance = _covariance(inside, (E @ Q).mT @ (E @ Q) / problem.length)
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


def _covariance(W: Tensor, S: Tensor) -> Tensor:
    """The one positive solution of `Σ (WᵀΣW) Σ = S`."""
    covariance = torch.eye(len(S), dtype=S.dtype, device=S.device)
    for _ in range(_ROUNDS):
        covariance = _geometric_mean(torch.linalg.inv(W.mT @ covariance @ W), S)
    return covariance


def _geometric_mean(P: Tensor, S: Tensor) -> Tensor:
    """`P # S = P^½ (P^−½ S P^−½)^½ P^½`."""
    root, inverse_root = _power(P, 0.5), _power(P, -0.5)
    mean = root @ _power(inverse_root @ S @ inverse_root, 0.5) @ root
    return (mean + mean.mT) / 2


def _power(S: Tensor, exponent: float) -> Tensor:
    sizes, directions = torch.linalg.eigh((S + S.mT) / 2)
    least = torch.finfo(S.dtype).eps ** 2 * sizes[-1]
    return directions * sizes.clamp(min=least) ** exponent @ directions.mT
