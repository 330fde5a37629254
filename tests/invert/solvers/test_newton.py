"""Newton's method on the regularised loss (the theorem) and with a repaired Hessian."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from layers import Kind, draw, normal, plain_loss, planted

from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.invert.derivatives.bounds import paper_gamma, radius
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.solvers.modified_newton import ModifiedNewton
from keyhole.invert.solvers.regularized_newton import RegularizedNewton


def errors(method, problem, X0, steps):
    """Return the distance to the optimum after each of a method's steps."""
    method = replace(method, radius=radius(problem, X0))
    exact = replace(method, slack=0.0, delta=None)
    equations = Equations.of(exact.regularized(problem))
    best = exact.begin(equations, X0.unsqueeze(0))
    for _ in range(30):
        best = exact.step(equations, best)
    state = method.begin(equations, X0.unsqueeze(0))
    distances = [float((state.x - best.x).norm())]
    for _ in range(steps):
        state = method.step(equations, state)
        distances.append(float((state.x - best.x).norm()))
    return distances, best.x[0]


def test_the_error_decreases_at_the_rate_of_the_slack():
    problem, X = planted(4, 4)
    for slack in (0.1, 0.3):
        distances, _ = errors(RegularizedNewton(slack=slack), problem, X, 12)
        ratios = np.array(distances[1:]) / np.array(distances[:-1])
        assert ratios[0] <= 1
        assert ratios[2:10] == pytest.approx(slack / (1 + slack), rel=0.02)


def test_without_slack_the_digits_double():
    problem, X = planted(4, 4)
    distances, _ = errors(RegularizedNewton(gamma=100.0, slack=0.0), problem, X, 6)
    fast = [(a, b) for a, b in itertools.pairwise(distances) if 1e-7 < a < 1e-1]
    assert fast
    assert all(b <= 10 * a**2 for a, b in fast)


def test_iterations_grow_with_the_logarithm_of_the_accuracy():
    problem, X = planted(4, 4)
    exponents = (3, 6, 9, 12)
    counts = [
        RegularizedNewton(accuracy=10.0**-e)(problem, start=X).iterations
        for e in exponents
    ]
    per_digit = 1 / math.log10(1.1 / 0.1)
    growth = np.polyfit(exponents, counts, 1)[0]
    assert growth == pytest.approx(per_digit, rel=0.15)


def test_the_optimum_is_unique_and_reached_from_every_start():
    problem, X = planted(4, 4)
    method = RegularizedNewton(radius=radius(problem, 3 * X))
    regularized = method.regularized(problem)
    results = [method(problem, start=start).X for start in (X, -3 * X, 0 * X)]
    for result in results:
        assert (result - results[0]).abs().max() <= 1e-11
        result = result.clone().requires_grad_()
        slope = torch.autograd.grad(plain_loss(regularized, result), result)[0]
        assert slope.abs().max() <= 1e-11 * 2 * regularized.gamma


def test_the_paper_gamma_makes_the_hessian_definite_inside_the_radius():
    for seed in range(20):
        problem, X = planted(4, 4, seed=seed)
        for R in (radius(problem), radius(problem, X), radius(problem, 4 * X)):
            regularized = RegularizedNewton(radius=R).regularized(problem)
            assert regularized.gamma == paper_gamma(problem, R) > 0
            inside = X * R / np.linalg.norm(X, 2)
            assert torch.linalg.eigvalsh(invert.hessian(regularized, inside))[0] > 0


def test_the_radius_covers_the_start():
    problem, X = planted(4, 4)
    result = RegularizedNewton()(problem, start=5 * X)
    assert f"radius={radius(problem, 5 * X)}" in result.method
    with pytest.raises(
        InputError, match=r"radius must be at least .* to cover the start"
    ):
        RegularizedNewton(radius=radius(problem))(problem, start=50 * X)
    with pytest.raises(InputError, match="to cover the weights and the output: got 1"):
        RegularizedNewton(radius=1.0)(problem)


