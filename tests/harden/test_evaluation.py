"""Evaluation: masks of the model's own, of other models, for wrong labels, and none."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import tiny_classifiers as small
import tiny_models
from keyhole.core.errors import InputError
from keyhole.disrupt import HackAttend, Rerank, Unit
from keyhole.disrupt.batches import Batches
from keyhole.harden import Evaluation, Plain, attack, evaluate, train
from keyhole.harden.defences.attack_masks import Cuts
from keyhole.harden.evaluate import lowered, lowering, raised, transferred, wrong_labels
from keyhole.models.masking import rewriting

LIGHT = HackAttend(0.1, schedule=Rerank(rounds=2, prefixes=3, refine=1), batch=32)


@pytest.fixture(scope="module")
def words():
    return tiny_models.tokenizer()


def classifier(seed=0, labels=2):
    return (
        small.model(seed=seed, labels=labels, dropout=0.0).eval().requires_grad_(False)
    )


def own(model, words, count=8):
    """Return examples whose labels are the model's answers, except the last two."""
    batches = Batches(model, words, small.examples(count))
    answers = {}
    for part, batch, _ in batches:
        ids = [example.id for example in part]
        answers.update(zip(ids, batches.predicted(batch).tolist(), strict=True))
    kept = [replace(example, label=answers[example.id]) for example in batches.examples]
    return [
        *kept[:-2],
        *(replace(example, label=1 - example.label) for example in kept[-2:]),
    ]


def test_masks_transferred_to_the_same_model_flip_the_same_examples(words):
    model = classifier(seed=1)
    examples = own(model, words)
    found = attack(model, words, examples, LIGHT, batch_size=5)
    assert [outcome.id for outcome in found.outcomes] == [
        example.id for example in examples
    ]
    assert found.flips
    # Other batches have other padding.
    again = transferred(Batches(model, words, examples, batch_size=7), found)
    assert (again.examples, again.flips) == (len(found.attacked), found.flips)


def test_only_examples_that_both_get_right_are_counted(words):
    model = classifier(seed=1)
    donor = classifier(seed=2)
    examples = own(model, words)
    found = attack(donor, words, examples, LIGHT)
    mine = attack(model, words, examples, LIGHT)
    both = [
        a.right and b.right for a, b in zip(found.outcomes, mine.outcomes, strict=True)
    ]
    measured = transferred(Batches(model, words, examples), found)
    assert measured.examples == sum(both)
    flips = 0
    for example, outcome, counts in zip(examples, found.outcomes, both, strict=True):
        if counts:
            flips += flips_alone(model, words, example, outcome.cut)
    assert measured.flips == flips


def flips_alone(model, words, example, cut):
    """Cut the donor's units on one sentence without padding."""
    (_, batch, labels) = next(iter(Batches(model, words, [example])))
    inputs = {
        name: value for name, value in batch.items() if name != "special_tokens_mask"
    }
    n = inputs["input_ids"].shape[1]
    cuts = Cuts()
    cuts.made = [torch.zeros(1, 4, n, n, dtype=torch.bool) for _ in range(2)]
    for unit in cut:
        cuts.made[unit.layer][0, unit.head, unit.query, unit.key] = True
    with rewriting(model, cuts), torch.no_grad():
        return int(model(**inputs).logits.argmax()) != int(labels)


def test_a_donor_with_other_layers_is_refused(words):
    model = classifier(seed=1)
    examples = own(model, words)
    found = attack(model, words, examples, replace(LIGHT, share=0.0))
    deeper = [replace(outcome, cut=(Unit(2, 0, 1, 1),)) for outcome in found.outcomes]
    found = replace(found, outcomes=tuple(deeper))
    with pytest.raises(InputError, match="same layers and heads"):
        transferred(Batches(model, words, examples), found)


def test_a_donor_that_attacked_other_texts_is_refused(words):
    model = classifier(seed=1)
    examples = own(model, words)
    found = attack(model, words, examples, replace(LIGHT, share=0.0))
    others = [replace(each, text=f"{each.text} w7") for each in examples]
    with pytest.raises(InputError, match="must have attacked the same texts"):
        transferred(Batches(model, words, others), found)
    turned = [replace(each, label=1 - each.label) for each in examples]
    assert transferred(Batches(model, words, turned), found).flips == 0


@pytest.mark.parametrize("labels", [2, 3])
def test_wrong_label_masks_do_not_depend_on_the_labels(words, labels):
    model = classifier(seed=1, labels=labels)
    examples = small.examples(6)
    turned = [replace(example, label=1 - example.label) for example in examples]
    made = []
    for given in (examples, turned):
        part, batch, _ = next(iter(Batches(model, words, given)))
        wrong = wrong_labels(model, batch, part, seed=3)
        made.append((wrong, lowering(model, batch, wrong, LIGHT).made))
        assert (wrong != Batches(model, words, given).predicted(batch)).all()
    assert torch.equal(made[0][0], made[1][0])
    assert all(torch.equal(a, b) for a, b in zip(made[0][1], made[1][1], strict=True))
    assert sum(int(cut.sum()) for cut in made[0][1]) > 0


