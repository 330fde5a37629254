"""Candidates against brute force: every change is there, and the more promising come first."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from keyhole.recover.embedding.candidates import FAR, Candidates, Changes, Shares
from keyhole.recover.embedding.ngrams import NGrams
from keyhole.recover.embedding.scoring import Texts

SIZE, MANY = 5, 10_000
TEXTS = [(0, 3, 1), (2, 2, 4, 0), (1,)]
MISSED = torch.linspace(-1, 2, SIZE)
LINES = [[0, 1, 2], [0, 1], [3, 1, 2, 2], [0, 4], [4, 3, 3, 0]]


@pytest.fixture(scope="module")
def candidates():
    odds = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    return Candidates(odds, odds.argsort(descending=True), NGrams.of(LINES, SIZE), longest=5)


def changes_of(candidates, text):
    return Changes(candidates, text, MISSED, torch.arange(SIZE), FAR)


def promise(candidates, text, missed=MISSED):
    known = sum(float(candidates.odds[token]) for token in set(text))
    missed = sum(float(missed[token]) for token in text)
    likely = float(candidates.ngrams.log_p(Texts.of([list(text)], 6))[0])
    return FAR.odds * known + FAR.missing * missed + FAR.order * likely


def every_change(text):
    n, tokens = len(text), range(SIZE)
    return {
        "replaced": {(*text[:k], t, *text[k + 1 :]) for k in range(n) for t in tokens},
        "put_in": {(*text[:k], t, *text[k:]) for k in range(n + 1) for t in tokens},
        "left_out": {(*text[:k], *text[k + 1 :]) for k in range(n)},
        "merged": {(*text[:k], t, *text[k + 2 :]) for k in range(n - 1) for t in tokens},
        "paired": {
            (*text[:k], a, b, *text[k + wide :])
            for wide in (1, 2) for k in range(n - wide + 1) for a in tokens for b in tokens
        },
    }  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_every_change_is_there(candidates, text):
    changes = changes_of(candidates, text)
    for kind, expected in every_change(text).items():
        assert set(getattr(changes, kind)(MANY)) == expected, kind


def test_no_change_is_longer_than_texts_may_be(candidates):
    text = (0, 3, 1, 0, 4)
    assert {len(child) for child in changes_of(candidates, text).paired(MANY)} == {5}
    new = candidates.changed(text, MISSED, 1.0, Shares(), {text}, 0)
    assert {len(child) for child in new} == {4, 5}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["replaced", "put_in", "left_out", "moved"])
def test_the_more_promising_come_first(candidates, text, kind):
    children = [c for c in getattr(changes_of(candidates, text), kind)(MANY) if c != text]
    promises = [promise(candidates, child) for child in children]
    assert promises == pytest.approx(sorted(promises, reverse=True), abs=1e-5)


def test_changes_that_are_known_make_room_for_the_next(candidates):
    text, shares = (0, 3, 1), Shares(4, 2, 2, 2, 2, 2)
    known: set[tuple[int, ...]] = {text}
    for turn in range(3):
        new = candidates.changed(text, MISSED, 0.5, shares, known, turn)
        assert new
        assert known.isdisjoint(new)
        known.update(new)


def test_a_wide_beam_writes_the_best_text_of_each_length(candidates):
    texts = candidates.written(width=SIZE**3, each=1)
    nothing = torch.zeros(SIZE)
    for length in (1, 2, 3):
        alike = (t for t in product(range(SIZE), repeat=length) if all(map(int.__ne__, t, t[1:])))
        assert texts[length - 1] == max(alike, key=lambda t: promise(candidates, t, nothing))
