"""Stacks of layers of which only the last output is known: `X_{ℓ+1} = attention_ℓ(X_ℓ)`.

For researchers (`keyhole lab stacks`). *Unmasking Transformers* inverts one layer and says (its
Section 1) that the rest follows by repeating: from the top, the input of a layer is the output of
the one below. A layer may have several inputs with one output. Peeling keeps up to `branches` of
them, those of least norm first; a wrong one is found out when the layer below cannot have produced
it. Errors multiply: a relative error ε in B may be one of `κ_L ⋯ κ_1 ε` in X, where κ_ℓ is the
condition of layer ℓ at its input. The result holds each κ, and how far the input of each layer
really moves when its output is moved at random by 1e-8: the product of the κ bounds what is typical
of that.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.core.errors import InputError, expect_count
from keyhole.core.files import read_tensors, write_tensors
from keyhole.core.machine import expect_memory
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import NEARLY, ROUNDING, distinct, judge, residual_of
from keyhole.invert.problem import Problem, number_in
from keyhole.invert.problem import plant as plant_layer
from keyhole.invert.run import expect_search
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.multistart import Solve, polished

_MOVED = 1e-8  # relative, when amplification is measured
_TENSORS = ("W", "V", "key_bias", "output_bias")
_FLAGS = ("causal", "residual")


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
class Stack:
    """Find the input of the first layer from the weights of all and the output `B` of the last.

    As a file: tensors `1.W`, `1.V`, `2.W`, … and B, optionally `1.key_bias`, `1.output_bias`;
    metadata `1.causal`, `1.residual` and `tolerance`, which is that of B.
    """

    layers: tuple[Layer, ...]
    B: Tensor
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise InputError("a stack needs at least one layer")
        problems = [layer.problem(self.B.new_zeros(1, layer.V.shape[-1])) for layer in self.layers]
        for number, (lower, upper) in enumerate(pairwise(problems), 1):
            if lower.outputs != upper.dim:
                raise InputError(
                    f"layer {number + 1} must take the {lower.outputs} outputs of layer {number}, "
                    f"but has d = {upper.dim}"
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

    def save(self, path: str | Path) -> None:
        """Write the stack as .safetensors, to be handed to another machine."""
        tensors: dict[str, Tensor] = {"B": self.B}
        metadata = {"keyhole": "1", "kind": "layers", "tolerance": str(self.tolerance)}
        for number, layer in enumerate(self.layers, 1):
            for name in _TENSORS:
                if (tensor := getattr(layer, name)) is not None:
                    tensors[f"{number}.{name}"] = tensor.clone()  # layers may share weights
            metadata |= {f"{number}.{name}": str(getattr(layer, name)) for name in _FLAGS}
        write_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Stack:
        """Read a stack; any .safetensors with tensors 1.W, 1.V, 2.W, … and B is one."""
        metadata, tensors = read_tensors(path)
        depth = 0
        while f"{depth + 1}.W" in tensors:
            depth += 1
        wanted = {"B", "1.W", *(f"{number}.V" for number in range(1, max(depth, 1) + 1))}
        known = {"B", *(f"{n}.{name}" for n in range(1, depth + 1) for name in _TENSORS)}
        if not wanted <= set(tensors) <= known:
            got = ", ".join(sorted(tensors)[:9]) or "nothing"
            raise InputError(f"{path} must hold tensors 1.W, 1.V, 2.W, … and B: it holds {got}")
        tolerance = number_in(metadata, "tolerance", path)
        try:
            layers = tuple(_layer(number, metadata, tensors) for number in range(1, depth + 1))
            stack = cls(layers, tensors["B"], tolerance)
        except InputError as error:
            raise InputError(f"{error} in {path}") from error
        if stack.fault:
            raise InputError(f"{stack.fault} in {path}")
        return stack


def _layer(number: int, metadata: dict[str, str], tensors: dict[str, Tensor]) -> Layer:
    given: dict[str, Any] = {}
    for name in _TENSORS:
        tensor = tensors.get(f"{number}.{name}")
        if tensor is None:
            continue
        if tensor.is_complex():
            raise InputError(f"expected real numbers in {number}.{name}, got {tensor.dtype}")
        if tensor.ndim < 1 or 0 in tensor.shape:
            raise InputError(f"{number}.{name} is empty: its shape is {tuple(tensor.shape)}")
        given[name] = tensor.double()
    given |= {name: metadata.get(f"{number}.{name}", "False") == "True" for name in _FLAGS}
    return Layer(**given)


def plant(
    depth: int, length: int = 8, dim: int = 8, *, scale: float = 0.3, residual: bool = False,
    causal: bool = False, seed: int = 0,
) -> tuple[Stack, Tensor]:  # fmt: skip
    """A stack and its input; V is as small as it is in deep models, 1/√(d·depth)."""
    expect_count("layers", depth)
    expect_memory(16 * depth * dim * dim, f"{depth:,} layers of d = {dim:,}")
    first, X = plant_layer(length, dim, scale=scale, residual=residual, causal=causal, seed=seed)
    others = (plant_layer(length, dim, scale=scale, seed=seed + k)[0] for k in range(1, depth))
    size = math.sqrt(dim * depth)
    layers = (
        Layer(problem.W, problem.V / size, residual=residual, causal=causal)
        for problem in (first, *others)
    )
    blank = Stack(tuple(layers), first.B)
    return replace(blank, B=blank.output(X)), X


@dataclass(frozen=True, eq=False)
class Amplification:
    """One layer at its input: κ, and how much a random error of its output grew on the way back."""

    condition: float | None
    measured: float | None


@dataclass(frozen=True, eq=False, repr=False)
class StackInversion(Inversion):
    """The input of a stack, or how far down the search came.

    `residual` is of the last layer's output, recomputed from X through all layers. `layers` go
    from the first to the last; `amplification` is measured through all of them, `bound`
    the product of their conditions. Where a layer could not be solved, `layers` is empty.
    """

    layers: tuple[Amplification, ...] = ()
    amplification: float | None = None

    kind: ClassVar[str] = "layers inversion"

    @property
    def bound(self) -> float | None:
        conditions = [layer.condition for layer in self.layers if layer.condition is not None]
        return math.prod(conditions) if 0 < len(conditions) == len(self.layers) else None

    def summary(self) -> str:
        lines = [f"{self.status}: {self.reason}", f"{self.seconds:.2f} s"]
        if self.amplification is not None:
            lines.append(
                f"errors in the output grow {self.amplification:.1e} times on the way back"
                + ("" if self.bound is None else f", {self.bound:.1e} times at most")
            )
        return "\n".join(lines)

    def contents(self) -> dict[str, Any]:
        return {**super().contents(), "bound": self.bound}


@dataclass(frozen=True, eq=False)
class Composed:
    """`layers(X) − B` for a batch of inputs, with its Jacobian by the chain rule."""

    layers: tuple[Equations, ...]
    B: Tensor
    fixed: None = None
    gamma: float = 0.0

    @classmethod
    def of(cls, stack: Stack) -> Composed:
        # With B = 0 the residuals of a layer are its output.
        zeros = [stack.B.new_zeros(len(stack.B), layer.V.shape[-1]) for layer in stack.layers]
        problems = [layer.problem(B) for layer, B in zip(stack.layers, zeros, strict=True)]
        return cls(tuple(Equations.of(problem) for problem in problems), stack.B.unsqueeze(0))

    def select(self, rows: Tensor) -> Composed:  # noqa: ARG002 - one stack serves every row
        return self

    def residuals(self, X: Tensor) -> Tensor:
        for layer in self.layers:
            X = layer.residuals(X)
        return X - self.B

    def loss_of(self, r: Tensor, X: Tensor) -> Tensor:  # noqa: ARG002 - there is no γ
        return r.square().sum((-2, -1))

    def jacobian(self, X: Tensor) -> Tensor:
        """J_L ⋯ J_1: (R, n·m, n·d)."""
        first, *others = self.layers
        J, X = first.jacobian(X), first.residuals(X)
        for layer in others:
            J, X = layer.jacobian(X) @ J, layer.residuals(X)
        return J


def judged(
    stack: Stack, inputs: list[Tensor], method: str, seconds: float, otherwise: str
) -> StackInversion:
    """What the inputs that a method found are worth; `otherwise` is why nothing is exact."""
    composed = Composed.of(stack)
    inputs = [polished(composed, X) for X in inputs]
    residuals = [_residual(stack, X) for X in inputs]
    pairs = list(zip(inputs, residuals, strict=True))
    exact = distinct([X for X, residual in pairs if residual <= ROUNDING])
    if not exact:
        X, least = min(pairs, key=lambda pair: pair[1], default=(None, None))
        nearly = least is not None and least <= NEARLY
        reason = otherwise if least is None else f"{otherwise}; residual {least:.1e}"
        status = Status.INEXACT if nearly else Status.UNSOLVED
        return StackInversion(status, reason, method, X, least, seconds=seconds)
    X, residual = exact[0], _residual(stack, exact[0])
    layers, undetermined = _amplifications(stack, X)
    reason = f"residual {residual:.1e}"
    if undetermined:
        reason += f"; layer {undetermined} leaves its input open: X is one of a family"
    if len(exact) > 1:
        reason += f"; {len(exact)} different inputs have this output"
    status = Status.NOT_IDENTIFIABLE if undetermined else Status.RECOVERED
    return StackInversion(
        status, reason, method, X, residual, seconds=seconds, solutions=tuple(exact), layers=layers,
        amplification=_moved(composed, X),
    )  # fmt: skip


def _residual(stack: Stack, X: Tensor) -> float:
    """What the judge of one layer says of the last, whose input is recomputed from X."""
    residual = residual_of(stack.top, stack.inputs(X)[-2])
    off = float((stack.output(X) - stack.B).abs().max())
    return 0.0 if off <= stack.tolerance else residual


def _amplifications(stack: Stack, X: Tensor) -> tuple[tuple[Amplification, ...], int]:
    """Of every layer, and the number of one that does not determine its input, or 0."""
    flow, undetermined = stack.inputs(X), 0
    layers: list[Amplification] = []
    for number, layer in enumerate(stack.layers):
        problem = layer.problem(flow[number + 1])
        verdict = judge(problem, flow[number])
        if verdict.status is Status.NOT_IDENTIFIABLE:
            undetermined = number + 1
        measured = _moved(Equations.of(problem), flow[number])
        layers.append(Amplification(verdict.condition, measured))
    return tuple(layers), undetermined


def _moved(equations: Composed | Equations, X: Tensor) -> float | None:
    """Relative change of X for a relative change of B; None if Newton's method loses its way."""
    stream = torch.Generator().manual_seed(0)
    noise = torch.randn(equations.B.shape, generator=stream, dtype=X.dtype).to(X.device)
    change = _MOVED * noise * (equations.B.norm() / noise.norm())
    moved = replace(equations, B=equations.B + change)
    nearest = polished(moved, X)
    left = float(moved.residuals(nearest.unsqueeze(0)).norm() / equations.B.norm())
    if not left <= 1e-3 * _MOVED:
        return None
    return float((nearest - X).norm() / X.norm()) / _MOVED


