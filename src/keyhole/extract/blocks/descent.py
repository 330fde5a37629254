"""All parameters of a wide layer, jointly: Gauss–Newton steps by conjugate gradients.

    minimise |f(θ) − y|²:    θ ← θ + p,    JᵀJ·p = −Jᵀ(f(θ) − y),    J = f′(θ)

This takes f, the answers y and a θ near by, and returns the θ that explains them best.
At d = 384 with 1,536 units there are 1.3 million parameters, too many for the matrix
JᵀJ. Products with J and Jᵀ cost as much as some answers of the model, so p is found by
conjugate gradients (core/least_squares.py). For inputs u that are evenly spread,
`Σ_n u uᵀ ≈ n·1`, and units of slopes φ' and columns C, the preconditioner multiplies
the gradient

    by A and a                  by (CᵀC ∘ φ'ᵀφ')⁻¹ from the left
    by C and other linear maps  by (ΦᵀΦ)⁻¹, Φ the features, the inputs and 1

(the factors of K-FAC, Martens and Grosse, arXiv 1503.05671). Their coupling is left to
the conjugate gradients. If a norm follows, between_norms.py uses a preconditioner that
solves for more at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from keyhole.core.least_squares import (
    NEWTON,
    Damped,
    Point,
    conjugate_gradients,
    divided,
    minimize,
)

Params = dict[str, Tensor]
Model = Callable[[Params], Tensor]
Precondition = Callable[[Params], Params]

# Conjugate gradients start over at each step: few long steps are cheaper.
_INNER = 3000
_REDUCTION = 1e-5  # of the gradient within one step
_EXACT = 1e-29  # residuals, relative to the squares of the answers
# Steps are halved, and six in a row have to leave less than a quarter of the squares.
_OPTIONS = replace(
    NEWTON, max_steps=48, grow=2.0, shrink=2.0, most=64.0, patience=6, stalled=0.25
)


class _Answers(Point):
    """The residuals of a model at a vector of its parameters, with products instead of J."""

    def __init__(self, x: Tensor, model: Callable[[Tensor], Tensor], y: Tensor) -> None:
        self._model = model
        with torch.no_grad():
            super().__init__(x, (model(x[0]) - y)[None])
        self._shape = y.shape

    @cached_property
    def _pull(self) -> Callable[[Tensor], Tensor]:
        pull = torch.func.vjp(self._model, self.x[0])[1]
        return lambda r: pull(r)[0]

    @cached_property
    def _push(self) -> Callable[[Tensor], Tensor]:
        # J as the transpose of its transpose: forward mode would run the model again
        # for each product.
        def pulled(r: Tensor) -> Tensor:
            return torch.func.vjp(self._model, self.x[0])[1](r)[0]

        push = torch.func.vjp(pulled, self.residuals.view(self._shape))[1]
        return lambda p: push(p)[0]

    def forward(self, p: Tensor) -> Tensor:
        return self._push(p[0]).view(1, -1)

    def backward(self, r: Tensor) -> Tensor:
        return self._pull(r.view(self._shape))[None]


def descend(
    model: Model,
    params: Params,
    y: Tensor,
    preconditioner: Callable[[Params], Precondition],
    target: float = _EXACT,
) -> tuple[Params, float]:
    """Return the parameters for which the model's answers are nearest to y, and the relative error.

    The fit ends once the residual is `target`, relative to the squares of the answers.
    """
    sizes = [part.numel() for part in params.values()]

    def named(x: Tensor) -> Params:
        parts = zip(params.items(), x.split(sizes), strict=True)
        return {name: flat.view_as(part) for (name, part), flat in parts}

    def joined(params: Params) -> Tensor:
        return torch.cat([part.flatten() for part in params.values()])

    def linearize(x: Tensor, _: Tensor) -> Point:
        return _Answers(x, lambda x: model(named(x)), y)

    def solver(point: Point) -> Damped:
        solve = preconditioner(named(point.x[0]))
        step = conjugate_gradients(
            point.forward,
            point.backward,
            point.residuals,
            rtol=_REDUCTION,
            max_steps=_INNER,
            precondition=lambda slope: joined(solve(named(slope[0])))[None],
        )
        return divided(step)

    square = float(y.square().sum())
    options = replace(_OPTIONS, solver=solver, target=target * square)
    x, loss = minimize(linearize, joined(params)[None], options)
    return named(x[0]), (float(loss) / square) ** 0.5


def inverse(gram: Tensor) -> Tensor:
    """Return the inverse of a Gram matrix plus a ridge: a block of a preconditioner."""
    ridge = 1e-10 * gram.diagonal().mean()
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(gram + ridge * eye))
