"""The equations of one token of a causal layer, everything before it known: d unknowns.

    Σ_h softmax(xᵀ W_h [x_1 … x_k x]) [x_1 … x_k x]ᵀ V_h (+ x) = b

The derivative is that of equations.py with all tokens but the last held still.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole import attention
from keyhole.invert.derivatives.equations import Equations


@dataclass(frozen=True, eq=False)
class TokenEquations:
    """The last row of the equations, for the last token; everything before it is known.

    Weights are those of the layer, `B` is (1,1,m), `before` (R,k,d), `fixed` (1,1,d). The unknown
    is X (R,1,d).
    """

    W: Tensor
    V: Tensor
    B: Tensor
    before: Tensor
    key_bias: Tensor | None = None
    fixed: Tensor | None = None
    residual: bool = False
    gamma: float = 0.0

    @classmethod
    def after(cls, prefixes: Tensor, equations: Equations) -> TokenEquations:
        """Those of the token that follows prefixes (P,k,d), in one layer's equations."""
        k = prefixes.shape[1]
        return cls(
            W=equations.W[0],
            V=equations.V[0],
            B=equations.B[:, k : k + 1],
            before=prefixes,
            key_bias=None if equations.key_bias is None else equations.key_bias[0],
            fixed=None if equations.fixed is None else equations.fixed[:, k : k + 1],
            residual=equations.residual,
        )

    def select(self, rows: Tensor) -> TokenEquations:
        return replace(self, before=self.before[rows])

    def impose(self, X: Tensor) -> Tensor:
        return X if self.fixed is None else torch.where(self.fixed.isnan(), X, self.fixed)

    def residuals(self, X: Tensor) -> Tensor:
        tokens = torch.cat([self.before, X], -2)
        out = attention.output(tokens, self.W, self.V, last=True, key_bias=self.key_bias)
        out = out.unsqueeze(-2) - self.B
        return out + X if self.residual else out

    def loss_of(self, r: Tensor, X: Tensor) -> Tensor:  # noqa: ARG002 - γ is not for this method
        return r.square().sum((-2, -1))

    def linearised(self, X: Tensor) -> TokenJacobian:
        return TokenJacobian(self, X)


@dataclass(frozen=True, eq=False)
class TokenJacobian:
    """The equations near one X."""

    equations: TokenEquations
    X: Tensor

    def jacobian(self) -> Tensor:
        """(R, m, d); columns of known entries are zero."""
        e, X = self.equations, self.X
        tokens = torch.cat([e.before, X], -2)
        A = attention.probabilities(attention.scores(X, tokens, e.W, key_bias=e.key_bias))
        H = torch.einsum("rkd,hdm->rhkm", tokens, e.V)
        C = A.mT * (H - A @ H)  # R,H,k+1,m
        keys = torch.einsum("rkd,hed->rhke", tokens, e.W)
        query = X.unsqueeze(-3) @ e.W
        if e.key_bias is not None:
            query = query + e.key_bias.unsqueeze(-2)
        J = C.mT @ keys + C[..., -1:, :].mT @ query + A[..., -1:] * e.V.mT
        J = J.sum(-3)
        if e.residual:
            J = J + torch.eye(J.shape[-1], dtype=J.dtype, device=J.device)
        return J if e.fixed is None else J * e.fixed.isnan().to(J.dtype)

    def log_volume(self) -> Tensor:
        """log|det J| of each row; of the unknown columns only, and √det JᵀJ if J is not square."""
        J = self.jacobian()
        if self.equations.fixed is not None:
            J = J[..., self.equations.fixed[0, 0].isnan()]
        return torch.linalg.svdvals(J).clamp(min=1e-300).log().sum(-1)
