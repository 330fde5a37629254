"""Theorem B.1 to the letter: measured ≤ guaranteed ≤ stated, and the query bound is kept."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import reference_noise as reference
import torch

from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.extract.sign_only_as_published import CHANCE, Plan, mean_length


def planted(dim, seed, margin, scale=0.5):
    """A head with ‖v‖ = 1 and no entry of v below the margin, and its ‖W‖."""
    head = oracle.plant(dim=dim, seed=seed, scale=scale)
    v = torch.where(head.v >= 0, 1.0, -1.0) * head.v.abs().clamp(min=0.7).clamp(max=1.4)
    v /= v.norm()
    assert float(v.abs().min()) >= margin
    return oracle.Head(head.W, v), float(torch.linalg.matrix_norm(head.W, 2))


@pytest.mark.parametrize(("dim", "margin"), [(1, 1.0), (2, 0.4), (3, 0.3)])
@pytest.mark.parametrize("seed", range(1))
def test_measured_within_guaranteed_within_stated(dim, margin, seed):
    head, bound = planted(dim, seed, margin)
    method = extract.SignOnlyAsPublished(bound, margin, accuracy=0.9, seed=seed)
    found = method(oracle.SignOnly(head))
    assert found.status in (Status.INEXACT, Status.UNVERIFIED)
    assert found.queries <= found.stated.queries == method.expected_queries(dim)
    error = found.model.W - head.W
    assert float(torch.linalg.matrix_norm(error)) <= found.stated.accuracy == 0.9
    assert float(torch.linalg.vector_norm(found.model.v - head.v)) <= 0.9
    assert float(error.abs().max()) <= found.guarantee <= 0.9 / dim
    assert float((found.model.v - head.v).abs().max()) <= found.guarantee_v


def test_the_plan_by_hand():
    accuracy = 0.1
    bound = 2.0
    margin = 0.2
    dim = 4
    plan = Plan.of(accuracy, bound, margin, dim)
    high = math.e / (1 + math.e)
    slope = 2 + math.e + 1 / math.e
    most = math.sqrt(high / (margin * bound))
    u = plan.values_error / margin
    of_scale = bound * slope * bound / margin * 2 * most * plan.scale_error
    of_values = bound * slope * high * 2 * u / (1 - u)
    assert of_scale == pytest.approx(accuracy / dim / 2)
    assert of_values == pytest.approx(accuracy / dim / 2)
    assert plan.most == pytest.approx(most)
    assert plan.least == pytest.approx(math.sqrt((1 - high) * margin / bound))
    assert (plan.most - plan.least) / 2**plan.levels <= 2 * plan.scale_error
    first = mean_length(dim) * plan.values_error
    assert 2 * dim * math.exp(-plan.samples * first**2 / 2) <= CHANCE
    assert plan.queries(dim) == plan.samples + 16 * plan.levels


def test_the_mean_length_is_that_of_the_sphere():
    assert mean_length(1) == pytest.approx(1)
    assert mean_length(2) == pytest.approx(2 / math.pi)
    assert mean_length(3) == pytest.approx(1 / 2)
    x = np.random.default_rng(0).normal(size=(200_000, 6))
    first = np.abs(x[:, 0] / np.linalg.norm(x, axis=1)).mean()
    assert mean_length(6) == pytest.approx(first, abs=3e-3)


def test_the_sign_changes_where_the_proof_says():
    rng = np.random.default_rng(1)
    for _ in range(20):
        W = rng.normal(size=(3, 3))
        v = rng.normal(size=3)
        bound = 4.0
        i, j = rng.integers(0, 3, size=2)
        c = -np.sign(v[i] * v[j]) / bound
        flip = math.sqrt(abs(v[i] / v[j]) / bound / (1 + math.exp(-c * W[i, j])))
        for factor, prevails in ((1 - 1e-6, False), (1 + 1e-6, True)):
            last = factor * flip * np.eye(3)[j]
            X = np.stack([last + c / (factor * flip) * np.eye(3)[i], last])
            assert (np.sign(reference.score(X, W, v)) == np.sign(v[j])) == prevails


def test_what_is_assumed_is_looked_at():
    head, bound = planted(2, 0, 0.4)
    v = torch.tensor([0.99, 0.1], dtype=torch.float64)
    uneven = oracle.SignOnly(oracle.Head(head.W, v / v.norm()))
    found = extract.SignOnlyAsPublished(bound, 0.4, accuracy=0.9)(uneven)
    assert found.status is Status.NOT_APPLICABLE
    assert "does not hold" in found.reason
    large = oracle.SignOnly(oracle.Head(20 * head.W, head.v))
    found = extract.SignOnlyAsPublished(bound, 0.4, accuracy=0.9)(large)
    assert found.guarantee is None  # labels beyond the brackets contradict the bound
    scores = extract.SignOnlyAsPublished(bound, 0.4, accuracy=0.9)(head)
    assert scores.status is Status.NOT_APPLICABLE
    mute = oracle.SignOnly(oracle.Head(head.W, torch.zeros_like(head.v)))
    found = extract.SignOnlyAsPublished(bound, 0.4, accuracy=0.9)(mute)
    assert found.status is Status.NOT_IDENTIFIABLE


def test_a_budget_leaves_what_is_known():
    head, bound = planted(2, 1, 0.4)
    signs = oracle.SignOnly(head)
    method = extract.SignOnlyAsPublished(bound, 0.4, accuracy=0.9)
    needed = method.expected_queries(2)
    early = method(oracle.Counted(signs, 100))
    assert (early.status, early.known) == (Status.BUDGET, 0)
    late = method(oracle.Counted(signs, needed - 2))
    assert late.status is Status.BUDGET
    assert 0.3 < late.known <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bound": 0.0}, "bound must be above 0, not 0.0"),
        ({"margin": 0.0}, "margin must be above 0, not 0.0"),
        ({"accuracy": 1.0}, "accuracy must be below 1, not 1.0"),
        (
            {"margin": 0.9},
            "the margin must not exceed 1/√d = 0.577, since ‖v‖ = 1: got 0.9",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    def attempt():
        extract.SignOnlyAsPublished(**{"bound": 1.0, "margin": 0.3, **arguments})(
            oracle.plant(dim=3)
        )

    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        attempt()
