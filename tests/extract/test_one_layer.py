"""One-layer Transformers from scores: network and attention, with Aᵀw = 0 and without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_relu import one_layer as reference
from torch import Tensor

from any_function import AnyFunction, normal
from keyhole.core.errors import InputError
from keyhole.extract import (
    Extraction,
    LowRank,
    OneLayerTransformer,
    ReluNetwork,
    SingleHead,
    Status,
)
from keyhole.extract.extraction import Step
from keyhole.oracle import Counted, Ledger, MultiHead, OneLayer, Oracle, Rounded, plant

Function = partial(AnyFunction, dim=5)


def transformer(
    dim: int, width: int, seed: int = 0, rank: int | None = None
) -> OneLayer:
    target = plant("one-layer", dim=dim, width=width, seed=seed, rank=rank)
    assert isinstance(target, OneLayer)
    return target


def even(target: OneLayer) -> OneLayer:
    """The same with every neuron mirrored, so that Aᵀw = 0."""
    return OneLayer(
        target.W, torch.cat([target.A, -target.A]), torch.cat([target.w, target.w])
    )


def fresh_error(target: OneLayer, model: object, seed: int = 77) -> float:
    worst = 0.0
    for length in (1, 2, 4, 9):
        X = normal(seed + length, 50, length, target.dim)
        answers = target(X)
        error = (model(X) - answers).abs().max() / answers.abs().max()
        worst = max(worst, float(error))
    return worst


def assert_recovered(
    result: Extraction, target: OneLayer, tolerance: float = 1e-8
) -> OneLayer:
    assert result.status is Status.RECOVERED, result.reason
    assert isinstance(result.model, OneLayer)
    assert fresh_error(target, result.model) <= tolerance
    assert result.known == 1.0
    return result.model


@pytest.mark.parametrize("width", [32, 64])
def test_sixteen_dimensions(width: int) -> None:
    for seed in range(2):
        target = transformer(16, width, seed)
        result = OneLayerTransformer(seed=seed)(target)
        model = assert_recovered(result, target)
        torch.testing.assert_close(model.W, target.W, atol=1e-11, rtol=0)
        assert result.queries <= 1.7 * width * 16 + 40 + 2 * 256 + 32


@pytest.mark.parametrize(("d", "m"), [(1, 1), (1, 3), (2, 2), (3, 7), (8, 4)])
def test_small_sizes(d: int, m: int) -> None:
    for seed in range(2):
        target = transformer(d, m, seed)
        assert_recovered(OneLayerTransformer()(target), target)


@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 3), (8, 6), (16, 16)])
def test_attention_is_found_where_the_paper_gives_up(d: int, m: int) -> None:
    for seed in range(2):
        target = even(transformer(d, m, seed))
        assert float((target.w @ target.A).abs().max()) < 1e-12
        model = assert_recovered(OneLayerTransformer()(target), target)
        torch.testing.assert_close(model.W, target.W, atol=1e-8, rtol=0)


@given(seed=st.integers(0, 2**31 - 1), d=st.integers(1, 5), m=st.integers(1, 8))
@settings(max_examples=12, deadline=None)
def test_any_small_transformer(seed: int, d: int, m: int) -> None:
    target = transformer(d, m, seed)
    result = OneLayerTransformer(seed=seed % 5)(target)
    # A network that is nearly zero beside its neurons leaves fewer digits, and says so.
    assert result.status in (Status.RECOVERED, Status.INEXACT)
    if result.status is Status.RECOVERED:
        assert fresh_error(target, result.model) < 1e-6


def test_planted_and_recovered_transformers_agree_with_a_naive_loop() -> None:
    target = transformer(3, 4, seed=2)
    model = assert_recovered(OneLayerTransformer()(target), target)
    for X in normal(5, 10, 4, 3):
        expected = reference(
            *(t.numpy() for t in (target.W, target.A, target.w)), X.numpy()
        )
        assert float(target(X.unsqueeze(0))) == pytest.approx(expected, abs=1e-12)
        again = reference(*(t.numpy() for t in (model.W, model.A, model.w)), X.numpy())
        assert again == pytest.approx(expected, abs=1e-9)


def test_low_rank_attention_costs_less() -> None:
    for mirrored in (False, True):
        target = transformer(12, 5, rank=2)
        target = even(target) if mirrored else target
        full = OneLayerTransformer()(target)
        low = OneLayerTransformer(attention=LowRank())(target)
        assert_recovered(low, target)
        assert full.queries - low.queries >= 140


def test_every_real_query_is_counted() -> None:
    for target in (transformer(6, 5), even(transformer(6, 5))):
        counted = Counted(target)
        result = OneLayerTransformer()(counted)
        assert result.check is not None
        assert counted.queries == result.queries + result.check.queries


def test_values_of_the_head_are_not_asked_twice() -> None:
    target = transformer(8, 4)
    lengths: list[int] = []

    def watch(sequences: Tensor) -> Tensor:
        lengths.extend([sequences.shape[1]] * len(sequences))
        return target(sequences)

    result = OneLayerTransformer()(AnyFunction(watch, 8))
    network = ReluNetwork()(target)
    assert lengths[: result.queries].count(1) == network.queries  # then the judge asks
    assert (
        2 * 64 <= result.queries - network.queries <= 2 * 64 + 8
    )  # a few forms are asked again


def test_a_linear_network_is_a_head() -> None:
    head = plant("head", dim=5, seed=1)
    result = OneLayerTransformer()(head)
    assert result.status is Status.RECOVERED
    assert isinstance(result.model, OneLayer)
    assert len(result.model.w) == 2


def test_zero_is_not_identifiable() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    silent = OneLayer(normal(0, 5, 5), normal(1, 3, 5), zero)
    cancelling = OneLayer(
        normal(0, 5, 5),
        normal(1, 1, 5).expand(2, 5).contiguous(),
        torch.tensor([1.0, -1.0]).double(),
    )
    for target in (silent, cancelling):
        result = OneLayerTransformer()(target)
        assert result.status is Status.NOT_IDENTIFIABLE
        assert "zero" in result.reason


def test_every_budget_keeps_what_was_paid_for() -> None:
    for target in (transformer(6, 5), even(transformer(6, 3))):
        full = OneLayerTransformer()(target)
        for left in (full.queries, full.queries - 15, 73, 50, 11, 7, 1):
            budget = full.queries - left
            result = OneLayerTransformer()(Counted(target, budget))
            assert result.status is Status.BUDGET
            assert result.queries == budget
        assert (
            OneLayerTransformer()(Counted(target, full.queries)).status
            is Status.UNVERIFIED
        )


def test_a_budget_that_ends_in_the_attention_leaves_the_network_and_some_columns() -> (
    None
):
    target = transformer(8, 5)
    queries = OneLayerTransformer()(target).queries
    result = OneLayerTransformer()(Counted(target, queries - 64))
    assert isinstance(result.model, OneLayer)
    x = normal(3, 20, 1, 8)
    torch.testing.assert_close(result.model(x), target(x), atol=1e-9, rtol=1e-9)
    assert 0.5 < result.known < 1.0
    assert float(torch.linalg.matrix_rank(result.model.W, atol=1e-6)) == 4


def test_a_ledger_resumes_without_asking_twice(tmp_path: Path) -> None:
    target = transformer(6, 5)
    with Ledger(Counted(target, 100), tmp_path / "l.sqlite") as ledger:
        assert OneLayerTransformer()(ledger).status is Status.BUDGET
    paid = Counted(target)
    with Ledger(paid, tmp_path / "l.sqlite") as ledger:
        result = OneLayerTransformer()(ledger)
    assert result.status is Status.RECOVERED
    assert result.check is not None
    assert result.remembered >= 90
    free = result.remembered + result.check.remembered
    assert paid.queries == result.queries + result.check.queries - free


def test_the_expected_number_of_queries() -> None:
    expected = OneLayerTransformer(width=24).expected_queries(8)
    assert expected is not None
    assert 0.8 < OneLayerTransformer()(transformer(8, 24)).queries / expected < 1.25
    assert OneLayerTransformer().expected_queries(8) is None
    assert OneLayerTransformer(width=3, attention=LowRank()).expected_queries(8) is None
    with pytest.raises(InputError):
        OneLayerTransformer(width=-2)


def test_a_method_for_several_heads_is_not_applicable() -> None:
    class Several(SingleHead):
        def steps(self, oracle: Oracle) -> Iterator[Step]:
            head = MultiHead([normal(0, 5, 5)], [normal(1, 5)])
            yield Step(head, 1, 1)

    result = OneLayerTransformer(attention=Several())(transformer(5, 3))
    assert result.status is Status.NOT_APPLICABLE
    assert "one head" in result.reason


TARGET = transformer(5, 4, seed=1)
NETWORK = TARGET.A, TARGET.w
MISFITS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda X: torch.ones(len(X), dtype=torch.float64),
    "random": lambda X: torch.randn(len(X), dtype=torch.float64),
    "sign": lambda X: TARGET(X).sign(),
    "two heads": plant("multi-head", dim=5, heads=2, seed=3),
    "mean": lambda X: torch.relu(X.mean(1) ** 3 @ TARGET.A.mT) @ TARGET.w,
    "first token": lambda X: torch.relu(X[:, 0] @ NETWORK[0].mT) @ NETWORK[1],
    "noise on two tokens": lambda X: (
        TARGET(X) + (X.shape[1] > 1) * torch.randn(len(X), dtype=torch.float64)
    ),
    "jump on two tokens": lambda X: TARGET(X) + (X.shape[1] > 1) * (X[:, 0, 0] > 0),
    "two layers": lambda X: TARGET(X + torch.relu(X).cumsum(1) * (X.shape[1] > 2)),
}


@pytest.mark.parametrize("name", MISFITS)
def test_other_functions_are_never_recovered(name: str) -> None:
    result = OneLayerTransformer()(Function(MISFITS[name]))
    assert result.status in (Status.MISMATCH, Status.INEXACT, Status.SATURATED)
    assert result.queries < 20_000


def test_broken_oracles_end_in_a_status() -> None:
    stream = torch.Generator().manual_seed(0)

    def nan(X: Tensor) -> Tensor:
        hit = torch.rand(len(X), generator=stream) < 0.02
        return torch.where(hit, math.nan, TARGET(X))

    def on_two(X: Tensor) -> Tensor:
        return TARGET(X) * (math.nan if X.shape[1] > 1 else 1.0)

    for broken in (nan, on_two, lambda X: X @ X):
        assert OneLayerTransformer()(Function(broken)).status is Status.ORACLE_FAILED
    assert (
        OneLayerTransformer()(Function(lambda X: X[:, -1])).status
        is Status.NOT_APPLICABLE
    )
    assert OneLayerTransformer()(Function(TARGET, dim=6)).status is Status.ORACLE_FAILED
    assert OneLayerTransformer()(Rounded(TARGET, 4)).status is Status.MISMATCH
