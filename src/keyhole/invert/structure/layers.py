"""Several layers, and only the last output: `X_{ℓ+1} = attention_ℓ(X_ℓ)`.

Ours; *Unmasking Transformers* inverts one layer and says (its Section 1) that the rest follows by
repeating. Two ways:

    peel.py        from the top, a layer at a time: the input of one is the output of the one below
    end_to_end.py  Levenberg–Marquardt on `layers(X) − B`, with the Jacobian J_L ⋯ J_1

A layer may have several inputs with one output. Peeling keeps up to `branches` of them, those of
least norm first; a wrong one is found out when the layer below cannot have produced it. Errors
multiply: a relative error ε in B may be one of `κ_L ⋯ κ_1 ε` in X, where κ_ℓ is the condition of
layer ℓ at its input. The result holds each κ and, beside it, how far the input of each layer really
moves when its output is moved at random by 1e-8: the product of the former bounds what is typical
of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from keyhole.core import Status, environment
from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, silent
from keyhole.core.result import Result
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.inversion import inputs_in, inputs_of
from keyhole.invert.judge import NEARLY, ROUNDING, distinct, judge, residual_of
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.multistart import polished

MOVED = 1e-8  # relative, when amplification is measured
_SOLVED = (Status.RECOVERED, Status.NOT_IDENTIFIABLE)


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of one layer, as in `Problem`."""

    W: Tensor
    V: Tensor
    key_bias: Tensor | None = None
    output_bias: Tensor | None = None
    causal: bool = False
    residual: bool = False

    def problem(self, B: Tensor, **more: Any) -> Problem:
        """To find the input of this layer from its output; `more` are fields of `Problem`."""
        return Problem(
            self.W, self.V, B, self.key_bias, self.output_bias,
            causal=self.causal, residual=self.residual, **more,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Layers:
    """Find the input of the first layer from the weights of all and the output `B` of the last."""

    layers: tuple[Layer, ...]
    B: Tensor
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise InputError("expected at least one layer, got none")
        problems = [layer.problem(self.B.new_zeros(1, layer.V.shape[-1])) for layer in self.layers]
        for number, (lower, upper) in enumerate(pairwise(problems), 1):
            if lower.outputs != upper.dim:
                raise InputError(
                    f"expected layer {number + 1} to take the {lower.outputs} outputs of layer "
                    f"{number}, got d = {upper.dim}"
                )
        object.__setattr__(self, "B", self.top.B)

    @property
    def top(self) -> Problem:
        """The problem of the last layer alone."""
        return self.layers[-1].problem(self.B, tolerance=self.tolerance)

    @property
    def fault(self) -> str | None:
        for number, layer in enumerate(self.layers, 1):
            last = number == len(self.layers)
            B = self.B if last else self.B.new_zeros(1, layer.V.shape[-1])
            if wrong := layer.problem(B).fault:
                return f"layer {number}: {wrong}"
        return None

    def inputs(self, X: Tensor) -> list[Tensor]:
        """What each layer receives when the first receives X, and what the last answers."""
        flow = [X]
        for layer in self.layers:
            B = X.new_zeros(X.shape[-2], layer.V.shape[-1])
            flow.append(layer.problem(B).output(flow[-1]))
        return flow

    def output(self, X: Tensor) -> Tensor:
        return self.inputs(X)[-1]


@dataclass(frozen=True, eq=False)
class Amplification:
    """One layer at its input: κ, and how much a random error of its output grew on the way back."""

    condition: float | None
    measured: float | None


@dataclass(frozen=True, eq=False, repr=False)
class LayersInversion(Result):
    """The input of a stack, or how far down the search came.

    `residual` is of the last layer's output, recomputed from X through all layers. `layers` go
    from the first to the last; `amplification` is measured through all of them together, `bound`
    the product of their conditions. Where a layer could not be solved, `layers` is empty.
    """

    status: Status
    reason: str
    method: str
    X: Tensor | None
    residual: float | None
    seconds: float
    solutions: tuple[Tensor, ...] = ()
    layers: tuple[Amplification, ...] = ()
    amplification: float | None = None
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "layers inversion"
    beside: ClassVar[str] = "inputs"

    @property
    def solved(self) -> bool:
        return self.status is Status.RECOVERED

    @property
    def bound(self) -> float | None:
        product = 1.0
        for layer in self.layers:
            if layer.condition is None:
                return None
            product *= layer.condition
        return product if self.layers else None

    def summary(self) -> str:
        lines = [f"{self.status}: {self.reason}", f"{self.seconds:.2f} s"]
        if self.amplification is not None:
            lines.append(
                f"errors in the output grow {self.amplification:.1e} times on the way back"
                + ("" if self.bound is None else f", {self.bound:.1e} times at most")
            )
        return "\n".join(lines)

    def contents(self) -> dict[str, Any]:
        data = asdict(replace(self, X=None, solutions=()))
        del data["X"]
        return {**data, "solutions": len(self.solutions), "bound": self.bound}

    def tensors(self) -> dict[str, Tensor]:
        return inputs_of(self.X, self.solutions)

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        X, solutions = inputs_in(tensors)
        plain = ("reason", "method", "residual", "seconds", "amplification", "environment")
        return cls(
            status=Status(data["status"]),
            X=X,
            solutions=solutions,
            layers=tuple(Amplification(**layer) for layer in data["layers"]),
            **{name: data[name] for name in plain},
        )


@dataclass(frozen=True, eq=False)
class Found:
    """What one search found, and how it ended, in words."""

    inputs: Sequence[Tensor]
    end: str


class Memory(Protocol):
    """Searches that are finished are not made again (searches.py)."""

    seconds: float

    def made(self, name: str, search: Callable[[], Found], like: Tensor) -> Found: ...


class SolveLayers(Protocol):
    """Any method that inverts a stack; `memory` holds what an earlier run of it had found."""

    def __call__(
        self, stack: Layers, *, progress: Progress = silent, memory: Memory | None = None
    ) -> LayersInversion: ...


@dataclass(frozen=True, eq=False)
class Composed:
    """`layers(X) − B` for a batch of inputs, with its Jacobian by the chain rule."""

    layers: tuple[Equations, ...]
    B: Tensor
    fixed: None = None
    gamma: float = 0.0

    @classmethod
    def of(cls, stack: Layers) -> Composed:
        # With B = 0 the residuals of a layer are its output.
        zeros = [stack.B.new_zeros(len(stack.B), layer.V.shape[-1]) for layer in stack.layers]
        problems = [layer.problem(B) for layer, B in zip(stack.layers, zeros, strict=True)]
        return cls(tuple(Equations.of([problem]) for problem in problems), stack.B.unsqueeze(0))

    def select(self, rows: Tensor) -> Composed:  # noqa: ARG002 - one stack serves every row
        return self

    def residuals(self, X: Tensor) -> Tensor:
        for layer in self.layers:
            X = layer.residuals(X)
        return X - self.B

    def loss_of(self, r: Tensor, X: Tensor) -> Tensor:  # noqa: ARG002 - there is no γ
        return r.square().sum((-2, -1))

    def linearised(self, X: Tensor) -> ComposedJacobian:
        return ComposedJacobian(self, X)


@dataclass(frozen=True, eq=False)
class ComposedJacobian:
    equations: Composed
    X: Tensor

    def jacobian(self) -> Tensor:
        """J_L ⋯ J_1: (R, n·m, n·d)."""
        first, *others = self.equations.layers
        X, J = first.residuals(self.X), first.linearised(self.X).jacobian()
        for layer in others:
            X, J = layer.residuals(X), layer.linearised(X).jacobian() @ J
        return J


def settle(
    stack: Layers, inputs: list[Tensor], method: str, seconds: float, otherwise: str
) -> LayersInversion:
    """Judge what a method found; `otherwise` says how it failed if nothing is exact."""
    composed = Composed.of(stack)
    inputs = [polished(composed, X) for X in inputs]
    residuals = {k: _residual(stack, X) for k, X in enumerate(inputs)}
    exact = distinct([X for k, X in enumerate(inputs) if residuals[k] <= ROUNDING])
    if not exact:
        best = min(residuals, key=lambda k: residuals[k], default=None)
        least = None if best is None else residuals[best]
        nearly = least is not None and least <= NEARLY
        status = Status.INEXACT if nearly else Status.UNSOLVED
        reason = otherwise if least is None else f"{otherwise}; residual {least:.1e}"
        X = None if best is None else inputs[best]
        return LayersInversion(status, reason, method, X, least, seconds)
    X, residual = exact[0], _residual(stack, exact[0])
    layers, missing = _amplifications(stack, X)
    reason = f"residual {residual:.1e}"
    if missing:
        reason += f"; layer {missing} leaves its input open: X is one of a family"
    if len(exact) > 1:
        reason += f"; {len(exact)} different inputs have this output"
    return LayersInversion(
        Status.NOT_IDENTIFIABLE if missing else Status.RECOVERED, reason, method, X, residual,
        seconds, tuple(exact), layers, _moved(composed, X),
    )  # fmt: skip


def _residual(stack: Layers, X: Tensor) -> float:
    """What the judge of one layer says of the last, whose input is recomputed from X."""
    residual = residual_of(stack.top, stack.inputs(X)[-2])
    off = float((stack.output(X) - stack.B).abs().max())
    return 0.0 if off <= stack.tolerance else residual


def _amplifications(stack: Layers, X: Tensor) -> tuple[tuple[Amplification, ...], int]:
    """Of every layer, and the number of one that does not determine its input, or 0."""
    flow, undetermined = stack.inputs(X), 0
    layers: list[Amplification] = []
    for number, layer in enumerate(stack.layers):
        problem = layer.problem(flow[number + 1])
        verdict = judge(problem, flow[number])
        if verdict.status is Status.NOT_IDENTIFIABLE:
            undetermined = number + 1
        measured = _moved(Equations.of([problem]), flow[number])
        layers.append(Amplification(verdict.condition, measured))
    return tuple(layers), undetermined


def _moved(equations: Composed | Equations, X: Tensor) -> float | None:
    """Relative change of X for a relative change of B; None if Newton's method loses its way."""
    stream = torch.Generator().manual_seed(0)
    noise = torch.randn(equations.B.shape, generator=stream, dtype=X.dtype).to(X.device)
    change = MOVED * noise * (equations.B.norm() / noise.norm())
    moved = replace(equations, B=equations.B + change)
    there = polished(moved, X)
    left = float(moved.residuals(there.unsqueeze(0)).norm() / equations.B.norm())
    if not left <= 1e-3 * MOVED:
        return None
    return float((there - X).norm() / X.norm()) / MOVED
