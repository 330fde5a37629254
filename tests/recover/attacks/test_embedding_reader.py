"""One vector of any kind is read by the same search: the last state, [CLS], a maximum, logits."""

from __future__ import annotations

import pytest

import tiny_models as tiny
from keyhole.models import Exposure
from keyhole.recover import leak_of, recover_texts
from keyhole.recover.attacks.embedding_reader import EmbeddingReader
from keyhole.recover.embedding.learn import Learning
from keyhole.recover.embedding.reader import Size
from keyhole.recover.embedding.search import Search

LINES = [" ".join(f"w{(k * j + k) % 40}" for j in range(1, 2 + k % 3)) for k in range(1, 200)]
SECRETS = ["w31 w2", "w8 w27"]
KINDS = {
    "the last state of a decoder": ("gpt2", Exposure("pooled", pooling="last")),
    "[CLS] alone": ("bert", Exposure("pooled", pooling="cls")),
    "the maximum": ("bert", Exposure("pooled", pooling="max", normalised=False)),
    "next-token logits": ("gpt2", Exposure("logits")),
    "log-probabilities of two tokens": (
        "gpt2",
        Exposure("logits", steps=2, log_probabilities=True),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_read_back(kind):
    family, exposure = KINDS[kind]
    causal = family in tiny.DECODERS
    model = tiny.language_model(family) if causal else tiny.model(family)
    words = tiny.tokenizer(causal)
    attack = EmbeddingReader(
        LINES, longest=2,
        learning=Learning(steps=10, batch=32, rate=3e-3, size=Size(32, 1, 2, 2), pool=32, every=20),
        search=Search(rounds=25, trust=(0.0, 1e-4), kept=4, first=8, tokens=64, pieces=4),
    )  # fmt: skip
    leaks = [leak_of(model, words, text, exposure) for text in SECRETS]
    recoveries = recover_texts(model, words, leaks, method=attack)
    assert [recovery.text for recovery in recoveries] == SECRETS
    assert all(recovery.verified for recovery in recoveries)
