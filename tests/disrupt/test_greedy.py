"""HackAttend as released, against a naive implementation, on real sentences."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import reference_disrupt as reference

import tiny_heads
from keyhole.data import Example, encode
from keyhole.disrupt import HackAttend
from keyhole.models.demo import EXAMPLES, load_demo

FULL = os.environ.get("KEYHOLE_FULL") == "1"
LICENSE = Path(__file__).parents[2] / "LICENSE"


def sentences(count):
    """Return reviews, and clauses of a fixed text."""
    clauses = re.split(r"(?<=[.;:,])\s+", " ".join(LICENSE.read_text().lower().split()))
    plain = [clause for clause in clauses if 6 <= len(clause.split()) <= 11]
    texts = [example.text for example in EXAMPLES[::2]] + plain
    assert len(texts) >= count
    return [Example(str(number), 0, text) for number, text in enumerate(texts[:count])]


@pytest.fixture(scope="module")
def classifier():
    loaded = load_demo("classification")
    return loaded.model.double(), loaded.tokenizer


@pytest.mark.parametrize(
    ("ranking", "share", "numbers"),
    [("gradient", 0.02, range(50) if FULL else (8, 9)), ("magnitude", 0.2, (2, 9))],
)
def test_the_units_are_those_of_the_naive_attack(classifier, ranking, share, numbers):
    model, tokenizer = classifier
    texts = sentences(max(numbers) + 1)
    batch, _ = encode(tokenizer, [texts[number] for number in numbers])
    labels = tiny_heads.own_labels(model, batch)
    found = HackAttend.as_released(share, ranking=ranking)(model, batch, labels)
    assert (
        len({outcome.flipped for outcome in found.outcomes}) == 2
    )  # with and without a flip
    for row, outcome in enumerate(found.outcomes):
        ids = batch["input_ids"][
            row : row + 1, : int(batch["attention_mask"][row].sum())
        ]
        cut, flipped = reference.as_released(
            model, ids, int(labels[row]), share, ranking
        )
        units = [(unit.layer, unit.head, unit.query, unit.key) for unit in outcome.cut]
        assert sorted(units) == sorted(cut)
        assert outcome.flipped == flipped


def test_all_but_the_first_token_and_padding_may_be_cut():
    model = tiny_heads.model("bert", "classes")
    batch = tiny_heads.texts(3)
    labels = tiny_heads.own_labels(model, batch)
    everything = HackAttend.as_released(1.0, ranking="attention")(model, batch, labels)
    for row, outcome in enumerate(everything.outcomes):
        n = int(batch["attention_mask"][row].sum())
        assert outcome.worst_head == 1
        expected = [(query, key) for query in range(1, n) for key in range(1, n)]
        assert outcome.heads >= 1
        for head in {(unit.layer, unit.head) for unit in outcome.cut}:
            cut = [(u.query, u.key) for u in outcome.cut if (u.layer, u.head) == head]
            assert cut == expected


@pytest.mark.parametrize("left", [False, True])
def test_the_first_token_of_a_padded_text_is_the_first_real_one(left):
    model = tiny_heads.model("gpt2", "causal", seed=9)
    batch = tiny_heads.texts(3, framed=False, left=left, seed=9)
    found = HackAttend.as_released(1.0)(model, batch)
    for row, outcome in enumerate(found.outcomes):
        real = batch["attention_mask"][row].nonzero().flatten().tolist()
        assert {unit.key for unit in outcome.cut} == set(real[1:])
        assert {unit.query for unit in outcome.cut} == set(real[1:])
