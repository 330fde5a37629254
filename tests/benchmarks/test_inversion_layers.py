"""Stacks: planted inputs come back through all layers, and errors grow as bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plants import gaussians, off, plant_stack
from torch.autograd.functional import jacobian

from inversion_layers import condition, flow, peel
from keyhole import invert

pytestmark = pytest.mark.release  # what belongs to benchmarks
ONE = invert.LevenbergMarquardt(starts=16, steps=200, solutions=2)


def nearest(solutions, X):
    return min(off(solution, X) for solution in solutions)


def test_the_output_is_the_witness():
    stack, X = plant_stack(4, 3, 3, causal=True)
    states = flow(stack, X)
    assert torch.allclose(states[-1], stack[-1].B, atol=1e-13)
    assert len(states) == 4


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_residual_stack_comes_back(depth):
    stack, X = plant_stack(5, 4, depth, seed=1)
    assert nearest(peel(stack, ONE, branches=2), X) <= 1e-9


@pytest.mark.parametrize("depth", [1, 2])
def test_bare_layers_have_some_input_with_the_output(depth):
    stack, _ = plant_stack(3, 4, depth, residual=False)
    solutions = peel(stack, replace(ONE, starts=32, solutions=1), branches=2)
    assert solutions
    for solution in solutions:
        answer = flow(stack, solution)[-1]
        assert float((answer - stack[-1].B).abs().max()) <= 1e-10


def test_causal_layers_are_peeled_token_by_token():
    stack, X = plant_stack(4, 4, 2, causal=True)
    solutions = peel(stack, invert.TokenByToken(beam=8), branches=4)
    assert nearest(solutions, X) <= 1e-8


def test_layers_of_other_widths():
    draw = gaussians(0)
    X = draw(3, 3)
    blank = torch.zeros(3, 5, dtype=torch.float64)
    first = invert.Problem(0.3 * draw(3, 3), draw(3, 5), blank, output_bias=draw(5))
    W = 0.3 * draw(2, 5, 5)
    V = draw(2, 5, 5) / 3
    second = invert.Problem(W, V, blank, draw(2, 5), residual=True)
    B = flow((first, second), X)[-1]
    solutions = peel((first, replace(second, B=B)), ONE, branches=2)
    assert nearest(solutions, X) <= 1e-8


def test_the_condition_bounds_that_of_all_layers():
    stack, X = plant_stack(5, 4, 2, seed=1)
    each = [
        float(torch.linalg.cond(jacobian(layer.output, X).flatten(2).flatten(0, 1)))
        for layer, X in zip(stack, flow(stack, X), strict=False)
    ]
    whole = jacobian(lambda X: flow(stack, X)[-1].flatten(), X).flatten(1)
    bound = condition(stack, X)
    assert bound == pytest.approx(each[0] * each[1], rel=1e-6)
    assert float(torch.linalg.cond(whole)) <= bound


def test_an_output_that_nothing_has():
    """One bare token more than its layer allows: V takes a direction away that B has."""
    (lower, upper), _ = plant_stack(3, 3, 2, residual=False)
    V = lower.V.clone()
    V[:, 0] = 0
    few = invert.LevenbergMarquardt(starts=4, steps=30)
    assert peel((replace(lower, V=V), upper), few) == []


def test_a_layer_that_forgets_leaves_a_family():
    (lower, upper), X = plant_stack(4, 3, 2, residual=False)
    V = lower.V.clone()
    V[:, 0] = V[:, 1]
    lower = replace(lower, V=V)
    upper = replace(upper, residual=True)
    assert condition((lower, upper), X) is None
