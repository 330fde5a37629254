"""Questions that defences refuse, and those that they answer."""

from __future__ import annotations

import math

import pytest
import torch

from keyhole import oracle
from keyhole.core.errors import InputError
from keyhole.oracle import Defence, Refused

DIM = 8
TARGET = oracle.plant(dim=DIM, seed=5)
NORM = math.sqrt(DIM)


def draw(count: int, n: int = 3, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(count, n, DIM, dtype=torch.float64, generator=stream)


def usual(count: int, n: int = 3) -> torch.Tensor:
    """Return tokens of the usual norm in random directions, no two of which are similar."""
    tokens = torch.nn.functional.normalize(draw(50 * count, n), dim=-1)
    cosines = (tokens @ tokens.mT).triu(1).abs().amax((1, 2))
    return NORM * tokens[(cosines < 0.8) & (tokens.abs().amax((1, 2)) < 0.9)][:count]


def test_lengths():
    limited = oracle.defended(TARGET, Defence(min_tokens=3, max_tokens=5))
    for n in (3, 4, 5):
        assert torch.equal(limited(draw(2, n)), TARGET(draw(2, n)))
    for n, reason in (
        (1, "3 tokens or more, not 1"),
        (2, "not 2"),
        (6, "at most 5 tokens, not 6"),
    ):
        with pytest.raises(Refused, match=reason) as refused:
            limited(draw(2, n))
        assert refused.value.status == 422
    assert torch.equal(
        oracle.defended(TARGET, Defence(max_tokens=2))(draw(1, 1)), TARGET(draw(1, 1))
    )
    with pytest.raises(InputError, match="min_tokens must not exceed max_tokens"):
        Defence(min_tokens=5, max_tokens=3)


def test_unusual_questions():
    guarded = oracle.defended(TARGET, Defence(usual_norm=NORM))
    X = usual(20)
    assert torch.equal(guarded(X), TARGET(X))
    axis = torch.eye(DIM, dtype=torch.float64) * NORM
    for question, reason in (
        (axis[:1, None], "along one coordinate"),
        (X[:1] / 3, r"norm is not between 1\.41\d* and 5\.65\d*"),
        (3 * X[:1], "norm is not between"),
        (torch.stack([X[0, 0], -1.1 * X[0, 0]])[None], "along one direction"),
        (torch.zeros(1, 2, DIM, dtype=torch.float64), "norm is not between"),
    ):
        with pytest.raises(Refused, match=reason):
            guarded(question)
    # One such question is enough to refuse a batch.
    with pytest.raises(Refused):
        guarded(torch.cat([X[:5], 3 * X[:1]]))


def test_fresh_noise_differs_each_time_and_averages_out():
    noisy = oracle.defended(TARGET, Defence(fresh_noise=0.1))
    X = draw(4).repeat(1000, 1, 1)
    errors = noisy(X) - TARGET(X)
    assert 0.09 < float(errors.abs().max()) <= 0.1
    assert (
        float(errors.view(1000, 4).mean(0).abs().max())
        < 0.1 / math.sqrt(3) * 5 / 1000**0.5
    )


def test_a_defence_is_stated_in_words():
    words = ["max_norm=2", "noise=0.1", "decimals=0", "sign_only=true", "seed=7"]
    whole = Defence.of_answers([*words, "min_tokens=3", "max_tokens=9"])
    assert whole.parameters == {
        "min_tokens": 3,
        "max_tokens": 9,
        "max_norm": 2.0,
        "noise": 0.1,
        "decimals": 0,
        "sign_only": True,
    }
    assert whole.seed == 7
    assert Defence.of_answers([]) == Defence()
    with pytest.raises(InputError, match="sign_only as true or false, got 'yes'"):
        Defence.of_answers(["sign_only=yes"])
    assert "3 tokens or more, 9 tokens at most, tokens of norm 2 at most" in str(whole)
    with pytest.raises(Refused):  # a refusal precedes all changes of answers
        oracle.defended(TARGET, whole)(draw(1, 2))
