"""Predictions against extractions that are really run: exact where they say so."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest
import torch

from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.extract.output_layer import answers_for
from keyhole.lab import cost
from keyhole.lab.cost import figures

FULL = bool(os.environ.get("KEYHOLE_FULL"))


def test_what_was_measured_can_be_measured_again():
    root = Path(__file__).parents[2]
    text = Path(cost.__file__).with_name("measured.json").read_text("utf-8")
    named = set(re.findall(r"(\w+)\.py", text))
    files = {
        path.stem for folder in ("benchmarks", "tests") for path in (root / folder).rglob("*.py")
    }
    assert named
    assert named <= files


class Meter:
    """Counts the questions and their tokens."""

    def __init__(self, target):
        self.target, self.dim, self.queries, self.tokens = target, target.dim, 0, 0

    def __call__(self, sequences):
        self.queries += sequences.shape[0]
        self.tokens += sequences.shape[0] * sequences.shape[1]
        return self.target(sequences)


def asked(method, target):
    """What the attack itself asks, without the judge."""
    meter = Meter(target)
    for _ in method.steps(meter):
        pass
    return meter


@pytest.mark.parametrize("dim", [8, 16])
@pytest.mark.parametrize(
    ("exposure", "rank", "method", "view"),
    [
        ("scores", None, extract.SingleHead(), None),
        ("scores", 3, extract.LowRank(rank=3), None),
        ("rounded", None, extract.Tolerant(5e-4), lambda target: oracle.Rounded(target, 3)),
    ],
)
def test_a_head_takes_exactly_so_many(dim, exposure, rank, method, view):
    target = oracle.plant("head", dim=dim, rank=rank, seed=1)
    meter = asked(method, view(target) if view else target)
    estimate = cost.head(dim, rank=rank, exposure=exposure)
    assert (estimate.queries, estimate.tokens) == (meter.queries, meter.tokens)
    assert estimate.lower_bound == method(view(target) if view else target).lower_bound


@pytest.mark.parametrize("dim", [8, 16])
def test_a_layer_that_answers_with_vectors_takes_exactly_so_many(dim):
    target = oracle.plant("attention", dim=dim, seed=1)
    meter = asked(extract.FullOutput(), target)
    for estimate in (cost.layer(dim, exposure="vectors"), cost.head(dim, exposure="vectors")):
        assert (estimate.queries, estimate.tokens) == (meter.queries, meter.tokens)
        assert estimate.lower_bound == extract.FullOutput()(target).lower_bound


@pytest.mark.parametrize("dim", [8, 16])
def test_an_unknown_rank_takes_no_more_than_stated(dim):
    result = extract.LowRank()(oracle.plant("head", dim=dim, rank=2, seed=1))
    estimate = cost.head(dim, rank=2)
    assert estimate.low <= result.queries <= estimate.high


GRID = itertools.product((4, 8, 16, 32), (1e-3, 1e-4, 1e-6), range(4))


@pytest.mark.parametrize(
    ("dim", "accuracy", "seed"), list(GRID) if FULL else [(8, 1e-4, 0), (16, 1e-3, 1)]
)
def test_signs_take_as_many_as_stated(dim, accuracy, seed):
    target = oracle.SignOnly(oracle.plant("head", dim=dim, seed=seed))
    result = extract.SignOnly(accuracy=accuracy, seed=seed)(target)
    assert result.status is Status.RECOVERED
    estimate = cost.head(dim, exposure="signs", accuracy=accuracy)
    assert estimate.low <= result.queries <= estimate.high
    assert estimate.lower_bound <= result.queries
    assert asked(extract.SignOnly(accuracy=accuracy, seed=seed), target).tokens <= (
        2 * result.queries
    )


@pytest.mark.parametrize("width", [8, 16, 50])
def test_the_last_layer_takes_exactly_so_many(width):
    stream = torch.Generator().manual_seed(width)
    W = torch.randn(400, width, generator=stream, dtype=torch.float64)
    table = torch.randn(400, width, generator=stream, dtype=torch.float64)

    def logits(ids):
        state = torch.tanh(table[ids].cumsum(1)).sum(1) / 10
        return torch.log_softmax(state @ W.mT, -1)

    result = extract.OutputLayer()(logits)
    assert (result.status, result.width) == (Status.RECOVERED, width)
    estimate = cost.layer(width, exposure="log-probabilities", vocabulary=400)
    assert estimate.queries == answers_for(width) == result.queries
    assert (estimate.lower_bound, estimate.tokens) == (width, 4 * result.queries)


def test_what_was_measured_lies_within_what_is_stated():
    for width, heads, low, high, bound in (
        (384, 12, 2944, 3148, 1474),
        (576, 9, 5424, 5508, None),
    ):
        estimate = cost.layer(width, heads=heads)
        assert estimate.low <= low <= high <= estimate.high
        assert bound in (None, estimate.lower_bound)
    whole = cost.layer(576, exposure="log-probabilities", vocabulary=49_152)
    assert whole.queries == 632 - 8  # eight are the judge's
    best = cost.layer(576, exposure="log-probabilities", vocabulary=49_152, top=100)
    assert best.low <= 4427 <= best.high


def test_prices():
    bill = cost.Cost(cost.head(64, rank=8), cost.Prices(50, price=0.01, token_price=3, daily=100))
    assert bill.estimate.queries == 1024
    assert bill.hours == pytest.approx(1024 / 50 / 3600, rel=1e-12)
    assert bill.money == pytest.approx(10.24 + 3 * bill.estimate.tokens / 1e6, rel=1e-12)
    assert (bill.days, bill.least_days) == (10.24, 10.24)
    assert "1,024" in bill.summary()
    assert bill.to_dict()["queries_high"] == 1024 + 128


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: cost.head(0), "width must be 1 or more"),
        (lambda: cost.head(8, rank=9), "the rank must not exceed the dimension, 8"),
        (lambda: cost.head(8, rank=2, exposure="signs"), "the rank is of use with scores"),
        (lambda: cost.head(8, exposure="smell"), "choose among scores"),
        (lambda: cost.head(8, exposure="signs", accuracy=2.0), "the accuracy must lie between"),
        (lambda: cost.layer(8, exposure="log-probabilities"), "the vocabulary must be larger"),
        (lambda: cost.layer(8, heads=9), "heads must be at most 8"),
        (lambda: cost.Prices(rate=0), "rate must be above 0"),
        (lambda: cost.Prices(price=-1), "price must be 0 or more"),
    ],
)
def test_wrong_input(ask, words):
    with pytest.raises(InputError, match=words):
        ask()


def test_figures_say_where_they_are_from():
    for name in ("signs", "checkpoint", "best tokens", "answer bytes", "text"):
        for figure in figures(name):
            assert figure.command
            assert len(figure.commit) == 7
            assert figure.machine
