"""Stacks: planted inputs come back through all layers, errors grow as measured and as bounded."""

from __future__ import annotations

import json
from dataclasses import fields, replace

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


def test_a_stack_has_no_field_for_the_input():
    assert {field.name for field in fields(stacks.Stack)} == {"layers", "B", "tolerance"}


def test_the_output_is_the_witness():
    stack, X = plant_stack(4, 3, 3, causal=True)
    assert torch.allclose(stack.output(X), stack.B, atol=1e-13)
    assert len(stack.inputs(X)) == 4


def test_the_chain_rule_is_autodiffs():
    stack, X = plant_stack(4, 3, 3)
    composed = Composed.of(stack)
    assert float(composed.residuals(X[None]).abs().max()) <= 1e-13
    expected = jacobian(lambda X: composed.residuals(X[None])[0].flatten(), X).flatten(1)
    assert torch.allclose(composed.jacobian(X[None])[0], expected, atol=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_residual_stack_comes_back(depth):
    stack, X = plant_stack(5, 4, depth, seed=1)
    result = PEEL(stack)
    assert result.status is Status.RECOVERED, result.reason
    assert min(off(solution, X) for solution in result.solutions) <= 1e-9
    assert result.residual <= 1e-12
    assert len(result.layers) == depth
    assert result.method == repr(PEEL)


@pytest.mark.parametrize("depth", [1, 2])
def test_bare_layers_have_some_input_with_the_output(depth):
    stack, _ = plant_stack(3, 4, depth, residual=False)
    result = stacks.Peel(replace(ONE, starts=32, solutions=1))(stack)
    assert result.status is Status.RECOVERED, result.reason
    for solution in result.solutions:
        assert float((stack.output(solution) - stack.B).abs().max()) <= 1e-10


def test_causal_layers_are_peeled_token_by_token():
    stack, X = plant_stack(4, 4, 2, causal=True)
    result = stacks.Peel(invert.TokenByToken(beam=8), branches=4)(stack)
    assert result.status is Status.RECOVERED
    assert min(off(solution, X) for solution in result.solutions) <= 1e-8


def test_layers_of_other_widths():
    draw = gaussians(0)
    X = draw(3, 3)
    layers = (
        stacks.Layer(0.3 * draw(3, 3), draw(3, 5), output_bias=draw(5)),
        stacks.Layer(0.3 * draw(2, 5, 5), draw(2, 5, 5) / 3, draw(2, 5), residual=True),
    )
    B = stacks.Stack(layers, torch.zeros(3, 5)).output(X)
    result = PEEL(stacks.Stack(layers, B))
    assert result.solved
    assert min(off(solution, X) for solution in result.solutions) <= 1e-8


def test_amplification_is_that_of_finite_differences():
    stack, _ = plant_stack(5, 4, 2, seed=1)
    result = PEEL(stack)
    X = result.X
    J = jacobian(lambda X: stack.output(X).flatten(), X).flatten(1)
    sizes = torch.linalg.svdvals(J)
    assert result.amplification <= float(sizes[0] / sizes[-1]) <= result.bound * (1 + 1e-9)
    assert result.amplification > float(1 / sizes[0]) * float(stack.B.norm() / X.norm()) / 2
    noise = gaussians(0)(1, 5, 4)[0]
    change = noise * (stack.B.norm() / noise.norm())
    expected = torch.linalg.solve(J, change.flatten()).norm() / X.norm()
    assert result.amplification == pytest.approx(float(expected), rel=1e-4)
    first = jacobian(lambda X: stack.inputs(X)[1].flatten(), X).flatten(1)
    assert result.layers[0].condition == pytest.approx(float(torch.linalg.cond(first)), rel=1e-6)


def test_nan_is_a_status():
    stack, _ = plant_stack(3, 3, 2)
    assert PEEL(replace(stack, B=stack.B * torch.nan)).status is Status.NOT_APPLICABLE
    lower = replace(stack.layers[0], W=stack.layers[0].W * torch.inf)
    result = PEEL(replace(stack, layers=(lower, stack.layers[1])))
    assert result.status is Status.NOT_APPLICABLE
    assert "layer 1" in result.reason
    assert result.bound is None


def unreachable():
    """One bare token more than its layer allows: V takes a direction away that B has."""
    stack, _ = plant_stack(3, 3, 2, residual=False)
    V = stack.layers[0].V.clone()
    V[:, 0] = 0
    return replace(stack, layers=(replace(stack.layers[0], V=V), stack.layers[1]))


def test_an_output_that_nothing_has():
    few = invert.LevenbergMarquardt(starts=4, steps=30)
    peeled = stacks.Peel(few)(unreachable())
    assert peeled.status is Status.UNSOLVED
    assert "no input of layer" in peeled.reason
    assert peeled.solutions == ()


def test_a_layer_that_forgets_leaves_a_family():
    stack, X = plant_stack(4, 3, 2, residual=False)
    V = stack.layers[0].V.clone()
    V[:, 0] = V[:, 1]
    layers = (replace(stack.layers[0], V=V), replace(stack.layers[1], residual=True))
    stack = replace(stack, layers=layers)
    stack = replace(stack, B=stack.output(X))
    result = stacks.Peel(replace(ONE, starts=8, solutions=1))(stack)
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "layer 1" in result.reason
    assert result.bound is None


def test_a_tolerance_is_allowed_for():
    stack, X = plant_stack(4, 3, 2, seed=1)
    rounded = replace(stack, B=(1e6 * stack.B).round() / 1e6, tolerance=1e-6)
    result = PEEL(rounded)
    assert result.status is Status.RECOVERED
    assert min(off(solution, X) for solution in result.solutions) <= 1e-3


def test_wrong_stacks_are_errors():
    with pytest.raises(InputError, match="at least one layer"):
        stacks.Stack((), torch.zeros(2, 2))
    layer, other = (stacks.Layer(torch.eye(d), torch.eye(d)) for d in (2, 3))
    with pytest.raises(InputError, match="layer 2 must take the 2 outputs"):
        stacks.Stack((layer, other), torch.zeros(2, 3))
    with pytest.raises(InputError, match="expected B"):
        stacks.Stack((layer,), torch.zeros(2, 3))


def test_the_result_is_saved_and_loaded(tmp_path):
    stack, _ = plant_stack(3, 3, 2)
    result = PEEL(stack)
    result.save(tmp_path / "stack.json")
    data = json.loads((tmp_path / "stack.json").read_text())
    assert data["kind"] == "layers inversion"
    assert data["solutions"] == len(result.solutions) >= 1
    assert data["bound"] == result.bound
    again = stacks.StackInversion.load(tmp_path / "stack.json")
    assert again.to_dict() == result.to_dict()
    assert torch.equal(again.X, result.X)
    assert all(map(torch.equal, again.solutions, result.solutions))
    assert len(again.layers) == 2
    assert repr(again).startswith("StackInversion: recovered: residual")
    assert len(repr(again).splitlines()) <= 3
