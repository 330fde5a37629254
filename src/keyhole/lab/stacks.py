"""Stacks of layers of which only the last output is known: `X_{ℓ+1} = attention_ℓ(X_ℓ)`.

For researchers (`keyhole lab stacks`). Ours; *Unmasking Transformers* inverts one layer and says
(its Section 1) that the rest follows by repeating. Two ways:

    Peel       from the top, a layer at a time: the input of one is the output of the one below
    EndToEnd   Levenberg–Marquardt on `layers(X) − B`, with the Jacobian J_L ⋯ J_1

A layer may have several inputs with one output. Peeling keeps up to `branches` of them, those of
least norm first; a wrong one is found out when the layer below cannot have produced it. Errors
multiply: a relative error ε in B may be one of `κ_L ⋯ κ_1 ε` in X, where κ_ℓ is the condition of
layer ℓ at its input. The result holds each κ, and how far the input of each layer really moves
when its output is moved at random by 1e-8: the product of the κ bounds what is typical of that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from keyhole.core import Status, environment
from keyhole.core.errors import InputError, expect_count
from keyhole.core.files import read_tensors, write_tensors
from keyhole.core.journal import Journal, Run, digest, stopping_on_ctrl_c
from keyhole.core.machine import expect_memory
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.core.registry import Entry, Registry
from keyhole.core.result import typed
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import NEARLY, ROUNDING, distinct, judge, residual_of
from keyhole.invert.problem import Problem, number_in
from keyhole.invert.problem import plant as plant_layer
from keyhole.invert.run import expect_search
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.multistart import Solve, polished
from keyhole.invert.solvers.starts import SMALL, continued, newton

_MOVED = 1e-8  # relative, when amplification is measured
_STARTS_AT_ONCE = 8  # that advance side by side; what they found is kept before the next begin
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


@dataclass(frozen=True, eq=False)
class Found:
    """What one search found, and how it ended, in words."""

    inputs: Sequence[Tensor]
    end: str


class Searches:
    """What a run has found so far, by the name of each search; without a journal in memory.

    A search is what takes long in a stack: the inputs of one layer for one output, or a handful of
    starts through all layers. What one found is written before the next begins, and its numbers
    come back from JSON bit for bit.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = Journal(None, {}) if journal is None else journal
        self.seconds = 0.0  # of all searches, those of earlier runs too

    def made(self, name: str, search: Callable[[], Found], like: Tensor) -> Found:
        """What a search finds, or found; inputs are of the kind of `like`."""
        if name not in self._journal:
            began = time.perf_counter()
            with stopping_on_ctrl_c():  # what half a search found is not what all of it finds
                found = search()
            record = {
                "inputs": [X.tolist() for X in found.inputs],
                "end": found.end,
                "seconds": time.perf_counter() - began,
            }
            self._journal.add({name: record})
        found, seconds = self._journal.recall(name, partial(_found, like))
        self.seconds += seconds
        return found


def _found(like: Tensor, record: dict[str, Any]) -> tuple[Found, float]:
    inputs = typed(list[list[list[float]]], record["inputs"], "inputs")
    found = Found([like.new_tensor(X) for X in inputs], typed(str, record["end"], "end"))
    return found, typed(float, record["seconds"], "seconds")


def _name_of(tensor: Tensor) -> str:
    """A short name for the numbers of a tensor."""
    numbers = tensor.detach().cpu().contiguous().to(torch.float64).numpy()
    return digest(list(tensor.shape), numbers.tobytes())


class SolveStack(Protocol):
    """Any method that inverts a stack; `memory` holds what an earlier run of it had found."""

    def __call__(
        self, stack: Stack, *, progress: Progress = silent, memory: Searches | None = None
    ) -> StackInversion: ...


@dataclass(frozen=True)
class Peel:
    """Layer by layer from the top with `method`, at most `branches` candidates at a time.

    Several inputs may have one output, so candidates are carried down; a wrong one dies where the
    layer below cannot have produced it. With a residual connection a layer of moderate weights has
    one or two inputs, and the output is a good start.
    """

    method: Solve = LevenbergMarquardt(starts=64, steps=200, solutions=4)  # noqa: RUF009 - frozen
    branches: int = 8

    def __call__(
        self, stack: Stack, *, progress: Progress = silent, memory: Searches | None = None
    ) -> StackInversion:
        if stack.fault:
            return StackInversion(Status.NOT_APPLICABLE, stack.fault, repr(self))
        searches = Searches() if memory is None else memory
        inputs, reason = self._inputs(stack, progress, searches)
        return judged(stack, inputs, repr(self), searches.seconds, reason)

    def _inputs(
        self, stack: Stack, progress: Progress, searches: Searches
    ) -> tuple[list[Tensor], str]:
        """Candidates for the input of the first layer, or the reason why there are none."""
        outputs, tolerance = [stack.B], stack.tolerance
        depth = len(stack.layers)
        for number in range(depth, 0, -1):
            progress(depth - number, depth, f"layers, {len(outputs)} candidates")
            found: list[Found] = []
            for B in outputs:
                problem = stack.layers[number - 1].problem(B, tolerance=tolerance)
                search = partial(self._search, problem)
                found.append(searches.made(f"layer {number} for {_name_of(B)}", search, B))
            inputs = [X for search in found for X in search.inputs]
            if not inputs:
                several = f" for any of {len(found)} candidates" if len(found) > 1 else ""
                return [], f"no input of layer {number} found{several}: {found[0].end}"
            outputs, tolerance = distinct(inputs)[: self.branches], 0.0
        progress(depth, depth, f"layers, {len(outputs)} candidates")
        return outputs, "peeled, but not exact when put through all layers again"

    def _search(self, problem: Problem) -> Found:
        inversion = self.method(problem)
        return Found(inversion.solutions, f"{inversion.status}, {inversion.reason}")


