"""The last state comes back from logits and from log-probabilities, to the digits of float64."""

from __future__ import annotations

import copy

import pytest
import torch

import tiny_models as tiny
from keyhole.core import Status, Unsuccessful
from keyhole.models import Exposure, capture
from keyhole.recover import Logits, leak_of
from keyhole.recover.embeddings.final_state import final_states, vectors_of

WAYS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "bias": {"tie_word_embeddings": False, "bias": True},
}


def exact(leak, values):
    """The leak with values in float64: what a file would round."""
    changed = copy.copy(leak)
    object.__setattr__(changed, "values", values)
    return changed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", tiny.DECODERS)
@pytest.mark.parametrize("log_probabilities", [False, True])
def test_every_family_and_head(family, way, log_probabilities):
    model = tiny.language_model(family, **WAYS[way]).double()
    ids = tiny.ids(1, 7, causal=True)
    exposure = Exposure("logits", log_probabilities=log_probabilities)
    values = capture(model, exposure, ids=ids)["values"][0]
    own = model(ids).logits[0, -1]
    own = own.log_softmax(-1) if log_probabilities else own
    assert torch.equal(values[0], own) or torch.allclose(
        values[0], own, atol=1e-12, rtol=0
    )
    states = final_states(model, exact(Logits(values, log_probabilities), values))
    truth = capture(model, Exposure("hidden", 3), ids=ids)["values"][0, -1:]
    assert states.shape == truth.shape == (1, 32)
    assert float((states - truth).abs().max()) <= 1e-11 * float(truth.abs().max())


def test_float32_and_rounded_logits_give_the_vector_of_the_last_state():
    model = tiny.language_model("llama")
    words = tiny.tokenizer(causal=True)
    texts = ["w3 w14 w15", "w9 w2"]
    leaks = [leak_of(model, words, text, "logits") for text in texts]
    vectors, exposure = vectors_of(model, leaks)
    for text, vector in zip(texts, vectors, strict=True):
        truth = leak_of(model, words, text, exposure).tensors["values"]
        assert torch.allclose(vector, truth, atol=1e-6)
    rounded = [Logits(leak.values.bfloat16()) for leak in leaks]
    assert float((vectors_of(model, rounded)[0] * vectors).sum(-1).min()) > 1 - 1e-4


def test_logits_that_did_not_leak_are_left_out():
    model = tiny.language_model("gpt2")
    words = tiny.tokenizer(causal=True)
    leak = leak_of(model, words, "w3 w14", "logits")
    best = leak.values[0].topk(40).indices
    some = torch.full_like(leak.values, torch.nan)
    some[0, best] = leak.values[0, best]
    whole, part = (vectors_of(model, [each])[0] for each in (leak, Logits(some)))
    assert torch.allclose(whole, part, atol=1e-5)
    assert Logits(some).rows(Logits(some).tensors).shape == (1, 40)
    some[0, best[31:]] = torch.nan
    with pytest.raises(
        Unsuccessful, match="31 logits leaked, and 32 are needed"
    ) as caught:
        vectors_of(model, [Logits(some)])
    assert caught.value.status is Status.NOT_IDENTIFIABLE


def test_a_head_with_dependent_columns_is_not_identifiable():
    model = tiny.language_model("llama", tie_word_embeddings=False)
    leak = leak_of(model, tiny.tokenizer(causal=True), "w3 w14", "logits")
    model.lm_head.weight[:, 4] = model.lm_head.weight[:, 5]
    with pytest.raises(Unsuccessful, match="dependent columns"):
        final_states(model, leak)
    model.lm_head.weight[:, 4] = 1.0  # log p leaves its part open, logits do not
    final_states(model, leak)
    with pytest.raises(Unsuccessful, match="dependent columns"):
        final_states(model, Logits(leak.values, log_probabilities=True))
