"""Finding out from the answers which method applies; the judge has the last word."""

from __future__ import annotations

import pytest
import torch

from keyhole import extract, oracle
from keyhole.extract import Auto, Status, choose
from keyhole.extract.auto import Kind

STREAM = torch.Generator().manual_seed(0)
HEAD = oracle.plant(dim=6, seed=1)
TARGETS = {
    "one head": (HEAD, Kind.HEAD, extract.LowRank),
    "one head, large W": (
        oracle.plant(dim=6, scale=300, seed=2),
        Kind.HEAD,
        extract.LowRank,
    ),
    "one head, small W": (
        oracle.plant(dim=6, scale=1e-4, seed=2),
        Kind.HEAD,
        extract.LowRank,
    ),
    "heads": (
        oracle.plant("multi-head", dim=6, heads=3, seed=1),
        Kind.HEADS,
        extract.MultiHead,
    ),
    "heads, large": (
        oracle.plant("multi-head", dim=6, heads=2, scale=30, seed=1),
        Kind.HEADS,
        extract.MultiHead,
    ),
    "network": (
        oracle.plant("one-layer", dim=5, width=6, seed=1),
        Kind.LAYER,
        extract.OneLayerTransformer,
    ),
    "rounded": (oracle.Rounded(HEAD, 3), Kind.ROUNDED, extract.Tolerant),
    "signs": (oracle.SignOnly(HEAD), Kind.SIGNS, extract.SignOnly),
    "vector": (
        oracle.plant("attention", dim=5, seed=1),
        Kind.LAST_VECTOR,
        extract.FullOutput,
    ),
    "vectors": (
        oracle.plant("attention", dim=5, every_token=True, seed=1),
        Kind.EVERY_VECTOR,
        extract.FullOutput,
    ),
}


@pytest.mark.parametrize(("target", "kind", "method"), TARGETS.values(), ids=TARGETS)
def test_the_kind_is_seen_for_every_seed_with_few_questions(target, kind, method):
    for seed in range(5):
        counted = oracle.Counted(target)
        choice = choose(counted, seed)
        assert choice.kind is kind
        assert isinstance(choice.method, method)
        assert choice.why
        assert counted.queries <= 50


@pytest.mark.parametrize(("target", "kind", "method"), TARGETS.values(), ids=TARGETS)
def test_auto_recovers_and_counts_its_own_questions(target, kind, method):
    counted = oracle.Counted(target)
    result = Auto()(counted)
    assert result.status is Status.RECOVERED, result.reason
    assert result.reason.startswith(f"{method.__name__}, since ")
    assert result.queries + result.check.queries == counted.queries


def test_tau_is_read_off_the_decimals():
    assert choose(oracle.Rounded(HEAD, 4)).method.tolerance == pytest.approx(5e-5)


@pytest.mark.parametrize("size", [1e-8, 1e-20])
def test_small_answers_are_not_rounded_ones(size):
    result = Auto()(oracle.Head(HEAD.W, size * HEAD.v))
    assert result.status is Status.RECOVERED, result.reason
    assert result.reason.startswith("LowRank, since ")


@pytest.mark.parametrize("budget", [0, 5, 12, 30])
def test_a_budget_is_a_result(budget):
    result = Auto()(oracle.Counted(HEAD, budget=budget))
    assert result.status is Status.BUDGET
    assert result.queries == budget


def odd(behaviour):
    class Odd:
        dim = 5

        def __call__(self, sequences: torch.Tensor) -> torch.Tensor:
            return behaviour(sequences)

    return Odd()


@pytest.mark.parametrize(
    "behaviour",
    [
        lambda s: torch.ones(len(s), dtype=torch.float64),
        lambda s: torch.zeros(len(s), dtype=torch.float64),
        lambda s: s[:, 0, 0] * torch.nan,
        lambda s: s.sum((1, 2)) ** 3,
        lambda s: s.sum((1, 2)).exp(),
        lambda s: torch.randn(len(s), generator=STREAM, dtype=torch.float64),
        lambda s: s[:, :, :2],
        lambda s: HEAD(s),
        lambda s: None,
    ],
)
def test_odd_oracles_end_in_a_status(behaviour):
    result = Auto()(odd(behaviour))
    assert result.status is not Status.RECOVERED
    assert result.status.advice
