"""Short prompts from logits by the weights alone, of every family; longer ones are said to be."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.core import Status
from keyhole.models import Exposure, capture
from keyhole.recover import Logits, degrade, leak_of, recover_text, recover_texts
from keyhole.recover.embeddings.short_prompt import Bigrams, ShortPrompt

TEXTS = ["w7", "w31 w2"]


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_every_family(family):
    model, words = tiny.language_model(family), tiny.tokenizer(causal=True)
    leaks = [leak_of(model, words, text, "logits") for text in TEXTS]
    recoveries = recover_texts(model, words, leaks)  # what the registry takes by itself
    assert [recovery.text for recovery in recoveries] == TEXTS
    assert all(recovery.verified for recovery in recoveries)
    assert {recovery.method for recovery in recoveries} == {"ShortPrompt"}


@pytest.mark.parametrize(
    ("precision", "forms"), [("float32", ["log-probabilities"]), ("bfloat16", []), ("int8", [])]
)
def test_as_leaks_are_in_practice(precision, forms):
    model, words = tiny.language_model("llama"), tiny.tokenizer(causal=True)
    leak = degrade(leak_of(model, words, "w31 w2", "logits:2"), precision, forms=forms)
    recovery = recover_text(model, words, leak)
    assert recovery.text == "w31 w2"
    assert recovery.status in (Status.RECOVERED, Status.INEXACT, Status.NOT_IDENTIFIABLE)


def test_three_tokens():
    model, words = tiny.language_model("llama"), tiny.tokenizer(causal=True)
    leak = leak_of(model, words, "w3 w14 w5", "logits")
    assert recover_text(model, words, leak).text == "w3 w14 w5"


def test_a_length_that_did_not_leak():
    model, words = tiny.language_model("llama"), tiny.tokenizer(causal=True)
    leaks = [Logits(leak_of(model, words, text, "logits").values) for text in TEXTS]
    assert [recovery.text for recovery in recover_texts(model, words, leaks)] == TEXTS


def test_few_tokens_tried_and_long_prompts_left():
    model, words = tiny.language_model("llama"), tiny.tokenizer(causal=True)
    texts = ["w9 w8", "w1 w2 w3 w4 w5"]
    leaks = [leak_of(model, words, text, "logits") for text in texts]
    short, long = recover_texts(model, words, leaks, method=ShortPrompt(tokens=40, sweeps=3))
    assert len(short.ids) == 2
    assert long.status is Status.NOT_APPLICABLE
    assert "longer than the 3 tokens" in long.reason


def test_logits_of_another_text_are_never_verified():
    model, words = tiny.language_model("llama"), tiny.tokenizer(causal=True)
    leak = leak_of(model, words, "w1 w2 w3 w4 w5", "logits")
    recovery = recover_text(model, words, Logits(leak.values), method=ShortPrompt(max_length=2))
    assert not recovery.verified


def test_bigrams_are_the_models_own_probabilities():
    model = tiny.language_model("gpt2", bias=True)
    pairs = torch.stack([torch.full((200,), 9), torch.arange(200)], 1)
    states = capture(model, Exposure("hidden", 3), ids=pairs)["values"]
    bigrams = Bigrams(model, states[:, -1], states[:1, 0])
    own = model(pairs).logits[:, -1].log_softmax(-1)
    some = torch.tensor([7, 50, 199])
    assert torch.allclose(bigrams.after(some), own[some], atol=1e-5)
    assert torch.allclose(bigrams.before(some), own[:, some].T, atol=1e-5)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.allclose(bigrams.between(ids, 1), own[3] + own[:, 5], atol=1e-4)
    assert torch.allclose(bigrams.between(ids, 2), own[4], atol=1e-4)
    first = model(torch.tensor([[9]])).logits[0, -1].log_softmax(-1)
    assert torch.allclose(bigrams.between(ids, 0), first + own[:, 4], atol=1e-4)
