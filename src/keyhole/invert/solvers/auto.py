"""Choose the method by the problem's structure, and say in the result which one it was.

    attention maps leaked      linear equations             ClosedForm
    a causal mask              triangular equations         TokenByToken
    a residual connection      the output is near X         LevenbergMarquardt from the output
    otherwise                  the mean field is near X     LevenbergMarquardt from a few starts,
                                                            along the curve from the
                                                            mean field
                                                            (continuation.py), from all
                                                            starts

NewtonCG replaces LevenbergMarquardt for problems whose matrices are too large.
Attention without a residual connection usually has several exact inputs with the same
output, so the search continues after the first until the starts (or `solutions`, or
`seconds`) are used up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.progress import Progress, silent
from keyhole.invert.derivatives.equations import DENSE
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import distinct
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.closed_form import ClosedForm
from keyhole.invert.solvers.continuation import solutions_along_the_curve
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.newton_cg import NewtonCG
from keyhole.invert.solvers.reduce import reduce
from keyhole.invert.solvers.token_by_token import TokenByToken

_FIRST_STARTS = 16  # tried before the curve is followed


@dataclass(frozen=True)
class Auto:
    """Try the methods that suit the problem's structure, the most promising first."""

    starts: int = 256
    steps: int = 400
    seed: int = 0
    solutions: int = 16
    seconds: float | None = None
    device: str = "cpu"

    def __call__(self, problem: Problem, *, progress: Progress = silent) -> Inversion:
        if problem.fault:
            return Inversion(Status.NOT_APPLICABLE, problem.fault, repr(self))
        began = time.perf_counter()
        result: Inversion | None = None
        try:
            for name, attempt in self._attempts(problem, began, progress):
                attempt = replace(attempt, reason=f"{attempt.reason} ({name})")
                result = attempt if result is None else _joined(result, attempt)
                stopped = (Status.NOT_APPLICABLE, Status.INTERRUPTED, Status.MISMATCH)
                if (
                    attempt.status in stopped
                    or len(result.solutions) >= self.solutions
                    or self._left(began) == 0
                ):
                    break
        except KeyboardInterrupt:  # came between two searches, which handle their own
            if result is None:
                result = Inversion(Status.INTERRUPTED, "stopped before a start")
            elif not result.solutions:
                result = replace(result, status=Status.INTERRUPTED)
        if result is None:
            raise AssertionError  # there is at least one attempt
        return replace(result, method=repr(self), seconds=time.perf_counter() - began)

    def _attempts(
        self,
        problem: Problem,
        began: float,
        progress: Progress,
    ) -> Iterator[tuple[str, Inversion]]:
        """Yield each attempt with the name of its method."""
        if problem.maps is not None:
            finish = LevenbergMarquardt(seed=self.seed, seconds=self._left(began))
            solved = ClosedForm(method=finish)(problem)
            yield "closed form, from the attention maps", solved
            return
        if problem.causal:
            method = TokenByToken(seed=self.seed, seconds=self._left(began))
            sweep = method(problem, progress=progress)
            yield "token by token, because the mask is causal", sweep
            if sweep.solutions:
                return
        unknowns = problem.length * problem.dim
        solver = LevenbergMarquardt if unknowns <= DENSE else NewtonCG
        search = solver(
            starts=min(_FIRST_STARTS, self.starts),
            steps=self.steps,
            seed=self.seed,
            device=self.device,
            solutions=1,
            seconds=self._left(began),
        )
        name = "Levenberg–Marquardt" if unknowns <= DENSE else "Newton–CG"
        if problem.residual:  # the first start is the output
            near = replace(search, starts=1)(problem, progress=progress)
            yield f"{name} from the output, because of the residual connection", near
            if near.solutions:
                return
        first = search(problem, progress=progress)
        yield f"{name} from the mean field", first
        if first.X is None:
            return
        if not first.solutions and unknowns <= DENSE:
            curve = self._along_the_curve(problem, began)
            if curve is not None:
                yield "along the curve from the mean field", curve
        rest = replace(
            search,
            starts=self.starts,
            solutions=self.solutions,
            seconds=self._left(began),
        )
        yield f"{name} from {self.starts} starts", rest(problem, progress=progress)

    def _left(self, began: float) -> float | None:
        """Return the remaining seconds, or None if there is no limit."""
        used = time.perf_counter() - began
        return None if self.seconds is None else max(0.0, self.seconds - used)

    def _along_the_curve(self, problem: Problem, began: float) -> Inversion | None:
        """Let a short search polish and judge the exact inputs that the curve crosses."""
        try:
            reduced = reduce(problem)
        except Unsuccessful:
            return None
        crossings: list[Tensor] = []
        for X in solutions_along_the_curve(reduced.problem):
            crossings.append(reduced.restore(X))
            if len(crossings) >= self.solutions or self._left(began) == 0:
                break
        if not crossings:
            return None
        check = LevenbergMarquardt(steps=10, solutions=self.solutions)
        return check(problem, start=torch.stack(crossings))


def _joined(first: Inversion, second: Inversion) -> Inversion:
    """Combine the results of two searches of the same problem."""
    solutions = tuple(distinct([*first.solutions, *second.solutions]))
    if first.solutions:
        better = second if solutions[0] is not first.solutions[0] else first
    else:
        closer = (second.residual or torch.inf) < (first.residual or torch.inf)
        better = second if second.solutions or closer else first
    reason = better.reason
    if len(solutions) > len(better.solutions) > 0:
        reason += f"; {len(solutions)} different inputs have this output"
    return replace(
        better,
        reason=reason,
        solutions=solutions,
        iterations=first.iterations + second.iterations,
        starts=max(first.starts, second.starts),
    )
