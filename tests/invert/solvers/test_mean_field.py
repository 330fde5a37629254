"""The mean field is unique and found from any start; its curve leads to exact inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from keyhole import invert
from keyhole.core import Status
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.judge import judge
from keyhole.invert.solvers.continuation import solutions_along_the_curve
from keyhole.invert.solvers.mean_field import covariance_of, geometric_mean
from keyhole.invert.solvers.reduce import reduce


@pytest.mark.parametrize(("n", "d"), [(9, 4), (5, 4), (5, 5), (4, 6)])
@pytest.mark.parametrize("biases", [False, True])
def test_it_solves_attention_to_first_order_in_the_scores(n, d, biases):
    problem = reduce(invert.plant(n, d, biases=biases, seed=n + d)[0]).problem
    X = invert.mean_field(problem)
    coldest = replace(Equations.of(problem), temperature=1e-7)
    # The residual is of second order, λ times smaller than the scores.
    assert float(coldest.residuals(X.unsqueeze(0)).abs().max()) < 1e-3


def test_the_covariance_is_unique_and_found_from_any_start():
    stream = torch.Generator().manual_seed(5)
    W = torch.randn(4, 4, generator=stream, dtype=torch.float64)
    M = torch.randn(4, 4, generator=stream, dtype=torch.float64)
    S = M @ M.mT
    result = covariance_of(W, S)
    assert torch.allclose(result @ W.mT @ result @ W @ result, S, rtol=1e-9, atol=1e-9)
    for _ in range(5):
        N = torch.randn(4, 4, generator=stream, dtype=torch.float64)
        covariance = N @ N.mT + 0.01 * torch.eye(4, dtype=torch.float64)
        distances = []
        for _ in range(50):
            covariance = geometric_mean(torch.linalg.inv(W.mT @ covariance @ W), S)
            distances.append(_thompson(covariance, result))
        assert distances[-1] < 1e-9
        # Each step halves the distance, down to rounding.
        for before, after in itertools.pairwise(distances):
            assert after <= 0.5 * before + 1e-10


def _thompson(P, S):
    return float(torch.linalg.eigvals(torch.linalg.solve(P, S)).real.log().abs().max())


@pytest.mark.parametrize("change", [{"causal": True}, {"residual": True}, {"heads": 2}])
def test_problems_without_a_mean_field(change):
    problem, _ = invert.plant(4, 4, **change)
    assert invert.mean_field(problem) is None
    assert invert.mean_field(invert.plant(1, 4)[0]) is None
    assert list(solutions_along_the_curve(problem)) == []


def test_a_singular_w_has_no_mean_field():
    problem, _ = invert.plant(4, 3)
    assert (
        invert.mean_field(replace(problem, W=torch.zeros(3, 3, dtype=torch.float64)))
        is None
    )


def test_every_crossing_of_the_curve_is_an_exact_input():
    crossed = 0
    for seed in range(4):
        problem, _ = invert.plant(6, 3, seed=seed)
        reduced = reduce(problem)
        for X in solutions_along_the_curve(reduced.problem, points=150):
            assert judge(problem, reduced.restore(X)).status is Status.RECOVERED
            crossed += 1
    assert crossed >= 3
