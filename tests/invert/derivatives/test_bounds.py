"""The paper's bounds and the values measured beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from layers import Kind, draw, plain_loss, planted, second

from keyhole import invert
from keyhole.errors import InputError
from keyhole.invert.derivatives.bounds import paper_gamma


def test_the_radius_and_the_bounds_are_the_papers():
    problem, X = planted(4, 3)
    result = invert.bounds(problem, X)
    norms = [np.linalg.norm(weights.numpy(), 2) for weights in (problem.W, problem.V)]
    R = max(1.0, *norms, np.abs(problem.B.numpy()).max())
    assert pytest.approx(float(R)) == result.R
    assert result.R_with_input == pytest.approx(max(R, np.linalg.norm(X.numpy(), 2)))
    assert result.lipschitz_bound == pytest.approx(4**3 * 3**3 * R**10)
    assert result.lowest_bound == pytest.approx(-4 * 3 * R**8)
    assert result.gamma == pytest.approx(paper_gamma(problem))


def test_the_radius_is_never_below_one():
    problem, X = planted(3, 2)
    small = replace(problem, W=problem.W / 100, V=problem.V / 100, B=problem.B / 100)
    assert invert.bounds(small, X).R == 1.0


def test_eigenvalues_are_those_of_the_hessian_that_autodiff_finds():
    problem, X = draw(Kind(n=3, d=2, m=2))
    expected = second(lambda x: plain_loss(problem, x))(X).reshape(6, 6).numpy()
    result = invert.bounds(problem, X)
    values = np.linalg.eigvalsh(expected)
    assert result.lowest == pytest.approx(values[0])
    assert result.highest == pytest.approx(values[-1])


def test_measured_values_lie_within_the_bounds():
    for seed in range(5):
        problem, X = planted(4, 4, seed=seed)
        result = invert.bounds(problem, X, seed=seed)
        assert result.lowest_bound <= result.lowest
        assert 0 < result.lipschitz <= result.lipschitz_bound


def test_the_lipschitz_constant_is_one_that_a_neighbour_shows():
    problem, X = planted(3, 3)
    result = invert.bounds(problem, X, neighbours=1, seed=5)
    away = torch.randn(3, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    Y = X + away * (1e-3 * X.norm() / away.norm())
    change = invert.hessian(problem, Y) - invert.hessian(problem, X)
    assert result.lipschitz == pytest.approx(np.linalg.norm(change.numpy(), 2) / (Y - X).norm())
    assert result == invert.bounds(problem, X, neighbours=1, seed=5)
    assert result.lipschitz <= invert.bounds(problem, X, neighbours=9, seed=5).lipschitz


def test_gamma_is_left_out():
    problem, X = planted(3, 3)
    assert invert.bounds(replace(problem, gamma=5.0), X) == invert.bounds(problem, X)


def test_everything_known_leaves_nothing_to_vary():
    problem, X = planted(3, 3)
    result = invert.bounds(replace(problem, known=X), X)
    assert result.lowest == result.highest == result.lipschitz == 0.0


def test_wrong_arguments_are_refused():
    problem, X = planted(3, 3)
    with pytest.raises(InputError, match="expected X of shape n×d"):
        invert.bounds(problem, X.unsqueeze(0))
    with pytest.raises(InputError, match="at least one neighbour, got 0"):
        invert.bounds(problem, X, neighbours=0)
