"""Defences of stored vectors, and the texts that an attacker reads who knows the defence."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

import tiny_models as tiny
from keyhole.audit.defences import recall
from keyhole.models import Loaded, identity
from keyhole.models.capture import Exposure
from keyhole.recover import Pooled
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.judge import Stored
from keyhole.recover.embeddings.pooling import embeddings
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.recover.gradients.update import epsilon_of
from stored_vectors import (
    Setting,
    mapped,
    metric_noise,
    no_defence,
    noise,
    private_noise,
    product_quantisation,
    projection,
    reading,
    retrieval,
    rotation,
    rounding,
    truncation,
)

pytestmark = pytest.mark.release  # what belongs to benchmarks

STREAM = torch.Generator().manual_seed(0)
D = 32
VECTORS = normalize(torch.randn(300, D, generator=STREAM), dim=-1)
WAY = Exposure("pooled")


def test_recall_is_the_share_of_the_nearest_that_are_found():
    docs = VECTORS[:40]
    queries = VECTORS[40:45]
    kept = docs + 0.3 * torch.randn(docs.shape, generator=STREAM)
    shares = []
    for query in queries:
        near = [
            sorted(range(40), key=lambda k: -float(query @ rows[k] / rows[k].norm()))[
                :10
            ]
            for rows in (docs, kept)
        ]
        shares.append(len(set(near[0]) & set(near[1])) / 10)
    assert recall(docs, kept, queries, queries) == pytest.approx(sum(shares) / 5)
    assert 0 < sum(shares) < 5


def test_noise_is_as_long_as_it_says_and_as_private():
    for made, share in ((noise(0.5, D), 0.5), (metric_noise(0.5, D), 0.5)):
        off = made.keep(VECTORS) - VECTORS
        assert float(off.norm(dim=1).square().mean().sqrt()) == pytest.approx(
            share, rel=0.05
        )
        assert float(off.square().mean().sqrt()) == pytest.approx(
            made.stated["noise"], rel=0.05
        )
    private = private_noise(D)
    assert epsilon_of(private.stated["noise"] / 2) == pytest.approx(8.0, rel=1e-3)


def test_product_quantisation_gives_centroids_of_its_codebook():
    made = product_quantisation(8, VECTORS)
    stored = made.keep(VECTORS[:3])
    for row in stored:
        leak = Pooled(row, **made.stated)
        assert Stored.of(leak, row).codes.shape == (8,)
    assert float((stored - VECTORS[:3]).norm()) < float(VECTORS[:3].norm())


def test_what_keeps_distances_costs_no_recall():
    docs = VECTORS[:200]
    queries = VECTORS[200:]
    assert retrieval(rotation(0, D), docs, queries) == pytest.approx(1, abs=0.01)
    halves = [
        retrieval(made, docs, queries)
        for made in (projection(16, D), truncation(16, D))
    ]
    assert all(0.1 < half < 0.9 for half in halves)
    assert retrieval(rounding("int8"), docs, queries) > retrieval(
        rounding("binary"), docs, queries
    )


MODEL = tiny.model("bert", num_hidden_layers=1)
WORDS = tiny.tokenizer()
LOADED = Loaded(MODEL, WORDS, identity(MODEL), "a tiny encoder")
LINES = [f"w{number} w{(3 * number + 1) % 190}" for number in range(190)]
SECRETS = ["w11", "w70"]


def vectors_of(texts):
    return embeddings(MODEL, WORDS, texts, WAY).float()


def test_an_encoder_behind_a_map_gives_mapped_vectors():
    plain = vectors_of(LINES[:3])
    map_ = torch.randn(D, 5, generator=STREAM)
    with mapped(MODEL, map_):
        given = vectors_of(LINES[:3])
    assert torch.allclose(given, normalize(plain @ map_, dim=-1), atol=1e-5)
    assert torch.equal(vectors_of(LINES[:3]), plain)


def test_who_knows_the_defence_reads_on_until_too_little_is_left():
    defences = [
        no_defence(),
        rounding("int8"),
        noise(0.01, D),
        private_noise(D),
        rotation(0, D),
        rotation(8, D),
        rotation(D + 8, D),
        projection(16, D),
        truncation(16, D),
    ]
    reader = CountedReader(LINES, max_length=1, search=SumSearch(passes=500))
    setting = Setting(
        LOADED,
        [WORDS(text)["input_ids"] for text in SECRETS],
        reader.ready(Target.of(MODEL, WORDS), WAY),
        vectors=vectors_of(SECRETS),
        known=vectors_of(LINES[:60]),
        docs=VECTORS,
        queries=VECTORS,
        texts=LINES,
    )
    exact = {}
    for made, recoveries in reading(setting, defences):
        exact[made.name] = [read.text for read in recoveries] == SECRETS
        assert all(not read.verified or read.text in SECRETS for read in recoveries)
    assert len(exact) == len(defences)
    kept = {name.split(",")[0] for name, read in exact.items() if not read}
    assert kept == {"Gaussian noise", "secret rotation"}
    assert exact[f"secret rotation, {D + 8} known texts"]
    assert exact["secret rotation, 8 known texts"]
    assert not exact["secret rotation, 0 known texts"]
    assert not exact["Gaussian noise, ε = 8, δ = 1e-05"]
