"""Counting, budgets, rounding, noise, signs, clipping; and oracles that fail or misbehave."""

from __future__ import annotations

import pytest
import torch

from any_function import Failing
from keyhole import oracle
from keyhole.core.errors import InputError

DIM = 4
TARGET = oracle.plant(dim=DIM, seed=5)


def draw(count: int, n: int = 3, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(count, n, DIM, dtype=torch.float64, generator=stream)


def test_counted_counts_sequences():
    counted = oracle.Counted(TARGET)
    counted(draw(3))
    counted(draw(4, n=1))
    assert counted.queries == 7


def test_a_budget_ends_with_what_was_paid_for():
    counted = oracle.Counted(TARGET, budget=5)
    counted(draw(3))
    with pytest.raises(oracle.BudgetExhausted, match="budget of 5 queries") as caught:
        counted(draw(4, seed=1))
    assert torch.equal(caught.value.answers, TARGET(draw(4, seed=1)[:2]))
    assert counted.queries == 5
    with pytest.raises(oracle.BudgetExhausted) as caught:
        counted(draw(1, seed=2))
    assert caught.value.answers is None


def test_an_outer_count_does_not_charge_for_what_an_inner_budget_refused():
    outer = oracle.Counted(oracle.Counted(TARGET, budget=2))
    with pytest.raises(oracle.BudgetExhausted):
        outer(draw(5))
    assert outer.queries == 2


def test_progress_receives_the_count():
    progress_calls: list[int] = []
    counted = oracle.Counted(TARGET, progress=progress_calls.append)
    counted(draw(2))
    counted(draw(3))
    assert progress_calls == [2, 5]


def test_rounded():
    answers = oracle.Rounded(TARGET, 2)(draw(50))
    assert (answers - TARGET(draw(50))).abs().max() <= 0.005 + 1e-15
    assert torch.equal(answers, torch.round(answers, decimals=2))


def test_noise_is_bounded_repeatable_and_seeded():
    noisy = oracle.Noisy(TARGET, 0.1, seed=3)
    error = noisy(draw(200)) - TARGET(draw(200))
    assert 0.09 < error.abs().max() <= 0.1
    assert abs(error.mean()) < 0.02
    assert torch.equal(noisy(draw(200).flip(0)).flip(0), noisy(draw(200)))
    assert not torch.equal(
        oracle.Noisy(TARGET, 0.1, seed=4)(draw(200)), noisy(draw(200))
    )


def test_noise_on_vector_answers():
    target = oracle.plant("attention", dim=DIM, every_token=True)
    error = oracle.Noisy(target, 0.1)(draw(20)) - target(draw(20))
    assert error.shape == (20, 3, DIM)
    assert len(error.unique()) == error.numel()


def test_sign_only():
    assert torch.equal(
        oracle.SignOnly(TARGET)(draw(50)), (TARGET(draw(50)) > 0).double()
    )


def test_clipped_shortens_long_tokens_and_leaves_short_ones():
    clipped = oracle.Clipped(TARGET, 1.0)
    short = 0.1 * draw(5)
    assert torch.equal(clipped(short), TARGET(short))
    long = 100 * draw(5)
    norms = torch.linalg.vector_norm(long, dim=-1, keepdim=True)
    assert torch.allclose(clipped(long), TARGET(long / norms), rtol=0, atol=1e-14)


def test_an_oracle_that_goes_down():
    failing = Failing(TARGET, after=3)
    failing(draw(3))
    with pytest.raises(oracle.OracleError, match="the endpoint is down"):
        failing(draw(1))


def test_identities_name_the_defences():
    wrapped = [
        TARGET,
        oracle.Rounded(TARGET, 2),
        oracle.Rounded(TARGET, 3),
        oracle.Noisy(TARGET, 0.1),
        oracle.Noisy(TARGET, 0.1, 1),
        oracle.SignOnly(TARGET),
        oracle.Clipped(TARGET, 1.0),
    ]
    assert len({oracle.identity_of(first) for first in wrapped}) == len(wrapped)
    assert oracle.identity_of(oracle.Counted(TARGET)) == TARGET.identity


def test_identity_of_another_oracle_depends_on_its_tensors():
    class Stranger:
        dim = DIM

        def __init__(self, W: torch.Tensor) -> None:
            self.W = W
            self.calls = 0

        def __call__(self, sequences: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return sequences.sum((1, 2))

    def closure(W: torch.Tensor):
        def answer(sequences: torch.Tensor) -> torch.Tensor:
            return (sequences @ W).sum((1, 2))

        answer.dim = DIM
        return answer

    for make in (Stranger, closure):
        first = make(torch.ones(4, 4))
        same = make(torch.ones(4, 4))
        other = make(torch.zeros(4, 4))
        first(draw(1).float())
        assert oracle.identity_of(first) == oracle.identity_of(same)
        assert oracle.identity_of(first) != oracle.identity_of(other)


def answering(answer):
    class Bad:
        dim = DIM

        def __call__(self, sequences):
            return answer(sequences)

    return Bad()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: None, "expected a tensor of 3 answers, got NoneType"),
        (
            lambda s: s[:2, 0, 0],
            r"expected 3 answers \(one per sequence\), got shape \(2,\)",
        ),
        (lambda s: torch.tensor(1.0), r"expected 3 answers .*, got shape \(\)"),
        (lambda s: s[:, 0, 0] / 0, "NaN or infinity in 3 of 3 answers"),
        (lambda s: s[:, 0, 0].long(), "expected real answers, got torch.int64"),
        (
            lambda s: s @ torch.ones(9),
            "the oracle failed on 3 questions .*: RuntimeError",
        ),
    ],
)
def test_invalid_answers_are_one_line_errors(answer, message):
    with pytest.raises(oracle.OracleError, match=message) as caught:
        oracle.ask(answering(answer), draw(3))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: oracle.Counted(TARGET, budget=-1),
        lambda: oracle.Rounded(TARGET, -1),
        lambda: oracle.Noisy(TARGET, float("nan")),
        lambda: oracle.Clipped(TARGET, 0.0),
    ],
)
def test_bad_arguments_are_refused(make):
    with pytest.raises(InputError, match="must be"):
        make()
