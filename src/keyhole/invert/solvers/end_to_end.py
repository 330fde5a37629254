"""Several layers at once: Levenberg–Marquardt on `layers(X) − B`.

Starts: the output itself; for a stack with residual connections, the output carried back while
attention grows from nothing, `X_{ℓ+1} = X_ℓ + t·attention_ℓ(X_ℓ)` for t from 0, where X = B, to 1;
then Gaussians, of a fifth of the output's size and of its size in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.core.progress import Progress, silent
from keyhole.invert.solvers.levenberg_marquardt import LevenbergMarquardt
from keyhole.invert.solvers.starts import SMALL, newton
from keyhole.invert.structure.layers import (
    Composed,
    Found,
    Layers,
    LayersInversion,
    Memory,
    settle,
)
from keyhole.invert.structure.searches import Searches

TOGETHER = 8  # starts that advance side by side; what they found is kept before the next begin


def _default() -> LevenbergMarquardt:
    return LevenbergMarquardt(starts=32)


@dataclass(frozen=True)
class EndToEnd:
    """All layers together; of `method` the starts, steps, seed and damping count."""

    method: LevenbergMarquardt = field(default_factory=_default)

    def __call__(
        self, stack: Layers, *, progress: Progress = silent, memory: Memory | None = None
    ) -> LayersInversion:
        if stack.fault:
            return LayersInversion(Status.NOT_APPLICABLE, stack.fault, repr(self), None, None, 0.0)
        searches = Searches() if memory is None else memory
        starts, inputs = self._starts(stack), list[Tensor]()
        for first in range(0, len(starts), TOGETHER):
            progress(first, len(starts), f"starts, all {len(stack.layers)} layers at once")
            search = partial(self._search, stack, starts[first : first + TOGETHER])
            inputs += searches.made(f"starts from {first}", search, stack.B).inputs
        tried = f"none of {len(starts)} starts of at most {self.method.steps} steps came through"
        return settle(stack, inputs, repr(self), searches.seconds, tried)

    def _search(self, stack: Layers, starts: Tensor) -> Found:
        inputs, losses = self.method.descend(Composed.of(stack), starts)
        return Found(list(inputs[losses.isfinite()]), f"{len(starts)} starts")

    def _starts(self, stack: Layers) -> Tensor:
        n, d = len(stack.B), stack.layers[0].W.shape[-1]
        starts: list[Tensor] = []
        if d == stack.B.shape[1]:
            starts.append(stack.B)
        if all(layer.residual for layer in stack.layers):
            starts.append(grown(stack))
        stream = torch.Generator().manual_seed(self.method.seed)
        size = float(stack.B.square().mean().sqrt())
        for k in range(self.method.starts - len(starts)):
            noise = torch.randn(n, d, generator=stream, dtype=torch.float64).to(stack.B.device)
            starts.append(size * noise * (SMALL if k % 2 else 1.0))
        return torch.stack(starts[: self.method.starts])


def grown(stack: Layers) -> Tensor:
    """B carried to t = 1 by Newton steps, as far as that goes without turning."""
    composed = Composed.of(stack)
    X, t, stride = stack.B.unsqueeze(0), 0.0, 0.1
    while t < 1 and stride > 1e-3:
        ahead = min(1.0, t + stride)
        layers = tuple(replace(e, V=ahead * e.V, B=ahead * e.B) for e in composed.layers)
        moved = newton(replace(composed, layers=layers), X)
        if moved is None:
            stride /= 2
        else:
            X, t, stride = moved, ahead, 1.5 * stride
    return X.squeeze(0)
