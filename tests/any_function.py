"""What tests of several methods share: oracles that are any function, seeded numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class AnyFunction:
    """An oracle that is any function of sequences."""

    def __init__(self, f: Callable[[Tensor], Tensor], dim: int) -> None:
        self.f, self.dim = f, dim

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.f(sequences)


def normal(seed: int, *shape: int) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)
