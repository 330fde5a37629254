"""Short questions asked in many words."""

from __future__ import annotations

import pytest
import torch

from keyhole import extract, oracle
from keyhole.extract.defences import Copied

TARGET = oracle.plant(dim=5, seed=4)


def draw(count: int, n: int) -> torch.Tensor:
    stream = torch.Generator().manual_seed(n)
    return torch.randn(count, n, 5, dtype=torch.float64, generator=stream)


@pytest.mark.parametrize(("least", "most"), [(3, None), (4, 4), (5, 6), (1, None)])
def test_one_and_two_tokens_are_asked_as_more(least, most):
    limits = oracle.Defence(min_tokens=least, max_tokens=most)
    limited = oracle.defended(TARGET, limits)
    copied = Copied(limited, least)
    for n in (1, 2):
        assert torch.allclose(
            copied(draw(30, n)), TARGET(draw(30, n)), rtol=0, atol=1e-12
        )
    steps = list(extract.SingleHead().steps(copied))
    assert torch.allclose(steps[-1].model.W, TARGET.W, rtol=0, atol=1e-8)


def test_an_odd_length_alone_is_asked_with_ordinary_questions():
    change = oracle.Defence(min_tokens=3, max_tokens=3)
    attack = extract.Adapted(change)
    assert str(attack) == "OrdinaryQuestions"
    result = attack(oracle.defended(TARGET, change))
    assert result.status is extract.Status.RECOVERED
    assert torch.allclose(result.model.W, TARGET.W, rtol=0, atol=1e-10)
    labels = oracle.Defence(min_tokens=3, max_tokens=3, sign_only=True)
    assert str(extract.Adapted(labels)) == "OrdinaryLabels"
