"""Loss, gradient, Jacobian and Hessian, compared with autodiff and with naive NumPy loops."""

from __future__ import annotations

import numpy as np
import pytest
import reference_inversion as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import KINDS, OPTIONS, Kind, draw, normal, plain_loss, second

from keyhole import invert
from keyhole.core.errors import InputError
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.derivatives.hessian import (
    as_matrix,
    blocks_of,
    gauss_newton_of,
    hessian_of,
)
from keyhole.invert.problem import Problem

EVERY = pytest.mark.parametrize("kind", KINDS, ids=str)


def close(result, expected, within=1e-12):
    """Assert equality within a share of the largest entry."""
    result = np.asarray(result)
    expected = np.asarray(expected)
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= within * max(
        1e-300, np.abs(expected).max()
    )


def naive(problem: Problem, X):
    """Return the reference's arguments in NumPy: X, the free entries, the layer, its options."""
    known = None if problem.known is None else problem.known.numpy()
    free = np.ones(X.shape) if known is None else np.isnan(known).astype(float)
    X = X.numpy() if known is None else np.where(np.isnan(known), X.numpy(), known)
    d = problem.dim
    m = problem.outputs
    layer = (problem.W.reshape(-1, d, d).numpy(), problem.V.reshape(-1, d, m).numpy())
    if problem.key_bias is None:
        biases = None
    else:
        biases = problem.key_bias.reshape(-1, d).numpy()
    output_bias = None if problem.output_bias is None else problem.output_bias.numpy()
    options = {"biases": biases, "output_bias": output_bias, "causal": problem.causal}
    return (
        X,
        free,
        (*layer, problem.B.numpy()),
        {**options, "residual": problem.residual},
    )


@EVERY
def test_first_derivatives_agree_with_naive_loops(kind):
    problem, X = draw(kind)
    at, free, layer, options = naive(problem, X)
    gamma = problem.gamma
    close(invert.loss(problem, X), reference.loss(at, *layer, gamma=gamma, **options))
    result = invert.gradient(problem, X)
    close(result, reference.gradient(at, free, *layer, gamma=gamma, **options))
    close(invert.jacobian(problem, X), reference.jacobian(at, free, *layer, **options))


@EVERY
def test_the_hessian_agrees_with_autodiff(kind):
    problem, X = draw(kind)
    expected = second(lambda x: plain_loss(problem, x))(X)
    expected = expected.reshape(X.numel(), X.numel())
    close(invert.hessian(problem, X), expected)
    close(invert.hessian_blocks(problem, X), expected)


@pytest.mark.parametrize("kind", [Kind(), KINDS[-1]], ids=str)
def test_the_hessian_agrees_with_differences_of_naive_loops(kind):
    problem, X = draw(kind)
    at, free, layer, options = naive(problem, X)
    expected = reference.hessian(at, free, *layer, gamma=problem.gamma, **options)
    close(invert.hessian(problem, X), expected, within=1e-6)
    close(invert.hessian_blocks(problem, X), expected, within=1e-6)


@EVERY
def test_products_are_those_of_the_matrices(kind):
    problem, X = draw(kind)
    P = normal(torch.Generator().manual_seed(9), *X.shape)
    J = invert.jacobian(problem, X)
    H = invert.hessian(problem, X)
    p = P.flatten()
    close(invert.hessian_product(problem, X, P).flatten(), H @ p)
    layer = Equations.of(problem).linearised(_imposed(problem, X))
    close(layer.backward(layer.forward(P.unsqueeze(0))).flatten(), J.mT @ (J @ p))
    close(gauss_newton_of(layer)[0], J.mT @ J)


def _imposed(problem, X):
    return Equations.of(problem).impose(X.unsqueeze(0))


