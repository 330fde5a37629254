"""The input from output and attention maps: linear equations, no search.

*Unmasking Transformers* takes the maps as unknown; with them known its equation is

    one head:  A X V = B,  X = A⁻¹ B V⁻¹        (V⁺ where V is wide)
    several:   Σ_h A_h X V_h (+ X) = B          linear in the nd entries of X

The second is solved as one matrix of Kronecker products up to some thousand unknowns, by conjugate
gradients on the normal equations beyond (leaked_maps.py). A solution of full rank is the only one:
maps take away the ambiguity that the output alone leaves (inversion.py).

Maps that are singular (equal tokens, uniform attention, a wide head) leave directions open. But
they say more than the equations use: `log A = X W Xᵀ (+ X u) + row constants`, quadratic in X. So
Gauss–Newton on both goes on from the solution of least norm, and the rank of both together at its
end tells whether the freedom is gone.

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

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import DENSE, Equations
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import Verdict, judge
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.multistart import polished
from keyhole.invert.structure.leaked_maps import Linear, fit_scores

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
            answer = Inversion(end.status, end.reason, "", None, None, 0, 0.0)
        return replace(answer, method=repr(self), seconds=time.perf_counter() - began)

    def _checked(self, problem: Problem) -> Tensor:
        if self.maps is not None:
            problem = replace(problem, maps=self.maps)  # which checks the shape
        if problem.maps is None:
            raise InputError("expected attention maps in the problem, got none")
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
            reason = f"expected finite numbers in maps, got {wrong} NaN or infinite"
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
            X = polished(Equations.of([self.problem]), X)
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
            method="",
            X=X,
            residual=verdict.residual,
            iterations=0,
            seconds=0.0,
            solutions=(X,) if exact else (),
            condition=verdict.condition,
        )
