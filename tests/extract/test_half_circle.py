"""The kinks of a half circle, against their angles in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference_relu import kinks as reference_kinks
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.extract.relu_network import find_pieces


def _tolerance(y: Tensor) -> float:
    return 1e-12 * float(y.abs().max())


class _Folded:
    """`½ Σ w_k |a_kᵀx(θ)|`, counting its questions."""

    def __init__(self, A: Tensor, w: Tensor) -> None:
        self.A = A
        self.w = w
        self.queries = self.levels = 0

    def __call__(self, t: Tensor) -> Tensor:
        self.queries += len(t)
        self.levels += 1
        return 0.5 * (torch.stack([t.cos(), t.sin()], 1) @ self.A.mT).abs() @ self.w


def _random(m: int, seed: int) -> _Folded:
    stream = torch.Generator().manual_seed(seed)
    A = torch.randn(m, 2, generator=stream, dtype=torch.float64)
    return _Folded(A, torch.randn(m, generator=stream, dtype=torch.float64))


@pytest.mark.parametrize("m", [1, 2, 5, 40, 200])
def test_every_kink_is_found_to_rounding_at_about_seven_questions_each(m: int) -> None:
    for seed in range(5):
        target = _random(m, seed)
        pieces = find_pieces(target, _tolerance, 1024)
        basis = np.eye(2)
        expected = reference_kinks(
            target.A.numpy(), target.w.numpy(), basis[0], basis[1]
        )
        assert len(pieces.kinks) == m
        found = np.sort(pieces.kinks.numpy() % math.pi)
        np.testing.assert_allclose(found, expected, atol=1e-9)
        assert target.queries <= 20 + 9 * m
        assert target.levels <= 40


def test_pieces_are_the_gradients_between_the_kinks() -> None:
    target = _random(30, 7)
    pieces = find_pieces(target, _tolerance, 1024)
    middles = pieces.kinks + pieces.widths / 2
    x = torch.stack([middles.cos(), middles.sin()], 1)
    gradients = 0.5 * ((x @ target.A.mT).sign() * target.w) @ target.A
    torch.testing.assert_close(pieces.planar, gradients, atol=1e-10, rtol=0)
    assert float(pieces.widths.sum()) == pytest.approx(math.pi)


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, -0.9), (1.0, -1.0), (-1.0, 0.3)])
def test_two_close_kinks_are_told_apart(
    gap: float, weights: tuple[float, float]
) -> None:
    # Of opposite sign, both can lie on one side of the point where the outer pieces
    # meet.
    angles = torch.tensor([1.0, 1.0 + gap, 2.5], dtype=torch.float64)
    A = torch.stack([-angles.sin(), angles.cos()], 1)
    target = _Folded(A, torch.tensor([*weights, 0.7], dtype=torch.float64))
    pieces = find_pieces(target, _tolerance, 1024)
    torch.testing.assert_close(pieces.kinks.sort().values, angles, atol=1e-9, rtol=0)


def test_kinks_closer_than_rounding_can_tell_count_as_one() -> None:
    angles = torch.tensor([1.0, 1.0 + 1e-13, 2.5], dtype=torch.float64)
    target = _Folded(
        torch.stack([-angles.sin(), angles.cos()], 1), torch.ones(3).double()
    )
    assert len(find_pieces(target, _tolerance, 1024).kinks) == 2


def test_a_kink_on_a_question_is_found() -> None:
    angles = torch.tensor(
        [math.pi / 32, 1.0], dtype=torch.float64
    )  # the very first question
    target = _Folded(
        torch.stack([-angles.sin(), angles.cos()], 1), torch.ones(2).double()
    )
    pieces = find_pieces(target, _tolerance, 1024)
    torch.testing.assert_close(pieces.kinks.sort().values, angles, atol=1e-9, rtol=0)


def test_zero_has_no_kinks() -> None:
    assert len(find_pieces(torch.zeros_like, _tolerance, 1024).kinks) == 0


@pytest.mark.parametrize(
    "values",
    [
        lambda t: torch.ones_like(t),
        lambda t: torch.sin(4 * t),
        lambda t: torch.floor(100 * torch.sin(2 * t)),
        lambda t: torch.randn(t.shape, dtype=torch.float64),
    ],
    ids=["constant", "smooth", "steps", "random"],
)
def test_what_is_not_piecewise_linear_ends_in_a_status(values: object) -> None:
    asked = 0

    def counted(t: Tensor) -> Tensor:
        nonlocal asked
        asked += len(t)
        return values(t)

    with pytest.raises(Unsuccessful) as end:
        find_pieces(counted, _tolerance, 64)
    assert end.value.status is Status.MISMATCH
    assert asked <= 64 * (4 * 64 + 16)  # levels times the largest batch
