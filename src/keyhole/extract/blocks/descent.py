"""All numbers of a wide layer at once: Gauss–Newton steps by conjugate gradients.

    minimise |f(θ) − y|²:    θ ← θ − p,    JᵀJ·p = Jᵀ(f(θ) − y),    J = f′(θ)

This takes f, the answers y and a θ near by, and returns the θ that explains them best.
At d = 384 with 1,536 units there are 1.3 million numbers, too many for the matrix JᵀJ.
Products with J and Jᵀ cost as much as some answers of the model, so p is found by
conjugate gradients. For inputs u that are evenly spread, `Σ_n u uᵀ ≈ n·1`, and units of
slopes φ' and columns C, the preconditioner multiplies the gradient

    by A and a                  by (CᵀC ∘ φ'ᵀφ')⁻¹ from the left
    by C and other linear maps  by (ΦᵀΦ)⁻¹, Φ the features, the inputs and 1

(the factors of K-FAC, Martens and Grosse, arXiv 1503.05671). Their coupling is left to
the conjugate gradients. If a norm follows, between_norms.py uses a preconditioner that
solves for more at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Numbers = dict[str, Tensor]
_STEPS = 24
_INNER = 3000  # conjugate gradients start over at each step: few long steps are cheaper
_ENOUGH = 1e-5  # reduction of the gradient within one step
_HALVINGS = 6
_EXACT = 1e-29  # residuals, relative to the squares of the answers
_SLOW = 0.5  # two steps in a row that leave more than this of the squares are the last


def descend(
    model: Callable[[Numbers], Tensor],
    numbers: Numbers,
    y: Tensor,
    preconditioner: Callable[[Numbers], Callable[[Numbers], Numbers]],
    enough: float = _EXACT,
) -> tuple[Numbers, float]:
    """Return the numbers for which the model's answers are nearest to y, and the relative error.

    The fit ends once the residual is `enough`, relative to the squares of the answers.
    """
    size = float(y.square().sum())
    rest = model(numbers) - y
    cost = float(rest.square().sum())
    slow = 0
    for _ in range(_STEPS):
        if cost <= enough * size or slow > 1:
            break
        step = _step(model, numbers, rest, preconditioner(numbers))
        before = cost
        for halving in range(_HALVINGS):
            tried = {
                name: part - 0.5**halving * step[name] for name, part in numbers.items()
            }
            off = model(tried) - y
            if float(off.square().sum()) < cost:
                numbers = tried
                rest = off
                cost = float(off.square().sum())
                break
        slow = slow + 1 if cost > _SLOW * before else 0
    return numbers, (cost / size) ** 0.5


def _step(
    model: Callable[[Numbers], Tensor],
    numbers: Numbers,
    rest: Tensor,
    solve: Callable[[Numbers], Numbers],
) -> Numbers:
    """Solve `J·step = rest` in the least-squares sense, by conjugate gradients."""

    def pulled(rest: Tensor) -> Numbers:
        return torch.func.vjp(model, numbers)[1](rest)[0]

    pull = torch.func.vjp(model, numbers)[1]
    # J as the transpose of its transpose: forward mode would run the model again for
    # each product.
    push = torch.func.vjp(pulled, rest)[1]
    slope: Numbers = pull(rest)[0]
    direction = solve(slope)
    step = {name: torch.zeros_like(part) for name, part in numbers.items()}
    size = start = _product(slope, direction)
    for _ in range(_INNER):
        moved: Tensor = push(direction)[0]
        length = size / float(moved.square().sum())
        step = {name: part + length * direction[name] for name, part in step.items()}
        rest = rest - length * moved
        slope = pull(rest)[0]
        solved = solve(slope)
        size, old = _product(slope, solved), size
        if not size > _ENOUGH**2 * start:
            break
        direction = {n: part + size / old * direction[n] for n, part in solved.items()}
    return step


def _product(a: Numbers, b: Numbers) -> float:
    return sum(float((part * b[name]).sum()) for name, part in a.items())


def inverse(gram: Tensor) -> Tensor:
    """Return the inverse of a Gram matrix plus a ridge: a block of a preconditioner."""
    ridge = 1e-10 * gram.diagonal().mean()
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(gram + ridge * eye))