def test_lowered_masks_lower_the_confidence_in_the_wrong_label(words):
    model = classifier(seed=1)
    part, batch, _ = next(iter(Batches(model, words, small.examples(12))))
    wrong = wrong_labels(model, batch, part, seed=0)
    inputs = {
        name: value for name, value in batch.items() if name != "special_tokens_mask"
    }

    def sure():
        with torch.no_grad():
            return model(**inputs).logits.softmax(-1).gather(1, wrong[:, None]).mean()

    before = sure()
    cuts = lowering(model, batch, wrong, LIGHT)
    with rewriting(model, cuts):
        assert sure() < before
    assert not any(weight.requires_grad for weight in model.parameters())


def test_raised_masks_flip_what_a_targeted_attack_flips(words):
    """With two classes the wrong label is the other class."""
    model = classifier(seed=1)
    examples = own(model, words)
    found = raised(Batches(model, words, examples), LIGHT, seed=0)
    batches = Batches(model, words, examples)
    flips = sum(
        LIGHT(model, batch, labels, targets=1 - labels).flips
        for _, batch, labels in batches
    )
    assert (found.examples, found.flips) == (len(examples) - 2, flips)
    assert flips


def test_a_share_of_zero_flips_nothing(words):
    model = classifier(seed=1)
    examples = own(model, words)
    nothing = replace(LIGHT, share=0.0)
    donor = attack(classifier(seed=2), words, examples, nothing)
    found = evaluate(
        model,
        words,
        examples,
        attacks={"k = 0": nothing},
        donors={"k = 0": donor},
        wrong_label=nothing,
    )
    parts = [
        *found.attacks.values(),
        *found.transferred.values(),
        *found.wrong_label.values(),
    ]
    assert len(parts) == 4
    assert [each.flips for each in parts] == [0, 0, 0, 0]
    assert found.accuracy == pytest.approx(6 / 8)
    assert lowered(Batches(model, words, examples), nothing, 0).examples == 6


def test_a_whole_evaluation_and_its_json(words):
    model = classifier(seed=1)
    examples = own(model, words)
    donor = attack(classifier(seed=2), words, examples[:4], LIGHT)
    counted = []

    def track(name, total=None):
        return lambda done, whole: counted.append((name, done, total, whole))

    found = evaluate(
        model,
        words,
        examples,
        attacks={"stronger": LIGHT},
        donors={"other": donor},
        wrong_label=LIGHT,
        attacked=4,
        batch_size=5,
        track=track,
    )
    parts = ("stronger", "other", "lowered", "raised")
    clean = [("clean", 5, 8, 8), ("clean", 8, 8, 8)]
    assert counted == [*clean, *((name, 4, 4, 4) for name in parts)]
    assert [*found.attacks, *found.transferred, *found.wrong_label] == list(parts)
    alone = attack(model, words, examples[:4], LIGHT)
    assert found.attacks["stronger"].success == alone.success
    assert found.attacks["stronger"].queries == alone.queries
    assert (found.examples, found.attacks["stronger"].examples) == (8, 4)
    assert Evaluation.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    with pytest.raises(InputError, match="format"):
        Evaluation.from_dict({**found.to_dict(), "format": 0})
    with pytest.raises(InputError, match="expected a saved evaluation, got None"):
        Evaluation.from_dict({"format": 1})
    with pytest.raises(InputError, match="accuracy is missing in a saved evaluation"):
        Evaluation.from_dict({"format": 1, "kind": "evaluation"})


def test_an_evaluation_is_saved_and_has_a_summary(words, tmp_path):
    model = classifier(seed=1)
    found = evaluate(
        model, words, own(model, words), attacks={"stronger": LIGHT}, attacked=2
    )
    found.save(tmp_path / "evaluation.json")
    assert Evaluation.load(tmp_path / "evaluation.json") == found
    assert repr(found).startswith("Evaluation: clean accuracy 75.0%; flips, stronger ")
    assert "\n" not in repr(found)


def test_pools_contain_every_example_once_with_less_padding(words):
    """In pools of texts of two lengths, all batches but one have a single length."""
    examples = [
        replace(
            example,
            text=example.text if number % 2 else f"{example.text} {example.text}",
        )
        for number, example in enumerate(small.examples(32))
    ]
    seen = {}

    class Counting:
        unk_token_id = words.unk_token_id

        def __init__(self, name):
            self.name = name

        def __call__(self, texts, **options):
            seen.setdefault(self.name, []).append(texts)
            return words(texts, **options)

    for pool in (1, 4):
        model = small.model(labels=2)
        train(model, Counting(pool), examples, Plain(), epochs=1, batch=8, pool=pool)
    for batches in seen.values():
        assert sorted(text for texts in batches for text in texts) == sorted(
            example.text for example in examples
        )

    def mixed(batches):
        return sum(len({len(text) > 40 for text in texts}) > 1 for texts in batches)

    assert mixed(seen[4]) <= 1 < mixed(seen[1])
