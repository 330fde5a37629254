"""What the vectors of probe sequences measures, against the formula."""

from __future__ import annotations

import numpy as np
import pytest
import reference_layers as reference
import torch
from planted_layers import KINDS, layer

from any_function import normal
from keyhole.extract.full_output import VectorOracle, open_vectors, solve_scores
from keyhole.oracle import Counted


@pytest.mark.parametrize(("every", "causal"), KINDS)
def test_answers_are_what_the_formula_says(every, causal):
    truth = layer(5, 2, 4, every, causal)
    vectors = VectorOracle(truth, 4, every, causal)
    keys = normal(1, 3, 5)
    xs = normal(2, 2, 5)
    got = vectors.respond(keys[None], xs, square=0.5, padding=2)[0]
    counts = vectors.references(2, padding=2)
    for i, x in enumerate(xs):
        expected = np.zeros(4)
        for W, V in zip(truth.W.numpy(), truth.V.numpy(), strict=True):
            weights = reference.weights_of_keys(
                0.5 * x.numpy(), keys.numpy(), W, float(counts[i])
            )
            expected += sum(
                a * (key @ V) for a, key in zip(weights, keys.numpy(), strict=True)
            )
        assert np.allclose(got[i].numpy(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_the_planted_layer_is_attention(causal):
    truth = layer(4, 3, 5, True, causal)
    X = normal(0, 6, 4)
    expected = reference.attention(X.numpy(), truth.W.numpy(), truth.V.numpy(), causal)
    assert np.allclose(truth(X[None])[0].numpy(), expected, atol=1e-12)


def test_scores_come_back_through_the_linear_solve():
    z = normal(3, 7, 2, 3)
    values = normal(4, 2, 3, 8)
    references = torch.arange(1.0, 8.0, dtype=torch.float64)
    weights = z.exp() / (references[:, None, None] + z.exp().sum(-1, keepdim=True))
    answers = torch.einsum("khp,hpm->km", weights, values)
    found, errors = solve_scores(answers, values, references)
    assert torch.allclose(found, z, atol=1e-12)
    assert bool(((found - z).abs() <= 100 * errors).all())


@pytest.mark.parametrize(("every", "causal"), KINDS)
@pytest.mark.parametrize("d", [1, 2, 7])
def test_values_and_causality_are_read_off(every, causal, d):
    truth = layer(d, 3, 4, every, causal)
    counted = Counted(truth)
    vectors, total = open_vectors(counted)
    assert (vectors.every_token, vectors.causal) == (every, causal)
    assert torch.allclose(total, truth.V.sum(0), atol=1e-13)
    assert counted.queries == (1 if causal else d)
