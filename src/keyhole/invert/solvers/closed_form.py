"""The input from output and attention maps: linear equations, no search.

*Unmasking Transformers* takes the maps as unknown; with them known its equation is

    one head:  A X V = B,  X = A⁻¹ B V⁻¹        (V⁺ where V is wide)
    several:   Σ_h A_h X V_h (+ X) = B          linear in the nd entries of X

The second is solved as one matrix of Kronecker products up to some thousand unknowns, by conjugate
gradients on the normal equations beyond (`Linear`). A solution of full rank is the only one:
maps take away the ambiguity that the output alone leaves (inversion.py).

Maps that are singular (equal tokens, uniform attention, a wide head) leave directions open. But
they say more than the equations use: `log A = X W Xᵀ (+ X u) + row constants`, quadratic in X. So
Levenberg–Marquardt on both goes on from the solution of least norm, and the rank of both at its end
tells whether the freedom is gone.

Maps that were rounded on the way give an X that is as inexact; from there Levenberg–Marquardt on
the output alone finds the last digits. Rounding shows in the sums of the rows, so rows that sum to
1 exactly must also be the maps of X, as exactly as the condition allows: otherwise they are not
maps of this problem.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import DENSE, Equations
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import Verdict, judge
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.multistart import polished

_AGREE = 1e-9  # maps this close are the same
_ROUNDED = 1e-14  # of an output in float64, after the sums it is made of
_NO_MAP = 0.1  # rows that miss 1 by more were never a softmax
_SOLVED = (Status.RECOVERED, Status.NOT_IDENTIFIABLE)


@dataclass(frozen=True, eq=False, repr=False)
class ClosedForm:
    """`maps` (n×n, or H×n×n for several heads) where the problem does not hold them itself."""

    maps: Tensor | None = None
    method: LevenbergMarquardt = field(default_factory=LevenbergMarquardt)  # for the last digits

    def __repr__(self) -> str:
        return f"ClosedForm(method={self.method!r})"

    def __call__(
        self,
        problem: Problem,
        *,
        progress: Progress = silent,  # noqa: ARG002 - one linear solve has no parts
    ) -> Inversion:
        began = time.perf_counter()
        maps = self._checked(problem)
        try:
            answer = _Answer(self, problem, maps).best()
        except Unsuccessful as end:
            answer = Inversion(end.status, end.reason)
        return replace(answer, method=repr(self), seconds=time.perf_counter() - began)

    def _checked(self, problem: Problem) -> Tensor:
        if self.maps is not None:
            problem = replace(problem, maps=self.maps)  # which checks the shape
        if problem.maps is None:
            raise InputError("closed-form needs the attention maps: the problem has none")
        n, heads = problem.length, problem.heads
        return problem.maps.to(problem.B.device).reshape(heads, n, n)


class _Answer:
    """One problem with its maps (H×n×n), from the linear solution to the judge."""

    def __init__(self, method: ClosedForm, problem: Problem, maps: Tensor) -> None:
        self.method, self.problem, self.maps = method, problem, maps
        if problem.fault:
            raise Unsuccessful(Status.NOT_APPLICABLE, problem.fault)
        wrong = int((~maps.isfinite()).sum())
        if wrong:
            reason = f"maps holds {wrong} NaN or infinite numbers"
            raise Unsuccessful(Status.NOT_APPLICABLE, reason)
        self.rounding = float((maps.sum(-1) - 1).abs().max())
        if self.rounding > _NO_MAP or float(maps.min()) < -_NO_MAP:
            reason = f"rows of the maps sum to 1 within {self.rounding:.1e}: no softmax made them"
            raise Unsuccessful(Status.MISMATCH, reason)

    def best(self) -> Inversion:
        linear = Linear.of(self.problem, self.maps)
        first, missing = linear.solve()
        X = first
        how = "the only input with this output and these maps"
        if missing is None:
            how = "by conjugate gradients; whether it is the only one was not looked at"
        elif missing and X.numel() <= DENSE:
            given = missing
            X, missing = fit_scores(self.problem, linear, X)
            how = f"the maps are singular and leave {given} directions open, their logarithms none"
        if missing:
            how = f"output and maps leave {missing} directions open: X is one of a family"
        X, verdict = self._sharpened(linear, X)
        off = self._off(X)
        slack = _AGREE if off <= _AGREE else self._slack(linear, first)
        if verdict.status in _SOLVED and off <= slack:
            status = Status.NOT_IDENTIFIABLE if missing else Status.RECOVERED
            return self._inversion(status, f"{verdict.reason}; {how}", X, verdict)
        if missing is None and not linear.solved_by(X):
            reason = f"{verdict.reason}: conjugate gradients did not converge on maps like these"
            return self._inversion(Status.UNSOLVED, reason, X, verdict)
        if self.rounding <= _AGREE and off > slack:
            also = f", with {missing} directions open" if missing else ""
            reason = (
                f"the maps do not belong to this problem: the input that they lead to has maps "
                f"{off:.1e} away from them{also}"
            )
            return self._inversion(Status.MISMATCH, reason, X, verdict)
        return self._refined(linear, X, verdict, slack)

    def _sharpened(self, linear: Linear, X: Tensor) -> tuple[Tensor, Verdict]:
        """X as it is if exact; else with the logarithms of the maps, else by Newton on the output.

        The equations of the output alone are the worst conditioned of all.
        """
        verdict = judge(self.problem, X, unique=True)
        if verdict.status not in _SOLVED and self.rounding <= _AGREE and X.numel() <= DENSE:
            X = fit_scores(self.problem, linear, X, restarts=0)[0]
            verdict = judge(self.problem, X, unique=True)
        if verdict.status not in _SOLVED:
            X = polished(Equations.of(self.problem), X)
            verdict = judge(self.problem, X, unique=True)
        return X, verdict

    def _refined(self, linear: Linear, X: Tensor, verdict: Verdict, slack: float) -> Inversion:
        """Levenberg–Marquardt on the output from where the maps lead: they may be rounded."""
        ends: list[str] = []
        for begin in (lambda: X, lambda: fit_scores(self.problem, linear, X, restarts=0)[0]):
            if ends and X.numel() > DENSE:
                break
            refined = self.method.method(self.problem, start=begin())
            ends.append(refined.reason)
            if refined.X is None or refined.status not in _SOLVED:
                continue
            off = self._off(refined.X)
            if off <= slack + 10 * self.rounding:
                also = f"from where the maps lead, whose own are within {off:.1e} of them"
                return replace(refined, reason=f"{refined.reason}; {also}")
            ends[-1] = f"an input with this output, but with maps {off:.1e} away"
        reason = (
            f"{verdict.reason} from maps whose rows sum to 1 within {self.rounding:.1e}; "
            f"Levenberg–Marquardt from there: {ends[-1]}; the maps are too coarse or foreign"
        )
        status = Status.UNSOLVED if verdict.status in _SOLVED else verdict.status
        return self._inversion(status, reason, X, verdict)

    def _off(self, X: Tensor) -> float:
        """How far the maps of X are from those that leaked."""
        maps = self.problem.maps_of(X).reshape(self.maps.shape)
        return float((maps - self.maps).abs().max())

    def _slack(self, linear: Linear, X: Tensor) -> float:
        """How far maps may be off: ten times what B within its tolerance does to its solution X."""
        stream = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, linear.B.shape, generator=stream).to(X) * 2 - 1
        size = max(self.problem.tolerance, _ROUNDED * float(linear.B.abs().max()))
        moved = replace(linear, B=linear.B + size * signs).solve()[0]
        return _AGREE + 10 * float(
            (self.problem.maps_of(moved) - self.problem.maps_of(X)).abs().max()
        )

    def _inversion(self, status: Status, reason: str, X: Tensor, verdict: Verdict) -> Inversion:
        exact = status in _SOLVED
        return Inversion(
            status=status,
            reason=reason,
            X=X,
            residual=verdict.residual,
            solutions=(X,) if exact else (),
            condition=verdict.condition,
        )


# What leaked attention maps say about X: equations linear in X, and equations for its scores.
#
#     Σ_h A_h X V_h (+ X) = B                                  `Linear`
#     X W_h Xᵀ + X u_h = log A_h + row constants               `fit_scores`

_ONE_FACTOR = 8192  # unknowns up to which a single factorisation is affordable
_ITERATIONS = 5000
_DEPENDENT = 1e-10
_OPEN = 1e-9  # singular values of what may not be quite a solution
_ROUNDS = 100
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
        V = problem.V.reshape(-1, problem.dim, problem.outputs)
        return cls(maps, V, problem.unbiased, problem.known, problem.residual)

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
    gamma: float = 0.0

    @property
    def B(self) -> Tensor:  # noqa: N802 - the paper's name
        return self.linear.B.unsqueeze(0)

    @property
    def fixed(self) -> Tensor | None:
        return None if self.linear.fixed is None else self.linear.fixed.unsqueeze(0)

    def select(self, rows: Tensor) -> Scores:  # noqa: ARG002 - one problem serves every row
        return self

    def loss_of(self, r: Tensor, X: Tensor) -> Tensor:  # noqa: ARG002 - there is no γ
        return r.square().sum((-2, -1))

    def residuals(self, X: Tensor) -> Tensor:
        """(1,1,K) for one input (1,n,d)."""
        X, problem, A = X[0], self.problem, self.linear.maps
        D = attention.scores(X, X, problem.W, key_bias=problem.key_bias).reshape(A.shape)
        D = D - torch.where(A > 0, A, 1.0).log()
        off = self.linear.apply(X) - self.linear.B
        return torch.cat([off.flatten(), _weighed(A, D).flatten()]).view(1, 1, -1)

    def jacobian(self, X: Tensor) -> Tensor:
        """(1, K, n·d); columns of known entries are zero."""
        J: Tensor = torch.func.jacrev(self.residuals)(X)
        J, fixed = J.reshape(1, -1, X.numel()), self.linear.fixed
        return J if fixed is None else J * fixed.isnan().flatten().to(J.dtype)


def _weighed(A: Tensor, D: Tensor) -> Tensor:
    weights = A.reshape(*A.shape, *(1,) * (D.ndim - A.ndim))
    part = weights * D
    return part - weights * part.sum(2, keepdim=True)


def fit_scores(
    problem: Problem, linear: Linear, X: Tensor, restarts: int = 8
) -> tuple[Tensor, int]:
    """Levenberg–Marquardt from X and a few points about it; the best, and how much stays open."""
    scores, method = Scores(problem, linear), LevenbergMarquardt(steps=_ROUNDS)
    stream = torch.Generator().manual_seed(0)
    spread = float(X.square().mean().sqrt())
    start, best, least = X, X, torch.inf
    for _ in range(1 + restarts):
        end, loss = method.descend(scores, start.unsqueeze(0))
        if float(loss) < least:
            best, least = end[0], float(loss)
        if least <= _FITS * float(linear.B.square().sum()):
            break
        noise = torch.randn(X.shape, generator=stream, dtype=X.dtype).to(X.device)
        start = X + spread * (noise if linear.fixed is None else noise * linear.fixed.isnan())
    J = scores.jacobian(best.unsqueeze(0))[0]
    J = J if linear.fixed is None else J[:, linear.fixed.isnan().flatten()]
    sizes = torch.linalg.svdvals(J)
    return best, J.shape[1] - int((sizes > _OPEN * sizes[0]).sum())
