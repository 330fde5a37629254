"""Tokens that are right by chance are nothing given away, and a few that are not are."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

import tiny_models
from keyhole.audit.texts import explained, reading_of, share_by_chance, verdict
from keyhole.core import Piece, Reading, Readings, Status
from keyhole.recover import Mark, TextRecovery
from keyhole.recover.originals import Original

TOKENIZER = tiny_models.tokenizer()
FREQUENT = [
    "w0",
    "w1",
    "w2",
]  # the commas and articles of these texts: at every third place


def texts(count=3, words=15, seed=0):
    stream = random.Random(seed)
    return [
        " ".join(
            FREQUENT[place % 3] if place % 3 == 0 else f"w{stream.randrange(10, 190)}"
            for place in range(words)
        )
        for _ in range(count)
    ]


def recovery(original, right):
    """Frequent words where they often stand, `right` more tokens of the text, others wrong."""
    ids = []
    for place, id_ in enumerate(original.ids):
        frequent = (place - 1) % 3 == 0
        ids.append(id_ if frequent or place in right or id_ < 5 else 199)
    return unsure(ids)


def unsure(ids):
    marks = (Mark.UNKNOWN,) * len(ids)
    return TextRecovery(Status.UNSOLVED, "", "Test", ids, "", False, 1, 0.0, marks)


def cell(right, kind="attention"):
    return compared(texts(), lambda original: recovery(original, right), kind)


def compared(lines, attack, kind="attention"):
    """The readings of these lines by an attack, with the share that chance has right."""
    originals = [Original.of(TOKENIZER, line, 60) for line in lines]
    read = list(map(attack, originals))
    chance = share_by_chance(TOKENIZER, originals, read, 60)
    readings = tuple(map(partial(reading_of, TOKENIZER), originals, read))
    return Readings(kind, 1, "float32", readings, chance)


def test_frequent_words_are_explained_by_chance():
    few = cell(right=())
    assert few.known == pytest.approx(1 / 3)
    assert few.chance == pytest.approx(1 / 3, abs=0.02)
    assert explained(few)
    status, reason = verdict([few], "")
    assert status is Status.UNSOLVED
    assert "guesses without the leak have 34% right" in reason


def test_a_few_rare_words_are_not():
    some = cell(right=(2, 3, 5, 6))
    assert some.known < 0.7
    assert some.chance == pytest.approx(1 / 3, abs=0.02)
    assert not explained(some)


def test_a_few_tokens_above_chance_are_given_away_in_part():
    def attack(original):
        return unsure(
            [id_ if n in (2, 6, 9) else 198 for n, id_ in enumerate(original.ids)]
        )

    part = compared(texts(seed=1), attack)
    assert part.known == pytest.approx(0.2)
    assert part.chance < 0.05
    assert verdict([part], "")[0] is Status.INEXACT


def test_the_last_full_stop_is_a_guess_whose_place_follows_from_the_length():
    stop = TOKENIZER.convert_tokens_to_ids("w0")
    stream = random.Random(2)
    lines = [
        " ".join([*(f"w{stream.randrange(10, 190)}" for _ in range(words)), "w0"])
        for words in range(3, 15)
    ]

    def attack(original):
        return unsure([id_ if id_ in (stop, 2, 3) else 198 for id_ in original.ids])

    stops = compared(lines, attack)
    assert stops.known == pytest.approx(12 / 114)
    assert stops.chance == pytest.approx(stops.known, abs=0.02)
    assert verdict([stops], "")[0] is Status.UNSOLVED


def test_one_text_is_held_against_ordinary_sentences():
    original = Original.of(TOKENIZER, texts(1)[0], 60)
    chance = share_by_chance(TOKENIZER, [original], [recovery(original, ())], 60)
    assert 0 < chance < 0.01  # none of its words is in them


def test_the_tail_of_the_binomial_counted_one_by_one():
    for right, total, share in (
        (0, 5, 0.3),
        (5, 5, 0.3),
        (5, 5, 0.2),
        (5, 45, 0.02),
        (6, 45, 0.02),
        (3, 9, 1.0),
    ):
        counted = sum(
            math.comb(total, k) * share**k * (1 - share) ** (total - k)
            for k in range(right, total + 1)
        )
        pieces = tuple(Piece("w", "likely", place < right) for place in range(total))
        part = Readings(
            "hidden", 1, "float32", (Reading("", pieces, False, False),), share
        )
        assert explained(part) == (counted > 1e-3)
