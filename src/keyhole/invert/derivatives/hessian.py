"""The Hessian of the inversion loss in closed form, and its products without the matrix.

*Unmasking Transformers*, Section 4.2: the Hessian is (n·d)×(n·d),

    ∇²L = 2JᵀJ + 2 Σ_ij c_ij ∇²c_ij + 2γI

with entry (i₁j₁, i₂j₂) at row `i₁·d + j₁` and column `i₂·d + j₂`. There are three forms
of it:

- `hessian` is vectorised; the comment above `Expansion` derives its formula.
- `hessian_product` needs no matrix. J and Jᵀ act through equations.py. The second derivatives come
  from the gradient `JᵀG`, each factor of which is differentiated along P.
- `hessian_blocks` computes it block by block as the paper writes it, for reading and checking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.least_squares import Linearize, Point, Regularised
from keyhole.invert.derivatives.equations import (
    Equations,
    Linearised,
    Smooth,
    jacobian,
    prepared,
)
from keyhole.invert.problem import Problem


def hessian(problem: Problem, X: Tensor) -> Tensor:
    """`∇²L(X)`: (…, n·d, n·d); rows and columns of known entries are zero."""
    equations, inputs, lead = prepared(problem, X)
    result = hessian_of(equations, inputs)
    return result.reshape(*lead, *result.shape[1:])


def hessian_product(
    problem: Problem,
    X: Tensor,
    P: Tensor,
) -> Tensor:
    """`∇²L(X)·P`, with the shape of P, in n² + nd numbers of memory for each head."""
    if P.shape != X.shape:
        raise InputError(
            f"expected P of the shape of X {tuple(X.shape)}, got {tuple(P.shape)}"
        )
    equations, inputs, _ = prepared(problem, X)
    layer = equations.linearised(inputs)
    free = equations.free
    along = P.to(inputs).reshape(inputs.shape)
    along = along if free is None else along * free
    curvature = Curvature.of(layer, 2 * layer.residuals)
    result = layer.backward(2 * layer.forward(along)) + curvature.product(layer, along)
    result = result + 2 * equations.gamma * along
    return (result if free is None else result * free).reshape(P.shape)


def hessian_of(equations: Equations, X: Tensor) -> Tensor:
    """`∇²L` for a batch of inputs: (R, n·d, n·d)."""
    layer = equations.linearised(X)
    return Expansion.of(layer, Curvature.of(layer, 2 * layer.residuals)).matrix()


def gauss_newton_of(layer: Linearised) -> Tensor:
    """`JᵀJ` for a batch of inputs: (R, n·d, n·d)."""
    return Expansion.of(layer, None).matrix() / 2


class LayerPoint(Point):
    """A layer at a batch of inputs (R,n,d): JᵀJ and products with J do not need J."""

    def __init__(self, layer: Linearised) -> None:
        super().__init__(layer.X, layer.residuals, layer.jacobian)
        self.layer = layer

    @cached_property
    def normal(self) -> Tensor:
        return gauss_newton_of(self.layer)

    def forward(self, p: Tensor) -> Tensor:
        return self.layer.forward(p.view_as(self.x)).flatten(1)

    def backward(self, r: Tensor) -> Tensor:
        return self.layer.backward(r.view_as(self.layer.residuals)).flatten(1)


def linearizer(equations: Smooth) -> Linearize:
    """Return the equations as residuals whose squares are minimised."""
    if not isinstance(equations, Equations):
        return lambda X, rows: equations.select(rows).point(X)
    free = 1.0 if equations.free is None else equations.free.flatten(1)

    def linearize(X: Tensor, _: Tensor) -> Point:
        layer = equations.linearised(X)
        if X[0].numel() < _LARGE:
            point = Point(X, layer.residuals, layer.jacobian)
        else:
            point = LayerPoint(layer)
        if not equations.gamma:
            return point
        return Regularised(point, equations.gamma * free)

    return linearize


def solvable(equations: Equations, H: Tensor) -> Tensor:
    """Put 1 on the diagonal of known entries, whose rows and columns of H are zero."""
    if equations.fixed is None:
        return H
    return H + torch.diag_embed((~equations.fixed.isnan()).flatten(1).to(H.dtype))


# The closed form, in which the sum over all outputs is one large matrix product.
#
# The paper gives `∇²c_ij` block by block. Summed over i and j first, for each head,
# with the residual `c`, `P_j = Wx_j`, `Q_i = Wᵀx_i (+ u)`, `h_j = Vᵀx_j`, `o_i = Σ_j
# A_ij h_j`,
#
#     E_ij = h_j − o_i,   M_ij = 2c_iᵀE_ij,   N_ij = A_ij M_ij,   y_i = 2Vc_i
#     B_i  = diag(A_i) − A_i A_iᵀ                            first derivative of a softmax row
#     T_i  = diag(N_i) − A_i N_iᵀ − N_i A_iᵀ                 its second, weighted by 2c
#     ds_ij = dx_iᵀP_j + Q_iᵀdx_j
#
#     dX·∇²L·dX = 2‖J dX‖² + Σ_i ds_iᵀ T_i ds_i + 2 Σ_ij N_ij dx_iᵀ W dx_j
#                 + 2 Σ_ijl (y_iᵀdx_j) B_i[j,l] ds_il + 2γ‖dX‖²
#     (J dX)_i  = Σ_j A_ij E_ij ds_ij + Σ_j A_ij Vᵀdx_j
#
# Multiplied out, terms of the same shape combine, and ∇²L is a matrix plus its
# transpose. With `D_i = Σ_j A_ij E_ij P_jᵀ`, block (l,l') of that matrix, called `half`
# below, is
#
#     Σ_i Q_i [A_il A_il' ((E_ilᵀE_il' − M_il) Q_i + 2V E_il − y_i)
#              + δ_ll' A_il (½M_il Q_i + y_i) + δ_il' own_il]ᵀ
#     + A_ll' (P_l' − Σ_j A_lj P_j) y_lᵀ + 2A_ll' D_lᵀVᵀ + N_ll' W + (AᵀA)_ll' VVᵀ
#     + δ_ll' (½ Σ_j own_lj P_jᵀ + γI)
#
#     own_il = A_il (2D_iᵀE_il + M_il (P_l − Σ_j A_ij P_j)) − A_il PᵀN_i
#
# where own_il is the effect of moving query i itself on its term for key l. The sum
# over i costs n³d²; JᵀJ of a complete J would cost n³d³, and the other terms cost n²d².
# Only the terms of JᵀJ combine different heads. A residual connection adds I to D, and
# D_lᵀ to the last line. With the temperature λ of equations.py, M in the sum over i and
# in own is multiplied by λ, and A becomes Ã where it mixes values.
#
# E is kept as differences. Multiplying it out would save a batch of products, but where
# attention is saturated E is zero, and rounding errors would replace it.

_CHUNK = (
    1 << 20
)  # numbers that one chunk of the large product may hold, to bound the memory
_LARGE = 200  # unknowns from which JᵀJ is computed by its structure, without J
_SMALL = 512  # the size up to which reading a matrix by columns is as fast as by rows


@dataclass(frozen=True, eq=False)
class Curvature:
    """The second derivatives of the layer's outputs, weighted by `G = 2c`."""

    M: Tensor  # (R,H,n,n)
    N: Tensor
    y: Tensor  # (R,H,n,d)
    temperature: float  # λ

    @classmethod
    def of(cls, layer: Linearised, G: Tensor) -> Self:
        wide = G.unsqueeze(-3)
        M = wide @ layer.H.mT
        M = M - (layer.A * M).sum(-1, keepdim=True)
        equations = layer.equations
        return cls(M, layer.A * M, wide @ equations.V.mT, equations.temperature)

    def product(self, layer: Linearised, P: Tensor) -> Tensor:
        """`Σ_ij G_ij ∇²c_ij · P`: the derivative of JᵀG along P, where G is constant."""
        A = layer.A
        equations = layer.equations
        wide = P.unsqueeze(-3)
        dS = wide @ layer.keys.mT + layer.queries @ wide.mT
        dA = A * (
            dS - (A * dS).sum(-1, keepdim=True)
        )  # dÃ; that of A is λ times as large
        dN = self.temperature * dA * self.M + A * (self.y @ wide.mT)
        dN = dN - A * dN.sum(-1, keepdim=True)
        out = dN @ layer.keys + self.N @ (wide @ equations.W.mT)
        out = out + dN.mT @ layer.queries + self.N.mT @ (wide @ equations.W)
        return (out + dA.mT @ self.y).sum(-3)


