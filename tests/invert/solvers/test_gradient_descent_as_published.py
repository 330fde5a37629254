"""Section 3.2 as published: a fixed step, which may converge or diverge."""

from __future__ import annotations

import pytest
import torch
from layers import plain_loss, planted

from keyhole import invert
from keyhole.core.errors import InputError
from keyhole.invert import GradientDescentAsPublished
from keyhole.invert.derivatives.equations import Equations


def test_a_step_is_the_rate_times_the_gradient():
    problem, X = planted(4, 3)
    start = (X + 0.1).requires_grad_()
    slope = torch.autograd.grad(plain_loss(problem, start), start)[0]
    equations = Equations.of(problem)
    method = GradientDescentAsPublished(rate=0.03)
    state = method.step(equations, method.begin(equations, start.detach().unsqueeze(0)))
    assert torch.allclose(state.x[0], start.detach() - 0.03 * slope, rtol=0, atol=1e-13)
    assert float(state.loss) == pytest.approx(float(invert.loss(problem, state.x[0])))


@pytest.mark.parametrize(("n", "d"), [(3, 4), (4, 3)])
def test_a_whole_run_is_exactly_the_papers_loop(n, d):
    """The problem is not reduced, and the result is not polished."""
    problem, X = invert.plant(n, d, seed=5)
    point = X + 1e-3
    expected = [float(plain_loss(problem, point).sqrt())]
    for _ in range(50):
        slope = torch.autograd.grad(plain_loss(problem, point.requires_grad_()), point)[
            0
        ]
        point = (point - 0.01 * slope).detach()
        expected.append(float(plain_loss(problem, point).sqrt()))
    method = GradientDescentAsPublished(rate=0.01, steps=50)
    result = method(problem, start=X + 1e-3)
    assert torch.allclose(result.X, point, rtol=0, atol=1e-12)
    assert [loss for _, loss in result.trace] == pytest.approx(expected, rel=1e-9)
    first = GradientDescentAsPublished(rate=0.01, steps=2, starts=1)(problem)
    assert first.trace[0][1] == pytest.approx(
        float(invert.loss(problem, problem.B).sqrt())
    )


def test_the_limit_of_the_rate_is_two_over_the_greatest_eigenvalue():
    problem, X = planted(3, 2, seed=1)
    greatest = float(torch.linalg.eigvalsh(invert.hessian(problem, X))[-1])
    vector = (
        torch.linalg.eigh(invert.hessian(problem, X))
        .eigenvectors[:, -1]
        .reshape(X.shape)
    )
    equations = Equations.of(problem)
    for share, shrinks in ((0.9, True), (1.1, False)):
        method = GradientDescentAsPublished(rate=share * 2 / greatest)
        state = method.begin(equations, (X + 1e-6 * vector).unsqueeze(0))
        for _ in range(10):
            state = method.step(equations, state)
        assert (float((state.x[0] - X).norm()) < 1e-6) == shrinks


def test_near_a_minimum_the_error_decreases_at_the_rate_of_the_condition():
    problem, X = invert.plant(3, 2, seed=1, symmetric=True)
    values, vectors = torch.linalg.eigh(invert.hessian(problem, X))
    least = float(values[0])
    greatest = float(values[-1])
    method = GradientDescentAsPublished(rate=1 / greatest)
    equations = Equations.of(problem)
    state = method.begin(
        equations, (X + 1e-6 * vectors[:, 0].reshape(X.shape)).unsqueeze(0)
    )
    for _ in range(200):
        state = method.step(equations, state)
    expected = 1e-6 * (1 - least / greatest) ** 200
    assert float((state.x[0] - X).norm()) == pytest.approx(expected, rel=1e-3)


def test_a_step_that_overflows_ends_the_start_and_keeps_the_last_input():
    problem, X = planted(3, 3)
    result = GradientDescentAsPublished(rate=1e200)(problem, start=X + 1)
    assert result.X is not None
    assert result.X.isfinite().all()
    assert not result.solved
    assert result.iterations < 5


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_a_number_above_zero(rate):
    with pytest.raises(InputError, match=r"rate must be (above 0|finite), not"):
        GradientDescentAsPublished(rate=rate)
