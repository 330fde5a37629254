"""Solve for the input from the output and the attention maps: linear equations, no search.

*Unmasking Transformers* takes the maps as unknown. With known maps its equation is
linear in X:

    one head:  A X V = B,  X = A⁻¹ B V⁻¹        (V⁺ where V is wide)
    several:   Σ_h A_h X V_h (+ X) = B          nd unknowns

The second is solved as one matrix of Kronecker products up to some thousand unknowns,
and by conjugate gradients on the normal equations for more (`Linear`). If the equations
have full rank, the solution is the only one: the maps remove the ambiguity that the
output alone leaves.

Singular maps (equal tokens, uniform attention, a wide head) leave directions open. But
the maps contain more than these equations use,

    log A = X W Xᵀ (+ X u) + row constants,     quadratic in X (`Scores`)

so Levenberg–Marquardt on both continues from the solution of least norm. The rank of
both equations at its end shows whether directions are still open.

Rounded maps give an inexact X. From there Levenberg–Marquardt on the output alone finds
the last digits. Rounding shows in the sums of the rows. If the rows sum to 1 exactly,
the maps must also be the maps of X, as exactly as the condition allows; otherwise they
belong to another problem.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core import Status, Unsuccessful, mismatch, not_applicable
from keyhole.core.errors import InputError
from keyhole.core.float64 import random_stream
from keyhole.core.least_squares import Point, conjugate_gradients
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import DENSE, Equations
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import SOLVED, Verdict, judge
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.multistart import polished

_AGREE = 1e-9  # maps that differ by less are equal
_ROUNDED = 1e-14  # relative rounding error of an output in float64
_NO_MAP = 0.1  # rows whose sums differ from 1 by more are not those of a softmax


@dataclass(frozen=True, eq=False, repr=False)
class ClosedForm:
    """The direct solution. `maps` (n×n, or H×n×n) replace those of the problem.

    `method` refines X if the maps are rounded.
    """

    maps: Tensor | None = None
    method: LevenbergMarquardt = field(default_factory=LevenbergMarquardt)

    def __repr__(self) -> str:
        return f"ClosedForm(method={self.method!r})"

    def __call__(
        self,
        problem: Problem,
        *,
        progress: Progress = silent,  # noqa: ARG002 - a linear solve has no parts
    ) -> Inversion:
        began = time.perf_counter()
        if self.maps is not None:
            problem = replace(problem, maps=self.maps)
        if problem.maps is None:
            raise InputError(
                "closed-form needs the attention maps: the problem has none"
            )
        n = problem.length
        heads = problem.heads
        maps = problem.maps.to(problem.B.device).reshape(heads, n, n)
        try:
            answer = _Answer(self, problem, maps).best()
        except Unsuccessful as end:
            answer = Inversion(end.status, end.reason)
        return replace(answer, method=repr(self), seconds=time.perf_counter() - began)


class _Answer:
    """The solution of one problem with its maps (H×n×n), judged."""

    def __init__(
        self,
        method: ClosedForm,
        problem: Problem,
        maps: Tensor,
    ) -> None:
        self.method = method
        self.problem = problem
        self.maps = maps
        if problem.fault:
            raise not_applicable(problem.fault)
        self.rounding = float((maps.sum(-1) - 1).abs().max())
        if self.rounding > _NO_MAP or float(maps.min()) < -_NO_MAP:
            reason = f"rows of the maps sum to 1 within {self.rounding:.1e}: no softmax made them"
            raise mismatch(reason)

    def best(self) -> Inversion:
        linear = Linear.of(self.problem, self.maps)
        first, missing = linear.solve()
        X = first
        how = "the only input with this output and these maps"
        if missing is None:
            how = "by conjugate gradients; whether it is the only one was not checked"
        elif missing and X.numel() <= DENSE:
            how = f"the maps are singular; their logarithms fix the {missing} open directions"
            X, missing = fit_scores(self.problem, linear, X)
        if missing:
            how = (
                f"output and maps leave {missing} directions open: X is one of a family"
            )
        X, verdict = self._sharpened(linear, X)
        off = self._off(X)
        slack = _AGREE if off <= _AGREE else self._slack(linear, first)
        if verdict.status in SOLVED and off <= slack:
            status = Status.NOT_IDENTIFIABLE if missing else Status.RECOVERED
            return self._inversion(status, f"{verdict.reason}; {how}", X, verdict)
        if missing is None and not linear.solved_by(X):
            reason = f"{verdict.reason}: conjugate gradients did not converge on maps like these"
            return self._inversion(Status.UNSOLVED, reason, X, verdict)
        if self.rounding <= _AGREE and off > slack:
            also = f", with {missing} directions open" if missing else ""
            reason = (
                "the maps do not belong to this problem: the input computed from them has maps "
                f"that differ by {off:.1e}{also}"
            )
            return self._inversion(Status.MISMATCH, reason, X, verdict)
        return self._refined(linear, X, verdict, slack)

    def _sharpened(self, linear: Linear, X: Tensor) -> tuple[Tensor, Verdict]:
        """Improve an X that is not exact: by the logarithms of the maps, then by Newton steps.

        The Newton steps come last, because the equations of the output alone are the
        worst conditioned.
        """
        verdict = judge(self.problem, X, unique=True)
        if (
            verdict.status not in SOLVED
            and self.rounding <= _AGREE
            and X.numel() <= DENSE
        ):
            X = fit_scores(self.problem, linear, X, restarts=0)[0]
            verdict = judge(self.problem, X, unique=True)
        if verdict.status not in SOLVED:
            X = polished(Equations.of(self.problem), X)
            verdict = judge(self.problem, X, unique=True)
        return X, verdict

    def _refined(
        self,
        linear: Linear,
        X: Tensor,
        verdict: Verdict,
        slack: float,
    ) -> Inversion:
        """Continue from X by Levenberg–Marquardt on the output, because the maps may be rounded."""
        ends: list[str] = []
        for begin in (
            lambda: X,
            lambda: fit_scores(self.problem, linear, X, restarts=0)[0],
        ):
            if ends and X.numel() > DENSE:
                break
            refined = self.method.method(self.problem, start=begin())
            ends.append(refined.reason)
            if refined.X is None or refined.status not in SOLVED:
                continue
            off = self._off(refined.X)
            if off <= slack + 10 * self.rounding:
                also = (
                    f"continued from the closed form; its maps are within {off:.1e} of those "
                    "given"
                )
                return replace(refined, reason=f"{refined.reason}; {also}")
            ends[-1] = (
                f"an input with this output, but with maps that differ by {off:.1e}"
            )
        reason = (
            f"{verdict.reason} from maps whose rows sum to 1 within {self.rounding:.1e}; "
            f"Levenberg–Marquardt from there: {ends[-1]}; the maps are too coarse or foreign"
        )
        status = Status.UNSOLVED if verdict.status in SOLVED else verdict.status
        return self._inversion(status, reason, X, verdict)

    def _off(self, X: Tensor) -> float:
        """Return the largest difference between the maps of X and those that leaked."""
        maps = self.problem.maps_of(X).reshape(self.maps.shape)
        return float((maps - self.maps).abs().max())

    def _slack(self, linear: Linear, X: Tensor) -> float:
        """Return ten times the change of the maps when B changes within its tolerance."""
        stream = random_stream(0)
        signs = torch.randint(0, 2, linear.B.shape, generator=stream).to(X) * 2 - 1
        size = max(self.problem.tolerance, _ROUNDED * float(linear.B.abs().max()))
        moved = replace(linear, B=linear.B + size * signs).solve()[0]
        return _AGREE + 10 * float(
            (self.problem.maps_of(moved) - self.problem.maps_of(X)).abs().max()
        )

    def _inversion(
        self,
        status: Status,
        reason: str,
        X: Tensor,
        verdict: Verdict,
    ) -> Inversion:
        exact = status in SOLVED
        return Inversion(
            status=status,
            reason=reason,
            X=X,
            residual=verdict.residual,
            solutions=(X,) if exact else (),
            condition=verdict.condition,
        )


_FACTORISED = 8192  # unknowns up to which a factorisation is affordable
_ITERATIONS = 5000  # of conjugate gradients
_DEPENDENT = 1e-10  # relative size of a pivot or singular value that counts as zero
_OPEN = 1e-9  # the same, at an X that may be slightly off a solution
_STEPS = 100  # of Levenberg–Marquardt on the scores
_FITS = 1e-24  # loss relative to the square of the output


@dataclass(frozen=True, eq=False)
class Linear:
    """`Σ_h A_h X V_h (+ X) = B` with maps (H×n×n), values (H×d×m), and known entries `fixed`."""

    maps: Tensor
    V: Tensor
    B: Tensor
    fixed: Tensor | None
    residual: bool

    @classmethod
    def of(cls, problem: Problem, maps: Tensor) -> Linear:
        V = problem.V.reshape(-1, problem.dim, problem.outputs)
        return cls(maps, V, problem.unbiased, problem.known, problem.residual)

    @property
    def shape(self) -> tuple[int, int]:
        return self.B.shape[0], self.V.shape[1]

    def solve(self) -> tuple[Tensor, int | None]:
        """Return the least-squares X of least norm, and the number of directions left open.

        The number is None if there are too many unknowns for a factorisation.
        """
        n, d = self.shape
        if len(self.maps) == 1 and not self.residual and self.fixed is None:
            half, open_tokens = _least_norm(self.maps[0], self.B)
            X, open_entries = _least_norm(self.V[0].mT, half.mT)
            return X.mT, n * d - (n - open_tokens) * (d - open_entries)
        if n * d <= _FACTORISED:
            return self._dense()
        return (self._conjugate_gradients(), None)

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
        if self.residual:
            return K + torch.eye(n * d, dtype=K.dtype, device=K.device)
        return K

    def _start(self) -> tuple[Tensor, Tensor]:
        """Return the known entries, with zeros for the others, and which entries are free."""
        n, d = self.shape
        if self.fixed is None:
            return self.B.new_zeros(n, d), torch.ones(
                n, d, dtype=torch.bool, device=self.B.device
            )
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
        """Solve the normal equations. X is judged later, so stopping early does no harm."""
        X, free = self._start()

        def forward(p: Tensor) -> Tensor:
            return self.apply(p.view_as(X)).view(1, -1)

        def backward(r: Tensor) -> Tensor:
            return (self.transposed(r.view_as(self.B)) * free).view(1, -1)

        r = (self.apply(X) - self.B).view(1, -1)
        rtol = torch.finfo(X.dtype).eps
        step = conjugate_gradients(
            forward, backward, r, rtol=rtol, max_steps=_ITERATIONS
        )
        return X + step.view_as(X)


def _least_norm(K: Tensor, B: Tensor) -> tuple[Tensor, int]:
    """Return the least-squares solution of `KX = B` of least norm, and K's rank deficiency."""
    columns = B.reshape(len(B), -1)
    X = _determined(K, columns)
    if X is not None:
        return X.reshape(-1, *B.shape[1:]), 0
    left, sizes, right = torch.linalg.svd(K, full_matrices=False)
    rank = int((sizes > _DEPENDENT * sizes[0]).sum())
    inside = left[:, :rank].mT @ columns / sizes[:rank, None]
    return (right[:rank].mT @ inside).reshape(-1, *B.shape[1:]), K.shape[1] - rank


