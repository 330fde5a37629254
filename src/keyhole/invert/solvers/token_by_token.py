"""Invert a causal layer one token after the other: the equations are triangular.

Ours; *Unmasking Transformers* has no mask. Token i sees only tokens ≤ i. So once the
earlier tokens are known, its equation has d unknowns, whatever the length:

    Σ_h softmax(x_iᵀ W_h [x_1 … x_i]) [x_1 … x_i]ᵀ V_h (+ x_i) = b_i

and the first is linear: `x_1 Σ_h V_h (+ x_1) = b_1`. n systems of size d×d replace one
of nd×nd.

A token may have several solutions, and each begins another sequence. A wrong one shows
only when a later token has no solution, so a beam of up to `beam` prefixes is kept.
Prefixes are ranked by their density among the inputs with the same output. For k
Gaussian tokens of unknown size it is

    ‖X‖^−kd / |det J|

where det J comes from the change of variables and is a product over the tokens. This
prefers small inputs, like the paper's γ‖X‖², and inputs where the output is not
sensitive.

The search for a token starts from guesses and then from Gaussians of the size of the
tokens so far. A guess assumes weight a on the token itself and equal weights on the
earlier ones, whose mean is m: `x = (y − (1 − a) m)/a`. a = 1/i is exact for small
scores.

The condition grows with every token, because each is a difference of averages. At n = d
= 16 it may exceed 1e12, and then an output in float64 does not determine all digits of
the input.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core import Status, Unsuccessful, not_applicable
from keyhole.core.float64 import normal, random_stream
from keyhole.core.least_squares import Point
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import SAME, SOLVED, Verdict, distinct, judge
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.multistart import polished
from keyhole.invert.solvers.reduce import Reduced, reduce

_ACCURACY = 1e-14  # relative residual at which a token's search ends
# relative residual of a solution; larger, because the tokens before are inexact too
_EXACT = 1e-10
_OWN_WEIGHTS = (1.0, 0.5, 0.2)  # further values of a, after 1/i
_SPREAD = 1.5  # of the Gaussian starts, relative to the tokens so far


@dataclass(frozen=True)
class TokenByToken:
    """Solve token by token, from left to right, with up to `beam` prefixes at a time.

    If no prefix can be continued, the search has lost the true one. It then begins
    again with twice as many starts, up to `attempts` times in all.
    """

    beam: int = 64
    starts: int = 24
    steps: int = 50
    attempts: int = 3
    seed: int = 0
    seconds: float | None = None

    def __call__(self, problem: Problem, *, progress: Progress = silent) -> Inversion:
        return _Sweep(self, problem, progress).run()


class _Sweep:
    """One run of the method on a problem."""

    def __init__(
        self,
        method: TokenByToken,
        problem: Problem,
        progress: Progress,
    ) -> None:
        self.method = method
        self.problem = problem
        self.progress = progress
        self.began = time.perf_counter()
        self.tried = self.dropped = 0
        self.starts = method.starts  # for the next token of each prefix
        self.stream = random_stream(method.seed)

    def run(self) -> Inversion:
        result = Inversion(Status.UNSOLVED, "no attempt was allowed")
        for _ in range(self.method.attempts):
            try:
                result = self._judged(self._solve())
                break
            except Unsuccessful as end:
                result = Inversion(end.status, end.reason)
                if end.status is not Status.UNSOLVED or self._late():
                    break
                self.starts *= 2
        seconds = time.perf_counter() - self.began
        return replace(
            result, method=repr(self.method), seconds=seconds, starts=self.tried
        )

    def _judged(self, inputs: list[Tensor]) -> Inversion:
        verdicts = [judge(self.problem, X) for X in inputs]
        pairs = list(zip(inputs, verdicts, strict=True))
        solutions = distinct([X for X, verdict in pairs if verdict.status in SOLVED])
        X, verdict = min(pairs, key=lambda pair: _preference(*pair))
        return Inversion(
            status=verdict.status,
            reason=self._reason(verdict, solutions),
            X=X,
            residual=verdict.residual,
            iterations=self.problem.length,
            solutions=tuple(solutions),
            condition=verdict.condition,
        )

    def _late(self) -> bool:
        seconds = self.method.seconds
        return seconds is not None and time.perf_counter() - self.began > seconds

    def _solve(self) -> list[Tensor]:
        _expect_triangular(self.problem)
        self.dropped = 0
        reduced = reduce(self.problem)
        equations = Equations.of(reduced.problem)
        prefixes = equations.B.new_empty(1, 0, equations.dim)
        log_volumes = equations.B.new_zeros(1)
        for i in range(self.problem.length):
            if self._late():
                raise Unsuccessful(Status.UNSOLVED, f"out of time at {self._place(i)}")
            try:
                prefixes, log_volumes = self._extend(
                    reduced, equations, prefixes, log_volumes
                )
                self.progress(
                    i + 1, self.problem.length, f"tokens, {len(prefixes)} prefixes"
                )
            except KeyboardInterrupt:
                raise Unsuccessful(
                    Status.INTERRUPTED, f"stopped at {self._place(i)}"
                ) from None
        return [reduced.restore(polished(equations, X)) for X in prefixes]

    def _extend(
        self,
        reduced: Reduced,
        equations: Equations,
        prefixes: Tensor,
        log_volumes: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Continue each prefix with each solution of the next token; keep the likeliest.

        `log_volumes` holds Σ log|det J| of each prefix.
        """
        token = TokenEquations.after(prefixes, equations)
        x = self._starts(token)
        count, starts = x.shape[:2]
        self.tried += count * starts
        each = token.select(torch.arange(count).repeat_interleave(starts))
        method = LevenbergMarquardt(steps=self.method.steps)
        x, loss = method.descend(each, x.flatten(0, 1).unsqueeze(1), _ACCURACY)
        good = loss.sqrt() <= _EXACT * token.B.norm()
        if self.problem.tolerance:
            good |= self._error(reduced, each.point(x)) <= self.problem.tolerance
        if not good.any():
            raise Unsuccessful(Status.UNSOLVED, self._stuck(token, loss))
        x = x.reshape(count, starts, -1)
        good = good.reshape(count, starts)
        parent, child = first_of_each(x, good).nonzero(as_tuple=True)
        x = x[parent, child].unsqueeze(1)
        longer = torch.cat([prefixes[parent], x], 1)
        log_volumes = log_volumes[parent] + token.select(parent).log_volume(x)
        norms = longer.flatten(1).norm(dim=1)
        order = (longer[0].numel() * norms.log() + log_volumes).argsort()
        self.dropped += max(0, len(order) - self.method.beam)
        order = order[: self.method.beam]
        return longer[order], log_volumes[order]

    def _starts(self, token: TokenEquations) -> Tensor:
        """The starts for the next token of each prefix, (P,R,d): guesses, then Gaussians."""
        before = token.before
        k = token.before.shape[1]
        V = token.V.sum(0)
        if token.residual:
            V = V + torch.eye(len(V), dtype=V.dtype, device=V.device)
        else:
            V = V
        y = (token.B[0] @ torch.linalg.pinv(V)).unsqueeze(0)
        if k == 0:  # linear: one start is enough
            return token.impose(y)
        mean = before.mean(1, keepdim=True)
        size = before.square().mean((1, 2), keepdim=True).sqrt()
        own = y.new_tensor([1 / (k + 1), *_OWN_WEIGHTS]).reshape(1, -1, 1)
        guesses = ((y - (1 - own) * mean) / own)[:, : self.starts]
        shape = (1, max(0, self.starts - guesses.shape[1]), y.shape[-1])
        noise = normal(self.stream, *shape).to(y.device)
        return token.impose(torch.cat([guesses, _SPREAD * size * noise], 1))

    def _error(self, reduced: Reduced, point: Point) -> Tensor:
        """Return the largest entry of a token's residual, as an error in the original B."""
        r = point.residuals
        if reduced.problem is not self.problem:
            r = reduced.restore(r) @ self.problem.V.reshape(self.problem.dim, -1)
        return r.abs().amax(1)

    def _place(self, i: int) -> str:
        return f"token {i + 1} of {self.problem.length}"

    def _stuck(self, token: TokenEquations, loss: Tensor) -> str:
        best = float(loss.min().sqrt() / token.B.norm().clamp(min=1e-300))
        reason = (
            f"no input found for {self._place(token.before.shape[1])}: best residual "
            f"{best:.1e}"
        )
        full = (
            f"; {self.dropped} prefixes had no place in the beam of {self.method.beam}"
        )
        return reason + (full if self.dropped else "")

    def _reason(self, verdict: Verdict, solutions: list[Tensor]) -> str:
        reason = verdict.reason
        if len(solutions) > 1:
            reason += f"; {len(solutions)} different inputs have this output"
        if solutions and self.dropped:
            reason += f"; {self.dropped} prefixes had no place in the beam and may lead to more"
        return reason


