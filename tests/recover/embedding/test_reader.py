"""The reader: what it writes with remembered keys is what it would write without."""

from __future__ import annotations

import math

import pytest
import torch

from keyhole.models import Exposure, capture
from keyhole.recover import leak_of, recover_texts
from keyhole.recover.attacks.embedding_reader import EmbeddingReader
from keyhole.recover.embedding.corpus import Corpus, damaged
from keyhole.recover.embedding.learn import Learning
from keyhole.recover.embedding.reader import Reader, Size
from keyhole.recover.embedding.scoring import Texts
from keyhole.recover.embedding.search import Search

SMALL = Size(width=32, layers=2, heads=2, longest=5)


LINES = [" ".join(f"w{(k * j + k) % 40}" for j in range(1, 2 + k % 5)) for k in range(1, 200)]


@pytest.fixture(scope="module")
def corpus(loaded, encoder):
    return Corpus.of(loaded.tokenizer, LINES, 5, encoder.table)


def test_vectors_are_those_of_the_model_whatever_the_padding(loaded, encoder):
    texts = ["w1", "w3 w4 w5 w6", "w9 w8"]
    ids = loaded.tokenizer(texts, add_special_tokens=False)["input_ids"]
    vectors = encoder.vectors(Texts.of(ids, 7))
    for text, vector in zip(texts, vectors, strict=True):
        leaked = leak_of(loaded.model, loaded.tokenizer, text, "pooled").values
        assert torch.allclose(vector, leaked / leaked.norm(), atol=1e-6)


def test_slopes_are_those_of_finite_differences(loaded, encoder):
    texts = Texts.of(loaded.tokenizer(["w1 w2 w3", "w4"], add_special_tokens=False)["input_ids"], 3)
    goals = encoder.vectors(Texts.of([[20], [30]], 3))
    cosines, slopes = encoder.slopes(texts, goals)
    assert torch.allclose(cosines, (encoder.vectors(texts) * goals).sum(-1), atol=1e-6)
    assert float(slopes[1, 2:].abs().max()) == 0  # behind the token that frames it
    ids, mask = encoder.framed(texts)
    words = encoder.target.parts.tokens(ids).detach()
    step = torch.zeros_like(words)
    step[0, 2] = torch.randn(words.shape[-1], generator=torch.Generator().manual_seed(0))

    def cosine(size):
        given = capture(loaded.model, Exposure("pooled"), embeddings=words + size * step, mask=mask)
        return float((torch.nn.functional.normalize(given["values"], dim=-1) * goals)[0].sum())

    slope = (cosine(1e-2) - cosine(-1e-2)) / 2e-2
    assert slope == pytest.approx(float((slopes[0, 1] * step[0, 2]).sum()), rel=2e-2, abs=1e-4)


def test_texts_to_learn_from_are_lines_and_windows(corpus):
    texts = corpus.draw(500, torch.Generator().manual_seed(0))
    assert set(texts.lengths.tolist()) == {1, 2, 3, 4, 5}
    assert int(texts.ids.where(~texts.mask, 0).abs().max()) == 0
    worse = damaged(texts, corpus, torch.Generator().manual_seed(1))
    assert 1 <= int(worse.lengths.min()) <= int(worse.lengths.max()) <= 5
    changed = (worse.ids != texts.ids).any(-1).float().mean()
    assert 0.4 < float(changed) < 1


def test_writing_with_memory_is_writing_without(encoder):
    torch.manual_seed(0)
    reader = Reader(encoder, 32, SMALL)
    torch.nn.init.normal_(reader.bag.weight, std=0.02)
    goals = torch.nn.functional.normalize(torch.randn(4, 32), dim=-1)
    guess = Texts.of([[7, 8], [9], [10, 11, 12], [13]], 5)
    written = reader.write(goals, guess, torch.zeros(4), torch.Generator())
    with torch.no_grad():
        for row in range(4):
            tokens: list[int] = []
            for _ in range(5):
                so_far = Texts.of([tokens], 5)
                x, bags = reader._read(goals[[row]], guess[[row]], so_far, reader.blocks)
                scores = reader._scores(x, bags)[0, len(tokens)]
                if not tokens:
                    scores[reader.end] = -torch.inf
                token = int(scores.argmax())
                if token == reader.end:
                    break
                tokens.append(token)
            assert written.tokens(row) == tokens


def test_the_beginning_of_a_guess_stays_where_it_is_to_be_kept(encoder):
    torch.manual_seed(0)
    reader = Reader(encoder, 32, SMALL)
    goals = torch.nn.functional.normalize(torch.randn(3, 32), dim=-1)
    guess = Texts.of([[7, 8, 9], [9, 10], [10, 11, 12]], 5)
    kept = torch.tensor([2, 0, 3])
    written = reader.write(goals, guess, torch.ones(3), torch.Generator().manual_seed(0), kept)
    for row in range(3):
        assert written.tokens(row)[: kept[row]] == guess.tokens(row)[: kept[row]]


def test_the_likelihood_is_the_product_over_tokens_and_the_end(encoder):
    torch.manual_seed(0)
    reader = Reader(encoder, 32, SMALL)
    goals = torch.nn.functional.normalize(torch.randn(2, 32), dim=-1)
    texts = Texts.of([[7, 8, 9], [10]], 5)
    together = reader.log_likelihood(goals, texts)
    with torch.no_grad():
        for row in range(2):
            tokens = texts.tokens(row)
            nothing = Texts.of([[]], 0)
            x, bags = reader._read(goals[[row]], nothing, Texts.of([tokens], 5), reader.blocks)
            chances = reader._scores(x, bags)[0].log_softmax(-1)
            right = sum(float(chances[k, token]) for k, token in enumerate([*tokens, reader.end]))
            assert float(together[row]) == pytest.approx(right, rel=1e-5)


def test_what_the_encoder_makes_of_a_text_is_what_it_leaks(loaded, encoder):
    ids = loaded.tokenizer(["w1 w2 w3", "w4"], add_special_tokens=False)["input_ids"]
    texts = Texts.of(ids, 5)
    vectors, states = encoder.look(texts)
    assert torch.allclose(vectors, encoder.vectors(texts), atol=1e-6)
    layer = Exposure("hidden", encoder.target.parts.layers)
    leaked = leak_of(loaded.model, loaded.tokenizer, "w4", layer).values
    assert torch.allclose(states[1, 0], leaked[1], atol=1e-5)


def test_it_learns(encoder, corpus):
    losses: list[float] = []
    learning = Learning(steps=100, batch=32, rate=3e-3, size=SMALL, pool=32, every=50, own=0.6)
    learning(encoder, corpus, lambda share, steps, loss: losses.append(loss))
    assert losses[-1] < 0.9 * math.log(len(encoder.table))  # that of knowing nothing


def test_texts_are_read_back_from_their_vectors(loaded):
    secrets = ["w3 w14 w5", "w31 w2", "w27 w19"]
    leaks = [leak_of(loaded.model, loaded.tokenizer, text, Exposure("pooled")) for text in secrets]
    attack = EmbeddingReader(
        LINES, longest=4,
        learning=Learning(steps=60, batch=64, rate=3e-3, size=SMALL, pool=64, every=50),
        search=Search(rounds=40, trust=(0.0, 1e-4), kept=4, first=16, tokens=32, pieces=8),
    )  # fmt: skip
    recoveries = recover_texts(loaded.model, loaded.tokenizer, leaks, method=attack)
    assert [recovery.text for recovery in recoveries] == secrets
    assert all(recovery.verified for recovery in recoveries)
