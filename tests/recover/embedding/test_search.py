"""The search with a reader: what may be asked of it."""

from __future__ import annotations

import torch

from keyhole.recover.embedding.corpus import Corpus
from keyhole.recover.embedding.learn import Learning
from keyhole.recover.embedding.reader import Size
from keyhole.recover.embedding.scoring import Texts
from keyhole.recover.embedding.search import Search


def test_fewer_texts_may_be_kept_than_are_mended(loaded, encoder):
    lines = [f"w{number} w{number + 7}" for number in range(20)]
    corpus = Corpus.of(loaded.tokenizer, lines, 2, encoder.table)
    reader = Learning(steps=1, batch=4, size=Size(16, 1, 1, longest=2), pool=4)(encoder, corpus)
    goals = encoder.vectors(Texts.of([[20]], 1))
    search = Search(rounds=3, trust=(0.0,), kept=2, of=4, first=4, tokens=4, pieces=2)
    pools = search(encoder, goals, reader, 2)
    assert pools.cosines.shape == (1, 2)
    assert torch.isfinite(pools.best).all()