def _determined(K: Tensor, columns: Tensor) -> Tensor | None:
    """Solve by LU or QR, or return None if a small pivot leaves the rank in doubt."""
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
    """The linear equations and those of the scores, `X W_h Xᵀ + X u_h = log A_h + row constants`.

    The residuals of the scores are weighted with the maps: `A ⊙ (D − Σ_k A_ik D_ik)`
    for `D = S(X) − log A`, the effect of a difference in scores on the map. So row
    constants cancel, and entries that a mask or rounding set to 0 do not count.
    """

    problem: Problem
    linear: Linear

    @property
    def B(self) -> Tensor:  # noqa: N802 - the paper's name
        return self.linear.B.unsqueeze(0)

    def select(self, rows: Tensor) -> Scores:  # noqa: ARG002 - the same for every row
        return self

    def residuals(self, X: Tensor) -> Tensor:
        """(K,) for one input (n,d)."""
        problem = self.problem
        A = self.linear.maps
        D = attention.scores(X, X, problem.W, key_bias=problem.key_bias)
        D = D.reshape(A.shape) - torch.where(A > 0, A, 1.0).log()
        off = self.linear.apply(X) - self.linear.B
        weighted = A * D
        weighted = weighted - A * weighted.sum(2, keepdim=True)
        return torch.cat([off.flatten(), weighted.flatten()])

    def jacobian(self, X: Tensor) -> Tensor:
        """(K, n·d); columns of known entries are zero."""
        J: Tensor = torch.func.jacrev(self.residuals)(X)
        J = J.flatten(1)
        fixed = self.linear.fixed
        return J if fixed is None else J * fixed.isnan().flatten().to(J.dtype)

    def point(self, X: Tensor) -> Point:
        """One input, as a batch (1,n,d)."""
        return Point(X, self.residuals(X[0])[None], lambda: self.jacobian(X[0])[None])


def fit_scores(
    problem: Problem,
    linear: Linear,
    X: Tensor,
    restarts: int = 8,
) -> tuple[Tensor, int]:
    """Search from X and random points around it. Return the best, and its open directions."""
    scores = Scores(problem, linear)
    method = LevenbergMarquardt(steps=_STEPS)
    stream = random_stream(0)
    spread = float(X.square().mean().sqrt())
    start = X
    best = X
    least = torch.inf
    for _ in range(1 + restarts):
        end, loss = method.descend(scores, start.unsqueeze(0))
        if float(loss) < least:
            best = end[0]
            least = float(loss)
        if least <= _FITS * float(linear.B.square().sum()):
            break
        noise = torch.randn(X.shape, generator=stream, dtype=X.dtype).to(X.device)
        start = X + spread * (
            noise if linear.fixed is None else noise * linear.fixed.isnan()
        )
    J = scores.jacobian(best)
    J = J if linear.fixed is None else J[:, linear.fixed.isnan().flatten()]
    sizes = torch.linalg.svdvals(J)
    return best, J.shape[1] - int((sizes > _OPEN * sizes[0]).sum())
