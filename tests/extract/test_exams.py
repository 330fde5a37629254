"""The exam of a model known by signs: how far off it is, and where the questions lie."""

from __future__ import annotations

import numpy as np
import pytest
import reference_noise as reference
import torch

from keyhole import oracle
from keyhole.extract import Status
from keyhole.extract.exams import SignExam, SignMethod
from keyhole.extract.extraction import Step
from keyhole.extract.judge import settle
from keyhole.extract.tolerant import Tolerant

HEAD = oracle.plant(dim=5, seed=0)


@pytest.mark.parametrize("off", [1e-3, 1e-5])
def test_the_exam_measures_by_signs_how_far_a_model_is_off(off):
    """A model that is nearly right differs in no sign of a random question; it does here."""
    model = oracle.Head(HEAD.W + off, HEAD.v)
    exam = SignExam.near(oracle.SignOnly(HEAD), 0, Step(model, 1, 1), finest=1e-8)
    assert off / 10 <= exam.grade(model).worst <= 1000 * off
    right = SignExam.near(oracle.SignOnly(HEAD), 0, Step(HEAD, 1, 1), finest=1e-8)
    assert right.grade(HEAD).worst == 1e-8
    assert right.grade(HEAD).queries == 40 * len(right.levels)


def test_the_exam_puts_its_questions_where_the_model_says_so():
    exam = SignExam.near(oracle.SignOnly(HEAD), 0, Step(HEAD, 1, 1), finest=1e-4)
    for questions, answers in exam.sets:
        values = [
            [
                abs(reference.score(X.numpy(), HEAD.W.numpy(), HEAD.v.numpy()))
                for X in level
            ]
            for level in questions.unflatten(0, (len(exam.levels), -1))
        ]
        ratio = np.array(values[:-1]) / np.array(values[1:])
        assert np.allclose(ratio, 10, rtol=1e-6)
        assert torch.equal(answers, (HEAD(questions) > 0).double())


OVERFLOWING = oracle.Head(1e308 * torch.ones_like(HEAD.W), HEAD.v)


def proposing(method, *models):
    """Return a method of this kind that proposes these models without a query."""

    class Proposing(method):
        def steps(self, target):
            for model in models:
                yield Step(model, 1, 1, guarantee=1e-9, guarantee_v=1e-9)

    return Proposing


def test_a_model_that_overflows_is_a_mismatch():
    tolerant = proposing(Tolerant, OVERFLOWING)(1e-3)
    result = settle(tolerant, oracle.Rounded(HEAD, 3))
    assert (result.status, result.check.worst) == (Status.MISMATCH, 1e99)
    by_signs = proposing(SignMethod, OVERFLOWING)()
    by_signs.accuracy = 1e-6
    result = settle(by_signs, oracle.SignOnly(HEAD))
    assert result.status is Status.MISMATCH
    assert result.reason.startswith(
        "the weights found cannot answer: NaN or infinity in "
    )


def test_an_early_model_that_overflows_does_not_end_the_exam():
    by_signs = proposing(SignMethod, OVERFLOWING, HEAD)()
    by_signs.accuracy = 1e-6
    result = settle(by_signs, oracle.SignOnly(HEAD))
    assert result.status is Status.RECOVERED, result.reason
    assert [error for _, error in result.trace] == [1.0, by_signs.finest]
