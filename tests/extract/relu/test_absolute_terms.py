"""Neurons from absolute terms and a linear part: the same function, and as few as there can be."""

from __future__ import annotations

import pytest
import torch

from any_function import normal
from keyhole.extract.relu.absolute_terms import Folds, neurons
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
