"""The order of tokens is fitted once for an exposure, whatever the leak's error."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny_models as tiny
from keyhole.models import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.layers import ordering

EXPOSURE = Exposure("hidden", 2)


@pytest.fixture
def runs():
    """Counts the tokens that went through models."""
    return [0]


def opened(runs):
    """Return the same model each time, with nothing remembered of it."""
    model = tiny.language_model("llama")

    def count(module, given, output):
        runs[0] += given[0].numel()

    target = Target.of(model, tiny.tokenizer(causal=True))
    model.get_input_embeddings().register_forward_hook(count)
    return target


@pytest.fixture
def target(runs):
    return opened(runs)


def test_another_precision_runs_nothing_and_orders_as_a_fit_of_its_own(target, runs):
    exact = ordering.fit(target, EXPOSURE, 256, 0)
    spent = runs[0]
    assert spent == exact.spent
    coarse = ordering.fit(target, EXPOSURE, 256, 0, error=0.3)
    assert runs[0] == spent == coarse.spent
    again = ordering.fit(opened(runs), EXPOSURE, 256, 0, error=0.3)
    assert runs[0] == 2 * spent
    for first, other in ((coarse.opening, again.opening), (coarse.rest, again.rest)):
        assert torch.equal(first.precision, other.precision)
        assert torch.equal(first.half_norms, other.half_norms)
    assert not torch.allclose(exact.rest.precision, coarse.rest.precision)


@pytest.mark.parametrize("other", [(Exposure("hidden", 1), 256, 0), (EXPOSURE, 256, 1)])
def test_another_exposure_or_seed_is_fitted_anew(target, runs, other):
    ordering.fit(target, EXPOSURE, 256, 0)
    spent = runs[0]
    ordering.fit(target, *other)
    assert runs[0] > spent


def test_the_tokens_alone_are_run_once_for_all_layers(target, runs):
    ordering.fit(target, EXPOSURE, 256, 0)
    spent = runs[0]
    other = ordering.fit(target, Exposure("hidden", 1), 256, 0)
    assert runs[0] - spent == other.spent - target.vocabulary


@pytest.mark.parametrize("width", [7, 5])
def test_the_strength_is_the_one_that_cross_validation_prefers(width):
    """The strength agrees with a loop over all fits and their residuals."""
    stream = torch.Generator().manual_seed(3)
    x = torch.randn(60, 7, generator=stream, dtype=torch.float64)
    x -= x.mean(0)
    map_ = torch.randn(7, width, generator=stream, dtype=torch.float64)
    y = x @ map_ + torch.randn(60, width, generator=stream, dtype=torch.float64)
    y -= y.mean(0)
    matrix, freedom = ordering.ridge(x.mT @ x, x.mT @ y, y.square().sum(0), 60)
    base = torch.zeros(7, width, dtype=torch.float64)
    if width == 7:
        base = torch.stack(
            [(x[:, k] @ y[:, k]) / (x[:, k] @ x[:, k]) for k in range(7)]
        ).diag()
    rest = y - x @ base
    scaled = x / x.std(0)
    best = None
    for strength in 60 * np.logspace(-5, 2, 15):
        inner = scaled.mT @ scaled + strength * torch.eye(7, dtype=torch.float64)
        part = torch.linalg.solve(inner, scaled.mT @ rest)
        hat = scaled @ torch.linalg.solve(inner, scaled.mT)
        loss = ((rest - scaled @ part).square().mean(0) / rest.var(0)).mean()
        loss = float(loss / (1 - hat.trace() / 60) ** 2)
        if best is None or loss < best[0]:
            best = loss, base + part / x.std(0)[:, None], float(hat.trace())
    assert torch.allclose(matrix, best[1], rtol=1e-9, atol=1e-12)
    assert freedom == pytest.approx(best[2], rel=1e-9)


def test_of_long_rows_some_numbers_decide(runs, monkeypatch):
    """Six numbers rank the right token in the first tenth three times as often as chance."""
    monkeypatch.setattr(ordering, "MANY", 12)
    target = opened(runs)
    order = ordering.fit(target, Exposure("kv", 1), 256, 0).rest
    assert order.fit.predicted.shape == (target.vocabulary, 6)
    assert len(order.fit.centre) == len(order.fit.spread) > 12
    tenth = target.vocabulary // 10
    assert order.reach(tenth) > 0.3
    assert torch.isfinite(order.likelihood(order.fit.seen)).all()