@dataclass(frozen=True)
class Peel:
    """Layer by layer from the top with `method`, at most `branches` candidates at a time.

    Several inputs may have one output, so candidates are carried down; a wrong one dies where the
    layer below cannot have produced it. With a residual connection a layer of moderate weights has
    one or two inputs, and the output is a good start.
    """

    method: Solve = LevenbergMarquardt(starts=64, steps=200, solutions=4)  # noqa: RUF009 - frozen
    branches: int = 8

    def __call__(self, stack: Stack, *, progress: Progress = silent) -> StackInversion:
        if stack.fault:
            return StackInversion(Status.NOT_APPLICABLE, stack.fault, repr(self))
        started = time.perf_counter()
        inputs, reason = self._inputs(stack, progress)
        return judged(stack, inputs, repr(self), time.perf_counter() - started, reason)

    def _inputs(self, stack: Stack, progress: Progress) -> tuple[list[Tensor], str]:
        """Candidates for the input of the first layer, or the reason why there are none."""
        outputs, tolerance = [stack.B], stack.tolerance
        depth = len(stack.layers)
        for number in range(depth, 0, -1):
            progress(depth - number, depth, f"layers, {len(outputs)} candidates")
            layer = stack.layers[number - 1]
            found = [self.method(layer.problem(B, tolerance=tolerance)) for B in outputs]
            inputs = [X for inversion in found for X in inversion.solutions]
            if not inputs:
                several = f" for any of {len(found)} candidates" if len(found) > 1 else ""
                end = f"{found[0].status}, {found[0].reason}"
                return [], f"no input of layer {number} found{several}: {end}"
            outputs, tolerance = distinct(inputs)[: self.branches], 0.0
        progress(depth, depth, f"layers, {len(outputs)} candidates")
        return outputs, "peeled, but not exact when put through all layers again"


def run(
    stack: str | Path | Stack, *, starts: int = 64, solutions: int = 4, branches: int = 8,
    seconds: float | None = None, device: str = "cpu", seed: int = 0, track: Track = untracked,
) -> StackInversion:  # fmt: skip
    """Read the input of a stack of layers back from all weights and the last output.

    `stack` is a .safetensors file or a stack; the others are options of the search at each layer.
    """
    asked = stack if isinstance(stack, Stack) else Stack.load(stack)
    if asked.fault:
        raise InputError(asked.fault)
    expect_search({"starts": starts, "solutions": solutions, "seconds": seconds}, device)
    expect_count("branches", branches)
    search = LevenbergMarquardt(
        starts=starts, steps=200, solutions=solutions, seconds=seconds, device=device, seed=seed
    )
    return Peel(search, branches)(asked, progress=track("invert layers"))
