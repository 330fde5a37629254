"""Appendix B: weights from signs, against planted truth, and oracles that are something else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_noise as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.core.errors import InputError


class Fake:
    def __init__(self, dim, function):
        self.dim = dim
        self.function = function
        self.calls = 0

    def __call__(self, sequences):
        self.calls += 1
        return self.function(sequences)


def errors(found, head):
    unit_v = head.v / torch.linalg.vector_norm(head.v)
    W = float((found.model.W - head.W).abs().max())
    return W, float((found.model.v - unit_v).abs().max())


def lower_bound_of(d, accuracy):
    return (d * d + d - 1) * math.log2(1 / accuracy)


@pytest.mark.parametrize("seed", range(3))
def test_a_million_to_one_within_three_halves_of_the_floor(seed):
    head = oracle.plant(dim=8, seed=seed)
    signs = Fake(8, oracle.SignOnly(head))
    found = extract.SignOnly(accuracy=1e-6)(signs)
    assert found.status is Status.RECOVERED
    assert max(errors(found, head)) <= found.guarantee <= 1e-6
    assert found.guarantee_v <= 1e-6
    assert found.queries <= 1.25 * lower_bound_of(8, 1e-6)
    assert found.lower_bound == math.ceil(lower_bound_of(8, 1e-6))
    assert torch.linalg.vector_norm(found.model.v) == pytest.approx(1)
    assert signs.calls < 120  # batches: a level of bisection is one


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dim=st.integers(1, 7),
    accuracy=st.sampled_from([1e-2, 1e-4, 1e-8]),
    scale=st.sampled_from([0.0, 1e-4, 0.1, 1.0, 30.0]),
    length=st.sampled_from([1e-8, 1.0, 1e8]),
)
def test_what_is_promised_holds(seed, dim, accuracy, scale, length):
    head = oracle.plant(dim=dim, seed=seed, scale=scale)
    head = oracle.Head(head.W, length * head.v)
    found = extract.SignOnly(accuracy=accuracy, seed=seed)(oracle.SignOnly(head))
    assert found.status in (Status.RECOVERED, Status.INEXACT)
    W, v = errors(found, head)
    assert W <= found.guarantee <= accuracy
    assert v <= found.guarantee_v <= accuracy


@pytest.mark.parametrize(
    "kind", ["zeros in v", "one entry in v", "spiky W", "rank one"]
)
def test_structure_does_no_harm(kind):
    head = oracle.plant(dim=6, seed=3, rank=1 if kind == "rank one" else None)
    W = head.W.clone()
    v = head.v.clone()
    if kind == "zeros in v":
        v[[0, 3, 4]] = 0.0
    if kind == "one entry in v":
        v[:] = 0.0
        v[2] = -1.0
    if kind == "spiky W":
        W[:] = 0.0
        W[1, 4] = 50.0
    head = oracle.Head(W, v)
    found = extract.SignOnly(accuracy=1e-5)(oracle.SignOnly(head))
    assert found.status is Status.RECOVERED
    assert max(errors(found, head)) <= found.guarantee <= 1e-5


def test_the_threshold_is_where_the_sign_flips():
    """λ² = σ(t)·c·vᵀp/|vᵀx|: just below, f > 0; just above, f < 0, by the naive formula."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        W, v, p, x = rng.normal(size=(4, 4)), *rng.normal(size=(3, 4))
        p = p * np.sign(v @ p)
        x = -x * np.sign(v @ x)
        c = rng.uniform(0.1, 1)
        z = c * p @ W @ x
        flip = math.sqrt(c * (v @ p) / -(v @ x) / (1 + math.exp(-z)))
        for factor, positive in ((1 - 1e-6, True), (1 + 1e-6, False)):
            last = factor * flip * x
            X = np.stack([last + c / (factor * flip) * p, last])
            assert (reference.score(X, W, v) > 0) == positive


