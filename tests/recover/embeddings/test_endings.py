"""Every token at the end of a text: the texts are those, and the right token is the nearest."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.models import Exposure
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import Endings
from keyhole.recover.embeddings.encoder import Encoder, Texts

LINES = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16]]


@pytest.fixture(scope="module")
def encoder():
    target = Target.of(tiny.language_model("llama"), tiny.tokenizer(causal=True))
    return Encoder(target, Exposure("pooled", pooling="last"))


@pytest.fixture(scope="module")
def endings(encoder):
    return Endings.of(encoder, Texts.of(LINES, 6), before=((0, 0), (1, 3)))


def test_each_token_ends_a_text_of_each_run(encoder, endings):
    size = len(encoder.table)
    texts = [endings.texts.tokens(row) for row in range(len(endings.texts))]
    assert [text[-1] for text in texts] == [*range(size)] * 2
    assert all(len(text) == 1 for text in texts[:size])
    for text in texts[size:]:
        assert 1 <= len(text) - 1 <= 3
        assert any(line[: len(text) - 1] == text[:-1] for line in LINES)


def test_vectors_are_those_of_the_texts(encoder, endings):
    size = len(encoder.table)
    for row in (3, size - 1, size + 3, 2 * size - 1):
        tokens = endings.texts.tokens(row)
        expected = encoder.vectors(Texts.of([tokens], len(tokens)))[0]
        assert torch.allclose(
            endings.vectors[row // size, row % size], expected, atol=1e-5
        )
    assert torch.equal(endings.of_tokens, endings.vectors[1])


def test_the_nearest_against_a_loop(encoder, endings):
    goals = encoder.vectors(Texts.of([[5, 6, 40], [90]], 3))
    barred = torch.tensor([0, 1])
    texts, owners = endings.nearest(goals, barred, 3, max_length=6)
    for number, goal in enumerate(goals):
        best = {}
        for run in range(2):
            for token in range(2, len(encoder.table)):
                cosine = float(goal @ endings.vectors[run, token])
                if cosine > best.get(token, (-2.0, 0))[0]:
                    best[token] = cosine, run
        chosen = sorted(best, key=lambda token: -best[token][0])[:3]
        rows = [best[token][1] * len(encoder.table) + token for token in chosen]
        expected = [endings.texts.tokens(row) for row in rows]
        own = (owners == number).nonzero().flatten().tolist()
        assert [texts.tokens(row) for row in own] == expected
    assert texts.tokens(3) == [90]  # a token alone, for what is a token alone


def test_texts_that_are_too_long_are_left_out(encoder, endings):
    goals = encoder.vectors(Texts.of([[5, 6, 40]], 3))
    texts, owners = endings.nearest(goals, torch.tensor([0]), 50, max_length=2)
    assert len(texts) == len(owners) < 50
    assert int(texts.lengths.max()) <= 2
