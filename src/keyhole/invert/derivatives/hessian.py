"""The Hessian of the inversion loss in closed form, and its products without the matrix.

*Unmasking Transformers*, Section 4.2: `∇²L = 2JᵀJ + 2 Σ_ij c_ij ∇²c_ij + 2γI`, (n·d)×(n·d), entry
(i₁j₁, i₂j₂) at row `i₁·d + j₁`, column `i₂·d + j₂`. hessian_terms.py has the formula. The products
need no matrix: J and Jᵀ act through equations.py, and the second derivatives through the gradient
`JᵀG`, each of whose factors is differentiated along P.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian_terms import Bend, Expansion
from keyhole.invert.derivatives.loss import prepared
from keyhole.invert.problem import Problem


def hessian(problem: Problem, X: Tensor) -> Tensor:
    """`∇²L(X)`: (…, n·d, n·d); rows and columns of known entries are zero."""
    equations, inputs, lead = prepared(problem, X)
    result = hessian_of(equations, inputs)
    return result.reshape(*lead, *result.shape[1:])


def hessian_product(problem: Problem, X: Tensor, P: Tensor) -> Tensor:
    """`∇²L(X)·P`, of the shape of P; memory n² + nd a head."""
    return _product(problem, X, P, hessian_product_of)


def gauss_newton_product(problem: Problem, X: Tensor, P: Tensor) -> Tensor:
    """`JᵀJ·P`, of the shape of P; memory n² + nd a head."""
    return _product(problem, X, P, gauss_newton_product_of)


def hessian_of(equations: Equations, X: Tensor) -> Tensor:
    """`∇²L` for a batch of inputs: (R, n·d, n·d)."""
    layer = equations.linearised(X)
    return Expansion.of(layer, Bend.of(layer, 2 * equations.residuals(X))).matrix()


def gauss_newton_of(equations: Equations, X: Tensor) -> Tensor:
    """`JᵀJ` for a batch of inputs: (R, n·d, n·d)."""
    return Expansion.of(equations.linearised(X), None).matrix() / 2


def held(equations: Equations, H: Tensor) -> Tensor:
    """H to be solved with: 1 on the diagonal of known entries, whose rows and columns are zero."""
    if equations.fixed is None:
        return H
    return H + torch.diag_embed((~equations.fixed.isnan()).flatten(1).to(H.dtype))


def hessian_product_of(equations: Equations, X: Tensor, P: Tensor) -> Tensor:
    """`∇²L·P` for a batch of inputs: (R,n,d)."""
    layer = equations.linearised(X)
    free = equations.free
    P = P if free is None else P * free
    bend = Bend.of(layer, 2 * equations.residuals(X))
    result = layer.backward(2 * layer.forward(P)) + bend.product(layer, P)
    if equations.gamma:
        result = result + 2 * equations.gamma * P
    return result if free is None else result * free


def gauss_newton_product_of(equations: Equations, X: Tensor, P: Tensor) -> Tensor:
    """`JᵀJ·P` for a batch of inputs: (R,n,d)."""
    layer = equations.linearised(X)
    return layer.backward(layer.forward(P))


def _product(
    problem: Problem,
    X: Tensor,
    P: Tensor,
    product: Callable[[Equations, Tensor, Tensor], Tensor],
) -> Tensor:
    if P.shape != X.shape:
        raise InputError(f"expected P of the shape of X {tuple(X.shape)}, got {tuple(P.shape)}")
    equations, inputs, _ = prepared(problem, X)
    return product(equations, inputs, P.to(inputs).reshape(inputs.shape)).reshape(P.shape)
