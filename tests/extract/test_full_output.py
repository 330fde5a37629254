"""FullOutput: planted layers as witness, a status for everything that cannot be settled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_layers import KINDS, layer

from keyhole.extract import FullOutput, Status
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.full_output import key_basis
from keyhole.oracle import Counted, Noisy, Rounded
from keyhole.oracle.planted import Attention, Head


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


def worst(found: Attention, truth: Attention) -> float:
    """Worst error of any head's W or V, relative to its largest entry; heads in any order."""
    assert isinstance(found, Attention)
    assert found.W.shape == truth.W.shape
    assert (found.every_token, found.causal) == (truth.every_token, truth.causal)

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))

    return max(
        min(
            max(
                apart(found.W[g], W)
                if bool(W.any())
                else float(found.W[g].abs().max()),
                apart(found.V[g], V),
            )
            for g in range(len(found.W))
        )
        for W, V in zip(truth.W, truth.V, strict=True)
    )


def test_any_rank_keys_in_a_row_have_independent_values():
    V = normal(7, 3) @ normal(3, 5, seed=1)
    keys, rank = key_basis(V)
    assert rank == 3
    assert float(torch.linalg.cond(keys)) < 10
    for block in keys.split(rank):
        assert int(torch.linalg.matrix_rank(block @ V)) == len(block)


# One head


@pytest.mark.parametrize("causal", [False, True])
def test_every_token_at_full_size(causal):
    truth = layer(64, 1, 64, True, causal, seed=1)
    result = FullOutput(seed=1)(truth)
    assert result.status is Status.RECOVERED
    assert result.queries <= (2 if causal else 65)
    assert worst(result.model, truth) <= 1e-9


def test_last_token_at_full_size():
    truth = layer(64, 1, 64, False, False, seed=1)
    result = FullOutput(seed=1)(truth)
    assert result.status is Status.RECOVERED
    assert result.queries == FullOutput().expected_queries(64) == 130
    assert worst(result.model, truth) <= 1e-9


