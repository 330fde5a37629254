"""Theorem 6.1 to the letter: measured ≤ guaranteed ≤ stated, with d² + d queries."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import reference_noise as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.extract.extraction import Extraction
from keyhole.extract.tolerant_as_published import accuracy_for, tolerance_for


def planted(dim, seed, zeros=0, scale=1.0):
    """A head with ‖v‖ = 1 and some zeros in v, its ‖W‖ and its margin."""
    head = oracle.plant(dim=dim, seed=seed, scale=scale)
    v = head.v.clone()
    v[: min(zeros, dim - 1)] = 0.0
    v /= v.norm()
    bound = float(torch.linalg.matrix_norm(head.W, 2))
    margin = float(v[v != 0].abs().min())
    return oracle.Head(head.W, v), max(bound, 1e-6), margin


class Extreme:
    """Errors of exactly ±τ, by the question: the worst that the theorem allows."""

    def __init__(self, head, tau, seed):
        self.head = head
        self.tau = tau
        self.dim = head.dim
        self.noisy = oracle.Noisy(head, 1.0, seed=seed)

    def __call__(self, sequences):
        truth = self.head(sequences)
        return truth + self.tau * (self.noisy(sequences) - truth).sign()


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dim=st.integers(1, 7),
    zeros=st.sampled_from([0, 0, 1, 3]),
    accuracy=st.sampled_from([1e-6, 1e-3, 0.1, 0.99]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
)
def test_measured_within_guaranteed_within_stated(seed, dim, zeros, accuracy, scale):
    head, bound, margin = planted(dim, seed, zeros, scale)
    tau = tolerance_for(accuracy, bound, margin, dim)
    method = extract.TolerantAsPublished(tau, bound, margin)
    found = method(Extreme(head, tau, seed))
    assert found.status in (Status.RECOVERED, Status.INEXACT, Status.NOT_IDENTIFIABLE)
    assert found.queries == dim * dim + dim == found.stated.queries
    assert found.stated.accuracy == pytest.approx(accuracy)
    error = found.model.W - head.W
    assert float(torch.linalg.matrix_norm(error)) <= accuracy
    assert float(torch.linalg.vector_norm(found.model.v - head.v)) <= accuracy
    if found.guarantee is not None:
        assert (
            float(error.abs().max()) <= found.guarantee <= accuracy / dim * (1 + 1e-6)
        )
        assert float((found.model.v - head.v).abs().max()) <= found.guarantee_v


def test_the_stated_tolerance_by_hand():
    slope = 2 + math.exp(0.5**0.5) + math.exp(-(0.5**0.5))
    by_hand = 0.01 * 0.2 / (2 * slope * 6 * (12 * 3.0 + 8))
    assert tolerance_for(0.01, bound=3.0, margin=0.2, dim=6) == pytest.approx(
        by_hand, rel=1e-12
    )
    assert accuracy_for(by_hand, 3.0, 0.2, 6) == pytest.approx(0.01, rel=1e-12)


def test_the_slope_bounds_the_logit_where_gates_may_be():
    """Lemma A.1 on [σ(−1/√2), σ(1/√2)]: |logit a − logit b| ≤ κ·|a − b|."""
    reach = 0.5**0.5
    gates = np.linspace(1 / (1 + math.exp(reach)), 1 / (1 + math.exp(-reach)), 401)
    slopes = np.diff(np.log(gates / (1 - gates))) / np.diff(gates)
    slope = 2 + 2 * math.cosh(reach)
    assert slopes.max() <= slope
    assert slopes.max() > 0.99 * slope


def test_the_probes_are_the_papers():
    """Every question and Ŵ against a loop over entries that follows the proof."""
    head, bound, margin = planted(4, 5, zeros=1)
    asked = []

    def keep(sequences):
        asked.append(sequences)
        return head(sequences)

    keep.dim = 4
    method = extract.TolerantAsPublished(0.0, bound, margin)
    steps = list(method.steps(keep))
    W = head.W.numpy()
    v = head.v.numpy()
    units = np.eye(4)
    k = int(np.abs(v).argmax())
    expected = np.zeros((4, 4))
    questions = [units[i][None] for i in range(4)]
    for i in sorted(range(4), key=lambda i: v[i] == 0):
        for j in range(4):
            u = units[i] + (units[k] if v[i] == 0 else 0)
            X = np.stack([units[j] / bound + u / 2, units[j] / bound])
            alpha = (reference.score(X, W, v) - v[j] / bound) / (u @ v / 2)
            form = 2 * bound * math.log(alpha / (1 - alpha))
            expected[i, j] = form - (expected[k, j] if v[i] == 0 else 0)
            questions.append(X)
    sent = [q.numpy() for batch in asked for q in batch]
    assert len(sent) == len(questions) == 20
    assert all(
        min(np.abs(q - s).max() for s in sent if s.shape == q.shape) == 0
        for q in questions
    )
    assert np.abs(steps[-1].model.W.numpy() - expected).max() < 1e-13
    assert np.abs(expected - W).max() < 1e-12


def test_our_version_needs_less_and_proves_more():
    head, bound, margin = planted(6, 1)
    noisy = oracle.Noisy(head, 1e-5, seed=1)
    published = extract.TolerantAsPublished(1e-5, bound, margin)(noisy)
    ours = extract.Tolerant(1e-5)(noisy)
    assert ours.guarantee * 1e6 < published.guarantee < published.stated.accuracy


def test_what_is_assumed_is_looked_at():
    head, bound, margin = planted(5, 2)
    small = extract.TolerantAsPublished(1e-6, bound / 8, margin)(head)
    assert small.status is Status.MISMATCH
    assert "‖W‖ ≤" in small.reason
    wide = extract.TolerantAsPublished(1e-6, bound, 4 * margin)(head)
    assert wide.status is Status.NOT_APPLICABLE
    assert "does not hold" in wide.reason
    noisy = oracle.Noisy(head, 1e-3, seed=3)
    liar = extract.TolerantAsPublished(1e-6, bound, margin)(noisy)
    assert liar.guarantee is None
    zero = oracle.Head(head.W, torch.zeros_like(head.v))
    blind = extract.TolerantAsPublished(1e-6, bound, margin)(zero)
    assert blind.status is Status.NOT_IDENTIFIABLE
    vectors = extract.TolerantAsPublished(1e-6, bound, margin)(
        oracle.plant("attention", dim=5)
    )
    assert vectors.status is Status.NOT_APPLICABLE


def test_a_budget_leaves_what_is_known():
    head, bound, margin = planted(5, 2)
    method = extract.TolerantAsPublished(1e-6, bound, margin)
    shares = []
    for budget in (3, 5, 17, 29, 30):
        found = method(oracle.Counted(head, budget))
        assert found.queries == budget
        assert found.guarantee is None
        shares.append(found.known)
    assert shares == sorted(shares)
    assert found.status is Status.UNVERIFIED


def test_the_statement_is_printed_and_saved(tmp_path):
    head, bound, margin = planted(4, 0)
    found = extract.TolerantAsPublished(1e-5, bound, margin)(head)
    assert "Theorem 6.1 states: W and v within" in found.summary()
    assert "at most 20 queries" in found.summary()
    found.save(tmp_path / "found.json")
    assert Extraction.load(tmp_path / "found.json").stated == found.stated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1.0, 1.0), "tolerance must be 0 or more, not -1.0"),
        ((0.1, 0.0, 1.0), "bound must be above 0, not 0.0"),
        ((0.1, 1.0, math.nan), "margin must be above 0, not nan"),
        (
            (0.1, 1.0, 0.2),
            "answers must be exact to less than half the margin, ±0.1, for zeros of "
            "v to be recognised: got ±0.1",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        extract.TolerantAsPublished(*arguments)
