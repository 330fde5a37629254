"""Where a search begins when there is no prior.

What the structure suggests comes first (a head that attends to itself, a residual stream: the
output is near the input; small scores: mean_field.py), then small Gaussian inputs:
from there Levenberg–Marquardt succeeds more often than from inputs of full size.
With a residual connection Gaussians of the output's size about the output find more inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from keyhole.invert.derivatives.equations import DENSE, Equations, Smooth
from keyhole.invert.problem import Problem
from keyhole.invert.structure.mean_field import mean_field

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
