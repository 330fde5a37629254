"""Counts of a corpus find the tokens of texts, and a search with them reads texts."""

from __future__ import annotations

import pytest
import torch

from keyhole.core.errors import InputError
from keyhole.models import Exposure
from keyhole.recover import leak_of, recover_texts
from keyhole.recover.embeddings.changes import LikelyTokens, Shares
from keyhole.recover.embeddings.counts import Counted
from keyhole.recover.embeddings.encoder import Texts
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.recover.run import run

LINES = [
    " ".join(f"w{(k * j + k) % 60}" for j in range(1, 2 + k % 5)) for k in range(1, 400)
]
SECRETS = ["w3 w14 w5", "w31 w2", "w8 w27 w19"]


@pytest.fixture(scope="module")
def lines(loaded):
    return loaded.tokenizer(LINES, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def counted(encoder, lines):
    return Counted.of(encoder, lines, 5)


@pytest.fixture(scope="module")
def secrets(loaded, encoder):
    ids = loaded.tokenizer(SECRETS, add_special_tokens=False)["input_ids"]
    return ids, encoder.vectors(Texts.of(ids, 3))


def test_the_odds_point_at_the_tokens_of_texts_that_are_not_in_the_corpus(
    counted, secrets
):
    ids, goals = secrets
    best = counted.token_odds.odds(goals).topk(20).indices.tolist()  # of 200
    held = [
        token in first
        for tokens, first in zip(ids, best, strict=True)
        for token in tokens
    ]
    assert sum(held) >= 6  # of 8; by chance less than one


def test_missing_tokens_follow_from_the_difference_of_the_odds(counted, secrets):
    _, goals = secrets
    token_odds = counted.token_odds
    expected = token_odds.odds(goals[0]) - token_odds.odds(goals[1])
    assert torch.allclose(token_odds.missing(goals[0] - goals[1]), expected, atol=1e-3)


def test_no_special_token_is_tried(counted, secrets):
    goals = secrets[1]
    likely = LikelyTokens.of(counted, goals)
    parents = Texts.of([[10, 11], [12]], 4)
    changes = likely.changes(
        parents,
        goals[:2] - goals[2],
        torch.tensor([0, 1]),
        torch.tensor([0, 3]),
        torch.Generator().manual_seed(0),
        4,
        1000,
        Shares(500, 500, 500),
    )
    assert not torch.isin(counted.special, changes.tokens[changes.allowed]).any()
    tried = [set(row.tolist()) for row in changes.tokens[:, changes.kinds == 0]]
    assert all(len(tokens) >= 190 for tokens in tried)  # of 200, if so many are wanted


def test_the_search_reads_texts_alone_and_in_a_batch(encoder, counted, secrets):
    ids = secrets[0][1:]
    goals = secrets[1][1:]
    search = SumSearch(passes=12_000)
    readings = search(encoder, goals, counted, 3)
    assert [reading.tokens for reading in readings] == ids
    assert all(reading.cosine > 1 - 1e-6 for reading in readings)
    assert search(encoder, goals[:1], counted, 3)[0].tokens == ids[0]
    first, again = (SumSearch(passes=500)(encoder, goals, counted, 3) for _ in range(2))
    assert first == again


def test_a_search_ends_when_its_passes_are_spent(encoder, lines, secrets):
    counted = Counted.of(encoder, lines, 5)
    reading = SumSearch(passes=100, arrived=-1.0)(encoder, secrets[1][:1], counted, 4)[
        0
    ]
    assert 1 <= len(reading.tokens) <= 4
    assert 100 <= reading.passes < 1000


def test_texts_are_read_back_and_verified(loaded, tmp_path):
    texts = SECRETS[1:2]
    leaks = [
        leak_of(loaded.model, loaded.tokenizer, text, Exposure("pooled"))
        for text in texts
    ]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join([*LINES[:80], "w31 w3"]), "utf-8")
    recoveries = run(loaded, leaks, corpus=corpus)
    assert [recovery.text for recovery in recoveries] == texts
    assert all(recovery.verified for recovery in recoveries)
    assert {recovery.method for recovery in recoveries} == {"CountedReader"}
    assert "counts of the corpus" in recoveries[0].reason


def test_a_corpus_without_texts_is_refused(loaded):
    leak = leak_of(loaded.model, loaded.tokenizer, SECRETS[0], Exposure("pooled"))
    with pytest.raises(InputError, match="the corpus holds no text"):
        recover_texts(
            loaded.model, loaded.tokenizer, [leak], method=CountedReader(["", "  "])
        )


def test_an_unlikely_token_is_found_after_the_best_text_has_stood(
    encoder, lines, secrets
):
    """No line holds the last token, and its odds are set to the lowest of all."""
    counted = Counted.of(encoder, lines, 5)
    odd = len(encoder.table) - 1
    secret = [*secrets[0][0], odd]
    counted.token_odds.weights[:, odd] = 0
    counted.token_odds.offset[odd] = -100
    goals = encoder.vectors(Texts.of([secret], 5))
    few = Shares(4, 0, 2)
    (reading,) = SumSearch(passes=20_000, shares=few)(encoder, goals, counted, 5)
    assert reading.tokens == secret
