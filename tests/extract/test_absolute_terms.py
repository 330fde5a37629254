"""Neurons from absolute terms and a linear part: the same function, and as few as there can be."""

from __future__ import annotations

import pytest
import torch

from any_function import normal
from keyhole.extract.relu_network import Folds, neurons
from keyhole.oracle import ReluFfn


@pytest.mark.parametrize(("d", "m"), [(6, 6), (12, 15), (4, 12)])
def test_neurons_of_any_folds_and_any_linear_part(d: int, m: int) -> None:
    folds = Folds(normal(0, m, d), normal(1, m).sign())
    x = normal(2, 50, d)
    for linear in (normal(3, d), torch.zeros(d, dtype=torch.float64)):
        model, unknowns = neurons(folds, linear)
        torch.testing.assert_close(model(x.unsqueeze(1)), folds(x) + x @ linear)
        assert (len(model.w), unknowns) == (m + 2, (m + 1) * d)
    true = ReluFfn(folds.normals * normal(4, m).sign().unsqueeze(1), folds.signs)
    model, unknowns = neurons(folds, 0.5 * true.w @ true.A)
    torch.testing.assert_close(model(x.unsqueeze(1)), true(x.unsqueeze(1)))
    if m < 1.5 * d:  # beyond 2d orientations are not looked for in earnest
        assert (len(model.w), unknowns) == (m, m * d)


@pytest.mark.parametrize("seed", range(8))
def test_few_neurons_beyond_twice_the_dimension_are_oriented(seed):
    """All corners are tried, so no neuron is made for a remainder."""
    stream = torch.Generator().manual_seed(seed)
    A = torch.randn(6, 2, generator=stream, dtype=torch.float64)
    w = torch.randn(6, generator=stream, dtype=torch.float64).sign()
    network, unknowns = neurons(Folds(A, w), 0.5 * w @ A)
    assert (len(network.w), unknowns) == (6, 12)
    x = torch.randn(50, 1, 2, generator=stream, dtype=torch.float64)
    assert torch.allclose(network(x), ReluFfn(A, w)(x), rtol=0, atol=1e-13)
