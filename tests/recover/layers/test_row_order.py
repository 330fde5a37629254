"""Rows find their positions; assignments are compared with brute force."""

from __future__ import annotations

import itertools

import pytest
import torch

import tiny_models as tiny
from keyhole.models import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.layers.unordered import assigned, fit_positions
from keyhole.recover.leaks import HiddenStates


def test_an_assignment_is_the_best_of_all():
    costs = torch.rand(5, 5, generator=torch.Generator().manual_seed(0))
    best = min(
        itertools.permutations(range(5)),
        key=lambda order: sum(
            float(costs[row, place]) for place, row in enumerate(order)
        ),
    )
    assert assigned(costs).tolist() == list(best)


def test_rows_that_did_not_leak_fill_what_is_left():
    costs = torch.tensor(
        [[9.0, 9, 0, 9], [torch.nan] * 4, [0, 9, 9, 9], [torch.nan] * 4]
    )
    assert assigned(costs).tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_rows_of_the_first_layer_find_their_places(family):
    target = Target.of(tiny.shared(family), tiny.tokenizer())
    exposure = Exposure("hidden", 1)
    positions = fit_positions(target, HiddenStates(torch.ones(12, 32), 1), 12, 4000, 0)
    right = 0
    for text in tiny.ids(texts=6, length=12):
        rows = capture(target.model, exposure, ids=text[None])["values"][0]
        shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(1))
        right += int(
            (shuffle[positions.order(rows[shuffle])] == torch.arange(12)).sum()
        )
    assert right >= 0.6 * 6 * 12  # chance gives one in twelve


def test_the_model_s_own_answer_corrects_an_order():
    target = Target.of(tiny.shared("bert"), tiny.tokenizer())
    exposure = Exposure("hidden", 1)
    positions = fit_positions(target, HiddenStates(torch.ones(12, 32), 1), 12, 4000, 0)
    (text,) = tiny.ids(texts=1, length=12)
    rows = capture(target.model, exposure, ids=text[None])["values"][0]
    wrong = torch.arange(12)
    wrong[[4, 5]] = torch.tensor([5, 4])
    given = capture(target.model, exposure, ids=text[wrong][None])["values"][0]
    order, increases = positions.reordered(rows[wrong], given)
    assert wrong[order].tolist() == list(range(12))
    assert int(increases.argmin()) == 4
