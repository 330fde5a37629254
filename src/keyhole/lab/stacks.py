"""Stacks of layers of which only the last output is known: `X_{ℓ+1} = attention_ℓ(X_ℓ)`.

*Unmasking Transformers* inverts one layer, and says in its Section 1 that several
layers are inverted one after the other, from the top: the input of a layer is the
output of the one below. A layer may have several inputs with one output. Peeling keeps
up to `branches` of them, those of least norm first; a wrong one shows when the layer
below cannot have produced it. Errors multiply: a relative error ε in B may become `κ_L
⋯ κ_1 ε` in X, where κ_ℓ is the condition number of layer ℓ at its input. The result's
`condition` is their product.

A stack is a sequence of problems, the first layer first. `B` of the last one is the
known output; `B` of the others is ignored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torch import Tensor

from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import NEARLY, ROUNDING, distinct, judge, residual_of
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.multistart import Solve, polished


def inputs_of(stack: Sequence[Problem], X: Tensor) -> list[Tensor]:
    """Return the input of each layer if the first receives X, and the output of the last."""
    return list(
        accumulate(stack, lambda inputs, layer: layer.output(inputs), initial=X)
    )


@dataclass(frozen=True, eq=False)
class Composed:
    """`layers(X) − B` for a batch of inputs, with its Jacobian by the chain rule."""

    layers: tuple[Equations, ...]
    B: Tensor
    fixed: None = None
    gamma: float = 0.0

    @classmethod
    def of(cls, stack: Sequence[Problem]) -> Composed:
        # With B = 0, the residuals of a layer are its output.
        B = stack[-1].B
        outputs = (replace(each, B=B.new_zeros(len(B), each.outputs)) for each in stack)
        return cls(tuple(map(Equations.of, outputs)), B.unsqueeze(0))

    def select(self, rows: Tensor) -> Composed:  # noqa: ARG002 - one stack serves every row
        return self

    def residuals(self, X: Tensor) -> Tensor:
        for layer in self.layers:
            X = layer.residuals(X)
        return X - self.B

    def jacobian(self, X: Tensor) -> Tensor:
        """J_L ⋯ J_1: (R, n·m, n·d)."""
        first, *others = self.layers
        J = first.jacobian(X)
        X = first.residuals(X)
        for layer in others:
            J = layer.jacobian(X) @ J
            X = layer.residuals(X)
        return J


@dataclass(frozen=True)
class Peel:
    """Inverts layer by layer from the top with `method`, and keeps at most `branches` candidates.

    With a residual connection, a layer with moderate weights has one or two inputs, and
    its output is a good start.
    """

    method: Solve = LevenbergMarquardt(starts=64, steps=200, solutions=4)  # noqa: RUF009 - frozen
    branches: int = 8

    def __call__(self, stack: Sequence[Problem]) -> Inversion:
        for number, (lower, upper) in enumerate(pairwise(stack), 1):
            if lower.outputs != upper.dim:
                raise InputError(
                    f"layer {number + 1} must take the {lower.outputs} outputs of layer {number}, "
                    f"but has d = {upper.dim}"
                )
        for number, layer in enumerate(stack, 1):
            if layer.fault:
                reason = f"layer {number}: {layer.fault}"
                return Inversion(Status.NOT_APPLICABLE, reason, repr(self))
        started = time.perf_counter()
        found = _judged(stack, *self._inputs(stack))
        return replace(found, method=repr(self), seconds=time.perf_counter() - started)

    def _inputs(self, stack: Sequence[Problem]) -> tuple[list[Tensor], str]:
        """Return candidates for the input of the first layer, and the reason if none is exact."""
        outputs = [stack[-1].B]
        tolerance = stack[-1].tolerance
        for number, layer in reversed(list(enumerate(stack, 1))):
            found = [
                self.method(replace(layer, B=B, tolerance=tolerance)) for B in outputs
            ]
            inputs = [X for inversion in found for X in inversion.solutions]
            if not inputs:
                if len(found) > 1:
                    several = f" for any of {len(found)} candidates"
                else:
                    several = ""
                end = f"{found[0].status}, {found[0].reason}"
                return [], f"no input of layer {number} found{several}: {end}"
            outputs = distinct(inputs)[: self.branches]
            tolerance = 0.0
        return outputs, "peeled, but not exact when put through all layers again"


def _judged(
    stack: Sequence[Problem], inputs: list[Tensor], otherwise: str
) -> Inversion:
    """Judge candidates by all layers; `otherwise` is the reason if none is exact."""
    composed = Composed.of(stack)
    pairs = [
        (X, _residual(stack, X)) for X in (polished(composed, each) for each in inputs)
    ]
    exact = distinct([X for X, residual in pairs if residual <= ROUNDING])
    if not exact:
        X, least = min(pairs, key=lambda pair: pair[1], default=(None, None))
        nearly = least is not None and least <= NEARLY
        reason = otherwise if least is None else f"{otherwise}; residual {least:.1e}"
        status = Status.INEXACT if nearly else Status.UNSOLVED
        return Inversion(status, reason, X=X, residual=least)
    X = exact[0]
    residual = _residual(stack, exact[0])
    flow = inputs_of(stack, X)
    reason = f"residual {residual:.1e}"
    verdicts = [
        judge(replace(layer, B=flow[n + 1]), flow[n]) for n, layer in enumerate(stack)
    ]
    status = Status.RECOVERED
    for number, verdict in enumerate(verdicts, 1):
        if verdict.status is Status.NOT_IDENTIFIABLE:
            status = Status.NOT_IDENTIFIABLE
            reason += f"; layer {number} leaves its input open: X is one of a family"
    if len(exact) > 1:
        reason += f"; {len(exact)} different inputs have this output"
    known = [each.condition for each in verdicts if each.condition is not None]
    condition = math.prod(known) if len(known) == len(stack) else None
    return Inversion(
        status,
        reason,
        X=X,
        residual=residual,
        solutions=tuple(exact),
        condition=condition,
    )


def _residual(stack: Sequence[Problem], X: Tensor) -> float:
    """Return the residual of the last layer, whose input is recomputed from X."""
    *_, last, answer = inputs_of(stack, X)
    off = float((answer - stack[-1].B).abs().max())
    return 0.0 if off <= stack[-1].tolerance else residual_of(stack[-1], last)
