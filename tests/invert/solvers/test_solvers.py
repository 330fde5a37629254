"""First-order, quasi-Newton and matrix-free solvers: planted inputs, variants, statuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keyhole import invert
from keyhole.core import Status
from keyhole.core.least_squares import cholesky, conjugate_gradients
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian import linearizer
from keyhole.invert.judge import residual_of

VARIANTS = {
    "bare": {"symmetric": True},
    "several heads": {"heads": 2, "value_scale": 0.4},
    "residual": {"residual": True, "value_scale": 0.2},
    "causal": {"causal": True, "symmetric": True},
    "everything": {
        "heads": 2,
        "residual": True,
        "causal": True,
        "biases": True,
        "value_scale": 0.2,
    },
}
METHODS = {
    "gradient descent": invert.GradientDescent(steps=3000),
    "Adam": invert.Adam(steps=3000, rate=0.01),
    "L-BFGS": invert.LBFGS(steps=600),
    "Newton–CG": invert.NewtonCG(steps=60),
}


def near(X, distance=1e-3):
    noise = torch.randn(
        X.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return X + distance * noise


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("name", ["L-BFGS", "Newton–CG"])
def test_near_the_input_it_finds_the_input(name, options):
    problem, X = invert.plant(4, 3, seed=5, **options)
    result = METHODS[name](problem, start=near(X))
    assert result.status is Status.RECOVERED, result.reason
    assert float((result.X - X).abs().max()) < 1e-8


@pytest.mark.parametrize("name", METHODS)
def test_from_its_own_starts(name):
    problem, X = invert.plant(3, 2, residual=True, value_scale=0.1, seed=len(name) % 3)
    result = replace(METHODS[name], starts=2)(problem)
    assert result.status is Status.RECOVERED
    assert residual_of(problem, result.X) < 1e-12
    assert float((result.X - X).abs().max()) < 1e-8


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_a_batch_are_independent(name):
    problem, X = invert.plant(4, 3, seed=1)
    starts = torch.stack([near(X, 0.1), near(X, 0.5), near(X, 1.0)])
    method = replace(METHODS[name], steps=10)
    equations = Equations.of(problem)

    def after(batch):
        state = method.begin(equations, batch)
        for _ in range(10):
            state = method.step(equations, state)
        return state.x

    alone = torch.cat([after(start.unsqueeze(0)) for start in starts])
    assert torch.allclose(after(starts), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_nan_and_unsolvable_problems_end_in_a_status(name):
    problem, _ = invert.plant(4, 3, scale=0.0)
    broken = replace(problem, B=problem.B * torch.nan)
    assert METHODS[name](broken).status is Status.NOT_APPLICABLE
    unreachable = replace(problem, B=torch.arange(12.0).reshape(4, 3))
    result = replace(METHODS[name], starts=2, steps=20)(unreachable)
    assert result.status is Status.UNSOLVED
    assert result.X is not None


def test_known_entries_are_kept():
    problem, X = invert.plant(4, 3, seed=1)
    known = torch.full_like(X, torch.nan)
    known[1] = X[1]
    for name in ("L-BFGS", "Newton–CG"):
        result = METHODS[name](replace(problem, known=known), start=near(X))
        assert torch.equal(result.X[1], X[1])
        assert result.status is Status.RECOVERED


def test_products_and_matrices_give_the_same_step():
    """By conjugate gradients and by Cholesky, with a regulariser and a known entry."""
    problem, X = invert.plant(4, 3, seed=1)
    known = torch.full_like(X, torch.nan)
    known[1, 2] = X[1, 2]
    equations = Equations.of(replace(problem, gamma=0.1, known=known))
    start = equations.impose(near(X, 0.5).unsqueeze(0))
    point = linearizer(equations)(start, torch.arange(1))
    weight = torch.tensor([0.05], dtype=torch.float64)
    p = conjugate_gradients(
        point.forward,
        point.backward,
        point.residuals,
        rtol=1e-12,
        max_steps=200,
        weight=weight,
    )
    unit = cholesky(point, scale=lambda _: torch.ones(1, dtype=torch.float64))
    wanted = unit(weight)(point.residuals)
    assert torch.allclose(p, wanted, rtol=0, atol=1e-9)
    assert float(p.view(4, 3)[1, 2]) == 0
    slope = invert.gradient(replace(problem, gamma=0.1, known=known), start[0])
    assert torch.allclose(
        2 * point.backward(point.residuals).view(4, 3), slope, atol=1e-12
    )


def test_a_residual_stream_is_inverted_from_the_output():
    solved = 0
    for seed in range(4):
        problem, X = invert.plant(
            12, 12, residual=True, value_scale=0.5 / 12**0.5, seed=seed
        )
        result = invert.Auto()(problem)
        assert result.status is Status.RECOVERED
        assert result.starts == 1
        solved += float((result.X - X).abs().max()) < 1e-9
    assert solved >= 3


def test_a_stream_with_heads_mask_and_biases():
    problem, X = invert.plant(
        6, 4, heads=2, residual=True, causal=True, biases=True, value_scale=0.15, seed=2
    )
    for method in (invert.LevenbergMarquardt(starts=1), invert.NewtonCG(starts=1)):
        result = method(problem)
        assert result.status is Status.RECOVERED
        assert float((result.X - X).abs().max()) < 1e-9