@given(
    d=st.integers(1, 9),
    m=st.integers(1, 9),
    kind=st.sampled_from(KINDS),
    size=st.floats(-6, 2.5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_one_head_of_any_shape_and_size(d, m, kind, size, seed):
    truth = layer(d, 1, m, *kind, seed, scale=10.0**size)
    result = FullOutput(seed=seed)(truth)
    assert result.status is Status.RECOVERED, (result.status, result.reason)
    condition = float(torch.linalg.cond(truth.V[0]))
    assert worst(result.model, truth) <= 1e-11 * max(10.0, condition)


@pytest.mark.parametrize(("every", "causal"), KINDS)
@pytest.mark.parametrize("rank", [1, 5])
def test_values_of_low_rank_still_show_all_of_the_attention(every, causal, rank):
    V = (normal(8, rank) @ normal(rank, 8, seed=1))[None]
    truth = Attention(normal(1, 8, 8, seed=2) / 3, V, every, causal)
    result = FullOutput()(truth)
    assert result.status is Status.RECOVERED
    assert worst(result.model, truth) <= 1e-10
    blocks = math.ceil(8 / rank)
    first = 1 if causal else 8
    assert result.queries <= (first + blocks if every else first + 2 + 8 * blocks + 8)


@pytest.mark.parametrize(("every", "causal"), KINDS)
def test_no_attention_at_all(every, causal):
    truth = Attention(
        torch.zeros(1, 5, 5, dtype=torch.float64), normal(1, 5, 5), every, causal
    )
    result = FullOutput()(truth)
    assert result.status is Status.RECOVERED
    assert float(result.model.W.abs().max()) < 1e-12


def test_a_spiky_matrix():
    W = normal(1, 12, 12) / 4
    W[0, 3, 5] = 400.0
    for every, causal in KINDS:
        truth = Attention(W, normal(1, 12, 12, seed=1), every, causal)
        assert worst(FullOutput()(truth).model, truth) <= 1e-10


def test_rounding_and_noise_drown_in_long_answers():
    truth = layer(8, 1, 8, False)
    for oracle in (Rounded(truth, 3), Noisy(truth, 1e-3)):
        result = FullOutput()(oracle)
        assert (
            result.status is Status.INEXACT
        )  # the judge compares with blurred answers
        assert worst(result.model, truth) <= 1e-9


# Several heads


@pytest.mark.parametrize(("every", "causal"), KINDS)
@pytest.mark.parametrize(
    ("d", "heads", "m"), [(8, 2, 8), (16, 4, 16), (9, 3, 5), (6, 3, 20)]
)
def test_heads_are_told_apart(d, heads, m, every, causal):
    truth = layer(d, heads, m, every, causal, seed=1)
    result = FullOutput(seed=1)(truth)
    assert result.status is Status.RECOVERED, result.reason
    assert worst(result.model, truth) <= 1e-8


@pytest.mark.parametrize(("every", "causal"), KINDS)
def test_heads_of_a_transformer(every, causal):
    """V_h = (d×k)(k×d): every head writes into its own k dimensions, mixed by a projection."""
    d = 16
    heads = 4
    k = 4
    W = normal(heads, d, k) @ normal(heads, k, d, seed=1) / d
    V = normal(heads, d, k, seed=2) @ normal(heads, k, d, seed=3) / 2
    truth = Attention(W, V, every, causal)
    result = FullOutput()(truth)
    assert result.status is Status.RECOVERED, result.reason
    assert worst(result.model, truth) <= 1e-8


@pytest.mark.parametrize(("every", "causal"), KINDS)
def test_a_head_without_scores_is_what_the_others_leave(every, causal):
    W = normal(3, 6, 6) / 2
    V = normal(3, 6, 9, seed=1)
    W[1] = 0
    truth = Attention(W, V, every, causal)
    result = FullOutput()(truth)
    assert result.status is Status.RECOVERED, result.reason
    assert worst(result.model, truth) <= 1e-8


def test_heads_of_different_strength():
    W = normal(2, 6, 6) / 2
    W[1] *= 1e-4
    for every, causal in KINDS:
        truth = Attention(W, normal(2, 6, 8, seed=1), every, causal)
        result = FullOutput()(truth)
        assert result.status is Status.RECOVERED, result.reason
        assert worst(result.model, truth) <= 1e-7


def test_values_that_cancel_do_not_hide_the_heads():
    V = normal(1, 6, 6)
    truth = Attention(normal(2, 6, 6, seed=1) / 2, torch.cat([V, -V]), False)
    result = FullOutput()(truth)
    assert result.status is not Status.NOT_IDENTIFIABLE
    assert result.status is not Status.RECOVERED or worst(result.model, truth) < 1e-8


@pytest.mark.parametrize(("every", "causal"), KINDS)
def test_equal_heads_come_out_merged(every, causal):
    W = normal(2, 6, 6) / 2
    V = normal(3, 6, 6, seed=1)
    truth = Attention(W[[0, 1, 1]], V, every, causal)
    result = FullOutput()(truth)
    assert result.status is Status.RECOVERED
    canonical = Attention(W, torch.stack([V[0], V[1] + V[2]]), every, causal)
    assert worst(result.model, canonical) <= 1e-8


@pytest.mark.parametrize(("every", "causal"), KINDS)
@pytest.mark.parametrize("factor", [2.0, -1.0, -0.5])
def test_proportional_heads_are_not_guessed(every, causal, factor):
    W = normal(1, 6, 6) / 2
    truth = Attention(
        torch.cat([W, factor * W]), normal(2, 6, 6, seed=1), every, causal
    )
    assert FullOutput()(truth).status in (Status.MISMATCH, Status.NOT_APPLICABLE)


@pytest.mark.parametrize(("every", "causal"), KINDS)
def test_more_heads_than_outputs_are_not_guessed(every, causal):
    truth = layer(6, 4, 2, every, causal)
    assert FullOutput()(truth).status in (Status.NOT_APPLICABLE, Status.MISMATCH)


# Failure is a value


def test_no_values_no_weights():
    for every, causal in KINDS:
        truth = Attention(
            normal(1, 4, 4), torch.zeros(1, 4, 3, dtype=torch.float64), every, causal
        )
        result = FullOutput()(truth)
        assert result.status is Status.NOT_IDENTIFIABLE
        assert "V = 0" in result.reason


def test_scores_are_for_another_method():
    result = FullOutput()(Head(normal(4, 4), normal(4)))
    assert result.status is Status.NOT_APPLICABLE
    assert "vector" in result.reason


@pytest.mark.parametrize(("every", "causal"), KINDS)
def test_every_budget_ends_in_a_status(every, causal):
    truth = layer(4, 2, 4, every, causal)
    needed = FullOutput()(truth).queries
    for budget in range(0, needed, 3):
        result = FullOutput()(Counted(truth, budget))
        assert result.status is Status.BUDGET
        assert result.queries <= budget
    assert FullOutput()(Counted(truth, needed)).status is Status.UNVERIFIED
    assert FullOutput()(Counted(truth, needed + 40)).status is Status.RECOVERED


class Adversary:
    """An oracle that answers with anything."""

    def __init__(self, answer, dim=5):
        self.dim = dim
        self.answer = answer
        self.stream = torch.Generator().manual_seed(1)

    def __call__(self, sequences):
        return self.answer(self, sequences)

    def noise(self, *shape):
        return torch.randn(*shape, generator=self.stream, dtype=torch.float64)


def every_now_and_then_nan(self, x):
    answers = self.noise(len(x), 3)
    answers[self.noise(len(x)) > 1.5] = math.nan
    return answers


ADVERSARIES = {
    "constant": lambda _, x: torch.ones(len(x), 3, dtype=torch.float64),
    "constant, every token": lambda _, x: torch.ones(
        *x.shape[:2], 3, dtype=torch.float64
    ),
    "huge": lambda _, x: torch.full((len(x), 3), 1e308, dtype=torch.float64),
    "huge, every token": lambda _, x: torch.full(
        (*x.shape[:2], 3), -1e308, dtype=torch.float64
    ),
    "random": lambda self, x: self.noise(len(x), 3),
    "random, every token": lambda self, x: self.noise(*x.shape[:2], 3),
    "linear": lambda _, x: x.sum(1)[:, :3],
    "last token": lambda _, x: x[:, -1, :3],
    "first token": lambda _, x: x[:, 0, :3],
    "identity": lambda _, x: x,
    "discontinuous": lambda _, x: x.sum(1).sign(),
    "discontinuous, every token": lambda _, x: x.cumsum(1).sign(),
    "quadratic": lambda _, x: (x * x).sum(1) * 1e-20,
    "nan at random": every_now_and_then_nan,
    "shape by length": lambda _, x: torch.ones(
        len(x), 1 + x.shape[1] % 3, dtype=torch.float64
    ),
    "too deep": lambda _, x: torch.ones(*x.shape, 2, dtype=torch.float64),
    "wrong tokens": lambda _, x: torch.ones(
        len(x), x.shape[1] + 1, 2, dtype=torch.float64
    ),
    "scalar once": lambda _, x: x[:, 0, 0] if len(x) > 1 else x[:, :, :2],
    "text": lambda _, x: "hello",
    "raises": lambda _, x: 1 / 0,
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_adversaries_end_in_a_status(name):
    counted = Counted(Adversary(ADVERSARIES[name]), budget=20_000)
    result = FullOutput()(counted)
    assert result.status is not Status.INEXACT
    if result.status is Status.RECOVERED:  # only where the answers are attention's
        assert name in ("linear", "last token", "first token", "identity")
        fresh = normal(5, 4, 5, seed=9)
        apart = (result.model(fresh) - Adversary(ADVERSARIES[name])(fresh)).abs().max()
        assert float(apart) < 1e-8


def test_an_oracle_that_lies_about_its_dimension():
    W = normal(6, 4)

    class Liar:
        dim = 5

        def __call__(self, sequences):
            return sequences[:, -1] @ W

    assert FullOutput()(Liar()).status is Status.ORACLE_FAILED


def test_the_same_seed_asks_the_same():
    truth = layer(8, 2, 8, False)
    first = FullOutput(seed=5)(truth)
    second = FullOutput(seed=5)(truth)
    assert torch.equal(first.model.W, second.model.W)
    assert first.queries == second.queries


def test_rotating_the_layer_rotates_the_weights():
    truth = layer(7, 1, 7)
    Q = random_orthogonal(7, torch.Generator().manual_seed(3))
    turned = Attention(Q @ truth.W @ Q.mT, Q @ truth.V, True)
    found = FullOutput()(turned).model
    assert torch.allclose(Q.mT @ found.W @ Q, truth.W, atol=1e-12)
