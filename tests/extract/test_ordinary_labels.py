"""One head from labels of ordinary questions."""

from __future__ import annotations

import pytest
import torch

from keyhole import oracle
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.extract import OrdinaryLabels
from keyhole.extract.defences import HonestClient
from keyhole.extract.ordinary_questions import (
    LabelExam,
    ordinary_sequences,
    usual_norm_of,
)

TARGET = oracle.plant(dim=5, seed=6)


def guarded(target, tokens):
    change = oracle.Defence(
        sign_only=True, usual_norm=usual_norm_of(target.dim), min_tokens=tokens
    )
    return oracle.defended(target, change)


def test_questions_in_doubt_bring_the_error_down():
    method = OrdinaryLabels(min_tokens=3, rounds=10)
    client = HonestClient.of(TARGET)
    labels = oracle.Counted(guarded(TARGET, 3))
    errors = [client.error_of(step.model) for step in method.steps(labels)]
    assert len(errors) == 10
    assert errors[-1] < 0.1 < 0.3 < errors[0]
    assert errors[-1] < client.served(guarded(TARGET, 3), labels=True).error / 5
    assert labels.queries <= method.expected_queries(5)


def test_the_judge_counts_wrong_labels():
    target = guarded(TARGET, 3)
    questions = ordinary_questions(40)
    exam = LabelExam(((questions, target(questions)),))
    assert exam.grade(TARGET).worst == 0
    assert exam.verdict(exam.grade(TARGET), None, 0.0)[0] is Status.INEXACT
    opposite = oracle.Head(TARGET.W, -TARGET.v)
    assert exam.grade(opposite).worst == 1
    status, reason = exam.verdict(exam.grade(opposite), None, 0.0)
    assert (status, reason) == (Status.MISMATCH, "0 of 40 fresh labels are right")


def ordinary_questions(count):
    stream = torch.Generator().manual_seed(0)
    return usual_norm_of(5) * ordinary_sequences(count, 3, 5, stream)


def test_what_it_does_not_try():
    result = OrdinaryLabels(most=10)(guarded(TARGET, 2))
    assert result.status is Status.NOT_APPLICABLE
    assert "30 unknowns are more than the 10" in result.reason
    with pytest.raises(InputError, match="rounds"):
        OrdinaryLabels(rounds=0)
