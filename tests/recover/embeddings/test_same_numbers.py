"""Numbers that correspond are recognised by how they vary together."""

from __future__ import annotations

import pytest
import torch

from keyhole.recover.embeddings.pooling import same_numbers


def drawn(mixing, count, seed):
    """Vectors whose numbers depend on each other as `mixing` says."""
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(count, len(mixing), generator=stream).double() @ mixing


@pytest.fixture
def mixing():
    stream = torch.Generator().manual_seed(7)
    return torch.eye(16).double() + 0.4 * torch.randn(16, 16, generator=stream).double()


def test_the_same_numbers_are_recognised(mixing):
    assert same_numbers(drawn(mixing, 60, 0), drawn(mixing, 60, 1))


def test_other_orders_and_encoders_are_not_recognised(mixing):
    own = drawn(mixing, 60, 0)
    assert not same_numbers(own, drawn(mixing, 60, 1).roll(3, 1))
    others = torch.eye(16).double() + 0.4 * torch.randn(
        16, 16, generator=torch.Generator().manual_seed(8)
    )
    assert not same_numbers(own, drawn(others, 60, 1))


def test_independent_numbers_are_seldom_recognised():
    """Independent numbers: the right order is one as good as any."""
    plain = torch.eye(12).double()
    assert not any(
        same_numbers(drawn(plain, 20, 2 * s), drawn(plain, 20, 2 * s + 1), s)
        for s in range(40)
    )


def test_too_few_vectors_and_constant_numbers_are_not_recognised(mixing):
    assert not same_numbers(drawn(mixing, 60, 0), drawn(mixing, 2, 1))
    assert not same_numbers(drawn(mixing, 60, 0), torch.ones(9, 16))
