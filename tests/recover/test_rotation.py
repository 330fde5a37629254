"""Secret rotations and linear maps, undone from known pairs."""

from __future__ import annotations

import pytest
import torch

from keyhole.core.errors import InputError
from keyhole.recover.secrets import undo_rotation

STREAM = torch.Generator().manual_seed(0)
D = 24


def normal(*shape):
    return torch.randn(*shape, generator=STREAM, dtype=torch.float64)


ROTATION = torch.linalg.qr(normal(D, D)).Q
NEW = normal(5, D)


@pytest.mark.parametrize("pairs", [D, D + 1, 3 * D])
def test_a_rotation_is_undone_exactly_from_as_many_pairs_as_numbers(pairs):
    known = normal(pairs, D)
    alignment = undo_rotation(known, known @ ROTATION)
    assert torch.allclose(alignment.undo(NEW @ ROTATION), NEW, atol=1e-10)


@pytest.mark.parametrize("pairs", [1, 7, D - 1])
def test_fewer_pairs_give_as_many_numbers_exactly(pairs):
    known = normal(pairs, D)
    alignment = undo_rotation(known, known @ ROTATION)
    assert alignment.own.shape == (D, pairs)
    assert torch.allclose(
        alignment.own.T @ alignment.own, torch.eye(pairs).double(), atol=1e-10
    )
    assert torch.allclose(
        alignment.numbers(NEW @ ROTATION), NEW @ alignment.own, atol=1e-10
    )
    # the result is the part in the span of the known vectors
    inside = NEW @ torch.linalg.pinv(known) @ known
    assert torch.allclose(alignment.undo(NEW @ ROTATION), inside, atol=1e-9)


def test_a_text_that_is_known_twice_counts_once():
    known = normal(5, D)
    twice = torch.cat([known, known])
    assert undo_rotation(twice, twice @ ROTATION).own.shape == (D, 5)


def test_rounding_is_averaged_away():
    errors = []
    for pairs in (2 * D, 40 * D):
        known = normal(pairs, D)
        stored = known @ ROTATION + 0.01 * normal(pairs, D)
        errors.append(
            float((undo_rotation(known, stored).undo(NEW @ ROTATION) - NEW).norm())
        )
    assert errors[1] < 0.5 * errors[0] < 0.1


@pytest.mark.parametrize(
    "stored", [torch.ones(3, 5), torch.ones(4, 4), torch.full((3, 4), torch.nan)]
)
def test_pairs_have_to_be_pairs(stored):
    with pytest.raises(InputError, match="known and stored vectors must"):
        undo_rotation(torch.ones(3, 4), stored)
