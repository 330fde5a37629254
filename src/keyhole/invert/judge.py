"""The judge of inversions: solvers propose inputs, and shared code checks them.

An input is "recovered" if it passes three tests. Its residual, recomputed from the
original problem instead of the reduced problem that a solver works on, must be at
rounding level, or within the stated tolerance of B. It must have the known entries. And
the equations must determine X at least locally: where their Jacobian is singular, a
family of inputs has the same output. A Jacobian that is too large to factorise is not
examined: then the equations are only counted, and the reason says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.invert.derivatives.equations import DENSE, Equations
from keyhole.invert.problem import Problem

ROUNDING = 1e-12  # a residual below this is exact
NEARLY = 1e-4  # a residual below this is "inexact", above it "unsolved"
SAME = 1e-6  # solutions whose relative distance is smaller count as the same
_SINGULAR = 1e-12  # relative size of a singular value that counts as zero
SOLVED = (Status.RECOVERED, Status.NOT_IDENTIFIABLE)  # the statuses of an exact input


@dataclass(frozen=True, eq=False)
class Verdict:
    status: Status
    reason: str
    residual: float
    condition: float | None


def residual_of(problem: Problem, X: Tensor) -> float:
    """Return the largest entry of `attention(X) − B`, relative to the largest sum of magnitudes."""
    if not X.isfinite().all():
        return torch.inf
    X = X.to(problem.B.device, torch.float64)
    sizes = problem.B.abs().amax()
    heads = problem.V.reshape(-1, problem.dim, problem.outputs)
    sizes = sizes + (X.abs().unsqueeze(0) @ heads.abs()).amax((1, 2)).sum()
    return float((problem.output(X) - problem.B).abs().max() / sizes.clamp(min=1e-300))


def judge(
    problem: Problem,
    X: Tensor,
    *,
    unique: bool = False,
) -> Verdict:
    """Decide whether an input solves the problem.

    With `unique`, X is known to be the only solution for another reason (leaked maps
    prove it), so the Jacobian is not examined.
    """
    residual = residual_of(problem, X)
    exact = residual <= ROUNDING
    within = exact or bool(
        (problem.output(X) - problem.B).abs().max() <= problem.tolerance
    )
    reason = f"residual {residual:.1e}"
    against = _against_known(problem, X)
    size = float(X.abs().max())
    if contradicts := against > ROUNDING * size:
        reason += f"; X contradicts the known entries, by up to {against:.1e}"
    if contradicts or not within:
        nearly = residual <= NEARLY and not against > NEARLY * size
        status = Status.INEXACT if nearly else Status.UNSOLVED
        return Verdict(status, reason, residual, None)
    condition, missing = (None, 0) if unique else _condition(problem, X)
    if not exact:
        reason += f", within the tolerance {problem.tolerance:.1e} of the output"
    if missing is None:
        unknowns = int(problem.unknown.sum())
        reason += f"; uniqueness not checked: {unknowns:,} unknowns are too many"
    elif missing:
        count = f"at least {missing:,}" if _too_large(problem) else missing
        reason += (
            f"; {count} directions at X leave the output as it is: X is one of a family"
        )
        return Verdict(Status.NOT_IDENTIFIABLE, reason, residual, condition)
    return Verdict(Status.RECOVERED, reason, residual, condition)


def _against_known(problem: Problem, X: Tensor) -> float:
    """Return the largest difference between X and the known entries."""
    if problem.known is None:
        return 0.0
    off = (X.to(problem.known) - problem.known).abs()
    return float(off.masked_fill(problem.known.isnan(), 0.0).max())


def _condition(problem: Problem, X: Tensor) -> tuple[float | None, int | None]:
    """Return the condition of the equations at X and the number of directions X may move in.

    If the Jacobian is too large, the number is how many more unknowns than equations
    there are, which is the least that it can be. It is None if there are as many
    equations: then nothing is known about it.
    """
    unknowns = int(problem.unknown.sum())
    if unknowns == 0:
        return 1.0, 0
    if _too_large(problem):
        independent = problem.outputs  # entries of a token's output
        if not problem.residual:
            values = problem.V.reshape(-1, problem.outputs)
            independent = int(torch.linalg.matrix_rank(values, rtol=_SINGULAR))
        missing = unknowns - problem.length * independent
        return None, missing if missing > 0 else None
    J = Equations.of(problem, X.device).jacobian(X.unsqueeze(0))[0]
    if problem.known is not None:
        J = J[:, problem.known.isnan().flatten()]
    sizes = torch.linalg.svdvals(J)
    rank = int((sizes > _SINGULAR * sizes[0]).sum())
    missing = unknowns - rank
    return (None if missing else float(sizes[0] / sizes[-1])), missing


def _too_large(problem: Problem) -> bool:
    """Return whether the Jacobian is too large to be factorised."""
    return problem.length * problem.dim > DENSE


def distinct(inputs: list[Tensor]) -> list[Tensor]:
    """Drop repeated inputs and sort the others by norm."""
    kept: list[Tensor] = []
    for X in inputs:
        if not any(
            float((X - other).abs().max()) <= SAME * float(X.abs().max())
            for other in kept
        ):
            kept.append(X)
    return sorted(kept, key=lambda X: float(X.norm()))
