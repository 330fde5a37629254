"""The encoder's vectors are what the model leaks, and its gradients are right."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.models import Exposure, capture
from keyhole.recover import leak_of
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.encoder import Encoder, Texts


def test_vectors_are_those_of_the_model_whatever_the_padding(loaded, encoder):
    texts = ["w1", "w3 w4 w5 w6", "w9 w8"]
    ids = loaded.tokenizer(texts, add_special_tokens=False)["input_ids"]
    vectors = encoder.vectors(Texts.of(ids, 7))
    for text, vector in zip(texts, vectors, strict=True):
        leaked = leak_of(loaded.model, loaded.tokenizer, text, "pooled").values
        assert torch.allclose(vector, leaked / leaked.norm(), atol=1e-6)


def test_slopes_are_those_of_finite_differences(loaded, encoder):
    texts = Texts.of(
        loaded.tokenizer(["w1 w2 w3", "w4"], add_special_tokens=False)["input_ids"], 3
    )
    goals = encoder.vectors(Texts.of([[20], [30]], 3))
    cosines, slopes = encoder.gradient(
        texts, lambda values: (encoder.directions(values) * goals).sum(-1)
    )
    assert torch.allclose(cosines, (encoder.vectors(texts) * goals).sum(-1), atol=1e-6)
    assert float(slopes[1, 2:].abs().max()) == 0  # behind the token that frames it
    ids, mask = encoder.framed(texts)
    words = encoder.target.parts.tokens(ids).detach()
    step = torch.zeros_like(words)
    step[0, 2] = torch.randn(
        words.shape[-1], generator=torch.Generator().manual_seed(0)
    )

    def cosine(size):
        given = capture(
            loaded.model, Exposure("pooled"), embeddings=words + size * step, mask=mask
        )
        return float(
            (torch.nn.functional.normalize(given["values"], dim=-1) * goals)[0].sum()
        )

    slope = (cosine(1e-2) - cosine(-1e-2)) / 2e-2
    assert slope == pytest.approx(
        float((slopes[0, 1] * step[0, 2]).sum()), rel=2e-2, abs=1e-4
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_causal_model_gives_the_log_probability_of_texts(family):
    """Against one pass for each beginning of each text."""
    model = tiny.language_model(family)
    words = tiny.tokenizer(causal=True)
    encoder = Encoder(Target.of(model, words), Exposure("pooled", pooling="last"))
    texts = Texts.of([[20, 21, 22, 23], [30], [31, 9]], 5)
    vectors, log_p = encoder.read(texts)
    gaps = encoder.next_log_p(texts)
    assert encoder.predicts
    torch.testing.assert_close(vectors, encoder.vectors(texts), rtol=0, atol=1e-5)
    assert log_p.shape == (3, 5)
    assert gaps.shape == (3, 6, len(encoder.table))
    for row in range(3):
        tokens = texts.tokens(row)
        for place in range(len(tokens) + 1):
            before = [*encoder.before, *tokens[:place]]
            if not before:
                assert bool(log_p[row, 0].isnan())
                assert bool(gaps[row, 0].isnan().all())
                continue
            with torch.no_grad():
                right = model(torch.tensor([before])).logits[0, -1].log_softmax(-1)
            torch.testing.assert_close(gaps[row, place], right, rtol=0, atol=1e-4)
            if place < len(tokens):
                assert float(log_p[row, place]) == pytest.approx(
                    float(right[tokens[place]]), abs=1e-4
                )


def test_an_encoder_does_not_predict_tokens(encoder):
    assert not encoder.predicts


def test_half_precision_gives_nearly_the_same():
    target = Target.of(tiny.language_model("llama"), tiny.tokenizer(causal=True))
    exposure = Exposure("pooled", pooling="last")
    texts = Texts.of([[20, 21, 22], [30]], 4)
    whole, half = (Encoder(target, exposure, dtype) for dtype in (None, torch.bfloat16))
    inside = texts.mask & ~whole.read(texts)[1].isnan()
    torch.testing.assert_close(
        half.read(texts)[1][inside], whole.read(texts)[1][inside], rtol=0, atol=0.1
    )
    gaps = half.next_log_p(texts)[:, 1:2].float()
    torch.testing.assert_close(gaps, whole.next_log_p(texts)[:, 1:2], rtol=0, atol=0.1)
