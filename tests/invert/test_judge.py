"""The judge of inversions: which inputs it calls recovered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keyhole import invert
from keyhole.core import Status
from keyhole.invert.judge import judge

LARGE = 60  # tokens and dimensions: too many unknowns for the Jacobian


def large(outputs, rank=None):
    """Return a large problem whose values have this many columns, and its input."""
    blank, X = invert.plant(LARGE, LARGE)
    V = blank.V[:, : rank or outputs] @ blank.W[: rank or outputs, :outputs]
    problem = replace(blank, V=V, B=torch.zeros(LARGE, outputs))
    return replace(problem, B=problem.output(X)), X


@pytest.mark.parametrize(("outputs", "rank"), [(10, None), (60, 10)])
def test_a_large_problem_with_fewer_equations_than_unknowns_is_not_identifiable(
    outputs, rank
):
    problem, X = large(outputs, rank)
    verdict = judge(problem, X)
    assert verdict.status is Status.NOT_IDENTIFIABLE
    assert "at least 3,000 directions at X leave the output as it is" in verdict.reason
    known = X.clone()
    known[10:] = torch.nan
    assert judge(replace(problem, known=known), X).status is Status.NOT_IDENTIFIABLE
    known = X.clone()
    known[:10] = torch.nan
    assert judge(replace(problem, known=known), X).status is Status.RECOVERED
    assert judge(replace(problem, known=X), X).condition == 1


def test_a_large_problem_says_that_uniqueness_was_not_checked():
    problem, X = large(LARGE)
    verdict = judge(problem, X)
    assert verdict.status is Status.RECOVERED
    assert verdict.reason.endswith(
        "; uniqueness not checked: 3,600 unknowns are too many"
    )
    small, X = invert.plant(4, 4)
    assert "checked" not in judge(small, X).reason


def test_an_input_that_contradicts_the_known_entries_is_not_recovered():
    problem, X = invert.plant(4, 4, seed=2)
    known = torch.full_like(X, torch.nan)
    known[0, 0] = X[0, 0]
    assert judge(replace(problem, known=known), X).status is Status.RECOVERED
    for maps_prove_it in (False, True):
        verdict = judge(replace(problem, known=known + 5), X, unique=maps_prove_it)
        assert verdict.status is Status.UNSOLVED
        assert "X contradicts the known entries, by up to 5.0e+00" in verdict.reason
    assert judge(replace(problem, known=known + 1e-8), X).status is Status.INEXACT
    assert judge(replace(problem, known=known + 1e-15), X).status is Status.RECOVERED
    assert judge(replace(problem, known=known), X * torch.nan).status is Status.UNSOLVED
