"""Token by token: planted inputs are found, and each kind of failure has its status."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plants import off, plant
from torch.autograd.functional import jacobian

from keyhole import invert
from keyhole.core import Status
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.solvers.token_by_token import TokenEquations, first_of_each


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("residual", [False, True])
def test_a_tokens_equations_and_derivative(heads, residual):
    problem, X, _ = plant(
        5, 3, heads=heads, causal=True, residual=residual, biases=True
    )
    for k in range(5):
        equations = TokenEquations.after(X[None, :k], Equations.of(problem))
        point = equations.point(X[None, k : k + 1])
        assert float(point.residuals.abs().max()) <= 1e-13
        x = torch.ones(3, dtype=torch.float64)
        expected = jacobian(
            lambda x, e=equations: e.point(x[None, None]).residuals[0], x
        )
        result = equations.point(x[None, None]).jacobian[0]
        assert torch.allclose(result, expected, atol=1e-12)


KINDS = {
    "n = d": (5, 5, {}),
    "n > d": (6, 3, {}),
    "n < d": (4, 8, {}),
    "one token": (1, 3, {}),
    "wide V": (5, 4, {"m": 6}),
    "biases": (5, 4, {"biases": True}),
    "residual": (5, 4, {"residual": True}),
    "heads": (5, 4, {"heads": 2}),
    "heads, everything": (4, 4, {"heads": 2, "biases": True, "residual": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_planted_input_is_among_the_solutions(kind):
    n, d, options = KINDS[kind]
    problem, X, _ = plant(n, d, causal=True, **options)
    result = invert.TokenByToken(beam=16)(problem)
    assert result.status is Status.RECOVERED, result.reason
    assert min(off(solution, X) for solution in result.solutions) <= 1e-7
    for solution in result.solutions:
        assert float((problem.output(solution) - problem.B).abs().max()) <= 1e-10
    norms = [float(solution.norm()) for solution in result.solutions]
    assert norms == sorted(norms)
    assert result.starts > 0
    assert result.condition is not None


def test_all_solutions_are_reported():
    counts = []
    for seed in range(3):
        problem, _, _ = plant(4, 3, seed, causal=True)
        result = invert.TokenByToken()(problem)
        counts.append(len(result.solutions))
        assert (f"{counts[-1]} different inputs" in result.reason) == (counts[-1] > 1)
    assert max(counts) > 1


def test_the_same_seed_gives_the_same_result():
    problem, _, _ = plant(3, 3, causal=True)
    once, again = (invert.TokenByToken(seed=3)(problem) for _ in range(2))
    assert torch.equal(once.X, again.X)


def test_known_tokens_are_kept_and_determine_the_others():
    problem, X, _ = plant(6, 4, seed=1, causal=True)
    known = torch.full_like(X, torch.nan)
    known[3:] = X[3:]
    result = invert.TokenByToken()(replace(problem, known=known))
    assert result.status is Status.RECOVERED
    assert off(result.X, X) <= 1e-8
    assert len(result.solutions) == 1


def test_a_contradictory_known_token():
    problem, X, _ = plant(5, 4, causal=True)
    known = torch.full_like(X, torch.nan)
    known[0] = X[0] + 1
    result = invert.TokenByToken(attempts=1)(replace(problem, known=known))
    assert result.status is Status.UNSOLVED
    assert "token 1 of 5" in result.reason


def test_a_tolerance_lets_rounded_outputs_agree_with_known_tokens():
    problem, X, _ = plant(4, 3, causal=True)
    known = X.clone()
    known[2] = torch.nan
    rounded = replace(problem, B=(1e4 * problem.B).round() / 1e4, known=known)
    assert invert.TokenByToken(attempts=1)(rounded).status is Status.UNSOLVED
    result = invert.TokenByToken()(replace(rounded, tolerance=1e-3))
    assert result.status is Status.RECOVERED
    assert off(result.X, X) <= 0.1


def test_equal_tokens():
    problem, X, _ = plant(5, 4, causal=True, equal_tokens=True)
    result = invert.TokenByToken()(problem)
    assert min(off(solution, X) for solution in result.solutions) <= 1e-6


def test_a_singular_v_leaves_a_family():
    problem, X, _ = plant(3, 3, causal=True)
    V = problem.V.clone()
    V[:, 0] = V[:, 1]
    singular = replace(problem, V=V)
    result = invert.TokenByToken(beam=8)(replace(singular, B=singular.output(X)))
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "family" in result.reason


def test_an_output_outside_the_range_of_v():
    problem, _, _ = plant(4, 3, m=5, causal=True)
    result = invert.TokenByToken()(replace(problem, B=problem.B + 1))
    assert result.status is Status.MISMATCH


def test_an_output_that_no_input_has():
    # With d = 1 and W = −1 the second output is a·x + 1 − a, a = σ(x − x²): at most
    # 1.03.
    W = torch.tensor([[-1.0]], dtype=torch.float64)
    V = torch.tensor([[1.0]], dtype=torch.float64)
    B = torch.tensor([[1.0], [9.0]], dtype=torch.float64)
    result = invert.TokenByToken()(invert.Problem(W, V, B, causal=True))
    assert result.status is Status.UNSOLVED
    assert "token 2 of 2" in result.reason


def test_without_a_mask_it_does_not_apply():
    problem, _, _ = plant(3, 3)
    assert invert.TokenByToken()(problem).status is Status.NOT_APPLICABLE


def test_a_regulariser_does_not_apply():
    problem, _, _ = plant(3, 3, causal=True)
    assert (
        invert.TokenByToken()(replace(problem, gamma=0.1)).status
        is Status.NOT_APPLICABLE
    )


def test_nan_is_a_status():
    problem, _, _ = plant(3, 3, causal=True)
    result = invert.TokenByToken()(replace(problem, B=problem.B * torch.nan))
    assert result.status is Status.NOT_APPLICABLE
    assert result.X is None


def test_a_time_limit_is_respected():
    problem, _, _ = plant(3, 3, causal=True)
    result = invert.TokenByToken(seconds=0.0)(problem)
    assert result.status is Status.UNSOLVED
    assert "out of time" in result.reason


def test_ctrl_c_stops_it(monkeypatch):
    problem, _, _ = plant(3, 3, causal=True)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(invert.LevenbergMarquardt, "descend", stop)
    assert invert.TokenByToken()(problem).status is Status.INTERRUPTED


def test_a_full_beam_is_reported():
    for seed in range(6):
        problem, _, _ = plant(6, 4, seed, causal=True)
        result = invert.TokenByToken(beam=1, attempts=1)(problem)
        assert len(result.solutions) <= 1
        if "no place in the beam" in result.reason:
            return
    raise AssertionError("a beam of one always sufficed")


def test_first_of_each():
    x = torch.tensor([[[1.0], [2.0], [1.0], [2.0], [3.0]]])
    good = torch.tensor([[True, False, True, True, True]])
    assert first_of_each(x, good).tolist() == [[True, False, False, True, True]]
