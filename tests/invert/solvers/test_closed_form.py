"""Leaked maps give X exactly if they determine it, and a status otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plants import gaussians, off, plant
from torch.autograd.functional import jacobian

from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.invert.solvers import closed_form as leaked_maps

KINDS = {
    "n < d": (4, 8, {}),
    "n = d": (8, 8, {}),
    "n > d": (16, 6, {}),
    "one token": (1, 4, {}),
    "wide V": (6, 4, {"m": 7}),
    "biases": (6, 4, {"biases": True}),
    "causal": (6, 6, {"causal": True}),
    "residual": (6, 6, {"residual": True}),
    "heads": (6, 4, {"heads": 3}),
    "heads, wide V": (6, 4, {"heads": 2, "m": 5}),
    "heads, everything": (
        6,
        4,
        {"heads": 2, "biases": True, "causal": True, "residual": True},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_maps_give_the_input_in_closed_form(kind):
    n, d, options = KINDS[kind]
    for seed in range(3):
        problem, X, maps = plant(n, d, seed, **options)
        result = invert.ClosedForm(maps)(problem)
        assert result.status is Status.RECOVERED, result.reason
        assert off(result.X, X) <= 1e-9
        assert "the only input" in result.reason
        assert len(result.solutions) == 1


def test_known_entries_are_kept_and_replace_missing_outputs():
    problem, X, maps = plant(6, 4, m=3)
    known = X.clone()
    known[2:, 1:] = torch.nan
    result = invert.ClosedForm(maps)(replace(problem, known=known))
    assert result.status is Status.RECOVERED
    assert off(result.X, X) <= 1e-10
    given = ~known.isnan()
    assert torch.equal(result.X[given], known[given])


def test_a_completely_known_input():
    problem, X, maps = plant(3, 2)
    result = invert.ClosedForm(maps)(replace(problem, known=X))
    assert result.status is Status.RECOVERED
    assert torch.equal(result.X, X)


def test_logarithms_complete_the_singular_maps_of_equal_tokens():
    problem, X, maps = plant(12, 4, equal_tokens=True)
    assert int(torch.linalg.matrix_rank(maps)) < 12
    result = invert.ClosedForm(maps)(problem)
    assert result.status is Status.RECOVERED
    assert off(result.X, X) <= 1e-9
    assert "singular" in result.reason


def test_logarithms_complete_a_narrow_v():
    problem, X, maps = plant(10, 4, m=3)
    result = invert.ClosedForm(maps)(problem)
    assert result.status is Status.RECOVERED
    assert off(result.X, X) <= 1e-9
    assert "10 open directions" in result.reason  # n (d − m)


def test_equal_tokens_with_few_others_leave_a_family():
    problem, _, maps = plant(3, 8, equal_tokens=True)
    result = invert.ClosedForm(maps)(problem)
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "directions open" in result.reason


def test_uniform_attention_determines_only_the_mean():
    n = 6
    d = 3
    problem, X, maps = plant(n, d, s=0.0)
    result = invert.ClosedForm(maps)(problem)
    assert result.status is Status.NOT_IDENTIFIABLE
    assert f"{(n - 1) * d} directions open" in result.reason
    assert torch.allclose(result.X.mean(0), X.mean(0))


def test_a_singular_v_with_uniform_attention():
    problem, _, maps = plant(4, 3, s=0.0)
    result = invert.ClosedForm(maps)(
        replace(problem, V=torch.zeros(3, 3), B=torch.zeros(4, 3))
    )
    assert result.status is Status.NOT_IDENTIFIABLE


@pytest.mark.parametrize("heads", [1, 2])
def test_maps_of_another_input_are_refused(heads):
    problem, _, _ = plant(6, 6, seed=0, heads=heads)
    _, _, maps = plant(6, 6, seed=1, heads=heads)
    result = invert.ClosedForm(maps)(problem)
    assert result.status is Status.MISMATCH
    assert "do not belong" in result.reason


def test_maps_that_no_softmax_made_are_refused():
    problem, _, maps = plant(4, 4)
    result = invert.ClosedForm(3 * maps)(problem)
    assert result.status is Status.MISMATCH
    assert result.X is None


@pytest.mark.parametrize("where", ["B", "W", "maps"])
def test_nan_is_a_status(where):
    problem, _, maps = plant(4, 4)
    if where == "maps":
        maps[0, 0] = torch.nan
    else:
        problem = replace(problem, **{where: getattr(problem, where) * torch.nan})
    result = invert.ClosedForm(maps)(problem)
    assert result.status is Status.NOT_APPLICABLE
    assert where in result.reason


def test_maps_of_a_wrong_shape_are_an_error():
    problem, _, maps = plant(4, 4)
    with pytest.raises(InputError, match="expected maps of shape 4×4, got 3×3"):
        invert.ClosedForm(maps[:3, :3])(problem)
    problem, _, _ = plant(4, 4, heads=2)
    with pytest.raises(InputError, match="expected maps of shape 2×4×4"):
        invert.ClosedForm(maps)(problem)


ROUNDED = {
    "float32": lambda A: A.float(),
    "float16": lambda A: A.half(),
    "three decimals": lambda A: (1000 * A).round() / 1000,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_maps_lead_to_the_exact_input(name):
    problem, X, maps = plant(6, 6, seed=3)
    result = invert.ClosedForm(ROUNDED[name](maps))(problem)
    assert result.status is Status.RECOVERED
    assert off(result.X, X) <= 1e-9
    assert "the only" not in result.reason  # rounded maps do not prove it


def test_rounded_maps_without_enough_steps_are_not_called_recovered():
    problem, X, maps = plant(16, 8, seed=3, s=1.0)
    method = invert.LevenbergMarquardt(starts=1, steps=1)
    result = invert.ClosedForm((20 * maps).round() / 20, method)(problem)
    assert result.status in (Status.INEXACT, Status.UNSOLVED)
    assert "rows sum to 1 within" in result.reason
    assert off(result.X, X) > 1e-9


def test_rounded_maps_of_another_layer_are_not_called_recovered():
    problem, _, _ = plant(5, 5, seed=0)
    _, _, maps = plant(5, 5, seed=1)
    method = invert.LevenbergMarquardt(starts=1, steps=100)
    result = invert.ClosedForm(maps.half(), method)(problem)
    assert result.status in (Status.UNSOLVED, Status.INEXACT)
    assert "too coarse or foreign" in result.reason
    assert result.solutions == ()


def test_the_tolerance_of_the_output_is_respected():
    problem, X, maps = plant(6, 6)
    blurred = replace(problem, B=problem.B.float(), tolerance=1e-5)
    result = invert.ClosedForm(maps)(blurred)
    assert result.status is Status.RECOVERED
    assert off(result.X, X) <= 1e-3


def test_the_repr_of_the_method_leaves_out_the_maps():
    problem, _, maps = plant(4, 4)
    assert invert.ClosedForm(maps)(problem).method.startswith("ClosedForm(method=Lev")


def test_conjugate_gradients_for_large_problems():
    problem, X, maps = plant(91, 91, heads=2, residual=True, v=0.1)
    result = invert.ClosedForm(maps)(problem)
    assert result.status is Status.RECOVERED
    assert "not checked" in result.reason
    assert off(result.X, X) <= 1e-8


def test_conjugate_gradients_that_do_not_converge_are_unsolved():
    """Tokens that attend only to themselves, and values that nearly hide the last entry."""
    n = 91
    X = gaussians(0)(91, 91)
    one = torch.eye(n, dtype=torch.float64)
    values = one.clone()
    values[-1, -1] = 1e-8
    problem = invert.Problem(
        torch.stack([one, one]), torch.stack([values, values]) / 2, X @ values
    )
    assert torch.equal(problem.output(X), problem.B)
    result = invert.ClosedForm(torch.stack([one, one]))(problem)
    assert result.status is Status.UNSOLVED
    assert "did not converge" in result.reason


def test_the_matrix_and_its_transpose_are_those_of_the_linear_map():
    problem, X, maps = plant(4, 3, heads=2, m=3, residual=True)
    linear = leaked_maps.Linear.of(problem, maps)
    out = linear.apply(X)
    assert torch.allclose(linear.matrix() @ X.flatten(), out.flatten())
    assert torch.allclose(
        linear.matrix().mT @ out.flatten(), linear.transposed(out).flatten()
    )


def test_the_derivative_of_the_scores_agrees_with_autodiff():
    problem, X, maps = plant(4, 3, heads=2, biases=True)
    scores = leaked_maps.Scores(problem, leaked_maps.Linear.of(problem, maps))
    assert float(scores.residuals(X).abs().max()) <= 1e-13
    expected = jacobian(scores.residuals, X).flatten(1)
    assert torch.allclose(scores.point(X[None]).jacobian[0], expected, atol=1e-12)
