"""Tensors of float64, in which the attacks compute, and random ones from a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Stream = torch.Generator
EPSILON: float = torch.finfo(torch.float64).eps
TINY: float = torch.finfo(torch.float64).tiny


def tensor(values: float | Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def full(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def arange(
    start: float,
    stop: float,
    step: float = 1,
) -> Tensor:
    return torch.arange(start, stop, step, dtype=torch.float64)


def random_stream(seed: int) -> Stream:
    return Stream().manual_seed(seed)


def normal(stream: Stream, *shape: int) -> Tensor:
    """Return independent numbers of mean 0 and variance 1."""
    return torch.randn(shape, generator=stream, dtype=torch.float64)


def uniform(stream: Stream, *shape: int) -> Tensor:
    """Return independent numbers between 0 and 1."""
    return torch.rand(shape, generator=stream, dtype=torch.float64)
