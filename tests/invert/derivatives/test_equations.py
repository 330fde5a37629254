"""The equations and their derivatives, compared with naive loops and autodiff."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from keyhole import invert
from keyhole.invert.derivatives.equations import Equations


@st.composite
def cases(draw):
    n = draw(st.integers(1, 4))
    d = draw(st.integers(1, 4))
    problem, X = invert.plant(
        n,
        d,
        heads=draw(st.integers(1, 3)),
        biases=draw(st.booleans()),
        causal=draw(st.booleans()),
        residual=draw(st.booleans()),
        scale=1.0,
        seed=draw(st.integers(0, 99)),
    )
    known = None
    if draw(st.booleans()):
        known = torch.full_like(X, torch.nan)
        known[0] = X[0]
    temperature = draw(st.sampled_from([0.05, 0.5, 1.0, 2.0]))
    equations = Equations.of(replace(problem, known=known))
    return replace(equations, temperature=temperature), X


@settings(max_examples=10, deadline=None)
@given(cases())
def test_derivatives_agree_with_autodiff(case):
    equations, X = case
    X = equations.impose(X + 0.1 * torch.ones_like(X))
    near = equations.linearised(X.unsqueeze(0) if X.ndim == 2 else X)
    free = equations.free

    def flat(x):
        return equations.residuals(x.reshape(1, *X.shape[-2:])).flatten()

    J = torch.func.jacrev(flat)(X.reshape(-1))
    if free is not None:
        J = J * free.reshape(1, -1)
    size = max(1.0, float(J.abs().max()))
    assert torch.allclose(near.jacobian()[0], J, rtol=0, atol=1e-12 * size)
    stream = torch.Generator().manual_seed(0)
    dX = torch.randn(1, *X.shape[-2:], generator=stream, dtype=torch.float64)
    G = torch.randn(equations.B.shape, generator=stream, dtype=torch.float64)
    assert torch.allclose(
        near.forward(dX).flatten(), J @ dX.flatten(), rtol=0, atol=1e-11 * size
    )
    assert torch.allclose(
        near.backward(G).flatten(), G.flatten() @ J, rtol=0, atol=1e-11 * size
    )


@pytest.mark.parametrize("causal", [False, True])
def test_residuals_agree_with_naive_loops(causal):
    problem, X = invert.plant(5, 3, causal=causal, seed=4)
    naive = reference.attention(X.numpy(), problem.W.numpy(), problem.V.numpy(), causal)
    residuals = Equations.of(problem).residuals(X.unsqueeze(0) + 0.0)
    assert np.allclose(
        residuals[0].numpy(), naive - problem.B.numpy(), rtol=0, atol=1e-13
    )


def test_as_the_temperature_vanishes_the_map_is_linear_in_the_scores():
    problem, X = invert.plant(6, 4, scale=1.0, seed=2)
    cold = replace(Equations.of(problem), temperature=1e-5)
    scores = torch.as_tensor(reference.scores(X.numpy(), problem.W.numpy()))
    linear = (1 + scores - scores.mean(1, keepdim=True)) / 6
    expected = linear @ X @ problem.V - problem.B
    assert torch.allclose(
        cold.residuals(X.unsqueeze(0))[0], expected, rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("seed", range(3))
def test_residuals_of_several_heads_are_the_output_less_b(seed):
    problem, X = invert.plant(4, 3, heads=2, biases=True, seed=seed)
    X = X + 0.1
    residuals = Equations.of(problem).residuals(X.unsqueeze(0))[0]
    assert torch.allclose(residuals, problem.output(X) - problem.B, rtol=0, atol=1e-13)
