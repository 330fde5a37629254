"""A layer with a residual connection: a continuation from the output to the input.

`X + t·attention(X) = B` has one solution at t = 0, the output B itself, and the problem's at t = 1.
The path between them is followed by Newton's method with adaptive steps in t. Each linear system is
solved by GMRES, which needs only products J·p: `J = I + t·K` is near the identity where attention
changes the stream little, so a few products suffice, and no matrix of size nd×nd is ever held.
Where the path turns back (attention as strong as the stream), a second path is tried, which scales
the scores instead: at t = 0 attention is uniform and the equations are linear. NewtonCG finishes
from the end of a path, or from the furthest point of one that did not reach t = 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.numerics import LinAlgError, least_squares
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import Equations, Linearised
from keyhole.invert.inversion import Inversion
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.newton_cg import NewtonCG
from keyhole.invert.solvers.starts import continued

_CONVERGED = 1e-11  # the residual relative to B at which Newton's method ends
_SHORTEST = 2e-3  # step in t below which a path is given up
_CORRECTIONS = 8  # Newton steps at one t
_PRODUCTS = 250  # products with J in one linear system
_NOTHING = 1e-14  # relative norm below which GMRES has the whole space


@dataclass(frozen=True)
class ResidualStream:
    """Continuation from the output, matrix-free; NewtonCG from where a path ended."""

    steps: int = 60
    seed: int = 0
    device: str = "cpu"

    def __call__(self, problem: Problem, *, progress: Progress = silent) -> Inversion:
        if not problem.residual:
            raise InputError("this method needs a problem with a residual connection")
        finish = NewtonCG(steps=self.steps, seed=self.seed, device=self.device)
        if problem.fault:
            return finish(problem)
        equations = Equations.of(problem, self.device)
        ends: list[Tensor] = []
        for path in (self._scaled_values(equations), self._scaled_scores(equations)):
            X, arrived = follow(*path)
            ends.append(X)
            if arrived:
                break
        return finish(problem, start=torch.cat(ends[::-1]), progress=progress)

    def _scaled_values(self, equations: Equations) -> tuple[Callable[[float], Equations], Tensor]:
        return lambda t: replace(equations, V=t * equations.V), equations.impose(equations.B)

    def _scaled_scores(self, equations: Equations) -> tuple[Callable[[float], Equations], Tensor]:
        def at(t: float) -> Equations:
            bias = equations.key_bias
            biased = None if bias is None else t * bias
            return replace(equations, W=t * equations.W, key_bias=biased)

        return at, equations.impose(equations.B)


def follow(at: Callable[[float], Equations], X: Tensor) -> tuple[Tensor, bool]:
    """From X towards t = 1: the last solution (1,n,d) on the path, and whether it is at 1."""
    start = corrected(at(0.0), X)
    X = X if start is None else start
    return continued(lambda t, X: corrected(at(t), X), X, stride=0.25, shortest=_SHORTEST)


def corrected(equations: Equations, X: Tensor) -> Tensor | None:
    """Newton's method from (1,n,d); None unless every step at least halves the residual."""
    scale = float(equations.B.abs().max())
    before = torch.inf
    for _ in range(_CORRECTIONS):
        r = equations.residuals(X)
        size = float(r.abs().max())
        if size <= _CONVERGED * scale:
            return X
        if not size < 0.5 * before:
            return None
        before = size
        try:
            X = X - gmres(equations.linearised(X), r, max(1e-8, min(1e-3, size / scale)))
        except LinAlgError:  # the products overflow
            return None
    return None


def gmres(linearised: Linearised, r: Tensor, accuracy: float) -> Tensor:
    """Solve `J p = r` to a relative accuracy by GMRES (Saad and Schultz 1986)."""
    size = r.norm()
    basis = [r.flatten() / size]
    H = r.new_zeros(_PRODUCTS + 1, _PRODUCTS)
    y = r.new_zeros(1, 1)
    for k in range(_PRODUCTS):
        w = linearised.forward(basis[k].reshape(r.shape)).flatten()
        Q = torch.stack(basis)
        for _ in range(2):  # twice is enough to stay orthogonal
            shares = Q @ w
            w = w - shares @ Q
            H[: k + 1, k] += shares
        H[k + 1, k] = w.norm()
        block = H[: k + 2, : k + 1]
        right = r.new_zeros(k + 2, 1)
        right[0] = size
        y = least_squares(block.cpu(), right.cpu()).to(r.device)
        remainder = (block @ y - right).norm()
        if remainder <= accuracy * size or H[k + 1, k] <= _NOTHING * size:
            break
        basis.append(w / H[k + 1, k])
    return (y.squeeze(1) @ torch.stack(basis[: len(y)])).reshape(r.shape)
