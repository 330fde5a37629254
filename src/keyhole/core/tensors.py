"""Tensors that modules of all packages make: directions, row numbers, random streams."""

from __future__ import annotations

import torch
from torch import Tensor


def normalized(rows: Tensor) -> Tensor:
    """Return the rows (…, d), each divided by its length; a row of zeros stays zero."""
    return torch.nn.functional.normalize(rows, dim=-1)


def row_numbers(rows: Tensor) -> Tensor:
    """Return 0, 1, … for the rows of a tensor, on its device."""
    return torch.arange(len(rows), device=rows.device)


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a random stream that is the same in every run."""
    return torch.Generator(device).manual_seed(seed)


def append_ones(rows: Tensor) -> Tensor:
    """Return the rows (n, d) with a 1 after each, which gives a linear map an offset."""
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)


def indices_of(mask: Tensor) -> Tensor:
    """Return the indices (k,) at which a mask (n,) is true."""
    return mask.nonzero().flatten()


def squared_norms(rows: Tensor) -> Tensor:
    """Return the squared lengths of rows (…, d)."""
    return rows.square().sum(-1)


def root_mean_square(numbers: Tensor) -> Tensor:
    return numbers.square().mean().sqrt()