@dataclass(frozen=True)
class EndToEnd:
    """All layers at once; of `method` the starts, steps, seed and damping count.

    Starts: the output itself; for a stack with residual connections, the output carried back while
    attention grows from nothing, `X_{ℓ+1} = X_ℓ + t·attention_ℓ(X_ℓ)` for t from 0, where X = B,
    to 1; then Gaussians, of a fifth of the output's size and of its size in turn.
    """

    method: LevenbergMarquardt = LevenbergMarquardt(starts=32)  # noqa: RUF009 - frozen

    def __call__(
        self, stack: Stack, *, progress: Progress = silent, memory: Searches | None = None
    ) -> StackInversion:
        if stack.fault:
            return StackInversion(Status.NOT_APPLICABLE, stack.fault, repr(self))
        searches = Searches() if memory is None else memory
        starts, inputs = self._starts(stack), list[Tensor]()
        for first in range(0, len(starts), _STARTS_AT_ONCE):
            progress(first, len(starts), f"starts, all {len(stack.layers)} layers at once")
            search = partial(self._search, stack, starts[first : first + _STARTS_AT_ONCE])
            inputs += searches.made(f"starts from {first}", search, stack.B).inputs
        tried = f"none of {len(starts)} starts of at most {self.method.steps} steps came through"
        return judged(stack, inputs, repr(self), searches.seconds, tried)

    def _search(self, stack: Stack, starts: Tensor) -> Found:
        inputs, losses = self.method.descend(Composed.of(stack), starts)
        return Found(list(inputs[losses.isfinite()]), f"{len(starts)} starts")

    def _starts(self, stack: Stack) -> Tensor:
        n, d = len(stack.B), stack.layers[0].W.shape[-1]
        starts: list[Tensor] = []
        if d == stack.B.shape[1]:
            starts.append(stack.B)
        if all(layer.residual for layer in stack.layers):
            starts.append(_grown(stack))
        stream = torch.Generator().manual_seed(self.method.seed)
        size = float(stack.B.square().mean().sqrt())
        for k in range(self.method.starts - len(starts)):
            noise = torch.randn(n, d, generator=stream, dtype=torch.float64).to(stack.B.device)
            starts.append(size * noise * (SMALL if k % 2 else 1.0))
        return torch.stack(starts[: self.method.starts])


def _grown(stack: Stack) -> Tensor:
    """B carried to t = 1 by Newton steps, as far as that goes without turning."""
    composed = Composed.of(stack)

    def solved(t: float, X: Tensor) -> Tensor | None:
        layers = tuple(replace(e, V=t * e.V, B=t * e.B) for e in composed.layers)
        return newton(replace(composed, layers=layers), X)

    return continued(solved, stack.B.unsqueeze(0))[0].squeeze(0)


def _peel(
    starts: int = 64, solutions: int = 4, branches: int = 8, seconds: float | None = None,
    device: str = "cpu", seed: int = 0,
) -> Peel:  # fmt: skip
    """The options are those of the search at each layer, but for `branches`."""
    search = LevenbergMarquardt(
        starts=starts, steps=200, solutions=solutions, seconds=seconds, device=device, seed=seed
    )
    return Peel(search, branches)


def _end_to_end(starts: int = 32, seed: int = 0) -> EndToEnd:
    return EndToEnd(LevenbergMarquardt(starts=starts, seed=seed))


METHODS: Registry[SolveStack, None] = Registry(
    "method",
    Entry("peel", _peel, method=Peel, note="Layer by layer, from the top."),
    Entry("end-to-end", _end_to_end, method=EndToEnd, note="Levenberg–Marquardt on all layers."),
)


def run(
    stack: str | Path | Stack,
    method: str | SolveStack = "peel",
    *,
    device: str = "cpu",
    seed: int = 0,
    journal: str | Path | None = None,
    force: bool = False,
    track: Track = untracked,
    resuming: Callable[[int], None] = lambda done: None,  # noqa: ARG005
    **options: Any,
) -> StackInversion:
    """Read the input of a stack of layers back from all weights and the last output.

    `stack` is a .safetensors file or a stack; `options` are the hyperparameters of a named
    method, such as starts=8. `journal` is the file that remembers finished
    searches, from which a run that was stopped goes on (`resuming` is called with how many there
    are); another run's is refused, or replaced with `force`.
    """
    asked = stack if isinstance(stack, Stack) else Stack.load(stack)
    if asked.fault:
        raise InputError(asked.fault)
    if isinstance(method, str):
        expect_search(options, device)
        expect_count("branches", options.get("branches"))
        method = METHODS.make(
            method, **options, seed=seed, device=None if device == "cpu" else device
        )
    with Journal(journal, _what_determines(asked, repr(method)), force=force) as finished:
        progress = track("invert layers")
        if len(finished):
            resuming(len(finished))
        return method(asked, progress=progress, memory=Searches(finished))


def _what_determines(stack: Stack, method: str) -> Run:
    """Everything that the inputs found follow from."""
    weights: list[object] = [_name_of(stack.B), stack.tolerance]
    for layer in stack.layers:
        tensors = (layer.W, layer.V, layer.key_bias, layer.output_bias)
        weights += [None if tensor is None else _name_of(tensor) for tensor in tensors]
        weights += [layer.causal, layer.residual]
    return {
        "run": "invert layers",
        "keyhole": environment()["keyhole"],
        "method": method,
        "stack": digest(*weights),
    }
