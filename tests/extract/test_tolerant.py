"""Theorem 6.1: what is guaranteed holds, against planted truth and errors of every kind."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.extract.extraction import Extraction

KNOWN = (Status.RECOVERED, Status.INEXACT)


class Fake:
    """An oracle made of a function, which keeps the longest token it was sent."""

    def __init__(self, dim, function):
        self.dim = dim
        self.function = function
        self.largest_norm = 0.0

    def __call__(self, sequences):
        self.largest_norm = max(self.largest_norm, float(sequences.norm(dim=-1).max()))
        return self.function(sequences)


def extreme(head, tau, seed=0):
    """Errors of exactly ±τ, the same for the same question: the worst that the theorem allows."""
    noisy = oracle.Noisy(head, 1.0, seed=seed)

    def answer(sequences):
        truth = head(sequences)
        return truth + tau * (noisy(sequences) - truth).sign()

    return Fake(head.dim, answer)


def errors(found, head):
    W = float((found.model.W - head.W).abs().max())
    return W, float((found.model.v - head.v).abs().max())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dim=st.integers(1, 7),
    tau=st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 3e-2]),
    max_norm=st.sampled_from([None, 1.0, 10.0, 1e4]),
    scale=st.sampled_from([1e-3, 0.3, 1.0, 30.0]),
    repeats=st.sampled_from([1, 1, 3]),
)
def test_errors_stay_within_the_guarantee(seed, dim, tau, max_norm, scale, repeats):
    head = oracle.plant(dim=dim, seed=seed, scale=scale)
    method = extract.Tolerant(
        tolerance=tau, max_norm=max_norm, repeats=repeats, seed=seed
    )
    target = extreme(head, tau, seed)
    found = method(target)
    assert found.status is not Status.MISMATCH
    if max_norm is not None:
        assert target.largest_norm <= max_norm
    if found.status in KNOWN:
        W, v = errors(found, head)
        assert found.guarantee >= W
        assert v <= found.guarantee_v


def test_errors_that_tau_explains_contradict_nothing():
    """Large W, short tokens, errors of ±τ throughout: W is vague, but nothing is refuted."""
    head = oracle.plant(dim=3, seed=152, scale=30.0)
    found = extract.Tolerant(tolerance=0.03, max_norm=1.0, seed=152)(
        extreme(head, 0.03, 152)
    )
    assert found.status is Status.INEXACT
    assert errors(found, head)[0] <= found.guarantee
    assert errors(found, head)[1] <= found.guarantee_v


@pytest.mark.parametrize("dim", [1, 2])
def test_no_empty_batch_is_sent_where_few_forms_are_all(dim):
    asked = []
    head = oracle.plant(dim=dim, seed=0)
    target = Fake(
        dim, lambda sequences: (asked.append(len(sequences)), head(sequences))[1]
    )
    assert (
        extract.Tolerant(tolerance=1e-3, max_norm=10.0)(target).status is Status.INEXACT
    )
    assert min(asked) > 0


@pytest.mark.parametrize("seed", range(3))
def test_long_tokens_undo_the_tolerance(seed):
    head = oracle.plant(dim=8, seed=seed)
    noisy = oracle.Noisy(head, 1e-3, seed=seed)
    short = extract.Tolerant(tolerance=1e-3, max_norm=10.0)(oracle.Clipped(noisy, 10.0))
    long = extract.Tolerant(tolerance=1e-3)(noisy)
    assert short.status is Status.INEXACT
    assert long.status is Status.RECOVERED
    assert errors(long, head)[0] * 1e6 < errors(short, head)[0] < short.guarantee
    assert "proved" in short.reason
    assert long.queries <= 8 * 8 + 2 * 8 + 40


@pytest.mark.parametrize("decimals", [1, 3, 6])
def test_rounding_is_a_tolerance(decimals):
    head = oracle.plant(dim=6, seed=decimals)
    tau = 0.5 * 10.0**-decimals
    found = extract.Tolerant(tolerance=tau, max_norm=10.0)(
        oracle.Rounded(head, decimals)
    )
    assert found.status is Status.INEXACT
    W, v = errors(found, head)
    assert found.guarantee >= W
    assert v <= found.guarantee_v <= 1.001 * tau / 10


def test_a_bound_and_a_margin_only_help():
    head = oracle.plant(dim=6, seed=4)
    v = head.v.clone()
    v[2] = 0.0
    head = oracle.Head(head.W, v)
    noisy = oracle.Noisy(head, 0.2, seed=1)
    plain = extract.Tolerant(tolerance=0.2, max_norm=3.0)(noisy)
    bound = float(torch.linalg.matrix_norm(head.W, 2))
    more = extract.Tolerant(tolerance=0.2, max_norm=3.0, bound=bound, margin=0.2)(noisy)
    assert more.model.v[2] == 0
    assert more.guarantee <= 2 * bound
    assert plain.guarantee is None or more.guarantee <= plain.guarantee
    assert errors(more, head)[0] <= more.guarantee


def test_a_guarantee_names_what_was_stated():
    """With ‖W‖ ≤ B stated the intervals rest on it as well: where it is false so are they."""
    v = torch.tensor([1.0, 0.1], dtype=torch.float64)
    head = oracle.Head(torch.tensor([[0.5, -0.3], [0.2, 0.7]], dtype=torch.float64), v)
    noisy = oracle.Noisy(head, 0.04, seed=1)
    plain = extract.Tolerant(0.04, max_norm=10.0)(noisy)
    assert plain.reason.endswith("proved if every answer is within ±0.04 of one head")
    small = extract.Tolerant(0.04, max_norm=1.0, bound=0.1)(noisy)
    assert errors(small, head)[0] > small.guarantee
    assert small.reason.endswith("of one head with ‖W‖ ≤ 0.1")
    both = extract.Tolerant(0.04, max_norm=10.0, bound=1.0, margin=0.05)(noisy)
    assert both.reason.endswith("of one head with ‖W‖ ≤ 1 and |v_i| ≥ 0.05 or 0")


def test_a_bound_or_a_margin_that_answers_refute_is_named():
    v = torch.tensor([1.0, 0.1], dtype=torch.float64)
    head = oracle.Head(torch.tensor([[0.5, -0.3], [0.2, 0.7]], dtype=torch.float64), v)
    small = extract.Tolerant(1e-6, bound=0.1)(head)
    assert small.status is Status.MISMATCH
    assert "W (stated: ‖W‖ ≤ 0.1) contradict each other" in small.reason
    wide = extract.Tolerant(1e-6, margin=0.5)(head)
    assert wide.status is Status.NOT_APPLICABLE
    assert "the margin 0.5 does not hold: some |v_i| is 1.0e-01" in wide.reason


def test_single_precision_must_be_stated():
    head = oracle.plant(dim=6, seed=2)
    server = Fake(6, lambda sequences: head(sequences).float())
    found = extract.Tolerant(tolerance=1e-3, precision=6e-8)(server)
    assert found.status in KNOWN
    assert errors(found, head)[0] <= found.guarantee < 1e-3
    assert extract.Tolerant(tolerance=1e-3)(server).status is Status.MISMATCH


def test_repeats_average_random_errors_and_the_fit_does_better():
    before = []
    after = []
    once = []
    for seed in range(2):
        head = oracle.plant(dim=5, seed=seed)
        for results, repeats, refine in (
            (once, 1, False),
            (before, 8, False),
            (after, 8, True),
        ):
            method = extract.Tolerant(
                0.02, max_norm=10.0, repeats=repeats, refine=refine
            )
            found = method(oracle.Noisy(head, 0.02, seed=seed, fresh=True))
            W, v = errors(found, head)
            assert found.guarantee >= W
            assert v <= found.guarantee_v
            results.append(W)
    assert np.mean(before) < 0.6 * np.mean(once)
    assert np.mean(after) < 0.9 * np.mean(before)


def test_fresh_noise_is_fresh_seeded_and_named():
    head = oracle.plant(dim=3, seed=0)
    X = torch.randn(
        5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    noisy = oracle.Noisy(head, 0.1, seed=1, fresh=True)
    first = noisy(X)
    second = noisy(X)
    assert not torch.equal(first, second)
    assert bool(((first - head(X)).abs() <= 0.1).all())
    assert torch.equal(first, oracle.Noisy(head, 0.1, seed=1, fresh=True)(X))
    assert noisy.identity != oracle.Noisy(head, 0.1, seed=1).identity


def test_budget_ends_with_what_is_known():
    head = oracle.plant(dim=6, seed=1)
    method = extract.Tolerant(tolerance=1e-3, max_norm=10.0)
    needed = method(head).queries
    known = []
    for budget in (3, 8, 20, 30, needed - 1):
        found = method(oracle.Counted(head, budget))
        assert found.status is Status.BUDGET
        assert found.queries == budget
        known.append(found.known)
    assert known == sorted(known)
    assert known[0] == 0 < known[-1] < 1
    assert method(oracle.Counted(head, needed)).status is Status.UNVERIFIED
    again = extract.Tolerant(tolerance=1e-3, max_norm=10.0, repeats=2)
    assert again(oracle.Counted(head, needed + 5)).known == 1


def _chance(odds, bad):
    stream = torch.Generator().manual_seed(0)
    head = oracle.plant(dim=5, seed=0)

    def answer(sequences):
        answers = head(sequences).clone()
        answers[torch.rand(len(answers), generator=stream) < odds] = bad
        return answers

    return answer


HEAD = oracle.plant(dim=5, seed=0)
ZERO = torch.zeros(5, dtype=torch.float64)
LIARS = {
    "zero": (
        lambda X: torch.zeros(len(X), dtype=torch.float64),
        Status.NOT_IDENTIFIABLE,
    ),
    "v = 0": (oracle.Head(HEAD.W, ZERO), Status.NOT_IDENTIFIABLE),
    "constant": (lambda X: torch.ones(len(X), dtype=torch.float64), Status.MISMATCH),
    "steps": (lambda X: torch.floor(3 * HEAD(X)), Status.MISMATCH),
    "square": (lambda X: HEAD(X) ** 2, Status.MISMATCH),
    "two heads": (oracle.plant("multi-head", dim=5, heads=2, seed=3), Status.MISMATCH),
    "vectors": (oracle.plant("attention", dim=5, seed=3), Status.NOT_APPLICABLE),
    "last": (lambda X: X[:, -1] @ HEAD.v, Status.SATURATED),
    "largest": (lambda X: (X @ HEAD.v).amax(-1), Status.SATURATED),
    "NaN": (_chance(0.2, math.nan), Status.ORACLE_FAILED),
    "raises": (lambda X: 1 // 0, Status.ORACLE_FAILED),
    "too few": (lambda X: HEAD(X)[:-1], Status.ORACLE_FAILED),
    "outliers": (_chance(0.5, 5.0), Status.MISMATCH),
}


@pytest.mark.parametrize("name", LIARS)
@pytest.mark.parametrize(
    "method", [{}, {"max_norm": 10.0}, {"max_norm": 10.0, "repeats": 2}]
)
def test_every_other_oracle_ends_in_a_status(name, method):
    function, status = LIARS[name]
    found = extract.Tolerant(tolerance=1e-3, **method)(Fake(5, function))
    assert found.status is status
    assert found.guarantee is None
    found.to_dict()


def test_a_large_tolerance_hides_the_weights():
    noisy = extreme(HEAD, 0.9)
    for bound in (None, 3.0):
        found = extract.Tolerant(tolerance=0.9, max_norm=1.0, bound=bound)(noisy)
        assert found.status is Status.NOT_IDENTIFIABLE
        assert "±0.9" in found.reason


def test_a_tolerance_that_is_too_small_is_found_out():
    noisy = oracle.Noisy(HEAD, 0.05, seed=1)
    for repeats in (1, 2):
        found = extract.Tolerant(tolerance=1e-6, max_norm=10.0, repeats=repeats)(noisy)
        assert found.status is Status.MISMATCH
        assert found.guarantee is None


def test_exact_uniform_attention_is_recovered():
    head = oracle.Head(torch.zeros(5, 5, dtype=torch.float64), HEAD.v)
    found = extract.Tolerant(tolerance=1e-3)(oracle.Noisy(head, 1e-3))
    assert found.status is Status.RECOVERED
    assert errors(found, head)[0] <= found.guarantee < 1e-12


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tolerance", -1.0, "tolerance must be 0 or more, not -1.0"),
        ("tolerance", math.nan, "tolerance must be 0 or more, not nan"),
        ("bound", 0.0, "bound must be above 0, not 0.0"),
        ("margin", -1.0, "margin must be above 0, not -1.0"),
        ("max_norm", math.inf, "max_norm must be finite, not inf"),
        ("repeats", 0, "repeats must be 1 or more, not 0"),
        ("precision", 0.0, "precision must be above 0, not 0.0"),
    ],
)
def test_bad_arguments_are_refused(name, value, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        extract.Tolerant(**{name: value})


def test_the_guarantee_travels_through_json(tmp_path):
    found = extract.Tolerant(tolerance=1e-3, max_norm=10.0)(oracle.Noisy(HEAD, 1e-3))
    found.save(tmp_path / "found.json")
    back = Extraction.load(tmp_path / "found.json")
    assert (back.guarantee, back.guarantee_v) == (found.guarantee, found.guarantee_v)
    assert torch.equal(back.model.W, found.model.W)
