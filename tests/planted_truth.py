"""Planted blocks, and comparisons with the planted truth: tests and benchmarks alone use them."""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.oracle import Block, Head


def relative(found: Tensor, truth: Tensor) -> float:
    """Return the largest error, relative to the largest entry."""
    return float((found - truth).abs().max() / truth.abs().max())


def worst(found: Head, truth: Head) -> float:
    return max(relative(found.W, truth.W), relative(found.v, truth.v))


def plant_block(
    dim: int = 16,
    *,
    heads: int = 4,
    groups: int | None = None,
    head_dim: int | None = None,
    width: int = 32,
    activation: str = "gelu",
    gated: bool = False,
    norm: str = "rms",
    rotary: bool = False,
    biases: bool = True,
    epsilon: float = 1e-5,
    every_token: bool = False,
    causal: bool = False,
    score: bool = False,
    places: int = 0,
    seed: int = 0,
) -> Block:
    """Return a random block, with states and scores of about 1 for tokens of norm √d.

    `places` is the number of distances that have a position bias.
    """
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    k = head_dim or dim // heads
    groups = groups or heads
    narrow = dim**-0.5
    share = 0.3 * biases
    turns = 10000.0 ** -(torch.arange(0, k, 2, dtype=torch.float64) / k)
    gates = width if gated else 0
    epsilon = 0.0 if norm == "none" else epsilon
    if norm == "behind":
        behind = {
            name: mean + 0.2 * normal(dim)
            for name, mean in (("D", 1.0), ("E", 1.0), ("e", 0.0))
        }
    else:
        behind = {}
    m = 1 if score else dim
    if places:
        behind["places"] = normal(heads, places)
    return Block(
        Q=normal(heads, dim, k) * narrow,
        q=normal(heads, k) * share,
        K=normal(groups, dim, k) * narrow,
        V=normal(groups, dim, k) * narrow,
        O=normal(heads, k, dim) * 0.7 * (heads * k) ** -0.5,
        b=normal(dim) * share,
        frequencies=turns.repeat(groups, 1) if rotary else normal(groups, 0),
        A=normal(width, dim) * narrow,
        a=normal(width) * share,
        G=normal(gates, dim) * narrow,
        g=normal(gates) * share,
        C=normal(m, width) * width**-0.5,
        c=normal(m) * share,
        w=normal(dim * score) * narrow,
        activation=activation,
        norm=norm,
        epsilon=epsilon,
        epsilon_behind=epsilon,
        every_token=every_token,
        causal=causal,
        **behind,
    )
