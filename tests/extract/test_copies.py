"""Short questions asked in many words."""

from __future__ import annotations

import math

import pytest
import torch

from keyhole import extract, oracle
from keyhole.core.errors import InputError
from keyhole.extract.adapted import Copied

TARGET = oracle.plant(dim=5, seed=4)


def draw(count: int, n: int) -> torch.Tensor:
    stream = torch.Generator().manual_seed(n)
    return torch.randn(count, n, 5, dtype=torch.float64, generator=stream)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 1), (3, 4), (5, 5), (7, 1)])
def test_copies_shift_the_logit_by_the_logarithm_of_their_ratio(n, m):
    pairs = draw(40, 2)
    a, b = pairs.unbind(1)
    z = ((a - b) @ TARGET.W * b).sum(1)
    shifted = torch.sigmoid(z + math.log(n / m))
    order = torch.tensor([0] * n + [1] * m)
    expected = b @ TARGET.v + shifted * ((a - b) @ TARGET.v)
    assert torch.allclose(TARGET(pairs[:, order]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("least", "most"), [(3, None), (4, 4), (3, 3), (5, 5), (9, 9), (1, None)])
def test_one_and_two_tokens_are_asked_as_more(least, most):
    limited = oracle.LengthLimited(TARGET, least, most)
    copied = Copied(limited, least, most)
    for n in (1, 2):
        assert torch.allclose(copied(draw(30, n)), TARGET(draw(30, n)), rtol=0, atol=1e-8)
    steps = list(extract.SingleHead().steps(copied))
    assert torch.allclose(steps[-1].model.W, TARGET.W, rtol=0, atol=1e-8)


def test_the_same_token_twice_tells_nothing_and_breaks_nothing():
    copied = Copied(oracle.LengthLimited(TARGET, 3, 3), 3, 3)
    twice = draw(4, 1).repeat(1, 2, 1)
    assert torch.allclose(copied(twice), TARGET(twice), rtol=0, atol=1e-12)


def test_lengths_that_cannot_be_written():
    copied = Copied(oracle.LengthLimited(TARGET, 4, 4), 4, 4)
    with pytest.raises(InputError, match="no multiple of 3 is among the lengths"):
        copied(draw(2, 3))
