"""The Hessian as the paper writes it: four cases, block by block. For reading and checking.

*Unmasking Transformers*, Definitions 4.2 and 4.3: `∇²c_{i₀j₀}` is an n×n grid of d×d blocks, which
differ by which of `i₁`, `i₂` is the token `i₀` that asks:

    H₁  i₁ = i₀ = i₂       H₂  i₁ = i₀ ≠ i₂       H₃  i₁ ≠ i₀ = i₂       H₄  i₁ ≠ i₀ ≠ i₂

and `∇²L = 2JᵀJ + 2 Σ c_{i₀j₀} ∇²c_{i₀j₀} + 2γI`. With `a` the row of the attention map that `i₀`
sees, `h_l = x_lᵀv` for `v = V_{*,j₀}`, `P_l = Wx_l`, `q = Wᵀx_{i₀} (+ u)`, and

    N = a∘(h − aᵀh)                  Σ_l a_l h_l, once differentiated by the scores
    T = diag(N) − aNᵀ − Naᵀ          and twice
    S = diag(a) − aaᵀ                a, once

a score moves with `∂s_l/∂x_l = q` and `∂s_l/∂x_{i₀} = P_l`, and its only second derivative is
`∂²s_l/∂x_{i₀}∂x_l = W`. A block is then what its two tokens do as keys,

    K(i₁,i₂) = T_{i₁i₂} qqᵀ + S_{i₁i₂} (vqᵀ + qvᵀ)        the diagonals of T and S: i₁ = i₂

and, where one of them is `i₀`, what it does as a query as well:

    H₄ = K(i₁,i₂)
    H₂ = K(i₀,i₂) + F(i₂),   F(l) = (PᵀT)_l qᵀ + (PᵀS)_l vᵀ + N_l W
    H₃ = H₂ᵀ with i₁ for i₂
    H₁ = K(i₀,i₀) + F(i₀) + F(i₀)ᵀ + PᵀTP

The paper counts the diagonal of H₄ as a case of its own and takes H₂ and H₃ for one: also four.
Departures: rows instead of columns for tokens, and what problem.py adds. A residual connection is
linear and has no second derivative; heads add up; entries that are known have zero rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.invert.derivatives.equations import Equations, jacobian, prepared
from keyhole.invert.problem import Problem


def hessian_blocks(problem: Problem, X: Tensor) -> Tensor:
    """`∇²L(X)` of one input (n×d), laid out like `hessian`: (n·d, n·d)."""
    if X.ndim != 2:
        raise InputError(f"expected X of shape n×d, got {tuple(X.shape)}")
    equations, inputs, _ = prepared(problem, X)
    X, c = inputs[0], equations.residuals(inputs)[0]
    n, d = X.shape
    grid = X.new_zeros(n, n, d, d)
    for i0 in range(n):
        for j0 in range(problem.outputs):
            grid += 2 * c[i0, j0] * blocks_of(equations, X, i0, j0)
    J = jacobian(problem, X)
    second = as_matrix(grid) + 2 * problem.gamma * torch.eye(n * d, dtype=X.dtype, device=X.device)
    if equations.free is not None:
        free = equations.free.flatten()
        second = free.unsqueeze(-1) * second * free
    return 2 * J.mT @ J + second


def blocks_of(equations: Equations, X: Tensor, i0: int, j0: int) -> Tensor:
    """`∇²c_{i₀j₀}` as the paper's grid: [i₁, i₂] is a block, (n, n, d, d)."""
    A = equations.maps(X.unsqueeze(0))[0]
    grid = X.new_zeros(len(X), len(X), X.shape[1], X.shape[1])
    for h, (W, V) in enumerate(zip(equations.W[0], equations.V[0], strict=True)):
        u = None if equations.key_bias is None else equations.key_bias[0, h]
        grid += _head(X, A[h, i0], W, V[:, j0], u, i0)
    return grid


def as_matrix(grid: Tensor) -> Tensor:
    """A grid of blocks (n,n,d,d) as the matrix (n·d, n·d) that it stands for."""
    n, _, d, _ = grid.shape
    return grid.transpose(1, 2).reshape(n * d, n * d)


def _head(X: Tensor, a: Tensor, W: Tensor, v: Tensor, u: Tensor | None, i0: int) -> Tensor:
    n, d = X.shape
    h = X @ v
    P = X @ W.mT
    q = W.mT @ X[i0] if u is None else W.mT @ X[i0] + u
    N = a * (h - a @ h)
    T = torch.diag(N) - torch.outer(a, N) - torch.outer(N, a)
    S = torch.diag(a) - torch.outer(a, a)
    qq, vq = torch.outer(q, q), torch.outer(v, q)

    def key(i1: int, i2: int) -> Tensor:
        return T[i1, i2] * qq + S[i1, i2] * (vq + vq.mT)

    def query(l: int) -> Tensor:  # noqa: E741
        return torch.outer(P.mT @ T[:, l], q) + torch.outer(P.mT @ S[:, l], v) + N[l] * W

    grid = X.new_zeros(n, n, d, d)
    for i1 in range(n):
        for i2 in range(n):
            if i1 == i0 == i2:
                block = key(i0, i0) + query(i0) + query(i0).mT + P.mT @ T @ P  # H1
            elif i1 == i0:
                block = key(i0, i2) + query(i2)  # H2
            elif i2 == i0:
                block = key(i1, i0) + query(i1).mT  # H3
            else:
                block = key(i1, i2)  # H4
            grid[i1, i2] = block
    return grid
