"""The inversion loss and its first derivatives, for one input or many.

*Unmasking Transformers*, Definition 1.2 and Section 4.1:

    L(X) = Σ_ij c_ij(X)² + γ‖X‖²,   c(X) = attention(X) − B,   ∇L = 2Jᵀc + 2γX

Known entries of a problem are put into X before anything is computed, so that derivatives with
respect to them are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.problem import Problem


def loss(problem: Problem, X: Tensor) -> Tensor:
    """`‖attention(X) − B‖² + γ‖X‖²`: (…) for an input (…, n, d)."""
    equations, inputs, lead = prepared(problem, X)
    return equations.loss(inputs).reshape(lead)


def gradient(problem: Problem, X: Tensor) -> Tensor:
    """`∇L(X)`, of the shape of X."""
    equations, inputs, lead = prepared(problem, X)
    return gradient_of(equations, inputs).reshape(*lead, *inputs.shape[1:])


def jacobian(problem: Problem, X: Tensor) -> Tensor:
    """J of the residual `c`: (…, n·m, n·d)."""
    equations, inputs, lead = prepared(problem, X)
    J = equations.linearised(inputs).jacobian()
    return J.reshape(*lead, *J.shape[1:])


def gradient_of(equations: Equations, X: Tensor) -> Tensor:
    """`∇L` for a batch of inputs: (R,n,d)."""
    result = equations.linearised(X).backward(2 * equations.residuals(X))
    if equations.gamma:
        free = equations.free
        result = result + 2 * equations.gamma * (X if free is None else X * free)
    return result


def prepared(problem: Problem, X: Tensor) -> tuple[Equations, Tensor, torch.Size]:
    """The problem's equations, X as a batch (R,n,d) with the known entries in it, and its shape."""
    if X.ndim < 2 or X.shape[-2:] != (problem.length, problem.dim):
        raise InputError(
            f"expected X of shape (…, {problem.length}, {problem.dim}), got {tuple(X.shape)}"
        )
    equations = Equations.of([problem])
    inputs = X.to(equations.B).reshape(-1, problem.length, problem.dim)
    return equations, equations.impose(inputs), X.shape[:-2]
