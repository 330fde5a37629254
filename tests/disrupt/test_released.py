"""HackAttend's released program, against a naive implementation."""

from __future__ import annotations

import itertools

import pytest
import reference_disrupt as reference
import torch

import tiny_heads
from keyhole.core.errors import InputError
from keyhole.disrupt import ReleasedProgram

POSITIONS = 13  # at least two are padding


def compared(model, batch, method):
    """Return the outcomes, after comparing their units and numbers with the naive ones."""
    labels = tiny_heads.own_labels(model, batch)
    found = method(model, batch, labels)
    more = (0, POSITIONS - batch["input_ids"].shape[-1])
    for row, outcome in enumerate(found.outcomes):
        ids, mask = (batch[name][row] for name in ("input_ids", "attention_mask"))
        ids = torch.nn.functional.pad(ids.view(-1, ids.shape[-1]), more)
        real = mask.view(len(ids), -1).sum(1).tolist()
        masks, queries, flipped = reference.released_program(
            model, ids, real, int(labels[row]), method.share, method.units
        )
        closed = {
            (layer, head, q, k, c)
            for layer, opened in enumerate(mask.tolist() for mask in masks)
            for c, head in itertools.product(range(len(opened)), range(len(opened[0])))
            for q, k in itertools.product(range(real[c]), repeat=2)
            if not opened[c][head][q][k]
        }
        assert set(outcome.cut) == closed
        assert (outcome.steps, outcome.flipped) == (queries, flipped)
    return found.outcomes


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_masks_and_queries_are_those_of_the_naive_program(share):
    outcomes = []
    for seed in range(3):
        model = tiny_heads.model("bert", "classes", seed=seed).double()
        batch = tiny_heads.texts(3, seed=seed)
        outcomes += compared(model, batch, ReleasedProgram(share, positions=POSITIONS))
    assert all(
        (0, 0) in {(unit.query, unit.key) for unit in each.cut} for each in outcomes
    )
    if share > 0.1:
        assert (
            len({outcome.flipped for outcome in outcomes}) == 2
        )  # with and without a flip


@pytest.mark.parametrize("cutting", [True, False])
def test_multiple_choice_masks_more_than_the_chosen_units(cutting):
    outcomes = []
    for seed in range(3):
        model = tiny_heads.model("bert", "choice", seed=seed).double()
        batch = tiny_heads.texts(2, 9, choices=3, seed=seed)
        method = ReleasedProgram(0.05, cutting, POSITIONS)
        outcomes += compared(model, batch, method)
    assert method.control != cutting
    assert all(bool(outcome.perturbation) == cutting for outcome in outcomes)
    assert any(outcome.flipped for outcome in outcomes)


def test_tasks_that_the_program_cannot_attack_are_refused():
    model = tiny_heads.model("gpt2", "causal")
    with pytest.raises(InputError, match="multiple choice only"):
        ReleasedProgram(positions=11)(model, tiny_heads.texts(1, framed=False))
    with pytest.raises(InputError, match="share"):
        ReleasedProgram(2.0)


def test_ids_name_every_example():
    model = tiny_heads.model("bert", "classes")
    batch = tiny_heads.texts(2)
    labels = tiny_heads.own_labels(model, batch)
    with pytest.raises(InputError, match="ids must name 2 examples: 1 were given"):
        ReleasedProgram(positions=POSITIONS)(model, batch, labels, ids=["a"])
