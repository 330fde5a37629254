"""Texts as the encoder sees them: its vectors are what the model leaks, its slopes are slopes."""

from __future__ import annotations

import pytest
import torch

from keyhole.models import Exposure, capture
from keyhole.recover import leak_of
from keyhole.recover.embedding.scoring import Texts


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
