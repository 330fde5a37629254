"""Steered heads show the network behind them as if each of its inputs could be set."""

from __future__ import annotations

import pytest
import torch

from any_function import normal
from keyhole.extract.one_layer import NotSteerable, Steered
from keyhole.oracle import OneLayer, ReluFfn, plant


def transformer(dim: int, heads: int, width: int, rank: int | None = None) -> OneLayer:
    target = plant("one-layer", dim=dim, heads=heads, width=width, rank=rank)
    assert isinstance(target, OneLayer)
    return target


def network(target: OneLayer) -> ReluFfn:
    """The network of all heads' outputs, one after the other."""
    return ReluFfn(target.A.transpose(0, 1).flatten(1), target.w)


@pytest.mark.parametrize(("d", "heads", "rank"), [(4, 2, None), (9, 3, None), (16, 4, 4)])
def test_steered_heads_show_the_network(d: int, heads: int, rank: int | None) -> None:
    target = transformer(d, heads, 7, rank)
    u = (
        normal(3, 500, 1, heads * d)
        * torch.logspace(-6, 6, 500, dtype=torch.float64)[:, None, None]
    )
    answers = network(target)(u)
    size = torch.linalg.vector_norm(u, dim=(1, 2))
    error = (Steered(target, target.W, 0)(u) - answers).abs() / size
    assert float(error.max()) < 1e-13


def test_steering_with_a_head_that_looks_nowhere() -> None:
    target = transformer(9, 3, 7)
    W = torch.stack([target.W[0], 0 * target.W[0], target.W[2]])
    target = OneLayer(W, target.A, target.w)
    u = normal(3, 500, 1, 27)
    error = Steered(target, target.W, 0)(u) - network(target)(u)
    assert float(error.abs().max()) < 1e-12


def test_steering_that_does_not_exist() -> None:
    target = transformer(9, 3, 4, rank=1)
    with pytest.raises(NotSteerable, match="look apart"):
        Steered(target, target.W, 0)(normal(0, 2, 1, 27))
    with pytest.raises(NotSteerable):
        Steered(target, target.W, 0)(torch.zeros(1, 1, 27, dtype=torch.float64))


def test_questions_do_not_show_the_last_digits_of_the_heads() -> None:
    target = transformer(12, 3, 4)
    u = normal(0, 200, 3, 12)
    tokens, _ = Steered(target, target.W, 0).tokens(u)
    again, _ = Steered(target, target.W * (1 + 1e-14 * normal(1, 3, 12, 12)), 0).tokens(u)
    assert torch.equal(tokens, again)
