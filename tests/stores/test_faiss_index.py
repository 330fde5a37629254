"""Real indexes of FAISS that keep codes: texts are judged by the code of their vector."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_models as tiny
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.judge import judge_vector
from keyhole.recover.embeddings.pooling import embeddings, ways
from keyhole.recover.leaks import Pooled
from keyhole.stores import open_store

faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
TEXT = "w1 w20 w3"
STREAM = np.random.default_rng(0)


def indexed(folder: Path, index, vectors):
    """Return the store of an index that is trained on these vectors and holds them."""
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(folder / "vectors.faiss"))
    return open_store(str(folder / "vectors.faiss"))


def test_centroids(tmp_path):
    vectors = STREAM.normal(size=(500, 12)).astype(np.float32)
    with indexed(tmp_path, faiss.IndexPQ(12, 3, 4), vectors) as store:
        assert store.rounding.keys() == {"codebook"}
        assert store.rounding["codebook"].shape == (3, 16, 4)
        kept = store.read([0, 7, 499]).unflatten(1, (3, 4))
        assert (
            float(
                torch.cdist(kept.transpose(0, 1), store.rounding["codebook"])
                .amin(-1)
                .max()
            )
            < 1e-6
        )


@pytest.mark.parametrize("kind", ["QT_8bit", "QT_6bit", "QT_4bit", "QT_8bit_uniform"])
def test_steps(tmp_path, kind):
    vectors = (STREAM.normal(size=(500, 8)) * np.arange(1, 9)).astype(np.float32)
    index = faiss.IndexScalarQuantizer(8, getattr(faiss.ScalarQuantizer, kind))
    with indexed(tmp_path, index, vectors) as store:
        off = (
            store.read(range(500)) - torch.from_numpy(vectors)
        ).abs() / store.rounding["steps"]
        assert 0.49 < float(off.max()) <= 0.5 + 1e-3  # half a step, and not less
        assert store.rounding.keys() == {"steps", "ends"}


def test_whole_vectors_have_no_quantiser(tmp_path):
    vectors = STREAM.normal(size=(20, 8)).astype(np.float32)
    with indexed(tmp_path, faiss.IndexFlatL2(8), vectors) as store:
        assert not store.rounding


def test_an_inverted_file_may_have_any_ids(tmp_path):
    vectors = STREAM.normal(size=(20, 8)).astype(np.float32)
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(8), 8, 2)
    index.train(vectors)
    index.add_with_ids(vectors, 2**62 - 5 * np.arange(20))
    faiss.write_index(index, str(tmp_path / "vectors.faiss"))
    with open_store(str(tmp_path / "vectors.faiss")) as store:
        assert store.read(range(20)).flip(0).tolist() == vectors.tolist()


@pytest.mark.parametrize("kind", ["product quantisation", "8 bits"])
def test_a_text_is_judged_by_its_code(tmp_path, kind):
    model = tiny.shared("bert", hidden_size=96)
    words = tiny.tokenizer()
    texts = [" ".join(f"w{n}" for n in STREAM.integers(0, 195, 3)) for _ in range(300)]
    vectors = (
        embeddings(model, words, [TEXT, *texts], ways(model)[0])
        .numpy()
        .astype(np.float32)
    )
    index = faiss.IndexPQ(96, 24, 4)
    if kind == "8 bits":
        index = faiss.IndexScalarQuantizer(96, faiss.ScalarQuantizer.QT_8bit)
    with indexed(tmp_path, index, vectors) as store:
        leak = Pooled(store.read([0])[0], **store.rounding)
    target = Target.of(model, words)
    ids = words(TEXT)["input_ids"]
    verdict = judge_vector(target, leak, ids)
    assert verdict.verified, verdict.reason
    for other in (texts[0], "w1 w20 w4", "w20 w1 w3", "w1 w20", "w1 w1 w20 w3"):
        assert not judge_vector(target, leak, words(other)["input_ids"]).verified
    plain = Pooled(leak.values)  # the quantiser is not known
    assert not judge_vector(target, plain, ids).verified
