"""Single changes of texts, and several at once, against plain lists."""

from __future__ import annotations

import random

import pytest
import torch

from keyhole.recover.embeddings.changes import (
    DELETED,
    INSERTED,
    REPLACED,
    SingleChanges,
)
from keyhole.recover.embeddings.encoder import Texts

PARENTS = [[3, 4, 5, 6], [7, 8]]
MAX_LENGTH = 6


@pytest.fixture(scope="module")
def single():
    parents = Texts.of(PARENTS, MAX_LENGTH)
    replaced = torch.tensor([[[8, 9]] * 4, [[3, 4]] * 4])
    put_in = torch.tensor([[[9]] * 5, [[5]] * 5])
    return SingleChanges.of(parents, replaced, put_in, MAX_LENGTH)


def by_hand(single: SingleChanges, row: int, changes: list[int]) -> list[int]:
    tokens: list[list[int]] = [[token] for token in PARENTS[row]]
    gaps: list[list[int]] = [[] for _ in range(single.width + 1)]
    for change in changes:
        place = int(single.places[change])
        token = int(single.tokens[row, change])
        match int(single.kinds[change]):
            case kind if kind == REPLACED:
                tokens[place] = [token]
            case kind if kind == DELETED:
                tokens[place] = []
            case _:
                gaps[place] = [token]
    parts = [[*gaps[k], *tokens[k]] for k in range(len(tokens))]
    return [token for part in parts for token in part] + gaps[len(tokens)]


def test_every_change_of_its_kind_and_place_is_there_once(single):
    counts = [
        int((single.kinds == kind).sum()) for kind in (REPLACED, INSERTED, DELETED)
    ]
    assert counts == [8, 5, 4]
    assert int(single.slots.max()) == 2 * single.width
    second = single.allowed[1]  # of two tokens
    assert int(second.sum()) == 2 * 2 + 3 + 2


@pytest.mark.parametrize("row", [0, 1])
def test_sets_of_changes_are_applied_as_by_hand(single, row):
    allowed = single.allowed[row].nonzero().flatten().tolist()
    draw = random.Random(row)
    sets: list[list[int]] = []
    while len(sets) < 60:
        some = draw.sample(allowed, draw.randint(1, 3))
        if len({int(single.slots[change]) for change in some}) == len(some):
            sets.append(some)
    table = torch.tensor([some + [-1] * (3 - len(some)) for some in sets])
    texts, fits = single.applied(torch.full((len(sets),), row), table)
    for number, some in enumerate(sets):
        expected = by_hand(single, row, some)
        assert bool(fits[number]) == (0 < len(expected) <= MAX_LENGTH)
        if fits[number]:
            assert texts.tokens(number) == expected


def test_a_text_of_maximum_length_gets_no_token_inserted():
    full = Texts.of([[3, 4]], 2)
    single = SingleChanges.of(
        full, torch.tensor([[[5], [5]]]), torch.tensor([[[5]] * 3]), 2
    )
    assert not single.allowed[0, single.kinds == INSERTED].any()
