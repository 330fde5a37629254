"""L-BFGS, a baseline: Nocedal 1980 (core/lbfgs.py), batched over the starts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from keyhole.core import lbfgs
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.solvers.multistart import Solver

_FIRST = 1.0  # length of the first step


@dataclass(frozen=True)
class LBFGS(Solver[lbfgs.LBFGS]):
    """A quasi-Newton method with limited memory, from many starts at once."""

    starts: int = 64
    steps: int = 2000
    memory: int = 20

    def begin(self, equations: Equations, X: Tensor) -> lbfgs.LBFGS:
        state = lbfgs.LBFGS.begin(X.flatten(1), _FIRST, self.memory)
        return self.step(equations, state)

    def step(self, equations: Equations, state: lbfgs.LBFGS) -> lbfgs.LBFGS:
        def objective(x: Tensor) -> tuple[Tensor, Tensor]:
            layer = equations.linearised(x.unflatten(1, (equations.length, -1)))
            return layer.loss, layer.gradient.flatten(1)

        return state.step(objective)
