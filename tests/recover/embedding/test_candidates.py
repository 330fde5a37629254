"""Candidates against brute force: every change is there, and the more promising come first."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from keyhole.recover.embedding.candidates import (
    MISSING,
    ODDS,
    ORDER,
    Candidates,
    Shares,
    _Changes,
)

SIZE, MANY = 5, 10_000
TEXTS = [(0, 3, 1), (2, 2, 4, 0), (1,)]


@pytest.fixture(scope="module")
def candidates():
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(SIZE + 1, SIZE + 1, generator=generator)
    odds = torch.randn(SIZE, generator=generator)
    return Candidates(torch.arange(10, 10 + SIZE), odds, pairs, longest=5)


MISSED = torch.linspace(-1, 2, SIZE)


def promise(candidates, text):
    known = sum(float(candidates.odds[token]) for token in set(text))
    missed = sum(float(MISSED[token]) for token in text)
    return ODDS * known + MISSING * missed + ORDER * candidates.log_p(text)


def changes(text):
    n, tokens = len(text), range(SIZE)
    replaced = {(*text[:k], t, *text[k + 1 :]) for k in range(n) for t in tokens}
    put_in = {(*text[:k], t, *text[k:]) for k in range(n + 1) for t in tokens}
    left_out = {(*text[:k], *text[k + 1 :]) for k in range(n)}
    paired = {
        (*text[:k], a, b, *text[k + wide :])
        for wide in (1, 2) for k in range(n - wide + 1) for a in tokens for b in tokens
    }  # fmt: skip
    return {"replaced": replaced, "put_in": put_in, "left_out": left_out, "paired": paired}


@pytest.mark.parametrize("text", TEXTS)
def test_every_change_is_there(candidates, text):
    made = _Changes(candidates, text, MISSED)
    for kind, expected in changes(text).items():
        assert set(getattr(made, kind)(MANY)) == expected, kind


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["put_in", "left_out", "moved"])
def test_the_more_promising_come_first(candidates, text, kind):
    promises = [
        promise(candidates, child)
        for child in getattr(_Changes(candidates, text, MISSED), kind)(MANY)
    ]
    assert promises == pytest.approx(sorted(promises, reverse=True), abs=1e-5)


@pytest.mark.parametrize("text", TEXTS)
def test_what_replaces_a_token_is_ranked_by_its_promise(candidates, text):
    children = [c for c in _Changes(candidates, text, MISSED).replaced(MANY) if c != text]
    promises = [promise(candidates, child) for child in children]
    assert promises == pytest.approx(sorted(promises, reverse=True), abs=1e-5)


def test_changes_that_are_known_make_room_for_the_next(candidates):
    text, shares = (0, 3, 1), Shares(3, 2, 1, 2, 1)
    known: set[tuple[int, ...]] = {text}
    for turn in range(3):
        new = candidates.changed(text, MISSED, shares, known, turn)
        assert new
        assert known.isdisjoint(new)
        known.update(new)


def test_a_wide_beam_writes_the_best_text_of_each_length(candidates):
    texts = candidates.written(width=SIZE**3, each=1)
    for length in (1, 2, 3):
        expected = max(
            product(range(SIZE), repeat=length),
            key=lambda text: ODDS * float(candidates.odds[list(set(text))].sum())
            + ORDER * candidates.log_p(text),
        )  # fmt: skip
        assert texts[length - 1] == expected
