"""The paper's bounds on the Hessian, beside what is measured.

*Unmasking Transformers*, with `‖W‖, ‖V‖ ≤ R`, `|b_ij| ≤ R`, `R > 1`:

    Lemma 4.4   ‖∇²L(X) − ∇²L(Y)‖ ≤ O(n³d³R¹⁰) ‖X − Y‖_F       the Hessian is Lipschitz
    Lemma 4.5   ∇²L(X) ⪰ −O(ndR⁸)·I                             and not too indefinite

The lemmas give no constants; 1 is taken for each. Theorem 1.3 asks for `‖W‖_F, ‖V‖_F ≤ R` and says
nothing about X; its lemmas rest on a "bounded parameter" assumption stated elsewhere (G.1), and a
bound on X must be part of that: the second derivative of a score is W, its first grows with X, so
the Hessian has no bound in R alone. R is therefore reported for the weights and the output, by
spectral norms (no larger than Frobenius norms, so the bounds are the tighter ones), and again with
`‖X‖` under it. All values are those of the loss without γ, which the lemmas are about; γ adds 2γ to
every eigenvalue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.errors import InputError
from keyhole.invert.derivatives.hessian import hessian
from keyhole.invert.derivatives.loss import prepared
from keyhole.invert.problem import Problem

_RADII = (1e-3, 1e-2, 1e-1, 1.0)  # of the neighbours, relative to ‖X‖


@dataclass(frozen=True)
class Bounds:
    """What the lemmas promise (`lipschitz_bound`, `lowest_bound`) and what was found."""

    R: float  # the least R ≥ 1 over ‖W‖, ‖V‖ and |b_ij|
    R_with_input: float  # and over ‖X‖
    lipschitz_bound: float  # n³d³R¹⁰
    lowest_bound: float  # −ndR⁸
    lowest: float  # the eigenvalues of ∇²L(X) lie between
    highest: float
    lipschitz: float  # the largest ‖∇²L(X) − ∇²L(Y)‖ / ‖X − Y‖_F seen
    neighbours: int

    @property
    def gamma(self) -> float:
        """The paper's regulariser, with the sign that makes the Hessian definite."""
        return -self.lowest_bound


def bounds(problem: Problem, X: Tensor, *, seed: int = 0, neighbours: int = 32) -> Bounds:
    """Compare the lemmas with the Hessian at X (n×d) and at seeded random neighbours of X."""
    if X.ndim != 2:
        raise InputError(f"expected X of shape n×d, got {tuple(X.shape)}")
    if neighbours < 1:
        raise InputError(f"expected at least one neighbour, got {neighbours}")
    problem = replace(problem, gamma=0.0)
    _, inputs, _ = prepared(problem, X)
    X = inputs[0]
    here = hessian(problem, X)
    eigenvalues = torch.linalg.eigvalsh(here)
    R = radius(problem)
    n, d = X.shape
    return Bounds(
        R=R,
        R_with_input=max(R, float(torch.linalg.matrix_norm(X, 2))),
        lipschitz_bound=float(n * d) ** 3 * R**10,
        lowest_bound=-float(n * d) * R**8,
        lowest=float(eigenvalues[0]),
        highest=float(eigenvalues[-1]),
        lipschitz=_steepest(problem, X, here, seed, neighbours),
        neighbours=neighbours,
    )


def radius(problem: Problem) -> float:
    """The least R ≥ 1 with ‖W‖, ‖V‖ ≤ R (spectral, every head) and |b_ij| ≤ R."""
    sizes = [torch.linalg.matrix_norm(weights, 2).max() for weights in (problem.W, problem.V)]
    return max(1.0, *map(float, sizes), float(problem.B.abs().max()))


def paper_gamma(problem: Problem) -> float:
    """`ndR⁸`: Definition 4.6 with the sign turned, which it takes to make the Hessian definite."""
    return problem.length * problem.dim * radius(problem) ** 8


def _steepest(problem: Problem, X: Tensor, here: Tensor, seed: int, neighbours: int) -> float:
    stream = torch.Generator().manual_seed(seed)
    size = max(float(X.norm()), 1.0)
    steepest = 0.0
    for number in range(neighbours):
        away = torch.randn(X.shape, generator=stream, dtype=X.dtype).to(X.device)
        if problem.known is not None:
            away = torch.where(problem.known.isnan(), away, 0.0)
        length = float(away.norm())
        if length == 0.0:
            break
        step = away * (_RADII[number % len(_RADII)] * size / length)
        change = torch.linalg.eigvalsh(hessian(problem, X + step) - here).abs().max()
        steepest = max(steepest, float(change / step.norm()))
    return steepest
