"""Stacks: planted inputs come back through all layers, errors grow as measured and as bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plants import gaussians, off, plant_stack
from torch.autograd.functional import jacobian

from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.lab import stacks
from keyhole.lab.stacks import Composed

ONE = invert.LevenbergMarquardt(starts=16, steps=200, solutions=2)
PEEL = stacks.Peel(ONE, branches=2)


def test_the_output_is_the_witness():
    stack, X = plant_stack(4, 3, 3, causal=True)
    flow = stacks.inputs_of(stack, X)
    assert torch.allclose(flow[-1], stack[-1].B, atol=1e-13)
    assert len(flow) == 4


def test_the_chain_rule_is_autodiffs():
    stack, X = plant_stack(4, 3, 3)
    composed = Composed.of(stack)
    assert float(composed.residuals(X[None]).abs().max()) <= 1e-13
    expected = jacobian(lambda X: composed.residuals(X[None])[0].flatten(), X).flatten(
        1
    )
    assert torch.allclose(composed.jacobian(X[None])[0], expected, atol=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_residual_stack_comes_back(depth):
    stack, X = plant_stack(5, 4, depth, seed=1)
    result = PEEL(stack)
    assert result.status is Status.RECOVERED, result.reason
    assert min(off(solution, X) for solution in result.solutions) <= 1e-9
    assert result.residual <= 1e-12
    assert result.method == repr(PEEL)


@pytest.mark.parametrize("depth", [1, 2])
def test_bare_layers_have_some_input_with_the_output(depth):
    stack, _ = plant_stack(3, 4, depth, residual=False)
    result = stacks.Peel(replace(ONE, starts=32, solutions=1))(stack)
    assert result.status is Status.RECOVERED, result.reason
    for solution in result.solutions:
        answer = stacks.inputs_of(stack, solution)[-1]
        assert float((answer - stack[-1].B).abs().max()) <= 1e-10


def test_causal_layers_are_peeled_token_by_token():
    stack, X = plant_stack(4, 4, 2, causal=True)
    result = stacks.Peel(invert.TokenByToken(beam=8), branches=4)(stack)
    assert result.status is Status.RECOVERED
    assert min(off(solution, X) for solution in result.solutions) <= 1e-8


def test_layers_of_other_widths():
    draw = gaussians(0)
    X = draw(3, 3)
    blank = torch.zeros(3, 5, dtype=torch.float64)
    first = invert.Problem(0.3 * draw(3, 3), draw(3, 5), blank, output_bias=draw(5))
    W = 0.3 * draw(2, 5, 5)
    V = draw(2, 5, 5) / 3
    second = invert.Problem(W, V, blank, draw(2, 5), residual=True)
    B = stacks.inputs_of((first, second), X)[-1]
    result = PEEL((first, replace(second, B=B)))
    assert result.solved
    assert min(off(solution, X) for solution in result.solutions) <= 1e-8


def test_the_condition_bounds_that_of_all_layers():
    stack, _ = plant_stack(5, 4, 2, seed=1)
    result = PEEL(stack)
    flow = stacks.inputs_of(stack, result.X)
    each = [
        float(torch.linalg.cond(jacobian(layer.output, X).flatten(2).flatten(0, 1)))
        for layer, X in zip(stack, flow, strict=False)
    ]
    whole = jacobian(
        lambda X: stacks.inputs_of(stack, X)[-1].flatten(), result.X
    ).flatten(1)
    assert result.condition == pytest.approx(each[0] * each[1], rel=1e-6)
    assert float(torch.linalg.cond(whole)) <= result.condition


def test_nan_is_a_status():
    stack, _ = plant_stack(3, 3, 2)
    lower, upper = stack
    assert (
        PEEL((lower, replace(upper, B=upper.B * torch.nan))).status
        is Status.NOT_APPLICABLE
    )
    result = PEEL((replace(lower, W=lower.W * torch.inf), upper))
    assert result.status is Status.NOT_APPLICABLE
    assert "layer 1" in result.reason
    assert result.condition is None


def unreachable():
    """One bare token more than its layer allows: V takes a direction away that B has."""
    (lower, upper), _ = plant_stack(3, 3, 2, residual=False)
    V = lower.V.clone()
    V[:, 0] = 0
    return replace(lower, V=V), upper


def test_an_output_that_nothing_has():
    few = invert.LevenbergMarquardt(starts=4, steps=30)
    peeled = stacks.Peel(few)(unreachable())
    assert peeled.status is Status.UNSOLVED
    assert "no input of layer" in peeled.reason
    assert peeled.solutions == ()


def test_a_layer_that_forgets_leaves_a_family():
    (lower, upper), X = plant_stack(4, 3, 2, residual=False)
    V = lower.V.clone()
    V[:, 0] = V[:, 1]
    lower = replace(lower, V=V)
    upper = replace(upper, residual=True)
    upper = replace(upper, B=stacks.inputs_of((lower, upper), X)[-1])
    result = stacks.Peel(replace(ONE, starts=8, solutions=1))((lower, upper))
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "layer 1" in result.reason
    assert result.condition is None


def test_a_tolerance_is_allowed_for():
    (lower, upper), X = plant_stack(4, 3, 2, seed=1)
    result = PEEL(
        (lower, replace(upper, B=(1e6 * upper.B).round() / 1e6, tolerance=1e-6))
    )
    assert result.status is Status.RECOVERED
    assert min(off(solution, X) for solution in result.solutions) <= 1e-3


def test_layers_that_do_not_fit_each_other_are_refused():
    layers = [
        invert.Problem(torch.eye(d), torch.eye(d), torch.zeros(2, d)) for d in (2, 3)
    ]
    with pytest.raises(InputError, match="layer 2 must take the 2 outputs"):
        PEEL(layers)
