"""Scores of units, against naive loops, finite differences and autodiff."""

from __future__ import annotations

import numpy as np
import pytest
import reference_disrupt as reference
import torch

import tiny_heads
from keyhole.disrupt.masked_queries import MaskedQueries
from keyhole.disrupt.rankings import RANKINGS, mask_gradient, removal, worth_of_cut
from keyhole.disrupt.tasks import ask
from keyhole.disrupt.units import survey


def rows(seed=0, size=6):
    stream = torch.Generator().manual_seed(seed)
    a = (
        torch.randn(size, size, generator=stream, dtype=torch.float64)
        .mul(2)
        .softmax(-1)
    )
    return a, torch.randn(size, size, generator=stream, dtype=torch.float64)


def test_removal_is_the_effect_of_removing_on_a_linear_loss():
    a, g = rows()
    assert np.allclose(
        removal(a, g), reference.removal_effect(a.numpy(), g.numpy()), atol=1e-12
    )


def test_removal_is_the_first_order_effect_of_removing():
    """The error decreases faster than the step, for a smooth loss of one row."""
    a, g = rows(1)
    curved = torch.randn(
        6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )

    def loss(row):
        return g[0] @ row + row @ curved @ row

    start = a[0].clone().requires_grad_()
    slope = torch.autograd.grad(loss(start), start)[0]
    for j in range(6):
        end = torch.tensor(reference.removed(a[0].numpy(), j))
        small = 1e-6
        moved = (loss(a[0] + small * (end - a[0])) - loss(a[0])) / small
        assert float(removal(a[:1], slope[None])[0, j]) == pytest.approx(
            float(moved), abs=1e-4
        )


def test_the_gradient_of_a_mask_before_the_softmax():
    a, g = rows(5)
    slope = reference.mask_gradient(a.log().numpy(), g.numpy())
    assert np.allclose(mask_gradient(a, g), slope, atol=1e-9)


def test_the_worth_of_a_cut_unit_is_the_effect_of_its_return():
    a, g = rows(3)
    back = a[0, 2]
    without = torch.tensor(reference.removed(a[0].numpy(), 2))
    fall = (g[0] * without).sum() - (g[0] * a[0]).sum()
    worth = worth_of_cut(without[None], g[:1], torch.full_like(g[:1], float(back)))
    assert float(worth[0, 2]) == pytest.approx(float(fall), abs=1e-12)


def test_the_simple_rankings():
    a, g = rows(4)
    noise = torch.rand_like(a)
    expected = {
        "gradient": -g,
        "magnitude": g.abs(),
        "attention": a,
        "random": noise,
        "gradient*attention": -g * a,
        "removal": removal(a, g),
        "mask-gradient": mask_gradient(a, g),
        "mask-magnitude": mask_gradient(a, g).abs(),
    }
    assert set(expected) == set(RANKINGS)
    for name, value in expected.items():
        assert torch.equal(RANKINGS[name](a, g, noise), value)


def test_the_gradient_is_that_of_a_summand_to_the_probabilities():
    """Finite differences on the model: one unit's probability is raised."""
    from keyhole.models.masking import Untouched, rewriting

    model = tiny_heads.model("bert", "classes").double()
    batch = tiny_heads.texts(2)
    question = ask(model, batch, tiny_heads.own_labels(model, batch))
    units = survey(model, question)
    queries = MaskedQueries(model, question, units, 8)
    indices = torch.arange(2)
    a, g = queries.slopes(torch.zeros_like(units.free), indices, "cross-entropy")
    small = 1e-6

    class Raise(Untouched):
        def bump(self, site, shape):
            bump = torch.zeros(shape, dtype=torch.float64)
            if site.index == 0:
                bump[0, 1, 4, 5] = small
            return bump

    with torch.no_grad():
        before = question.surprise(question.logits(model))
        with rewriting(model, Raise()):
            after = question.surprise(question.logits(model))
    slope = float(units.at(g, units.places[0])[0, 0, 1, 4, 5])
    assert slope == pytest.approx(float((after - before)[0]) / small, rel=1e-4)
    assert torch.allclose(
        units.at(a, units.places[0]).sum(-1), torch.ones((), dtype=torch.float64)
    )


def test_a_new_ranking_is_one_function_and_one_entry(monkeypatch):
    from keyhole.disrupt import HackAttend

    monkeypatch.setitem(RANKINGS, "least attention", lambda a, g, noise: -a)
    model = tiny_heads.model("bert", "classes")
    batch = tiny_heads.texts(2)
    found = HackAttend.as_released(0.1, ranking="least attention")(
        model, batch, tiny_heads.own_labels(model, batch)
    )
    assert (
        found.method["words"]
        == "10% of each head's attention cut, as released, ranked by least attention"
    )
    assert all(outcome.masked for outcome in found.outcomes)