def test_budget_ends_with_the_bits_that_are_known():
    signs = oracle.SignOnly(oracle.plant(dim=5, seed=1))
    method = extract.SignOnly(accuracy=1e-4)
    needed = method(signs).queries
    known = []
    for budget in (3, 40, 130, 300, 400, needed - 1):
        found = method(oracle.Counted(signs, budget))
        assert found.status is Status.BUDGET
        assert found.queries == budget
        known.append(found.known)
    assert known == sorted(known)
    assert known[0] == 0 < known[-2] < known[-1] <= 1
    assert method(oracle.Counted(signs, needed)).status is Status.UNVERIFIED


HEAD = oracle.plant(dim=5, seed=0)
ZERO = torch.zeros(5, dtype=torch.float64)


def _random(odds, value, function):
    stream = torch.Generator().manual_seed(0)

    def answer(sequences):
        answers = function(sequences).clone()
        answers[torch.rand(len(answers), generator=stream) < odds] = value
        return answers

    return answer


def _signs(function):
    return lambda X: (function(X) > 0).double()


TWO = oracle.plant("multi-head", dim=5, heads=2, seed=3)
LIARS = {
    "never": (
        lambda X: torch.zeros(len(X), dtype=torch.float64),
        {Status.NOT_IDENTIFIABLE},
    ),
    "always": (
        lambda X: torch.ones(len(X), dtype=torch.float64),
        {Status.MISMATCH, Status.NOT_IDENTIFIABLE},
    ),
    "v = 0": (_signs(oracle.Head(HEAD.W, ZERO)), {Status.NOT_IDENTIFIABLE}),
    "scores": (HEAD, {Status.NOT_APPLICABLE}),
    "vectors": (oracle.plant("attention", dim=5, seed=3), {Status.NOT_APPLICABLE}),
    "two heads": (_signs(TWO), {Status.MISMATCH, Status.SATURATED}),
    "last": (_signs(lambda X: X[:, -1] @ HEAD.v), {Status.SATURATED}),
    "largest": (_signs(lambda X: (X @ HEAD.v).amax(-1)), {Status.SATURATED}),
    "square": (
        _signs(lambda X: HEAD(X) ** 2),
        {Status.MISMATCH, Status.NOT_IDENTIFIABLE},
    ),
    "shifted": (_signs(lambda X: HEAD(X) - 0.5), {Status.MISMATCH, Status.SATURATED}),
    "coin": (
        _random(0.5, 1.0, lambda X: torch.zeros(len(X), dtype=torch.float64)),
        {Status.MISMATCH, Status.NOT_IDENTIFIABLE, Status.SATURATED},
    ),
    "sometimes wrong": (
        _random(0.2, 1.0, _signs(HEAD)),
        {Status.MISMATCH, Status.NOT_IDENTIFIABLE, Status.SATURATED},
    ),
    "NaN": (_random(0.1, math.nan, _signs(HEAD)), {Status.ORACLE_FAILED}),
    "raises": (lambda X: 1 // 0, {Status.ORACLE_FAILED}),
    "other dim": (oracle.SignOnly(oracle.plant(dim=4, seed=0)), {Status.ORACLE_FAILED}),
}


@pytest.mark.parametrize("name", LIARS)
def test_every_other_oracle_ends_in_a_status(name):
    function, statuses = LIARS[name]
    found = extract.SignOnly(accuracy=1e-4)(Fake(5, function))
    assert found.status in statuses
    found.to_dict()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("accuracy", 0.0, r"accuracy must be 1e-12 or more, not 0\.0"),
        ("accuracy", math.nan, "accuracy must be 1e-12 or more, not nan"),
        ("accuracy", 1.0, r"accuracy must be below 1, not 1\.0"),
        ("accuracy", 1e-15, "accuracy must be 1e-12 or more, not 1e-15"),
    ],
)
def test_bad_arguments_are_refused(name, value, message):
    with pytest.raises(InputError, match=message):
        extract.SignOnly(**{name: value})