@pytest.mark.parametrize("options", [(), ("known",)])
def test_its_own_starts_are_drawn_inside(options):
    problem, X = draw(Kind(options=frozenset(options)))
    method = RegularizedNewton(radius=2 + 2 * radius(problem))
    equations = Equations.of(method.regularized(problem))
    X = equations.impose(torch.stack([0.1 * X, 100 * X]))
    state = method.begin(equations, X)
    assert (state.x[0] == X[0]).all()
    assert np.linalg.norm(state.x[1], 2) <= method.radius * (1 + 1e-12)
    assert (equations.impose(state.x) == state.x).all()


def test_the_reason_says_that_the_optimum_is_not_the_input():
    problem, X = planted(4, 4)
    result = RegularizedNewton()(problem, start=X)
    assert result.status is Status.UNSOLVED
    assert "is not the input: its output is off by 1.0e+00" in result.reason
    assert result.residual > 0.1


def test_the_reason_says_when_gamma_is_too_small():
    problem, _ = planted(4, 4)
    result = RegularizedNewton(gamma=1e-3)(problem)
    assert result.status is Status.UNSOLVED
    assert "γ = 1.0e-03 leaves the Hessian indefinite" in result.reason


def test_the_reason_says_when_the_steps_are_used_up():
    problem, X = planted(4, 4)
    result = RegularizedNewton(steps=3)(problem, start=X)
    assert "away from the optimum with γ" in result.reason
    assert result.iterations == 3


def test_without_gamma_it_finds_a_nearby_input():
    problem, X = planted(4, 4, seed=1)
    result = RegularizedNewton(gamma=0, slack=0)(problem, start=X + 1e-3)
    assert result.status is Status.RECOVERED
    assert (result.X - X).abs().max() <= 1e-10


def test_a_drawn_hessian_is_within_the_slack_except_with_probability_delta():
    """At most a share δ of runs of T steps may have a step outside."""
    for delta, rows, steps in ((0.01, 1, 10), (0.5, 2, 2), (0.9, 3, 1)):
        outside = 0
        for seed in range(200):
            method = RegularizedNewton(delta=delta, steps=steps, seed=seed)
            stream = torch.Generator().manual_seed(seed)
            norms = [
                np.linalg.norm(method.perturbation(normal(stream, rows, 2)), 2)
                for _ in range(steps)
            ]
            outside += max(norms) > 1
            assert max(norms) > 0.1  # the slack is really used
        assert outside <= delta * 200


def test_a_drawn_hessian_is_symmetric_and_reproducible():
    _, X = planted(3, 2)
    S = RegularizedNewton(delta=0.1, seed=4).perturbation(X)
    assert torch.equal(S, S.mT)
    assert torch.equal(S, RegularizedNewton(delta=0.1, seed=4).perturbation(X))
    assert not torch.equal(S, RegularizedNewton(delta=0.1, seed=5).perturbation(X))
    assert not torch.equal(
        S, RegularizedNewton(delta=0.1, seed=4).perturbation(X + 1e-9)
    )


@pytest.mark.parametrize("slack", [0.1, 0.3])
def test_theorem_1_3_with_a_drawn_hessian(slack):
    """Within ε in T = log(‖X₀ − X*‖/ε)/log((1 − ε₀)/ε₀) steps, in all but δ of the runs."""
    problem, X = planted(4, 4)
    delta = 0.1
    runs = 5
    accuracy = 1e-9
    late = 0
    for seed in range(runs):
        method = RegularizedNewton(slack=slack, delta=delta, steps=40, seed=seed)
        distances, _ = errors(method, problem, X, 25)
        # The rate is in the norm of the Hessian, whose condition is near 1 with this γ.
        allowed = (
            math.ceil(math.log(distances[0] / accuracy) / math.log((1 - slack) / slack))
            + 1
        )
        late += min(distances[: allowed + 1]) > accuracy
        worst = slack / (1 - slack)
        ratios = [b / a for a, b in itertools.pairwise(distances) if b > 1e-13]
        assert max(ratios[1:]) <= 1.02 * worst
        assert max(ratios[1:]) > 0.05 * worst  # an exact Hessian would do far better
    assert late <= delta * runs


