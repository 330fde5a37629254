"""One-layer Transformers with several heads: heads by their odd part, the network by steering."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from any_function import AnyFunction, normal
from keyhole.extract import Extraction, MultiHead, OneLayerTransformer, Status
from keyhole.oracle import Clipped, Counted, Ledger, OneLayer, Rounded, plant

ATTACK = OneLayerTransformer(attention=MultiHead())


Function = partial(AnyFunction, dim=6)


def transformer(dim: int, heads: int, width: int, seed: int = 0, **more: int) -> OneLayer:
    target = plant("one-layer", dim=dim, heads=heads, width=width, seed=seed, **more)
    assert isinstance(target, OneLayer)
    return target


def with_heads(target: OneLayer, *W: Tensor) -> OneLayer:
    return OneLayer(torch.stack(W), target.A, target.w)


def fresh_error(target: OneLayer, model: OneLayer, seed: int = 77) -> float:
    worst = 0.0
    for length in (1, 2, 4, 9):
        X = normal(seed + length, 50, length, target.dim)
        answers = target(X)
        worst = max(worst, float((model(X) - answers).abs().max() / answers.abs().max()))
    return worst


def assert_recovered(result: Extraction, target: OneLayer) -> OneLayer:
    assert result.status is Status.RECOVERED, result.reason
    assert isinstance(result.model, OneLayer)
    assert fresh_error(target, result.model) <= 1e-8
    assert result.known == 1.0
    return result.model


@pytest.mark.parametrize(("d", "heads", "width"), [(9, 2, 12), (12, 3, 16)])
def test_several_heads(d: int, heads: int, width: int) -> None:
    for seed in range(1):
        target = transformer(d, heads, width, seed)
        result = OneLayerTransformer(attention=MultiHead(), seed=seed)(target)
        model = assert_recovered(result, target)
        assert model.W.shape == (heads, d, d)
        for W in target.W:  # the heads come in some order
            assert float((model.W - W).abs().amax((1, 2)).min()) < 1e-8
        assert f"{heads} heads" in result.reason
        assert result.queries <= 2.6 * heads * d * d + 1.6 * width * heads * d + 400 * heads


@given(seed=st.integers(0, 2**31 - 1), heads=st.integers(1, 3), width=st.integers(1, 6))
@settings(max_examples=4, deadline=None)
def test_any_small_transformer(seed: int, heads: int, width: int) -> None:
    target = transformer(9, heads, width, seed)
    result = OneLayerTransformer(attention=MultiHead(seed=seed % 3), seed=seed % 5)(target)
    assert result.status in (Status.RECOVERED, Status.INEXACT), result.reason
    assert isinstance(result.model, OneLayer)
    if result.status is Status.RECOVERED:
        assert fresh_error(target, result.model) < 1e-6


def test_planted_and_recovered_transformers_agree_with_a_naive_loop() -> None:
    target = transformer(4, 2, 5, seed=2)
    model = assert_recovered(ATTACK(target), target)
    for X in normal(5, 10, 4, 4):
        parts = (t.numpy() for t in (target.W, target.A, target.w))
        expected = reference.one_layer_heads(X.numpy(), *parts)
        assert float(target(X.unsqueeze(0))) == pytest.approx(expected, abs=1e-12)
        assert float(model(X.unsqueeze(0))) == pytest.approx(expected, abs=1e-9)


def test_one_head_keeps_its_shape() -> None:
    target = transformer(6, 1, 5)
    model = assert_recovered(ATTACK(target), target)
    assert model.W.shape == (6, 6)
    torch.testing.assert_close(model.W, target.W, atol=1e-10, rtol=0)
    assert ATTACK(target).queries > OneLayerTransformer()(target).queries


def test_equal_heads_act_as_one() -> None:
    target = transformer(6, 2, 5)
    target = with_heads(target, target.W[0], target.W[0])
    model = assert_recovered(ATTACK(target), target)
    assert model.W.shape == (6, 6)
    assert fresh_error(OneLayer(target.W[0], target.A.sum(0), target.w), model) < 1e-8


@pytest.mark.parametrize("factor", [0.0, -1.0, -2.5])
def test_related_heads(factor: float) -> None:
    target = transformer(6, 2, 5, seed=4)
    target = with_heads(target, target.W[0], factor * target.W[0])
    assert_recovered(ATTACK(target), target)


def test_heads_of_low_rank() -> None:
    target = transformer(12, 3, 8, rank=3)
    low = ATTACK(target)
    assert_recovered(low, target)
    assert low.queries < ATTACK(transformer(12, 3, 8)).queries - 200


@pytest.mark.release
def test_proportional_heads_cannot_be_steered_apart() -> None:
    target = transformer(6, 2, 5)
    result = ATTACK(with_heads(target, target.W[0], 2 * target.W[0]))
    assert result.status is Status.NOT_APPLICABLE
    assert "look apart" in result.reason


def test_more_heads_than_can_be_steered() -> None:
    result = ATTACK(transformer(5, 4, 5))
    assert result.status is Status.NOT_APPLICABLE
    assert "4 heads look 12 ways and x has 5 components" in result.reason
    assert isinstance(result.model, OneLayer)  # the heads are known, and the odd part
    assert len(result.model.W) == 4
    assert result.known < 1.0


def test_heads_that_leave_no_odd_part() -> None:
    target = transformer(6, 2, 5)
    even = OneLayer(target.W, torch.cat([target.A, -target.A], 1), torch.cat([target.w, target.w]))
    assert ATTACK(even).status is Status.NOT_APPLICABLE
    silent = OneLayer(target.W, target.A, 0 * target.w)
    assert ATTACK(silent).status is Status.NOT_IDENTIFIABLE
    # One head of two: w is orthogonal to the columns of its A.
    A, w = target.A.clone(), target.w
    A[1] -= torch.outer(w, w @ A[1]) / (w @ w)
    result = ATTACK(OneLayer(target.W, A, w))
    assert result.status is Status.MISMATCH


def test_every_real_query_is_counted() -> None:
    counted = Counted(transformer(6, 2, 5))
    result = ATTACK(counted)
    assert result.check is not None
    assert counted.queries == result.queries + result.check.queries


def test_every_budget_ends_in_a_status() -> None:
    target = transformer(6, 2, 5)
    full = ATTACK(target)
    for budget in (0, 1, 17, 40, 200, 451, full.queries - 60, full.queries - 1):
        result = ATTACK(Counted(target, budget))
        assert result.status is Status.BUDGET
        assert result.queries == budget
    assert ATTACK(Counted(target, full.queries)).status is Status.UNVERIFIED


def test_a_budget_that_ends_in_the_network_leaves_the_heads() -> None:
    target = transformer(6, 2, 5)
    result = ATTACK(Counted(target, ATTACK(target).queries - 30))
    assert isinstance(result.model, OneLayer)
    for W in target.W:
        assert float((result.model.W - W).abs().amax((1, 2)).min()) < 1e-8
    assert 0.5 < result.known < 1.0


def test_a_ledger_resumes_without_asking_twice(tmp_path: Path) -> None:
    target = transformer(6, 2, 5)
    with Ledger(Counted(target, 700), tmp_path / "l.sqlite") as ledger:
        assert ATTACK(ledger).status is Status.BUDGET
    paid = Counted(target)
    with Ledger(paid, tmp_path / "l.sqlite") as ledger:
        result = ATTACK(ledger)
    assert result.status is Status.RECOVERED
    assert result.check is not None
    assert result.remembered >= 700  # a few questions come up twice by themselves
    free = result.remembered + result.check.remembered
    assert paid.queries == result.queries + result.check.queries - free


def test_a_recovered_transformer_survives_a_file(tmp_path: Path) -> None:
    result = ATTACK(transformer(6, 2, 5))
    result.save(tmp_path / "r.json")
    again = Extraction.load(tmp_path / "r.json")
    X = normal(0, 5, 3, 6)
    assert isinstance(again.model, OneLayer)
    assert isinstance(result.model, OneLayer)
    assert torch.equal(again.model(X), result.model(X))


def test_the_expected_number_of_queries() -> None:
    expected = OneLayerTransformer(width=16, attention=MultiHead(heads=2)).expected_queries(12)
    assert expected is not None
    assert 0.8 < ATTACK(transformer(12, 2, 16)).queries / expected < 1.25
    assert OneLayerTransformer(width=16, attention=MultiHead()).expected_queries(12) is None
    assert OneLayerTransformer(attention=MultiHead(heads=2)).expected_queries(12) is None


TARGET = transformer(6, 2, 5, seed=1)
MISFITS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda X: torch.ones(len(X), dtype=torch.float64),
    "random": lambda X: torch.randn(len(X), dtype=torch.float64),
    "sign": lambda X: TARGET(X).sign(),
    "rounded": Rounded(TARGET, 4),
    "clipped": Clipped(TARGET, 10.0),
    "bias": lambda X: TARGET(X) + 0.3,
    "squashed": lambda X: torch.tanh(TARGET(X)),
    "first token": lambda X: torch.relu(X[:, 0] @ TARGET.A[0].mT) @ TARGET.w,
    "noise on two tokens": lambda X: (
        TARGET(X) + (X.shape[1] > 1) * torch.randn(len(X), dtype=torch.float64)
    ),
    "noise on the network": lambda X: (
        TARGET(X) + (X.shape[1] == 3) * torch.randn(len(X), dtype=torch.float64)
    ),
    "jump on two tokens": lambda X: TARGET(X) + (X.shape[1] > 1) * (X[:, 0, 0] > 0),
    "longer sequences": lambda X: TARGET(X) * (1.0 if X.shape[1] < 5 else 2.0),
}


@pytest.mark.parametrize("name", MISFITS)
def test_other_functions_are_never_recovered(name: str) -> None:
    result = ATTACK(Function(MISFITS[name]))
    assert result.status in (Status.MISMATCH, Status.INEXACT, Status.NOT_APPLICABLE)
    assert result.queries < 20_000


def test_broken_oracles_end_in_a_status() -> None:
    stream = torch.Generator().manual_seed(0)

    def nan(X: Tensor) -> Tensor:
        hit = torch.rand(len(X), generator=stream) < 0.02
        return torch.where(hit, math.nan, TARGET(X))

    def on_three(X: Tensor) -> Tensor:
        return TARGET(X) * (math.nan if X.shape[1] == 3 else 1.0)

    for broken in (nan, on_three, lambda X: X @ X):
        assert ATTACK(Function(broken)).status is Status.ORACLE_FAILED
    assert ATTACK(Function(lambda X: X[:, -1])).status is Status.NOT_APPLICABLE
    assert ATTACK(Function(TARGET, dim=7)).status is Status.ORACLE_FAILED