@settings(deadline=None, max_examples=15)
@given(
    n=st.integers(1, 6),
    d=st.integers(1, 5),
    m=st.integers(1, 5),
    heads=st.sampled_from([None, 1, 2, 3]),
    options=st.sets(st.sampled_from(OPTIONS)),
    seed=st.integers(0, 99),
)
def test_any_shape(n, d, m, heads, options, seed):
    problem, X = draw(Kind(n, d, m, heads, frozenset(options)), seed)
    expected = second(lambda x: plain_loss(problem, x))(X)
    # A single token attends to itself. Its Hessian is 2VVᵀ, so rounding is relative to
    # V.
    scale = expected.abs().max().clamp(min=1.0)
    result = invert.hessian(problem, X)
    assert (result - expected.reshape(result.shape)).abs().max() <= 1e-12 * scale
    product = invert.hessian_product(problem, X, X)
    at = (result @ X.flatten()).reshape(X.shape)
    assert (product - at).abs().max() <= 1e-11 * scale


def test_a_batch_equals_single_inputs():
    problem, _ = draw(KINDS[-1])
    X = normal(torch.Generator().manual_seed(1), 2, 3, problem.length, problem.dim)
    for function in (invert.loss, invert.gradient, invert.jacobian, invert.hessian):
        batched = function(problem, X)
        for place in np.ndindex(2, 3):
            close(batched[place], function(problem, X[place]), within=1e-14)


@pytest.mark.parametrize("inputs", [1, 2])
def test_a_large_matrix_is_computed_in_chunks(inputs):
    """Large enough for chunks and tiled transposes; compared with products without a matrix."""
    problem, _ = draw(Kind(n=120, d=5, heads=2, options=frozenset(OPTIONS)))
    stream = torch.Generator().manual_seed(1)
    X, P = (normal(stream, inputs, 120, 5) for _ in range(2))
    H = invert.hessian(problem, X)
    assert torch.equal(H, H.mT)
    along = (H @ P.reshape(inputs, 600, 1)).reshape(P.shape)
    close(along, invert.hessian_product(problem, X, P))


@pytest.mark.parametrize("temperature", [0.3, 0.9])
def test_the_hessian_at_another_temperature(temperature):
    problem, X = draw(KINDS[-1])
    equations = Equations.of(problem)
    equations = type(equations)(**{**vars(equations), "temperature": temperature})
    at = equations.impose(X.unsqueeze(0))

    def loss(x):
        return equations.loss(equations.impose(x.unsqueeze(0)))[0]

    expected = second(loss)(at[0]).reshape(X.numel(), X.numel())
    close(hessian_of(equations, at)[0], expected)


def test_the_blocks_are_second_derivatives_of_one_residual():
    problem, X = draw(Kind(heads=2, options=frozenset({"key_bias", "causal"})))
    equations = Equations.of(problem)
    for i0, j0 in ((0, 0), (2, 1), (3, 2)):
        grid = blocks_of(equations, X, i0, j0)
        expected = second(lambda x, i=i0, j=j0: problem.output(x)[i, j])(X)
        close(grid, expected.permute(0, 2, 1, 3))
        assert torch.equal(as_matrix(grid)[3:6, 0:3], grid[1, 0])


@pytest.mark.parametrize("scale", [10, 30, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_saturated_attention_is_free_of_rounding_errors(scale, seed):
    problem, X = draw(
        Kind(n=4, d=3, options=frozenset({"residual"} if seed else ())), seed
    )
    X = scale * X
    expected = second(lambda x: plain_loss(problem, x))(X).reshape(X.numel(), X.numel())
    close(invert.hessian(problem, X), expected)
    close(invert.hessian_blocks(problem, X), expected)


def test_wrong_shapes_are_refused():
    problem, X = draw(Kind())
    with pytest.raises(
        InputError, match=r"expected X of shape \(…, 4, 3\), got \(4, 4\)"
    ):
        invert.hessian(problem, torch.zeros(4, 4))
    with pytest.raises(InputError, match="expected P of the shape of X"):
        invert.hessian_product(problem, X, X[:2])
    with pytest.raises(InputError, match="expected X of shape n×d"):
        invert.hessian_blocks(problem, X.unsqueeze(0))
