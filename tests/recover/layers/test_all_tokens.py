"""Trying the whole vocabulary at a few positions."""

from __future__ import annotations

import pytest
import torch

from keyhole.recover.layers.trials import try_all

RIGHT = torch.tensor([7, 900, 3, 5000])
TOKENS = torch.arange(6000)


def misfits(texts):
    """Count the wrong tokens; those at the ends count three times."""
    return ((texts != RIGHT) * torch.tensor([3.0, 1.0, 1.0, 3.0])).sum(-1)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_one_wrong_token_is_found_wherever_the_vocabulary_has_it(place):
    ids = RIGHT.clone()
    ids[place] = 11
    tried = try_all(misfits, ids, torch.tensor([place]), TOKENS, most=10_000)
    assert tried.ids.tolist() == RIGHT.tolist()
    assert tried.loss == 0
    assert tried.forwards <= len(TOKENS) + 1


def test_what_takes_half_of_the_loss_is_taken_before_the_rest_is_tried():
    ids = torch.tensor([11, 11, 3, 5000])
    tried = try_all(misfits, ids, torch.tensor([0, 1]), TOKENS, most=10_000)
    assert tried.ids.tolist() == [7, 11, 3, 5000]
    assert tried.forwards < 1000


def test_the_best_of_so_many_texts_and_never_a_worse_one():
    ids = torch.tensor([7, 11, 11, 11])
    few = try_all(misfits, ids, torch.tensor([3, 1]), TOKENS, most=300)
    assert few.ids.tolist() == ids.tolist()
    assert few.forwards == 300
    more = try_all(misfits, ids, torch.tensor([3, 1]), TOKENS, most=5200)
    assert more.ids.tolist() == [7, 900, 11, 11]
    assert more.forwards <= 5200


def test_a_small_vocabulary_in_which_nothing_helps():
    ids = torch.tensor([7, 11, 3, 5000])
    tried = try_all(misfits, ids, torch.tensor([0, 3]), TOKENS[:60], most=10_000)
    assert tried.ids.tolist() == ids.tolist()
    assert tried.forwards == 121
