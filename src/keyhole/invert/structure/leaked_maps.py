"""What leaked attention maps say about X: equations linear in X, and equations for its scores.

    Σ_h A_h X V_h (+ X) = B                                  `Linear`
    X W_h Xᵀ + X u_h = log A_h + row constants               `fit_scores`

closed_form.py makes an attack of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole import attention
from keyhole.invert.problem import Problem

_ONE_FACTOR = 8192  # unknowns up to which a single factorisation is affordable
_ITERATIONS = 5000
_DEPENDENT = 1e-10
_OPEN = 1e-9  # singular values of what may not be quite a solution
_ROUNDS = 100
_LEAST = 1e-15
_GAVE_UP = 1e12
_FITS = 1e-24  # loss relative to the output's square


@dataclass(frozen=True, eq=False)
class Linear:
    """`Σ_h A_h X V_h (+ X) = B` with maps (H×n×n), values (H×d×m), and what is known of X."""

    maps: Tensor
    V: Tensor
    B: Tensor
    fixed: Tensor | None
    residual: bool

    @classmethod
    def of(cls, problem: Problem, maps: Tensor) -> Linear:
        B = problem.B if problem.output_bias is None else problem.B - problem.output_bias
        V = problem.V.reshape(-1, problem.dim, problem.outputs)
        return cls(maps, V, B, problem.known, problem.residual)

    @property
    def shape(self) -> tuple[int, int]:
        return self.B.shape[0], self.V.shape[1]

    def solve(self) -> tuple[Tensor, int | None]:
        """X of least norm that comes nearest to B, and in how many directions it may move.

        None where that was not looked at: too many unknowns for a factorisation.
        """
        n, d = self.shape
        if len(self.maps) == 1 and not self.residual and self.fixed is None:
            half, open_tokens = _least_norm(self.maps[0], self.B)
            X, open_entries = _least_norm(self.V[0].mT, half.mT)
            return X.mT, n * d - (n - open_tokens) * (d - open_entries)
        return self._dense() if n * d <= _ONE_FACTOR else (self._conjugate_gradients(), None)

    def apply(self, X: Tensor) -> Tensor:
        out = (self.maps @ X @ self.V).sum(0)
        return out + X if self.residual else out

    def solved_by(self, X: Tensor) -> bool:
        off = (self.apply(X) - self.B).abs().max()
        return bool(off <= _OPEN * self.B.abs().max())

    def transposed(self, R: Tensor) -> Tensor:
        out = (self.maps.mT @ R @ self.V.mT).sum(0)
        return out + R if self.residual else out

    def matrix(self) -> Tensor:
        """nm×nd, for X row by row."""
        n, d = self.shape
        K = torch.einsum("hij,hdm->imjd", self.maps, self.V).reshape(-1, n * d)
        return K + torch.eye(n * d, dtype=K.dtype, device=K.device) if self.residual else K

    def _start(self) -> tuple[Tensor, Tensor]:
        """The known entries with zeros for the others, and which are free."""
        n, d = self.shape
        if self.fixed is None:
            return self.B.new_zeros(n, d), torch.ones(n, d, dtype=torch.bool, device=self.B.device)
        return self.fixed.nan_to_num(nan=0.0), self.fixed.isnan()

    def _dense(self) -> tuple[Tensor, int]:
        X, free = self._start()
        if not free.any():
            return X, 0
        K = self.matrix()[:, free.flatten()]
        r = (self.B - self.apply(X)).flatten()
        X[free], missing = _least_norm(K, r)
        return X, missing

    def _conjugate_gradients(self) -> Tensor:
        """On the normal equations; X is judged, so that stopping early can do no harm."""
        X, free = self._start()
        r = self.B - self.apply(X)
        s = self.transposed(r) * free
        p, size = s, s.square().sum()
        enough = torch.finfo(s.dtype).eps ** 2 * size
        for _ in range(_ITERATIONS):
            if not bool(size > enough):
                break
            q = self.apply(p)
            alpha = size / q.square().sum()
            X, r = X + alpha * p, r - alpha * q
            s = self.transposed(r) * free
            before, size = size, s.square().sum()
            p = s + size / before * p
        return X


def _least_norm(K: Tensor, B: Tensor) -> tuple[Tensor, int]:
    """The least of all X nearest to `KX = B`, and the number of columns that K leaves open."""
    columns = B.reshape(len(B), -1)
    X = _determined(K, columns)
    if X is not None:
        return X.reshape(-1, *B.shape[1:]), 0
    left, sizes, right = torch.linalg.svd(K, full_matrices=False)
    rank = int((sizes > _DEPENDENT * sizes[0]).sum())
    inside = left[:, :rank].mT @ columns / sizes[:rank, None]
    return (right[:rank].mT @ inside).reshape(-1, *B.shape[1:]), K.shape[1] - rank


def _determined(K: Tensor, columns: Tensor) -> Tensor | None:
    """The one solution by LU or QR, if their pivots leave no doubt that there is one."""
    if K.shape[0] < K.shape[1]:
        return None
    if K.shape[0] == K.shape[1]:
        factors, order, _ = torch.linalg.lu_factor_ex(K)
        if not _regular(factors):
            return None
        X = torch.linalg.lu_solve(factors, order, columns)
        return X + torch.linalg.lu_solve(factors, order, columns - K @ X)
    Q, R = torch.linalg.qr(K)
    if not _regular(R):
        return None
    return torch.linalg.solve_triangular(R, Q.mT @ columns, upper=True)


def _regular(triangle: Tensor) -> bool:
    pivots = triangle.diagonal().abs()
    return bool(pivots.min() > _DEPENDENT * pivots.max())


@dataclass(frozen=True, eq=False)
class Scores:
    """Both kinds of equations together, least squares in X.

    The scores' are weighted with the maps, `A ⊙ (D − Σ_k A_ik D_ik)` for `D = S(X) − log A`: what
    a difference in scores does to the map. So constants of a row drop out, and so do entries
    that a mask or rounding made 0.
    """

    problem: Problem
    linear: Linear

    def residuals(self, X: Tensor) -> Tensor:
        problem, A = self.problem, self.linear.maps
        D = attention.scores(X, X, problem.W, key_bias=problem.key_bias).reshape(A.shape)
        D = D - torch.where(A > 0, A, 1.0).log()
        return torch.cat(
            [(self.linear.apply(X) - self.linear.B).flatten(), _weighed(A, D).flatten()]
        )

    def jacobian(self, X: Tensor) -> Tensor:
        """Columns of free entries only."""
        A, (n, d) = self.linear.maps, X.shape
        W = self.problem.W.reshape(-1, d, d)
        queries = X @ W
        if self.problem.key_bias is not None:
            queries = queries + self.problem.key_bias.reshape(-1, 1, d)
        keys = X @ W.mT
        dS = X.new_zeros(len(W), n, n, n, d)  # of the score of key j, query i, by token l
        index = torch.arange(n, device=X.device)
        dS[:, index, :, index] += keys
        dS[:, :, index, index] += queries.unsqueeze(2)
        J = torch.cat([self.linear.matrix(), _weighed(A, dS).reshape(-1, n * d)])
        return J if self.linear.fixed is None else J[:, self.linear.fixed.isnan().flatten()]


def _weighed(A: Tensor, D: Tensor) -> Tensor:
    weights = A.reshape(*A.shape, *(1,) * (D.ndim - A.ndim))
    part = weights * D
    return part - weights * part.sum(2, keepdim=True)


def fit_scores(
    problem: Problem, linear: Linear, X: Tensor, restarts: int = 8
) -> tuple[Tensor, int]:
    """Damped Gauss–Newton from X and a few points about it; the best, and how much stays open."""
    scores = Scores(problem, linear)
    stream = torch.Generator().manual_seed(0)
    spread = float(X.square().mean().sqrt())
    start, best, least = X, X, torch.inf
    for _ in range(1 + restarts):
        end, loss = _descend(scores, start)
        if loss < least:
            best, least = end, loss
        if least <= _FITS * float(linear.B.square().sum()):
            break
        noise = torch.randn(X.shape, generator=stream, dtype=X.dtype).to(X.device)
        start = X + spread * (noise if linear.fixed is None else noise * linear.fixed.isnan())
    J = scores.jacobian(best)
    sizes = torch.linalg.svdvals(J)
    return best, J.shape[1] - int((sizes > _OPEN * sizes[0]).sum())


def _descend(scores: Scores, X: Tensor) -> tuple[Tensor, float]:
    fixed = scores.linear.fixed
    free = torch.ones_like(X, dtype=torch.bool) if fixed is None else fixed.isnan()
    enough = _FITS * float(scores.linear.B.square().sum())
    r = scores.residuals(X)
    loss, damping = float(r.square().sum()), 1e-2
    for _ in range(_ROUNDS):
        J = scores.jacobian(X)
        normal = J.mT @ J
        size = float(normal.diagonal().mean())
        normal.diagonal().add_((_LEAST + damping * min(1.0, loss)) * size)
        factor, info = torch.linalg.cholesky_ex(normal)
        step = torch.cholesky_solve((J.mT @ r).unsqueeze(-1), factor).squeeze(-1)
        ahead = X.clone()
        ahead[free] -= step
        r_ahead = scores.residuals(ahead)
        ahead_loss = float(r_ahead.square().sum())
        if int(info) == 0 and ahead_loss < loss:
            X, r, loss, damping = ahead, r_ahead, ahead_loss, damping / 5
        elif loss <= enough or damping > _GAVE_UP:
            break
        else:
            damping *= 4
    return X, loss
