"""The judge: no oracle, however it behaves, gets a wrong model called right."""

from __future__ import annotations

import pytest
import torch

from keyhole import extract, oracle
from keyhole.extract import Status
from keyhole.extract.extraction import Step
from keyhole.extract.judge import Method, settle

HONEST = oracle.plant(dim=5, rank=2, seed=9)


def test_the_truth_passes_and_a_small_lie_does_not():
    assert extract.judge(HONEST, HONEST).worst == 0
    bent = oracle.Head(HONEST.W + 1e-6, HONEST.v)
    assert 1e-8 < extract.judge(HONEST, bent).worst < 1e-2


def test_fresh_queries_are_counted_apart_and_repeatable():
    counted = oracle.Counted(HONEST)
    result = extract.SingleHead()(counted)
    assert result.queries == 30
    assert counted.queries == 30 + result.check.queries
    assert extract.SingleHead()(HONEST).check == result.check


def constant(seed, sequences):
    return torch.full((len(sequences),), float(seed + 1), dtype=torch.float64)


def discontinuous(seed, sequences):
    return torch.floor(3 * HONEST(sequences))


def nan_at_random(seed, sequences):
    answers = HONEST(sequences)
    answers[torch.rand(len(answers)) < 0.5] = torch.nan
    return answers


def lying_about_dim(seed, sequences):
    return oracle.plant(dim=7, seed=seed)(sequences)


def nondeterministic(seed, sequences):
    return HONEST(sequences) + torch.randn(len(sequences), dtype=torch.float64)


def linear(seed, sequences):
    return sequences.sum((1, 2))


def raising(seed, sequences):
    raise ValueError("multi\nline\ntrouble")


def empty(seed, sequences):
    return torch.empty(0)


ODD = [
    constant,
    discontinuous,
    nan_at_random,
    lying_about_dim,
    nondeterministic,
    linear,
    raising,
    empty,
]


@pytest.mark.parametrize("behaviour", ODD, ids=lambda behaviour: behaviour.__name__)
@pytest.mark.parametrize("method", [extract.SingleHead, extract.LowRank])
def test_odd_oracles_end_in_a_status(behaviour, method):
    torch.manual_seed(0)
    for seed in range(3):

        class Odd:
            dim = 5

            def __call__(self, sequences, seed=seed):
                return behaviour(seed, sequences)

        counted = oracle.Counted(Odd())
        result = method(seed=seed)(counted)
        assert result.status not in (Status.RECOVERED, Status.UNVERIFIED)
        assert result.status.advice
        assert "\n" not in result.reason
        assert counted.queries <= 150


def test_a_lying_dimension_that_fits_the_tensor():
    class Liar:
        dim = 3

        def __call__(self, sequences):
            padded = torch.nn.functional.pad(sequences, (0, 2))
            return HONEST(padded)

    # Only three coordinates can be reached, and on those the stolen head is right.
    result = extract.SingleHead()(Liar())
    assert result.status is Status.RECOVERED
    assert torch.allclose(result.model.W, HONEST.W[:3, :3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_question_that_is_not_finite_is_not_the_oracles_fault(value):
    asked = []

    class Target:
        dim = 5

        def __call__(self, sequences):
            asked.append(sequences)
            return HONEST(sequences)

    class Overflowing(Method):
        def steps(self, target):
            yield Step(HONEST, 1, 2)
            oracle.ask(target, torch.full((1, 2, 5), value, dtype=torch.float64))

    result = settle(Overflowing(), Target())
    assert result.status is Status.MISMATCH
    assert "the next query would not be finite" in result.reason
    assert not asked
    assert result.queries == 0
