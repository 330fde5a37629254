"""The ReLU units of a block without norms, with biases: relu_network.py in one dimension more.

One number of a block's answer to a single token is `f(x) = ℓ·x + e + Σ_k w_k ReLU(a_k·x + α_k)`.
Since ReLU(z) = (|z| + z)/2, it is

    f(x) = E(x, 1) + L·(x, 1),    E(x, t) = ½ Σ_k w_k |a_k·x + α_k t|,

and `t·f(x/t) = E(x, t) + L·(x, t)` for t > 0, which E's being even extends to t < 0 once L is
known: a network without biases of d + 1 numbers. Beyond all kinks,

    f(λx) − f(−λx) = 2λ·L_x·x + …,    f(λx) + f(−λx) = λ·… + 2 L_t,

so two λ give L, for d directions 4d queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status, Unsuccessful
from keyhole.extract.bilinear import random_orthogonal, random_units
from keyhole.extract.blocks.units import Units
from keyhole.extract.relu_network import ReluNetwork
from keyhole.oracle.planted import ReluFfn

_BEYOND = 2.0**18
_RESOLUTION = 1e-9  # L_t has lost digits to the lengths it is read at
_STEP = 1e-3
_POINTS = 15


def straight(value: Callable[[Tensor], Tensor], d: int, stream: torch.Generator) -> bool:
    """Are the answers to short steps from random points on a line, nearly everywhere?"""
    x = torch.randn(_POINTS, d, generator=stream, dtype=torch.float64)
    step = _STEP * random_units(_POINTS, d, stream)
    before, at, after = value(torch.cat([x - step, x, x + step])).chunk(3)
    bend = (before + after - 2 * at).abs().amax(1) / (after - before).abs().amax(1)
    return float(bend.median()) < 1e-9


def find_relu_units(
    value: Callable[[Tensor], Tensor], d: int, seed: int, stream: torch.Generator
) -> Units:
    """Their rows and biases; the columns of C are left to a fit."""
    one = _Homogeneous(value, d, stream)
    network: ReluFfn | None = None
    for step in ReluNetwork(seed=seed, resolution=_RESOLUTION).steps(one):
        if isinstance(step.model, ReluFfn):
            network = step.model
    if network is None or not len(network.A):
        raise Unsuccessful(Status.NOT_APPLICABLE, "the answers have no kinks")
    rows = network.A * network.w.abs()[:, None]
    # A pair of opposite rows is what is linear.
    likeness = normalize(rows, dim=1) @ normalize(rows, dim=1).mT
    rows = rows[(likeness > -1 + 1e-9).all(1)]
    rows = rows / rows[:, :d].norm(dim=1, keepdim=True)
    none = torch.zeros(0, dtype=torch.float64)
    return Units(
        rows[:, :d].contiguous(), rows[:, d].contiguous(), none.reshape(0, d), none,
        torch.zeros(d, len(rows), dtype=torch.float64), "relu",
    )  # fmt: skip


class _Homogeneous:
    """`E(x, t) + L·(x, t)` of one number of the answers, as an oracle of one token (x, t)."""

    def __init__(self, value: Callable[[Tensor], Tensor], d: int, stream: torch.Generator) -> None:
        self._value, self.dim = value, d + 1
        self._mixture = torch.randn(d, generator=stream, dtype=torch.float64)
        frame = random_orthogonal(d, stream)
        far = _BEYOND * torch.cat([frame, -frame])
        near, further = (self._scores(length * far).chunk(2) for length in (1, 2))
        odd = (further[0] - further[1]) - (near[0] - near[1])
        self._linear = frame.mT @ odd / (2 * _BEYOND)
        self._constant = float((2 * (near[0] + near[1]) - (further[0] + further[1])).median()) / 2

    def _scores(self, x: Tensor) -> Tensor:
        return self._value(x) @ self._mixture

    def __call__(self, sequences: Tensor) -> Tensor:
        x, t = sequences[:, -1, :-1], sequences[:, -1, -1]
        size = t.abs().clamp(min=1e-12)
        sign = torch.where(t < 0, -1.0, 1.0).to(torch.float64)
        scores = size * self._scores(sign[:, None] * x / size[:, None])
        linear = sign * (x @ self._linear) + size * self._constant
        return torch.where(t < 0, scores - 2 * linear, scores)
