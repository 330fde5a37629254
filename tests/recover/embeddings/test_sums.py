"""Sets of changes whose effects add up to a residual, against all possible sets."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from keyhole.recover.embeddings.sums import Effects, Sets

SLOTS = torch.tensor([0, 0, 1, 1, 2, 3, 4, 4])


def effects_of(seed: int, d: int = 6) -> tuple[Effects, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randn(2, len(SLOTS), d, generator=generator, dtype=torch.float64)
    cost = moves.square().sum(-1) - 0.1 * torch.randn(
        2, len(SLOTS), generator=generator
    )
    off = 2 * torch.randn(2, d, generator=generator, dtype=torch.float64)
    return Effects(moves, cost, SLOTS, 5), off


def value(
    effects: Effects,
    off: torch.Tensor,
    row: int,
    changes: tuple[int, ...],
    overlap: float,
) -> float:
    """The objective by its definition: a loop over the set."""
    rest = off[row].clone()
    more = 0.0
    for change in changes:
        move = effects.moves[row, change]
        more += float(effects.cost[row, change] - move @ move)
        rest -= move / (1 + overlap * (len(changes) - 1))
    return float(rest @ rest) + more


def possible(most: int) -> list[tuple[int, ...]]:
    sets = [
        some for k in range(2, most + 1) for some in combinations(range(len(SLOTS)), k)
    ]
    return [some for some in sets if len({int(SLOTS[c]) for c in some}) == len(some)]


@pytest.mark.parametrize("seed", range(8))
def test_a_wide_beam_finds_the_best_of_all_sets(seed):
    effects, off = effects_of(seed)
    overlap = torch.tensor([0.0, 0.3])
    found = effects.grown(Sets.none(off), width=200, depth=3, count=5, overlap=overlap)
    for row in range(2):
        rho = float(overlap[row])
        ranked = sorted(
            possible(3), key=lambda some: value(effects, off, row, some, rho)
        )
        given = [
            tuple(sorted(c for c in some if c >= 0)) for some in found[row].tolist()
        ]
        assert given == ranked[:5]


def test_sets_are_extended():
    effects, off = effects_of(3)
    begun = torch.tensor([[[0, 2]], [[1, 5]]])
    rest = off - torch.stack(
        [effects.moves[0, [0, 2]].sum(0), effects.moves[1, [1, 5]].sum(0)]
    )
    sets = Sets(begun, rest[:, None], torch.ones(2, 1, dtype=torch.bool))
    for row, changes in enumerate(effects.grown(sets, 50, 2, 6).tolist()):
        for some in changes:
            chosen = [change for change in some if change >= 0]
            assert chosen[:2] == begun[row, 0].tolist()
            slots = SLOTS[chosen].tolist()
            assert len(set(slots)) == len(slots)


def test_changes_that_were_not_run_are_in_no_set():
    effects, off = effects_of(1)
    barred = effects.cost.clone()
    barred[:, ::2] = 1e9
    only = Effects(effects.moves, barred, effects.slots, effects.slot_count)
    for some in only.grown(Sets.none(off), 50, 3, 20).flatten(0, 1).tolist():
        assert all(change % 2 for change in some if change >= 0)


def test_the_overlap_is_measured_on_the_sets_that_were_run():
    effects, _ = effects_of(2)
    sets = torch.tensor([[[0, 2, -1], [1, 3, 4], [5, 6, -1]]] * 2)
    ran = torch.tensor([[True, True, False]] * 2)
    did = torch.zeros(2, 3, 6, dtype=torch.float64)
    for row, overlap in enumerate((0.0, 0.4)):
        for k, changes in enumerate(sets[row].tolist()):
            chosen = [change for change in changes if change >= 0]
            did[row, k] = effects.moves[row, chosen].sum(0) / (
                1 + overlap * (len(chosen) - 1)
            )
    did[:, 2] = 7.0  # was not run
    assert effects.overlap(sets, did, ran).tolist() == pytest.approx([0.0, 0.4])
