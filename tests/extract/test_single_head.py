"""Theorem 4.1: the planted truth, the naive witness, and every way it can fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from keyhole import extract, oracle
from keyhole.extract import Status
from planted_truth import relative, worst


@pytest.mark.parametrize("d", [1, 2, 3, 8, 33, 64])
def test_exactly_d_squared_plus_d_queries_to_rounding(d):
    for seed in range(3):
        target = oracle.plant(dim=d, seed=seed)
        result = extract.SingleHead(seed=seed)(target)
        assert result.status is Status.RECOVERED
        assert result.queries == result.lower_bound == d * d + d
        assert worst(result.model, target) <= 1e-12


def test_agrees_with_the_paper_s_own_algorithm():
    target = oracle.plant(dim=6, seed=4)
    result = extract.SingleHead()(target)

    def one_at_a_time(X: np.ndarray) -> float:
        return reference.head(X, target.W.numpy(), target.v.numpy())

    W, v = reference.steal_head(one_at_a_time, 6)
    np.testing.assert_allclose(result.model.W, W, atol=1e-12)
    np.testing.assert_allclose(result.model.v, v, atol=1e-15)


def test_saturating_logits_cost_neither_precision_nor_queries():
    for seed in range(5):
        target = oracle.plant(dim=64, scale=30, seed=seed)
        result = extract.SingleHead()(target)
        assert worst(result.model, target) <= 1e-11
        assert result.queries <= 1.02 * (64 * 64 + 64)


entries = st.sampled_from([0.0, 1e-12, -1e-3, 1.0, -7.0, 1e6, 1e12])


@settings(max_examples=20, deadline=None)
@given(
    d=st.integers(1, 12),
    exponent=st.floats(-3, 2),
    special=st.lists(entries, max_size=12),
    seed=st.integers(0, 2**31),
)
def test_any_scale_of_w_and_any_entries_of_v(d, exponent, special, seed):
    planted = oracle.plant(dim=d, scale=10**exponent, seed=seed)
    v = planted.v.clone()
    v[: len(special)] = torch.tensor(special, dtype=torch.float64)[:d]
    target = oracle.Head(planted.W, v)
    result = extract.SingleHead(seed=seed)(target)
    if not v.any():
        assert result.status is Status.NOT_IDENTIFIABLE
        return
    assert result.status is Status.RECOVERED, result.reason
    assert torch.equal(result.model.v, v)
    assert relative(result.model.W, planted.W) <= 1e-11
    assert result.queries <= d * d + d + 16


@pytest.mark.parametrize(
    ("scale", "error"),
    [(0.0, 1e-30), (1e-30, 1e-30), (1e-8, 1e-19), (1e6, 1e-5), (1e12, 10.0)],
)
def test_scales_far_from_one(scale, error):
    planted = oracle.plant(dim=8, seed=1)
    target = oracle.Head(scale * planted.W, planted.v)
    result = extract.SingleHead()(target)
    assert result.status is Status.RECOVERED
    assert (result.model.W - target.W).abs().max() <= error
    assert result.queries <= 72 + 24


@pytest.mark.parametrize("rank", [1, 3])
def test_a_singular_w_is_no_obstacle(rank):
    target = oracle.plant(dim=10, rank=rank, seed=2)
    assert worst(extract.SingleHead()(target).model, target) <= 1e-11


def test_a_spiky_w():
    W = torch.zeros(16, 16, dtype=torch.float64)
    W[3, 5] = 1e3
    W[0, 0] = 1e-3
    target = oracle.Head(W, oracle.plant(dim=16).v)
    assert worst(extract.SingleHead()(target).model, target) <= 1e-12


def test_v_zero_is_not_identifiable():
    target = oracle.Head(oracle.plant(dim=5).W, torch.zeros(5, dtype=torch.float64))
    result = extract.SingleHead()(target)
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "v = 0" in result.reason
    assert result.model is None
    assert result.queries == 5


@pytest.mark.parametrize("budget", [0, 3, 8, 20, 70, 71])
def test_a_budget_that_runs_out_is_a_result(budget):
    target = oracle.plant(dim=8, seed=3)
    result = extract.SingleHead()(oracle.Counted(target, budget=budget))
    assert result.status is Status.BUDGET
    assert result.queries == budget
    assert f"stopped after {budget} queries" in result.reason
    if budget < 8:
        assert result.model is None
        return
    columns = (budget - 8) // 8  # complete columns; what they tell about W is exact
    assert result.known == (8 + 8 * columns) / 72
    assert torch.equal(result.model.v, target.v)
    difference = torch.linalg.svdvals(result.model.W - target.W)
    assert int((difference > 1e-12).sum()) == 8 - columns


def test_a_budget_that_leaves_nothing_for_the_check_is_unverified():
    result = extract.SingleHead()(oracle.Counted(oracle.plant(dim=4), budget=20))
    assert result.status is Status.UNVERIFIED
    assert result.queries == 20


def test_rounded_answers_give_an_inexact_model():
    result = extract.SingleHead()(oracle.Rounded(oracle.plant(dim=8, seed=1), 5))
    assert result.status is Status.INEXACT
    assert 1e-8 < result.check.worst < 1e-2


@pytest.mark.parametrize("kind", ["multi-head", "one-layer"])
def test_another_kind_of_model_is_never_called_recovered(kind):
    result = extract.SingleHead()(oracle.plant(kind, dim=6, heads=3, seed=1))
    assert result.status is Status.MISMATCH


def test_vector_answers_are_not_applicable():
    result = extract.SingleHead()(oracle.plant("attention", dim=4))
    assert result.status is Status.NOT_APPLICABLE
    assert "expected one score per sequence" in result.reason


def test_the_trace_ends_where_the_result_is():
    result = extract.SingleHead()(oracle.plant(dim=16, seed=1))
    queries, errors = zip(*result.trace, strict=True)
    assert queries[0] == 16
    assert queries[-1] == result.queries
    assert errors[-1] == result.check.worst
    assert min(errors[:-1]) > 1e-3
