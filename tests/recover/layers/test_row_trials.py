"""Candidates are tried at many positions in a pass, each judged by its own row."""

from __future__ import annotations

import functools

import pytest
import torch

import tiny_models as tiny
from keyhole.models import Exposure, capture
from keyhole.recover.layers.trials import try_rows

LENGTH = 40
WRONG = torch.tensor([3, 4, 11, 20, 27, 33])


@functools.cache
def model():
    return tiny.shared("bert")


def rows(ids):
    return capture(model(), Exposure("hidden", 2), ids=ids)["values"].detach()


def planted():
    """Return a text, the text with some wrong tokens, and the misfits of any text."""
    ids = tiny.ids(texts=1, length=LENGTH, seed=1)[0]
    leaked = rows(ids[None])[0]
    spoilt = ids.clone()
    spoilt[WRONG] = ids[WRONG].roll(1)
    return ids, spoilt, lambda texts: (rows(texts) - leaked).square().sum(-1)


def candidates(places, right, count=6, at=4):
    """Return random tokens for each place, with the right one if `right` (m,) is not -1."""
    stream = torch.Generator().manual_seed(0)
    lists = torch.randint(5, 60, (len(places), count), generator=stream)
    lists[:, at] = torch.where(right >= 0, right, lists[:, at])
    return lists


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_wrong_tokens_are_replaced_together(batch_size):
    ids, spoilt, misfits = planted()
    places = torch.arange(1, LENGTH - 1)[torch.randperm(LENGTH - 2)]
    tried = try_rows(
        misfits, spoilt, places, candidates(places, ids[places]), batch_size
    )
    assert torch.equal(tried.ids, ids)
    assert tried.loss < 1e-8
    groups = -(-len(places) // batch_size)
    assert tried.forwards <= 1 + 6 * groups + len(places)


def test_what_no_candidate_explains_stays():
    """The text never gets worse, and a right text is left unchanged."""
    ids, spoilt, misfits = planted()
    before = float(misfits(spoilt[None]).sum())
    tried = try_rows(
        misfits, spoilt, WRONG, candidates(WRONG, torch.full_like(WRONG, -1)), 4
    )
    assert tried.loss <= before
    assert tried.loss == pytest.approx(float(misfits(tried.ids[None]).sum()), rel=1e-5)
    untouched = try_rows(
        misfits, ids, WRONG, candidates(WRONG, torch.full_like(WRONG, -1)), 4
    )
    assert torch.equal(untouched.ids, ids)


def test_no_places_cost_no_trials():
    ids, _, misfits = planted()
    nowhere = torch.zeros(0, dtype=torch.long)
    tried = try_rows(misfits, ids, nowhere, torch.zeros(0, 6, dtype=torch.long), 4)
    assert torch.equal(tried.ids, ids)
    assert tried.forwards == 1
