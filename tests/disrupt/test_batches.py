"""Batches contain every example once, have similar lengths, and keep outcomes in order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny_classifiers as small
import tiny_models
from keyhole.core.errors import InputError
from keyhole.data import encode
from keyhole.disrupt import HackAttend, Rerank
from keyhole.disrupt.batches import Batches, grouped

LIGHT = HackAttend(0.1, schedule=Rerank(rounds=2, prefixes=2, refine=1), batch=32)


@pytest.fixture(scope="module")
def words():
    return tiny_models.tokenizer()


def classifier(kind="classes"):
    return small.model(kind, seed=1, labels=2, dropout=0.0).eval().requires_grad_(False)


def mixed(count=10, choices=False):
    """Return examples whose texts have three lengths in turn."""
    return [
        replace(example, text=" ".join([example.text] * (1 + number % 3)))
        for number, example in enumerate(small.examples(count, choices=choices))
    ]


def test_a_group_ends_when_full_or_when_the_number_of_choices_changes():
    two = small.examples(5, choices=True)
    none = small.examples(2)
    groups = grouped([*two, *none], 3)
    assert groups == [two[:3], two[3:], none]
    assert grouped([], 3) == []


def test_batches_have_similar_lengths_unless_the_order_is_fixed(words):
    examples = mixed()
    made = [part for part, _, _ in Batches(classifier(), words, examples, 4)]
    assert sorted(example.id for part in made for example in part) == sorted(
        example.id for example in examples
    )
    sizes = [len(example.text) for part in made for example in part]
    assert sizes == sorted(sizes)
    kept = [
        part for part, _, _ in Batches(classifier(), words, examples, 4, alike=False)
    ]
    assert kept == [examples[:4], examples[4:8], examples[8:]]


@pytest.mark.parametrize("kind", ["classes", "choices"])
def test_accuracy_equals_that_of_single_examples(words, kind):
    model = classifier(kind)
    examples = mixed(choices=kind == "choices")
    right = 0
    for example in examples:
        batch, labels = encode(words, [example])
        batch.pop("special_tokens_mask")
        with torch.no_grad():
            right += int(model(**batch).logits.argmax()) == int(labels)
    assert Batches(model, words, examples, 4).accuracy() == right / len(examples)


def test_outcomes_are_in_the_order_of_the_examples_even_if_ids_repeat(words):
    model = classifier()
    examples = [replace(example, id="same") for example in mixed()]
    found = Batches(model, words, examples, 4).attack(LIGHT)
    for example, outcome in zip(examples, found.outcomes, strict=True):
        alone = LIGHT(model, *encode(words, [example])).outcomes[0]
        assert (outcome.right, outcome.before) == (alone.right, alone.before)
        assert outcome.units == alone.units


def test_examples_with_two_and_three_choices_are_attacked_in_one_run(words):
    two = mixed(4, choices=True)
    three = [replace(example, choices=(*example.choices, "w3 w4")) for example in two]
    found = Batches(classifier("choices"), words, [*three, *two]).attack(LIGHT)
    assert len(found.outcomes) == 8
    assert min(example.units for example in found.attacked) > 0


def test_progress_is_reported_after_each_batch(words):
    steps = []
    batches = Batches(
        classifier(), words, mixed(), 4, progress=lambda *step: steps.append(step)
    )
    batches.accuracy()
    assert steps == [(4, 10), (8, 10), (10, 10)]
    replace(batches, examples=batches.examples[:3]).attack(LIGHT)
    assert steps[3:] == [(3, 3)]


def test_no_examples_are_refused(words):
    with pytest.raises(InputError, match="no examples to attack"):
        Batches(classifier(), words, []).attack(LIGHT)
