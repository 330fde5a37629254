"""Several wrong tokens are corrected at once, by the sums of their effects."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import tiny_models as tiny
from keyhole.models import Exposure, capture
from keyhole.recover.layers.trials import try_sums

LENGTH = 24


@functools.cache
def model():
    return tiny.shared("bert")


def rows(ids):
    return capture(model(), Exposure("hidden", 3), ids=ids)["values"].detach()


def planted(wrong):
    ids = tiny.ids(texts=1, length=LENGTH, seed=2)[0]
    leaked = rows(ids[None])[0]
    spoilt = ids.clone()
    spoilt[wrong] = 7 + torch.arange(len(wrong))
    return ids, spoilt, lambda texts: (leaked - rows(texts)).flatten(1)


def candidates(places, right, count=6):
    lists = torch.randint(
        5, 60, (len(places), count), generator=torch.Generator().manual_seed(0)
    )
    lists[:, 3] = right
    return lists


@pytest.mark.parametrize("wrong", [[10, 11], [4, 5, 6], [2]])
def test_neighbours_that_are_wrong_are_put_right_together(wrong):
    ids, spoilt, missing = planted(wrong)
    places = torch.tensor(sorted({*wrong, 15, 16}))
    tried = try_sums(missing, spoilt, places, candidates(places, ids[places]))
    assert torch.equal(tried.ids, ids)
    assert tried.loss < 1e-8


def test_it_is_as_good_as_every_pair():
    """The result is compared with all pairs at two positions, without the right tokens."""
    ids, spoilt, missing = planted([10, 11])
    places = torch.tensor([10, 11])
    lists = candidates(places, torch.tensor([30, 31]))
    tried = try_sums(missing, spoilt, places, lists)
    losses = []
    for first, second in itertools.product(
        [spoilt[10], *lists[0]], [spoilt[11], *lists[1]]
    ):
        text = spoilt.clone()
        text[10] = first
        text[11] = second
        losses.append(float(missing(text[None]).square().sum()))
    assert tried.loss <= sorted(losses)[3]  # sums are approximate
    assert tried.loss == pytest.approx(
        float(missing(tried.ids[None]).square().sum()), rel=1e-5
    )
    assert not torch.equal(tried.ids, ids)


def test_a_right_text_is_left_alone():
    ids, _, missing = planted([3])
    places = torch.tensor([3, 9])
    tried = try_sums(missing, ids, places, candidates(places, ids[places].roll(1)))
    assert torch.equal(tried.ids, ids)
