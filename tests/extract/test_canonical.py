"""Proposition 7.1: which sets of heads are the same function; the witness is their answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from keyhole import oracle
from keyhole.core.errors import InputError
from keyhole.extract import canonical, same_function
from keyhole.extract.canonical import difference, remarks


def heads(dim: int, count: int, seed: int) -> oracle.MultiHead:
    return oracle.plant("multi-head", dim=dim, heads=count, seed=seed)


def answers(model: oracle.MultiHead, seed: int = 0) -> np.ndarray:
    """By the naive loops, not by the library."""
    stream = np.random.default_rng(seed)
    W = [w.numpy() for w in model.W]
    v = [u.numpy() for u in model.v]
    sequences = [stream.normal(size=(n, model.dim)) for n in (1, 2, 3, 4)]
    return np.array([reference.multi_head(X, W, v) for X in sequences])


def disguised(model: oracle.MultiHead, seed: int) -> oracle.MultiHead:
    """The same function: heads split in two, invisible ones added, all in another order."""
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    W = []
    v = []
    for head, value in zip(model.W, model.v, strict=True):
        part = normal(model.dim)
        W += [head, head]
        v += [part, value - part]
    W.append(normal(model.dim, model.dim))
    v.append(torch.zeros(model.dim, dtype=torch.float64))
    order = torch.randperm(len(W), generator=stream).tolist()
    return oracle.MultiHead([W[i] for i in order], [v[i] for i in order])


@settings(max_examples=25, deadline=None)
@given(d=st.integers(1, 6), count=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_split_permuted_and_invisible_heads_are_the_same_function(d, count, seed):
    model = heads(d, count, seed)
    other = disguised(model, seed)
    np.testing.assert_allclose(answers(other), answers(model), atol=1e-12)
    assert same_function(model, other)
    assert same_function(other, model)
    assert len(canonical(other).W) == count
    np.testing.assert_allclose(answers(canonical(other)), answers(model), atol=1e-12)
    assert len(remarks(other)) == count + 1
    assert not remarks(model)


@settings(max_examples=25, deadline=None)
@given(
    d=st.integers(2, 6),
    count=st.integers(1, 5),
    in_value=st.booleans(),
    exponent=st.integers(-6, 0),
    seed=st.integers(0, 2**31),
)
def test_a_small_change_is_another_function(d, count, in_value, exponent, seed):
    model = heads(d, count, seed)
    W = [w.clone() for w in model.W]
    v = [u.clone() for u in model.v]
    changed = v[0] if in_value else W[0]
    changed += 10.0**exponent * (1 + changed.abs())
    other = oracle.MultiHead(W, v)
    assert not np.allclose(answers(other), answers(model), rtol=0, atol=1e-13)
    assert not same_function(model, disguised(other, seed))


def test_opposite_heads_with_equal_values_are_not_one_head():
    model = heads(4, 1, 0)
    pair = oracle.MultiHead([model.W[0], -model.W[0]], [model.v[0], model.v[0]])
    assert len(canonical(pair).W) == 2
    assert not same_function(model, pair)


def test_heads_that_cancel_are_gone_and_remarked():
    model = heads(4, 2, 1)
    W = model.W
    v = model.v
    cancelling = oracle.MultiHead([W[0], W[1], W[1]], [v[0], v[1], -v[1]])
    assert same_function(cancelling, oracle.MultiHead([W[0]], [v[0]]))
    assert remarks(cancelling) == ("heads 1, 2 cancel: their v adds up to 0",)


def test_nothing_visible_is_one_head_of_zeros():
    model = heads(3, 2, 2)
    blind = oracle.MultiHead(model.W, [0 * v for v in model.v])
    assert not canonical(blind).tensors()["v"].any()
    assert same_function(blind, oracle.MultiHead([model.W[0]], [0 * model.v[0]]))
    assert remarks(blind) == (
        "head 0 is invisible: v = 0",
        "head 1 is invisible: v = 0",
    )


def test_other_dimensions_and_other_numbers_of_heads_differ():
    assert not same_function(heads(3, 2, 0), heads(4, 2, 0))
    assert not same_function(heads(3, 2, 0), heads(3, 3, 0))


@pytest.mark.parametrize("tolerance", [-1.0, 1.0, 1e9, math.nan])
def test_a_tolerance_must_be_one(tolerance):
    for use in (canonical, remarks):
        with pytest.raises(InputError, match="tolerance must be"):
            use(heads(2, 1, 0), tolerance=tolerance)
    with pytest.raises(InputError, match="tolerance must be"):
        same_function(heads(2, 1, 0), heads(2, 1, 1), tolerance=tolerance)


def test_two_tokens_do_not_tell_opposite_heads_apart_and_three_do():
    """Why the proof needs copies of a token: σ(z) + σ(−z) = 1."""
    W = heads(3, 1, 4).W[0]
    u = heads(3, 1, 5).v[0]
    opposite = oracle.MultiHead([W, -W], [u, u])
    uniform = oracle.MultiHead([torch.zeros_like(W)], [2 * u])
    stream = torch.Generator().manual_seed(0)
    for length, equal in ((1, True), (2, True), (3, False)):
        X = torch.randn(20, length, 3, generator=stream, dtype=torch.float64)
        assert torch.allclose(opposite(X), uniform(X), atol=1e-12) == equal
    assert not same_function(opposite, uniform)


def test_copies_of_a_token_show_the_values_of_every_head():
    """The proof as a computation: 1/(k + t_h) is inverted, and v_hᵀδ comes out."""
    model = heads(4, 3, 6)
    stream = torch.Generator().manual_seed(1)
    x, delta = torch.randn(2, 4, generator=stream, dtype=torch.float64)
    W = torch.stack(list(model.W))
    v = torch.stack(list(model.v))
    t = torch.exp(-(delta @ W @ x))
    base = float(model(x.view(1, 1, 4)))
    counts = torch.arange(1, 4, dtype=torch.float64)
    rows = [torch.cat([(x + delta).expand(int(k), 4), x[None]])[None] for k in counts]
    answers = torch.stack([model(row)[0] - base for row in rows]) / counts
    cauchy = 1 / (counts[:, None] + t)
    assert torch.allclose(torch.linalg.solve(cauchy, answers), v @ delta, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda W, v: (W[:1], v[:1]), "1 against 2 heads in canonical form"),
        (lambda W, v: (W, [v[0], 2 * v[1]]), "v differs by"),
        (lambda W, v: ([W[0], W[1] + 1], v), "W differs by"),
        (
            lambda W, v: ([W[0], W[0] + 1e-6], v),
            "heads of one have no partner in the other",
        ),
    ],
)
def test_a_difference_is_named(change, message):
    model = heads(3, 2, 7)
    W, v = change(list(model.W), list(model.v))
    assert difference(oracle.MultiHead(W, v), model).startswith(message)
    assert difference(model, heads(4, 2, 7)) == "d = 3 against d = 4"
    assert difference(model, disguised(model, 1)) == ""