def _preference(X: Tensor, verdict: Verdict) -> tuple[int, float]:
    """Sort key: unique inputs, then inputs of a family, then inexact ones; the least norm first."""
    if verdict.status in SOLVED:
        return SOLVED.index(verdict.status), float(X.norm())
    return len(SOLVED), verdict.residual


def _expect_triangular(problem: Problem) -> None:
    reason = problem.fault
    if reason is None and not problem.causal:
        reason = "without a causal mask every token depends on all others"
    elif reason is None and problem.gamma > 0:
        reason = "γ > 0 couples the tokens"
    if reason is not None:
        raise not_applicable(reason)


def first_of_each(x: Tensor, good: Tensor) -> Tensor:
    """Return which of the solutions x (P,R,d) are good and do not repeat an earlier one: (P,R)."""
    same = torch.cdist(x, x) <= SAME * x.norm(dim=-1, keepdim=True)
    same &= good.unsqueeze(-1) & good.unsqueeze(-2)
    return good & ~same.tril(-1).any(-1)


@dataclass(frozen=True, eq=False)
class TokenEquations:
    """The equations of the next token x of a causal layer, after known tokens `before` (R,k,d).

        Σ_h softmax(xᵀ W_h [x_1 … x_k x]) [x_1 … x_k x]ᵀ V_h (+ x) = b

    `W` and `V` are those of the layer, `B` is (1,1,m) and `fixed` (1,1,d). The unknown
    is X (R,1,d). The derivative is that of equations.py where all tokens but the last
    are constant.
    """

    W: Tensor
    V: Tensor
    B: Tensor
    before: Tensor
    keys: Tensor  # W x_j of the tokens before, (R,H,k,d)
    values: Tensor  # x_j V, (R,H,k,m)
    key_bias: Tensor | None = None
    fixed: Tensor | None = None
    residual: bool = False

    @classmethod
    def after(cls, prefixes: Tensor, equations: Equations) -> TokenEquations:
        """The equations of the token that follows prefixes (P,k,d) of a layer's input."""
        k = prefixes.shape[1]
        wide = prefixes.unsqueeze(-3)
        return cls(
            W=equations.W[0],
            V=equations.V[0],
            B=equations.B[:, k : k + 1],
            before=prefixes,
            keys=wide @ equations.W[0].mT,
            values=wide @ equations.V[0],
            key_bias=None if equations.key_bias is None else equations.key_bias[0],
            fixed=None if equations.fixed is None else equations.fixed[:, k : k + 1],
            residual=equations.residual,
        )

    def select(self, rows: Tensor) -> TokenEquations:
        return replace(
            self,
            before=self.before[rows],
            keys=self.keys[rows],
            values=self.values[rows],
        )

    def impose(self, X: Tensor) -> Tensor:
        if self.fixed is None:
            return X
        return torch.where(self.fixed.isnan(), X, self.fixed)

    def point(self, X: Tensor) -> Point:
        """The residuals at X; columns of the Jacobian (R,m,d) of known entries are zero."""
        wide = X.unsqueeze(-3)
        query = wide @ self.W
        if self.key_bias is not None:
            query = query + self.key_bias.unsqueeze(-2)
        tokens = torch.cat([self.before, X], -2).unsqueeze(-3)
        A = attention.probabilities(query @ tokens.mT)  # R,H,1,k+1
        H = torch.cat([self.values, wide @ self.V], -2)  # R,H,k+1,m
        O = A @ H  # noqa: E741 - the output's name
        r = O.sum(-3) - self.B
        if self.residual:
            r = r + X

        def jacobian() -> Tensor:
            C = A.mT * (H - O)
            keys = torch.cat([self.keys, wide @ self.W.mT], -2)
            J = C.mT @ keys + C[..., -1:, :].mT @ query + A[..., -1:] * self.V.mT
            J = J.sum(-3)
            if self.residual:
                J = J + torch.eye(J.shape[-1], dtype=J.dtype, device=J.device)
            return J if self.fixed is None else J * self.fixed.isnan().to(J.dtype)

        return Point(X, r, jacobian)

    def log_volume(self, X: Tensor) -> Tensor:
        """Return log|det J| for each row, or log √det JᵀJ if J of the unknowns is not square."""
        J = self.point(X).jacobian
        if self.fixed is not None:
            J = J[..., self.fixed[0, 0].isnan()]
        return torch.linalg.svdvals(J).clamp(min=1e-300).log().sum(-1)
