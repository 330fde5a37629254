"""Problems of known answer, to try attacks on: the input comes with the problem, never in it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_number, expect_seed
from keyhole.core.machine import expect_room
from keyhole.invert.problem import Problem


def plant(
    length: int = 8,
    dim: int = 8,
    *,
    scale: float = 0.3,
    symmetric: bool = False,
    heads: int = 1,
    value_scale: float = 1.0,
    residual: bool = False,
    causal: bool = False,
    biases: bool = False,
    seed: int = 0,
) -> tuple[Problem, Tensor]:
    """A problem and its input: X standard Gaussian, W with entries of variance scale²/d.

    `symmetric` makes `W = scale·MMᵀ` instead, M with entries of variance 1/d; entries of V have
    standard deviation `value_scale` (a real block has about 1/√d).
    """
    for name, size in {"tokens": length, "dim": dim, "heads": heads}.items():
        if size < 1:
            raise InputError(f"expected {name} of 1 or more, got {size}")
    expect_number("scale", scale, least=0)
    expect_seed(seed)
    # X, W, V and M, and the scores and maps of the output.
    numbers = 4 * length * dim + 4 * heads * dim * dim + 3 * heads * length * length
    expect_room(8 * numbers, f"{length:,} tokens of d = {dim:,} with {heads:,} heads")
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    several = (heads,) if heads > 1 else ()
    X = normal(length, dim)
    V = value_scale * normal(*several, dim, dim)
    M = normal(*several, dim, dim) / math.sqrt(dim)
    blank = Problem(
        W=scale * (M @ M.mT if symmetric else M),
        V=V,
        B=X,
        key_bias=normal(*several, dim) / math.sqrt(dim) if biases else None,
        output_bias=normal(dim) if biases else None,
        residual=residual,
        causal=causal,
    )
    problem = replace(blank, B=blank.output(X))
    if problem.fault:
        raise InputError(f"{problem.fault}: try a smaller scale than {scale:g}")
    return problem, X
