"""Oracles for tests: any function, an endpoint that fails, and seeded numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.oracle import Oracle, OracleError, ask, identity_of


class AnyFunction:
    """An oracle that is any function of sequences."""

    def __init__(self, f: Callable[[Tensor], Tensor], dim: int) -> None:
        self.f = f
        self.dim = dim

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.f(sequences)


class Failing:
    """An endpoint that goes down after `after` answers."""

    def __init__(self, inner: Oracle, after: int) -> None:
        self.inner = inner
        self.dim = inner.dim
        self.after = after
        self.identity = identity_of(inner)

    def __call__(self, sequences: Tensor) -> Tensor:
        if len(sequences) > self.after:
            raise OracleError("no answer: the endpoint is down")
        self.after -= len(sequences)
        return ask(self.inner, sequences)


def normal(seed: int, *shape: int) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)
