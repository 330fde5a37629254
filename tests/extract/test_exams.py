"""The exam of a model known by signs: how far off it is, and where the questions lie."""

from __future__ import annotations

import numpy as np
import pytest
import reference_noise as reference
import torch

from keyhole import oracle
from keyhole.extract.exams import SignExam
from keyhole.extract.extraction import Step

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
            [abs(reference.score(X.numpy(), HEAD.W.numpy(), HEAD.v.numpy())) for X in level]
            for level in questions.unflatten(0, (len(exam.levels), -1))
        ]
        ratio = np.array(values[:-1]) / np.array(values[1:])
        assert np.allclose(ratio, 10, rtol=1e-6)
        assert torch.equal(answers, (HEAD(questions) > 0).double())
