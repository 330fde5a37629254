"""Theorem 5.1: the cross approximation, and the paper's convex program as its baseline."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole import extract, oracle
from keyhole.core.errors import InputError
from keyhole.extract import Status
from planted_truth import relative, worst


def unknowns(d: int, r: int) -> int:
    return d + 2 * r * d - r * r


@pytest.mark.parametrize(
    ("d", "r"), [(1, 1), (8, 2), (16, 16), (32, 5), (64, 4), (128, 8)]
)
def test_as_many_queries_as_unknowns(d, r):
    for seed in range(1):
        target = oracle.plant(dim=d, rank=r, seed=seed)
        known = extract.LowRank(rank=r, seed=seed)(target)
        found = extract.LowRank(seed=seed)(target)
        assert known.queries == known.lower_bound == unknowns(d, r)
        assert unknowns(d, r) <= found.queries <= unknowns(d, r) + 2 * d
        for result in (known, found):
            assert result.status is Status.RECOVERED
            assert worst(result.model, target) <= 1e-11


@settings(max_examples=30, deadline=None)
@given(
    d=st.integers(1, 14),
    share=st.floats(0, 1),
    exponent=st.floats(-3, 2),
    seed=st.integers(0, 2**31),
)
def test_finds_any_rank_at_any_scale(d, share, exponent, seed):
    r = round(share * d)
    planted = oracle.plant(dim=d, rank=max(r, 1), scale=10**exponent, seed=seed)
    target = planted if r else oracle.Head(0 * planted.W, planted.v)
    result = extract.LowRank(seed=seed)(target)
    assert result.status is Status.RECOVERED
    assert int(torch.linalg.matrix_rank(result.model.W, rtol=1e-9)) <= r
    if r:
        assert relative(result.model.W, target.W) <= 1e-9
    assert result.queries <= unknowns(d, r) + 2 * d + 32


def test_decaying_singular_values():
    Q = [torch.linalg.qr(oracle.plant(dim=24, seed=seed).W)[0] for seed in (1, 2)]
    sizes = torch.zeros(24, dtype=torch.float64)
    sizes[:6] = 10.0 ** -torch.arange(6, dtype=torch.float64)
    target = oracle.Head(Q[0] @ sizes.diag() @ Q[1], oracle.plant(dim=24).v)
    result = extract.LowRank()(target)
    assert result.lower_bound == unknowns(24, 6)
    assert worst(result.model, target) <= 1e-12


def test_a_rank_given_too_low_is_a_mismatch_and_too_high_costs_little():
    target = oracle.plant(dim=16, rank=4, seed=1)
    assert extract.LowRank(rank=2)(target).status is Status.MISMATCH
    generous = extract.LowRank(rank=9)(target)
    assert generous.status is Status.RECOVERED
    assert generous.queries <= unknowns(16, 4) + 16


def test_the_budget_leaves_the_best_model_so_far():
    target = oracle.plant(dim=16, rank=4, seed=1)
    result = extract.LowRank()(oracle.Counted(target, budget=90))
    assert result.status is Status.BUDGET
    assert int(torch.linalg.matrix_rank(result.model.W)) == 2


@pytest.mark.parametrize("arguments", [{"rank": -1}])
def test_bad_arguments(arguments):
    with pytest.raises(InputError, match="rank must be"):
        extract.LowRank(**arguments)


@pytest.mark.parametrize(
    "method", [extract.LowRank(rank=99), extract.NuclearNorm(rank=99)]
)
def test_a_rank_that_no_such_matrix_has_is_refused_before_anything_is_asked(method):
    target = oracle.Counted(oracle.plant(dim=4, seed=1))
    for asked in (lambda: method(target), lambda: method.expected_queries(4)):
        with pytest.raises(
            InputError, match=r"the rank must not exceed the dimension, 4: got 99"
        ):
            asked()
    assert target.queries == 0


def test_nuclear_norm_needs_more_and_gives_less():
    target = oracle.plant(dim=8, rank=1, seed=1)
    enough = extract.NuclearNorm(rank=1)(target)
    assert enough.queries == 8 + 6 * 8
    assert enough.status is Status.RECOVERED
    assert worst(enough.model, target) <= 1e-5
    scarce = extract.NuclearNorm(rank=1, oversampling=1.5)(target)
    assert scarce.status is Status.MISMATCH
    assert extract.LowRank(rank=1)(target).queries < enough.queries


def test_nuclear_norm_measures_with_independent_gaussian_pairs():
    """Every pair that is sent is one of the seed's own draws, in order, up to its scale."""
    target = oracle.plant(dim=6, rank=1, seed=1)
    pairs = []

    def keep(sequences):
        if sequences.shape[1] == 2:
            pairs.append(sequences)
        return target(sequences)

    keep.dim = 6
    method = extract.NuclearNorm(rank=1, oversampling=40, seed=3)
    stream = torch.Generator().manual_seed(3)
    deltas, xs = torch.randn(2, 240, 6, generator=stream, dtype=torch.float64)
    list(method.steps(keep))
    sent = torch.cat(pairs)
    d = sent[:, 0] - sent[:, 1]
    x = sent[:, 1]
    drawn = torch.cat([deltas, xs], 1)
    rows = torch.cat([d, x], 1)
    cosine = torch.nn.functional.cosine_similarity(rows[:, None], drawn[None], dim=-1)
    assert float(cosine.amax(1).min()) > 1 - 1e-12
    assert len(cosine.argmax(1).unique()) == 240
    # Standard Gaussian, whatever v is: signs of vᵀδ are even, and nothing was left out
    # near 0.
    along = deltas @ target.v / target.v.norm()
    assert abs(float(along.sign().mean())) < 4 / math.sqrt(240)
    assert abs(float((along.abs() < 0.1).double().mean()) - 0.0797) < 4 * 0.0175
    assert float(torch.cat([deltas, xs]).var()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("method", [extract.LowRank, extract.NuclearNorm])
def test_a_rank_beyond_the_dimension_is_refused(method):
    with pytest.raises(
        InputError, match="the rank must not exceed the dimension, 4: got 5"
    ):
        method(rank=5)(oracle.plant(dim=4))


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"rank": 1, "oversampling": 0.0}])
def test_nuclear_norm_bad_arguments(arguments):
    with pytest.raises(InputError, match="must be"):
        extract.NuclearNorm(**arguments)


def test_nuclear_norm_without_cvxpy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(InputError, match=r"pip install 'keyhole\[convex\]'"):
        extract.NuclearNorm(rank=1)(oracle.plant(dim=4, rank=1))


def test_expected_queries():
    assert extract.LowRank(rank=3).expected_queries(10) == unknowns(10, 3)
    assert extract.LowRank().expected_queries(10) is None
    assert extract.SingleHead().expected_queries(10) == 110
    assert extract.NuclearNorm(rank=2).expected_queries(10) == 10 + math.ceil(
        6 * 2 * 10
    )
