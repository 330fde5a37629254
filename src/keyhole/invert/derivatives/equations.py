"""The equations `r(X) = attention(X) − B = 0` of a problem, and their derivatives.

*Unmasking Transformers*, Section 4 (row form). With `h_j = Vᵀx_j`, `C_ij = A_ij (h_j −
o_i)`,

    do_i = Σ_j C_ij (dx_iᵀ W x_j + x_iᵀ W dx_j) + Σ_j A_ij Vᵀ dx_j

and with the residual `c = attention(X) − B` (Definition 1.2 and Section 4.1)

    L(X) = Σ_ij c_ij(X)² + γ‖X‖²,     ∇L = 2Jᵀc + 2γX

In do_i, the first term depends on the query alone (the paper's case i₁ = i₀), and the
other two on every token. Heads are one more axis, over which everything is summed. A
key bias `u` turns `Wᵀx_i` into `Wᵀx_i + u`. Known entries of X are put in first;
derivatives with respect to them are zero.

One parameter is added, the temperature λ of continuation.py: `Ã = U + (softmax(λS) −
U)/λ`, with the uniform map `U`, replaces A. At λ = 1, Ã is A. As λ → 0 it becomes
linear in the scores. The derivatives keep their form, where C is computed from
softmax(λS) and the last term from Ã.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core.errors import InputError
from keyhole.core.least_squares import Point
from keyhole.invert.problem import Problem

# The number of unknowns up to which an nd×nd matrix is factorised: 72 MB, and about a
# second. Larger problems get only products with the Jacobian: no dense steps, no
# polishing by Newton's method, and no check of whether the equations determine X beyond
# counting them.
DENSE = 3000


@dataclass(frozen=True, eq=False)
class Equations:
    """The equations of one problem, for a batch of inputs X (R,n,d).

    `W` is (1,H,d,d), `V` (1,H,d,m), and `B` (1,n,m) without its bias. `fixed` (1,n,d)
    holds the known entries, and NaN for the others. `temperature` is λ.
    """

    W: Tensor
    V: Tensor
    B: Tensor
    key_bias: Tensor | None = None
    fixed: Tensor | None = None
    causal: bool = False
    residual: bool = False
    gamma: float = 0.0
    temperature: float = 1.0

    @classmethod
    def of(
        cls, problem: Problem, device: torch.device | str | None = None
    ) -> Equations:
        device = problem.B.device if device is None else device
        heads = problem.heads
        d = problem.dim
        bias = problem.key_bias
        known = problem.known
        return cls(
            problem.W.to(device).reshape(1, heads, d, d),
            problem.V.to(device).reshape(1, heads, d, -1),
            problem.unbiased.to(device).unsqueeze(0),
            None if bias is None else bias.to(device).reshape(1, heads, d),
            None if known is None else known.to(device).unsqueeze(0),
            problem.causal,
            problem.residual,
            problem.gamma,
        )

    def select(self, rows: Tensor) -> Self:  # noqa: ARG002 - the same for every row
        return self

    @property
    def length(self) -> int:
        return self.B.shape[-2]

    @property
    def dim(self) -> int:
        return self.W.shape[-1]

    @property
    def free(self) -> Tensor | None:
        """1 where an entry of X is unknown, 0 where it is known."""
        return None if self.fixed is None else self.fixed.isnan().to(self.B.dtype)

    def impose(self, X: Tensor) -> Tensor:
        """Return X with the known entries put in."""
        if self.fixed is None:
            return X
        return torch.where(self.fixed.isnan(), X, self.fixed)

    def uniform(self) -> Tensor:
        """The attention map U of equal scores: (n,n)."""
        n = self.length
        return attention.probabilities(self.B.new_zeros(n, n), causal=self.causal)

    def linearised(self, X: Tensor) -> Linearised:
        """Compute the terms from which residuals and derivatives at X are assembled."""
        wide = X.unsqueeze(-3)
        queries = wide @ self.W  # Wᵀx_i (+ u)
        if self.key_bias is not None:
            queries = queries + self.key_bias.unsqueeze(-2)
        scores = self.temperature * queries @ wide.mT
        A = attention.probabilities(scores, causal=self.causal)
        return Linearised(self, X, A, wide @ self.V, queries)

    def residuals(self, X: Tensor) -> Tensor:
        """`attention(X) − B`: (R,n,m)."""
        return self.linearised(X).residuals

    def loss(self, X: Tensor) -> Tensor:
        """`‖r(X)‖² + γ‖X‖²`: (R,)."""
        return self.linearised(X).loss

    def jacobian(self, X: Tensor) -> Tensor:
        return self.linearised(X).jacobian()


@dataclass(frozen=True, eq=False)
class Linearised:
    """The layer at X: its residuals, products with its Jacobian, and the Jacobian itself."""

    equations: Equations
    X: Tensor
    A: Tensor  # softmax(λS), (R,H,n,n)
    H: Tensor  # X V_h, (R,H,n,m)
    queries: Tensor  # Wᵀx_i (+ u)

    @cached_property
    def keys(self) -> Tensor:
        """W x_j: (R,H,n,d)."""
        return self.X.unsqueeze(-3) @ self.equations.W.mT

    @cached_property
    def soft(self) -> Tensor:
        """Ã = U + (A − U)/λ, which is A itself at λ = 1."""
        equations = self.equations
        if equations.temperature == 1.0:
            return self.A
        U = equations.uniform()
        return U + (self.A - U) / equations.temperature

    @cached_property
    def residuals(self) -> Tensor:
        """`attention(X) − B`: (R,n,m)."""
        out = (self.soft @ self.H).sum(-3) - self.equations.B
        return out + self.X if self.equations.residual else out

    @property
    def loss(self) -> Tensor:
        """`L = ‖r(X)‖² + γ‖X‖²`: (R,)."""
        loss = self.residuals.square().sum((-2, -1))
        return loss + self.equations.gamma * self.X.square().sum((-2, -1))

    @property
    def gradient(self) -> Tensor:
        """`∇L = 2Jᵀr + 2γX`: (R,n,d)."""
        slope = self.backward(2 * self.residuals)
        if not self.equations.gamma:
            return slope
        free = 1.0 if self.equations.free is None else self.equations.free
        return slope + 2 * self.equations.gamma * free * self.X

    def forward(self, dX: Tensor) -> Tensor:
        """`J dX`: (R,n,d) to (R,n,m), with n×n numbers of memory for each head."""
        free = self.equations.free
        dX = dX if free is None else dX * free
        wide = dX.unsqueeze(-3)
        dS = wide @ self.keys.mT + self.queries @ wide.mT
        dA = self.A * dS
        dA = dA - self.A * dA.sum(-1, keepdim=True)
        out = (dA @ self.H + self.soft @ (wide @ self.equations.V)).sum(-3)
        return out + dX if self.equations.residual else out

    def backward(self, G: Tensor) -> Tensor:
        """`Jᵀ G`: (R,n,m) to (R,n,d)."""
        wide = G.unsqueeze(-3)
        M = self.A * (wide @ self.H.mT)
        N = M - self.A * M.sum(-1, keepdim=True)
        out = (
            N @ self.keys
            + N.mT @ self.queries
            + self.soft.mT @ (wide @ self.equations.V.mT)
        )
        out = out.sum(-3)
        out = out + G if self.equations.residual else out
        free = self.equations.free
        return out if free is None else out * free

    def jacobian(self) -> Tensor:
        """J as a matrix: (R, n·m, n·d); columns of known entries are zero."""
        R, heads, n, m = self.H.shape
        d = self.keys.shape[-1]
        O = self.A @ self.H  # noqa: E741 - the output's name
        C = self.A.unsqueeze(-1) * (self.H.unsqueeze(-3) - O.unsqueeze(-2))  # R,H,i,j,m
        J = self.H.new_zeros(R, n, m, n, d)
        for h in range(heads):
            # C_il Q_iᵀ + Ã_il Vᵀ; the term of the query itself follows the loop
            J += (
                C[:, h].transpose(-1, -2).unsqueeze(-1)
                * self.queries[:, h, :, None, None, :]
            )
            V = self.equations.V[:, h].mT
            J += self.soft[:, h, :, None, :, None] * V[:, None, :, None, :]
        own = torch.einsum("rhijm,rhjd->rimd", C, self.keys)
        if self.equations.residual:
            own = own + torch.eye(d, dtype=J.dtype, device=J.device)
        index = torch.arange(n, device=J.device)
        J[:, index, :, index, :] += own.transpose(0, 1)
        free = self.equations.free
        J = J if free is None else J * free[:, None, None]
        return J.reshape(R, n * m, n * d)


class OtherEquations(Protocol):
    """Equations of something else than a layer, as of one token of it."""

    @property
    def B(self) -> Tensor: ...  # noqa: N802 - the paper's name

    def point(self, X: Tensor) -> Point:
        """Return the residuals and their Jacobian at a batch of inputs (R,n,d)."""
        ...

    def select(self, rows: Tensor) -> Self:
        """Return the equations of some rows of a batch of inputs."""
        ...


Smooth = Equations | OtherEquations


def loss(problem: Problem, X: Tensor) -> Tensor:
    """`‖attention(X) − B‖² + γ‖X‖²`: (…) for an input (…, n, d)."""
    equations, inputs, lead = prepared(problem, X)
    return equations.loss(inputs).reshape(lead)


def gradient(problem: Problem, X: Tensor) -> Tensor:
    """`∇L(X)`, with the shape of X."""
    equations, inputs, lead = prepared(problem, X)
    slope = equations.linearised(inputs).gradient
    return slope.reshape(*lead, *inputs.shape[1:])


def jacobian(problem: Problem, X: Tensor) -> Tensor:
    """The Jacobian of the residual `c`: (…, n·m, n·d)."""
    equations, inputs, lead = prepared(problem, X)
    J = equations.jacobian(inputs)
    return J.reshape(*lead, *J.shape[1:])


def prepared(problem: Problem, X: Tensor) -> tuple[Equations, Tensor, torch.Size]:
    """Return the equations, X as a batch (R,n,d) with its known entries, and X's batch shape."""
    if X.ndim < 2 or X.shape[-2:] != (problem.length, problem.dim):
        raise InputError(
            f"expected X of shape (…, {problem.length}, {problem.dim}), got {tuple(X.shape)}"
        )
    equations = Equations.of(problem)
    inputs = X.to(equations.B).reshape(-1, problem.length, problem.dim)
    return equations, equations.impose(inputs), X.shape[:-2]