def test_known_entries_are_kept_with_a_drawn_hessian():
    problem, X = draw(Kind(options=frozenset({"known"})))
    method = RegularizedNewton(delta=0.1, radius=2 + 2 * radius(problem))
    equations = Equations.of(method.regularized(problem))
    state = method.begin(equations, equations.impose(X.unsqueeze(0)))
    for _ in range(3):
        state = method.step(equations, state)
        assert torch.allclose(equations.impose(state.x), state.x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"gamma": "small"}, 'gamma must be "paper" or a number'),
        ({"gamma": -1.0}, "gamma must be 0 or more"),
        ({"delta": 0.0}, "delta must be above 0"),
        ({"delta": math.nan}, "delta must be above 0"),
        ({"slack": 1.0}, "slack must be below 1"),
        ({"delta": 0.1, "slack": 0.0}, "delta needs slack above 0"),
    ],
)
def test_wrong_hyperparameters_are_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        RegularizedNewton(**wrong)


@pytest.mark.parametrize("method", [RegularizedNewton(), ModifiedNewton()])
def test_a_meaningless_problem_is_a_status(method):
    problem, _ = planted(3, 3)
    result = method(replace(problem, B=problem.B * torch.nan))
    assert result.status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("seed", range(3))
def test_modified_newton_finds_the_input(seed):
    problem, X = planted(4, 4, seed=seed)
    stream = torch.Generator().manual_seed(seed)
    near = X + 0.02 * normal(stream, 4, 4)
    result = ModifiedNewton()(problem, start=near)
    assert result.status is Status.RECOVERED
    assert (result.X - X).abs().max() <= 1e-10
    alone = ModifiedNewton(starts=8)(problem)
    assert alone.status is Status.RECOVERED


def test_modified_newton_doubles_the_digits_near_the_input():
    problem, X = planted(4, 4, seed=1)
    equations = Equations.of(problem)
    method = ModifiedNewton()
    state = method.begin(equations, (X + 1e-3).unsqueeze(0))
    distances = []
    for _ in range(5):
        distances.append(float((state.x[0] - X).norm()))
        state = method.step(equations, state)
    fast = [(a, b) for a, b in itertools.pairwise(distances) if a > 1e-6]
    assert len(fast) >= 2
    assert all(b <= 100 * a**2 for a, b in fast)
    assert distances[-1] <= 1e-13


@pytest.mark.parametrize(
    "options", [{"known"}, {"causal", "residual"}, {"key_bias", "gamma"}]
)
@pytest.mark.parametrize("heads", [None, 2])
def test_every_step_decreases_the_loss_despite_an_indefinite_hessian(options, heads):
    problem, X = draw(Kind(heads=heads, options=frozenset(options)), seed=4)
    equations = Equations.of(problem)
    X = equations.impose(torch.stack([X, 3 * X, -X]))
    method = ModifiedNewton()
    state = method.begin(equations, X)
    assert (torch.linalg.eigvalsh(invert.hessian(problem, X))[:, 0] < 0).any()
    for _ in range(10):
        ahead = method.step(equations, state)
        assert ((ahead.loss < state.loss) | ahead.finished).all()
        assert ahead.loss.tolist() == pytest.approx(
            invert.loss(problem, ahead.x).tolist()
        )
        state = ahead
    assert (equations.impose(state.x) == state.x).all()


def test_a_row_that_is_not_finite_does_not_move():
    problem, X = planted(3, 3)
    equations = Equations.of(problem)
    method = ModifiedNewton()
    state = method.begin(equations, torch.stack([X + 0.01, X * torch.nan]))
    ahead = method.step(equations, state)
    assert ahead.finished.tolist() == [False, True]
    assert ahead.loss[0] < state.loss[0]
