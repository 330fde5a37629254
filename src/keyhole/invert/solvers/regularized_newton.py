"""Newton's method on the regularised loss, as in the paper's theorem.

*Unmasking Transformers*, Theorem 1.3 with Definition 4.6: with `L_reg = γ‖X‖²` large
enough that `∇²L` is positive definite everywhere, Newton steps

    X ← X − H̃⁻¹ ∇L(X),      (1 − ε₀) ∇²L ⪯ H̃ ⪯ (1 + ε₀) ∇²L

come within ε of the optimum in `T = O(log(‖X₀ − X*‖/ε))` iterations. In this module:

- The paper's `γ = O(−ndR⁸)` has the wrong sign and no constant, and its R does not cover X.
  `gamma="paper"` is the corrected γ (bounds.py), which is proved to make the Hessian
  definite while ‖X‖ ≤ R. That R is `radius`, by default the least that covers the
  weights, the output and the start; the method's own starts are drawn inside it.
- The theorem allows a Hessian that is known only within ε₀, so its rate is linear. `slack` is ε₀,
  and H̃ is the worst case `(1 + ε₀)∇²L`: each step leaves ε₀/(1 + ε₀) of the error.
  `slack=0` is Newton's method, which is quadratic.
- The theorem fails with probability δ, because a random H̃ may not be within ε₀ of ∇²L. The paper
  does not say how H̃ is drawn. With `delta`, ∇²L = CCᵀ and `H̃ = C(I + ε₀S)Cᵀ`, where S
  is symmetric Gaussian with N = nd rows and variance σ² (2σ² on the diagonal). H̃ is
  within ε₀ exactly if ‖S‖ ≤ 1, and `P(‖S‖ > 2σ√N + t) ≤ 2exp(−t²/4σ²)`. With `1/σ = 2√N
  + 2√ln(2T/δ)`, all T steps are within ε₀ with probability at least 1 − δ. A step then
  leaves at most ε₀/(1 − ε₀) of the error in the norm of ∇²L.

The optimum is not the input, because so large a γ draws X to 0. The result's reason
says how far its output is from B. To find the input itself use modified_newton.py or
levenberg_marquardt.py, whose damping vanishes at the solution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_number
from keyhole.core.float64 import normal, random_stream
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.bounds import paper_gamma, radius
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian import hessian_of, solvable
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.multistart import Iterate, Solver


@dataclass(frozen=True)
class RegularizedNewton(Solver[Iterate]):
    """Theorem 1.3: reach the optimum of the loss with γ to within `accuracy`, at a linear rate."""

    as_given: ClassVar[bool] = True

    starts: int = 1
    steps: int = 100
    gamma: float | str = "paper"
    slack: float = 0.1
    delta: float | None = None
    radius: float | None = None
    accuracy: float = 1e-12

    def __post_init__(self) -> None:
        if isinstance(self.gamma, str):
            if self.gamma != "paper":
                raise InputError(
                    f'gamma must be "paper" or a number, not {self.gamma!r}'
                )
        else:
            expect_number("gamma", self.gamma, least=0)
        expect_number("slack", self.slack, least=0, below=1)
        expect_number("delta", self.delta, above=0, below=1)
        if self.delta is not None and self.slack == 0:
            raise InputError("delta needs slack above 0: with 0 nothing is drawn")
        expect_number("radius", self.radius, least=1)

    def __call__(
        self,
        problem: Problem,
        *,
        start: Tensor | None = None,
        progress: Progress = silent,
    ) -> Inversion:
        if problem.fault:
            return super().__call__(problem, start=start)  # reports the fault
        inside = replace(self, radius=self._radius(problem, start))
        regularized = inside.regularized(problem)
        result = Solver.__call__(inside, regularized, start=start, progress=progress)
        return inside._explained(regularized, result)

    def regularized(self, problem: Problem) -> Problem:
        """Return the problem whose loss is minimised: its γ is replaced by that of the method."""
        if isinstance(self.gamma, str):
            return replace(
                problem, gamma=paper_gamma(problem, self._radius(problem, None))
            )
        return replace(problem, gamma=self.gamma)

    def _radius(self, problem: Problem, start: Tensor | None) -> float:
        """Return an R that covers the weights, the output, the start and twice the known X."""
        least = radius(problem)
        if problem.known is not None:
            known = problem.known.nan_to_num(nan=0.0)
            least = max(least, 2 * float(torch.linalg.matrix_norm(known, 2)))
        size = 0.0 if start is None else float(torch.linalg.matrix_norm(start, 2).max())
        if self.radius is None:
            return max(least, size)
        for what, value in (("the weights and the output", least), ("the start", size)):
            if value > self.radius and isinstance(self.gamma, str):
                raise InputError(
                    f"the radius must be at least {value:.6g} to cover {what}: got {self.radius:g}"
                )
        return self.radius

    def begin(self, equations: Equations, X: Tensor) -> Iterate:
        if isinstance(self.gamma, str) and self.radius is not None:
            X = _inside(X, equations.fixed, self.radius)
        return Iterate.at(equations, X)

    def step(self, equations: Equations, state: Iterate) -> Iterate:
        factor, p, definite = self._newton(equations, state.x)
        arrived = self._arrived(p)
        ahead = state.x + self._inexact(equations, state.x, factor, p)
        X = torch.where(definite[:, None, None], ahead, state.x)
        return Iterate(X, equations.loss(X), arrived | ~definite)

    def _newton(self, equations: Equations, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the Hessian's Cholesky factor, Newton's step, and whether H is definite."""
        factor, info = torch.linalg.cholesky_ex(
            solvable(equations, hessian_of(equations, X))
        )
        slope = equations.linearised(X).gradient.flatten(1).unsqueeze(-1)
        p = -torch.cholesky_solve(slope, factor).reshape(X.shape)
        return factor, p, info == 0

    def _inexact(
        self,
        equations: Equations,
        X: Tensor,
        factor: Tensor,
        p: Tensor,
    ) -> Tensor:
        """Return the step with H̃ in place of the Hessian: the worst case, or a random draw."""
        if self.delta is None:
            return p / (1 + self.slack)
        S = torch.stack([self.perturbation(row) for row in X])
        if equations.fixed is not None:
            free = equations.fixed.isnan().flatten(1).to(S.dtype)
            S = S * free.unsqueeze(1) * free.unsqueeze(2)
        identity = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
        right = factor.mT @ p.flatten(1).unsqueeze(-1)
        solved, info = torch.linalg.solve_ex(identity + self.slack * S, right)
        step = torch.linalg.solve_triangular(factor.mT, solved, upper=True).reshape(
            p.shape
        )
        return torch.where((info == 0)[:, None, None], step, p)

    def perturbation(self, X: Tensor) -> Tensor:
        """Draw S for one input. Its norm is at most 1 at every step, except with probability δ.

        The draw depends on the seed and the input only, so that a run can be repeated.
        """
        if self.delta is None:
            raise InputError("a perturbation needs delta, the probability of a failure")
        stream = random_stream(hash((self.seed, *X.flatten().tolist())) % 2**63)
        size = X.numel()
        drawn = normal(stream, size, size).to(X.device)
        width = 2 * math.sqrt(size) + 2 * math.sqrt(
            math.log(2 * self.steps / self.delta)
        )
        return (drawn + drawn.mT) / math.sqrt(2) / width

    def _arrived(self, p: Tensor) -> Tensor:
        return p.flatten(1).norm(dim=1) <= self.accuracy

    def _explained(self, problem: Problem, result: Inversion) -> Inversion:
        if (
            result.X is None
            or result.residual is None
            or result.solved
            or not problem.gamma
        ):
            return result
        equations = Equations.of(problem, result.X.device)
        _, p, definite = self._newton(equations, result.X.unsqueeze(0))
        off = f"its output is off by {result.residual:.1e}, relatively"
        if not definite:
            reason = (
                f"γ = {problem.gamma:.1e} leaves the Hessian indefinite at X; {off}"
            )
        elif self._arrived(p):
            reason = f"the optimum with γ = {problem.gamma:.1e} is not the input: {off}"
        else:
            reason = (
                f"{float(p.norm()):.1e} away from the optimum with γ = {problem.gamma:.1e} after "
                f"{self.steps} steps, and that is not the input either: {off}"
            )
        return replace(result, reason=reason)


def _inside(
    X: Tensor,
    fixed: Tensor | None,
    R: float,
) -> Tensor:
    """Shrink the unknown entries of each input until ‖X‖ ≤ R."""
    if fixed is None:
        known = torch.zeros_like(X)
    else:
        known = fixed.nan_to_num(nan=0.0).expand_as(X)
    free = X - known
    left = R - torch.linalg.matrix_norm(known, 2)
    size = torch.linalg.matrix_norm(free, 2).clamp(min=1e-300)
    shorter = known + (left / size)[:, None, None] * free
    outside = torch.linalg.matrix_norm(X, 2) > R
    return torch.where(outside[:, None, None], shorter, X)
