"""One head by questions that nobody would refuse, against the planted truth."""

from __future__ import annotations

import pytest
import torch

from keyhole import oracle
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.extract import OrdinaryQuestions
from keyhole.extract.ordinary_questions import usual_norm_of


def guarded(target, **change):
    usual = usual_norm_of(target.dim)
    return oracle.defended(target, oracle.Defence(usual_norm=usual, **change))


@pytest.mark.parametrize(
    ("dim", "tokens"), [(2, 1), (5, 1), (5, 2), (5, 3), (12, 3), (12, 5)]
)
def test_a_head_is_stolen_with_questions_like_everybodys(dim, tokens):
    target = oracle.plant(dim=dim, seed=dim)
    counted = oracle.Counted(guarded(target, min_tokens=tokens))
    method = OrdinaryQuestions(min_tokens=tokens)
    result = method(counted)
    assert result.status is Status.RECOVERED, result.reason
    assert torch.allclose(result.model.W, target.W, rtol=0, atol=1e-10)
    assert torch.allclose(result.model.v, target.v, rtol=0, atol=1e-10)
    assert result.queries == method.expected_queries(dim)
    assert counted.queries >= result.queries


def test_rounding_is_averaged_out():
    target = oracle.plant(dim=6, seed=2)
    errors = []
    for oversampling in (2.0, 32.0):
        method = OrdinaryQuestions(
            min_tokens=3, answer_error=5e-3, oversampling=oversampling
        )
        result = method(guarded(target, min_tokens=3, decimals=2))
        assert result.status is Status.INEXACT
        errors.append(float((result.model.W - target.W).abs().max()))
    assert errors[1] < errors[0] / 4
    assert errors[1] < 5e-3


def test_what_is_not_one_head_is_not_taken_for_one():
    heads = oracle.plant("multi-head", dim=5, heads=2, seed=1)
    for tokens in (1, 3):
        result = OrdinaryQuestions(min_tokens=tokens)(heads)
        assert result.status is Status.MISMATCH
    silent = oracle.Head(
        torch.eye(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    )
    assert OrdinaryQuestions()(silent).status is Status.NOT_IDENTIFIABLE


def test_too_few_dimensions_for_tokens_that_differ():
    result = OrdinaryQuestions(min_tokens=8)(oracle.plant(dim=2))
    assert result.status is Status.NOT_APPLICABLE
    assert "2 dimensions are too few" in result.reason


def test_a_budget_below_the_unknowns_leaves_nothing():
    target = oracle.plant(dim=6, seed=2)
    result = OrdinaryQuestions()(oracle.Counted(target, budget=60))
    assert result.status is Status.BUDGET
    assert result.model is None


def test_more_unknowns_than_can_be_fitted():
    result = OrdinaryQuestions()(oracle.plant(dim=70))
    assert result.status is Status.NOT_APPLICABLE
    assert "4,970 unknowns are more than the 4,500" in result.reason
    assert result.queries == 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"usual_norm": 0.0}, "usual_norm"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"answer_error": -1.0}, "answer_error"),
        ({"oversampling": 0.5}, "oversampling"),
    ],
)
def test_settings_that_make_no_sense(settings, reason):
    with pytest.raises(InputError, match=reason):
        OrdinaryQuestions(**settings)