@dataclass(frozen=True, eq=False)
class Expansion:
    """The terms of the closed form at one X; without `curvature`, those of 2JᵀJ alone."""

    layer: Linearised
    curvature: Curvature | None
    E: Tensor  # (R,H,i,j,m)
    D: Tensor  # Dᵀ, summed over heads: (R,i,d,m)
    own: Tensor  # (R,H,i,l,d)

    @classmethod
    def of(cls, layer: Linearised, curvature: Curvature | None) -> Self:
        A = layer.A.unsqueeze(-1)
        keys = layer.keys
        E = layer.H.unsqueeze(-3) - (layer.A @ layer.H).unsqueeze(-2)
        D = torch.einsum("rhijm,rhjd->ridm", A * E, keys)
        if layer.equations.residual:
            D = D + torch.eye(D.shape[-1], dtype=D.dtype, device=D.device)
        own = 2 * E @ D.mT.unsqueeze(1)
        if curvature is not None:
            heat = curvature.temperature
            own.addcmul_(heat * curvature.M.unsqueeze(-1), _centred(layer.A, keys))
            own -= heat * (curvature.N @ keys).unsqueeze(-2)
        return cls(layer, curvature, E, D, A * own)

    def matrix(self) -> Tensor:
        """The half plus its transpose: (R, n·d, n·d)."""
        R, _, n, d = self.layer.keys.shape
        step = max(1, _CHUNK // (R * n * n * d))
        parts = [
            self._half(slice(start, min(n, start + step)))
            for start in range(0, n, step)
        ]
        half = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        half.diagonal(0, 1, 3).add_(self._last_line().permute(0, 2, 3, 1))
        whole = _with_transpose(half.view(R, n * d, n * d))
        free = self.layer.equations.free
        if free is None:
            return whole
        mask = free.flatten(1)
        return whole * mask.unsqueeze(-1) * mask.unsqueeze(-2)

    def _half(self, rows: slice) -> Tensor:
        """Some rows of blocks, without the last line: (R,l,a,l',b)."""
        R, heads, n, d = self.layer.keys.shape
        half = self._sum_over_queries(0, rows)
        for h in range(1, heads):
            half += self._sum_over_queries(h, rows)
        half = half.view(R, -1, d, n, d)
        for h in range(heads):
            for grid, block in self._products(h, rows):
                half.addcmul_(grid[:, :, None, :, None], block.unsqueeze(-2))
            if self.curvature is not None:
                A = self.layer.A[:, h, rows]
                keys = self.layer.keys[:, h]
                left = (A.unsqueeze(-1) * _centred(A, keys)).mT
                half.addcmul_(
                    left.unsqueeze(-1), self.curvature.y[:, h, rows, None, None]
                )
        return half

    def _sum_over_queries(self, h: int, rows: slice) -> Tensor:
        """The sum over i, for one head: (R,l,a,l'b)."""
        layer = self.layer
        E = self.E[:, h, :, rows]
        A_il = layer.A[:, h, :, rows].mT.unsqueeze(-1)  # R,l,i,1
        inner = A_il.new_zeros(())  # R,l,i,l',b
        for k in range(layer.A.shape[1]):
            A = layer.A[:, k, None]
            Q = layer.queries[:, k, None]
            EE = (E @ self.E[:, k].mT).transpose(1, 2)  # R,l,i,l'
            VE = 2 * (E @ layer.equations.V[0, k].mT).transpose(1, 2)  # R,l,i,b
            if self.curvature is not None and k == h:
                heat = self.curvature.temperature
                EE = EE - heat * self.curvature.M[:, h, :, rows].mT.unsqueeze(-1)
                if layer.soft is layer.A:
                    VE = VE - self.curvature.y[:, h, None]
            term = (A_il * A * EE).unsqueeze(-1) * Q.unsqueeze(-2)
            inner = term if k == 0 else inner.add_(term)
            inner.addcmul_(layer.soft[:, k, None, :, :, None], (A_il * VE).unsqueeze(3))
        if self.curvature is not None:
            self._add_curvature(inner, self.curvature, h, A_il, rows)
        inner.diagonal(0, 2, 3).add_(self.own[:, h, :, rows].permute(0, 2, 3, 1))
        return layer.queries[:, h].mT.unsqueeze(1) @ inner.flatten(-2)

    def _add_curvature(
        self,
        inner: Tensor,
        curvature: Curvature,
        h: int,
        A_il: Tensor,
        rows: slice,
    ) -> None:
        """Add the diagonals of B_i and T_i, and `−A_il A_il' y_i` where Ã is not A."""
        y = curvature.y[:, h, None]
        Q = self.layer.queries[:, h, None]
        M = curvature.temperature / 2 * curvature.M[:, h, :, rows].mT.unsqueeze(-1)
        inner.diagonal(rows.start, 1, 3).add_(
            (A_il * torch.addcmul(y, M, Q)).permute(0, 2, 3, 1)
        )
        if self.layer.soft is not self.layer.A:
            A = self.layer.A[:, h, None, :, :, None]
            inner.addcmul_(A, (A_il * y).unsqueeze(3), value=-1)

    def _products(self, h: int, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """The Kronecker products of the third line, as pairs (R,l,l') and (R,l or 1,a,b)."""
        layer = self.layer
        V = self.layer.equations.V
        yield layer.soft[:, h, rows], 2 * self.D[:, rows] @ V[0, h].mT
        if self.curvature is not None:
            yield self.curvature.N[:, h, rows], layer.equations.W[:, h, None]
        for k in range(V.shape[1]):
            grid = layer.soft[:, h, :, rows].mT @ layer.soft[:, k]
            yield grid, (V[:, h] @ V[:, k].mT).unsqueeze(1)

    def _last_line(self) -> Tensor:
        """The last line, which is in diagonal blocks only: (R,l,d,d)."""
        keys = self.layer.keys
        equations = self.layer.equations
        d = keys.shape[-1]
        blocks = torch.einsum("rhila,rhlb->riab", self.own, keys / 2)
        if equations.residual:
            blocks = blocks + self.D
        if self.curvature is not None and equations.gamma:
            blocks = blocks + equations.gamma * torch.eye(
                d, dtype=keys.dtype, device=keys.device
            )
        return blocks


def _centred(A: Tensor, keys: Tensor) -> Tensor:
    """`P_j − Σ_l A_il P_l`: (…,i,j,d)."""
    return keys.unsqueeze(-3) - (A @ keys).unsqueeze(-2)


def _with_transpose(half: Tensor) -> Tensor:
    if half.shape[-1] <= _SMALL:
        return half + half.mT
    whole = torch.empty_like(half)
    for transposed, matrix in zip(whole, half, strict=True):
        transposed.copy_(
            matrix.mT
        )  # copies in tiles: twice as fast as `half + half.mT`
    return whole.add_(half)


# The Hessian as the paper writes it: four cases, block by block.
#
# *Unmasking Transformers*, Definitions 4.2 and 4.3: `∇²c_{i₀j₀}` is an n×n grid of d×d
# blocks. The cases depend on which of `i₁`, `i₂` is the query token `i₀`:
#
#     H₁  i₁ = i₀ = i₂       H₂  i₁ = i₀ ≠ i₂       H₃  i₁ ≠ i₀ = i₂       H₄  i₁ ≠ i₀ ≠ i₂
#
# and `∇²L = 2JᵀJ + 2 Σ c_{i₀j₀} ∇²c_{i₀j₀} + 2γI`. With `a` the row of the attention
# map of query `i₀`, `h_l = x_lᵀv` for `v = V_{*,j₀}`, `P_l = Wx_l`, `q = Wᵀx_{i₀} (+
# u)`, and
#
#     N = a∘(h − aᵀh)                  Σ_l a_l h_l, differentiated by the scores once
#     T = diag(N) − aNᵀ − Naᵀ          and twice
#     S = diag(a) − aaᵀ                a, differentiated once
#
# a score has the derivatives `∂s_l/∂x_l = q` and `∂s_l/∂x_{i₀} = P_l`, and its only
# second derivative is `∂²s_l/∂x_{i₀}∂x_l = W`. A block is then the effect of its two
# tokens as keys,
#
#     K(i₁,i₂) = T_{i₁i₂} qqᵀ + S_{i₁i₂} (vqᵀ + qvᵀ)        the diagonals of T and S: i₁ = i₂
#
# and, where one of them is `i₀`, also its effect as a query:
#
#     H₄ = K(i₁,i₂)
#     H₂ = K(i₀,i₂) + F(i₂),   F(l) = (PᵀT)_l qᵀ + (PᵀS)_l vᵀ + N_l W
#     H₃ = H₂ᵀ with i₁ for i₂
#     H₁ = K(i₀,i₀) + F(i₀) + F(i₀)ᵀ + PᵀTP
#
# The paper counts the diagonal of H₄ as a case and H₂ and H₃ as one, which is also
# four. Departures: tokens are rows instead of columns, and the layer may have what
# problem.py adds. A residual connection is linear and has no second derivative. Heads
# are summed. Known entries have zero rows.


def hessian_blocks(problem: Problem, X: Tensor) -> Tensor:
    """`∇²L(X)` of one input (n×d), laid out like `hessian`: (n·d, n·d)."""
    if X.ndim != 2:
        raise InputError(f"expected X of shape n×d, got {tuple(X.shape)}")
    equations, inputs, _ = prepared(problem, X)
    X = inputs[0]
    c = equations.residuals(inputs)[0]
    n, d = X.shape
    grid = X.new_zeros(n, n, d, d)
    for i0 in range(n):
        for j0 in range(problem.outputs):
            grid += 2 * c[i0, j0] * blocks_of(equations, X, i0, j0)
    J = jacobian(problem, X)
    second = as_matrix(grid) + 2 * problem.gamma * torch.eye(
        n * d, dtype=X.dtype, device=X.device
    )
    if equations.free is not None:
        free = equations.free.flatten()
        second = free.unsqueeze(-1) * second * free
    return 2 * J.mT @ J + second


def blocks_of(
    equations: Equations,
    X: Tensor,
    i0: int,
    j0: int,
) -> Tensor:
    """`∇²c_{i₀j₀}` as the paper's grid: [i₁, i₂] is a block, (n, n, d, d)."""
    A = equations.linearised(X.unsqueeze(0)).A[0]
    grid = X.new_zeros(len(X), len(X), X.shape[1], X.shape[1])
    for h, (W, V) in enumerate(zip(equations.W[0], equations.V[0], strict=True)):
        u = None if equations.key_bias is None else equations.key_bias[0, h]
        grid += _blocks_of_head(X, A[h, i0], W, V[:, j0], u, i0)
    return grid


def as_matrix(grid: Tensor) -> Tensor:
    """Turn a grid of blocks (n,n,d,d) into the matrix (n·d, n·d)."""
    n, _, d, _ = grid.shape
    return grid.transpose(1, 2).reshape(n * d, n * d)


def _blocks_of_head(
    X: Tensor,
    a: Tensor,
    W: Tensor,
    v: Tensor,
    u: Tensor | None,
    i0: int,
) -> Tensor:
    n, d = X.shape
    h = X @ v
    P = X @ W.mT
    q = W.mT @ X[i0] if u is None else W.mT @ X[i0] + u
    N = a * (h - a @ h)
    T = torch.diag(N) - torch.outer(a, N) - torch.outer(N, a)
    S = torch.diag(a) - torch.outer(a, a)
    qq = torch.outer(q, q)
    vq = torch.outer(v, q)

    def key(i1: int, i2: int) -> Tensor:
        return T[i1, i2] * qq + S[i1, i2] * (vq + vq.mT)

    def query(l: int) -> Tensor:  # noqa: E741
        return (
            torch.outer(P.mT @ T[:, l], q) + torch.outer(P.mT @ S[:, l], v) + N[l] * W
        )

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
