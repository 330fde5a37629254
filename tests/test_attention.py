"""The attention formula, against naive loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from keyhole import attention

RNG = np.random.default_rng(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.as_tensor(RNG.standard_normal(shape))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("heads", [0, 1, 3])  # 0: W and V without a head axis
def test_output_is_the_sum_of_naive_heads(n, causal, last, m, heads):
    d = 4
    X = draw(2, n, d)
    W = draw(max(heads, 1), d, d)
    V = draw(max(heads, 1), d, m)
    stripped = (W[0], V[0]) if heads == 0 else (W, V)
    got = attention.output(X, *stripped, causal=causal, last=last)
    for sequence, answer in zip(X, got, strict=True):
        expected = sum(
            reference.attention(sequence.numpy(), W[h].numpy(), V[h].numpy(), causal)
            for h in range(len(W))
        )
        np.testing.assert_allclose(
            answer, expected[-1] if last else expected, atol=1e-13
        )


def test_scores_put_the_query_on_the_left():
    X = draw(5, 3)
    W = draw(3, 3)
    np.testing.assert_allclose(
        attention.scores(X, X, W), reference.scores(X.numpy(), W.numpy()), atol=1e-13
    )


def test_probabilities_are_rows_that_sum_to_one_and_hide_the_future():
    A = attention.probabilities(draw(2, 4, 4), causal=True)
    np.testing.assert_allclose(A.sum(-1), 1.0, atol=1e-15)
    assert (A.triu(1) == 0).all()


def test_huge_scores_do_not_overflow():
    A = attention.probabilities(
        torch.tensor([[1e300, -1e300, 1e300]], dtype=torch.float64)
    )
    np.testing.assert_array_equal(A, [[0.5, 0.0, 0.5]])
