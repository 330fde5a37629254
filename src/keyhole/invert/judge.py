"""The judge of inversions: solvers propose inputs, shared code recomputes what they give.

"Recovered" needs a residual at rounding level (or within the stated tolerance of B), recomputed
from the original problem, not from the reduced one that a solver saw, and equations that determine
X at least locally: where their Jacobian is singular, a family of inputs has the same output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.invert.derivatives.equations import DENSE, Equations
from keyhole.invert.problem import Problem

ROUNDING = 1e-12  # relative to the numbers that were added up
NEARLY = 1e-4
SAME = 1e-6  # solutions closer than this (relative) are one
_SINGULAR = 1e-12


@dataclass(frozen=True, eq=False)
class Verdict:
    status: Status
    reason: str
    residual: float
    condition: float | None


def residual_of(problem: Problem, X: Tensor) -> float:
    """The largest entry of `attention(X) − B` relative to the largest sum of magnitudes."""
    if not bool(X.isfinite().all()):
        return torch.inf
    X = X.to(problem.B.device, torch.float64)
    sizes = problem.B.abs().amax()
    heads = problem.V.reshape(-1, problem.dim, problem.outputs)
    sizes = sizes + (X.abs().unsqueeze(0) @ heads.abs()).amax((1, 2)).sum()
    return float((problem.output(X) - problem.B).abs().max() / sizes.clamp(min=1e-300))


def judge(problem: Problem, X: Tensor, *, unique: bool = False) -> Verdict:
    """Decide what an input is worth as an answer to a problem.

    `unique`: something else than the output has settled that X is the only one, as leaked maps do;
    then the Jacobian is not looked at.
    """
    residual = residual_of(problem, X)
    off = float((problem.output(X) - problem.B).abs().max())
    exact = residual <= ROUNDING
    if not exact and not off <= problem.tolerance:
        nearly = residual <= NEARLY
        reason = f"residual {residual:.1e}"
        return Verdict(Status.INEXACT if nearly else Status.UNSOLVED, reason, residual, None)
    condition, missing = (None, 0) if unique else _determined(problem, X)
    reason = f"residual {residual:.1e}"
    if not exact:
        reason += f", within the tolerance {problem.tolerance:.1e} of the output"
    if missing:
        reason += f"; {missing} directions at X leave the output as it is: X is one of a family"
        return Verdict(Status.NOT_IDENTIFIABLE, reason, residual, condition)
    return Verdict(Status.RECOVERED, reason, residual, condition)


def _determined(problem: Problem, X: Tensor) -> tuple[float | None, int]:
    """The condition of the equations at X, and in how many directions X may move freely."""
    unknowns = problem.length * problem.dim
    if unknowns > DENSE:
        return None, 0
    equations = Equations.of(problem, X.device)
    J = equations.jacobian(X.unsqueeze(0))[0]
    if problem.known is not None:
        J = J[:, problem.known.isnan().flatten()]
    if J.shape[1] == 0:
        return 1.0, 0
    sizes = torch.linalg.svdvals(J)
    rank = int((sizes > _SINGULAR * sizes[0]).sum())
    missing = J.shape[1] - rank
    return (None if missing else float(sizes[0] / sizes[-1])), missing


def distinct(inputs: list[Tensor]) -> list[Tensor]:
    """The first of each kind, those of least norm in front."""
    kept: list[Tensor] = []
    for X in inputs:
        if not any(float((X - other).abs().max()) <= SAME * float(X.abs().max()) for other in kept):
            kept.append(X)
    return sorted(kept, key=lambda X: float(X.norm()))
