"""Several layers, one by one from the top: each layer's input is the output of the one below.

Needs no more than a method for one layer. Up to `branches` candidates are carried down, because
several inputs may have one output; a wrong candidate dies where the layer below cannot have
produced it. With a residual connection a layer of moderate weights has one or two inputs, and the
output is a good start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from keyhole.core import Status
from keyhole.core.progress import Progress, silent
from keyhole.invert.inversion import Inversion
from keyhole.invert.judge import distinct
from keyhole.invert.problem import Problem
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.structure.layers import Found, Layers, LayersInversion, Memory, settle
from keyhole.invert.structure.searches import Searches, name_of


class OneLayer(Protocol):
    """Any method that inverts a problem."""

    def __call__(self, problem: Problem) -> Inversion: ...


def _default() -> LevenbergMarquardt:
    return LevenbergMarquardt(starts=64, steps=200, solutions=4)


@dataclass(frozen=True)
class Peel:
    """Layer by layer with `method`, at most `branches` candidates at a time."""

    method: OneLayer = field(default_factory=_default)
    branches: int = 8

    def __call__(
        self, stack: Layers, *, progress: Progress = silent, memory: Memory | None = None
    ) -> LayersInversion:
        if stack.fault:
            return LayersInversion(Status.NOT_APPLICABLE, stack.fault, repr(self), None, None, 0.0)
        searches = Searches() if memory is None else memory
        inputs, reason = self._inputs(stack, progress, searches)
        return settle(stack, inputs, repr(self), searches.seconds, reason)

    def _inputs(
        self, stack: Layers, progress: Progress, searches: Memory
    ) -> tuple[list[Tensor], str]:
        """Candidates for the input of the first layer, or the reason why there are none."""
        outputs, tolerance = [stack.B], stack.tolerance
        depth = len(stack.layers)
        for number in range(depth, 0, -1):
            progress(depth - number, depth, f"layers, {len(outputs)} candidates")
            inputs: list[Tensor] = []
            ends: list[str] = []
            for B in outputs:
                problem = stack.layers[number - 1].problem(B, tolerance=tolerance)
                search = partial(self._search, problem)
                found = searches.made(f"layer {number} for {name_of(B)}", search, B)
                inputs += found.inputs
                ends.append(found.end)
            if not inputs:
                several = f" for any of {len(ends)} candidates" if len(ends) > 1 else ""
                return [], f"no input of layer {number} found{several}: {ends[0]}"
            outputs, tolerance = distinct(inputs)[: self.branches], 0.0
        progress(depth, depth, f"layers, {len(outputs)} candidates")
        return outputs, "peeled, but not exact when put through all layers again"

    def _search(self, problem: Problem) -> Found:
        inversion = self.method(problem)
        return Found(inversion.solutions, f"{inversion.status}, {inversion.reason}")
