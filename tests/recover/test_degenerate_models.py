"""Models whose tokens are all alike, or whose weights are broken: every attack ends in a status."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny_models
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.data import NO_LABEL, Example
from keyhole.models.capture import Exposure
from keyhole.recover import (
    CachedKeys,
    EncoderStates,
    SubLayerOutput,
    TokenSearch,
    recover_text,
    recover_texts,
)
from keyhole.recover.gradients import recover_batch
from keyhole.recover.gradients.update import batch_of, update_of
from keyhole.recover.simulate import degrade, leak_of

TEXTS = ("w3 w5 w77 w8 w9 w11", "w100 w40 w41")


def table(model):
    return model.get_input_embeddings().weight


def all_equal(model):
    table(model).copy_(table(model)[7].clone().expand_as(table(model)))


def nearly_equal(model):
    stream = torch.Generator().manual_seed(1)
    all_equal(model)
    table(model).add_(1e-9 * torch.randn(table(model).shape, generator=stream))


def all_zero(model):
    table(model).zero_()


def no_weights(model):
    for weight in model.parameters():
        weight.zero_()


def damaged(family, change):
    if family in tiny_models.DECODERS:
        model = tiny_models.language_model(family)
    else:
        model = tiny_models.model(family)
    with torch.no_grad():
        change(model)
    return model, tiny_models.tokenizer(family in tiny_models.DECODERS)


EXPOSURES = {
    "hidden:2": (),
    "hidden:2 in no order": ("permuted",),
    "kv:1": (),
    "attention:1": (),
}


ALIKE = [("bert", change) for change in (all_equal, nearly_equal, no_weights)]
ALIKE += [("gpt2", all_zero), ("gpt2", nearly_equal), ("llama", all_equal)]


@pytest.mark.parametrize(("family", "change"), ALIKE)
def test_tokens_that_are_all_alike_are_not_identifiable(family, change):
    model, tokenizer = damaged(family, change)
    exposures = dict(EXPOSURES)
    if family == "bert":
        exposures["maps:1"] = ()
    for words, forms in exposures.items():
        exposure = Exposure.parse(words.split()[0])
        leaks = [
            degrade(leak_of(model, tokenizer, text, exposure), forms=forms)
            for text in TEXTS
        ]
        for recovery in recover_texts(model, tokenizer, leaks):
            assert recovery.status is Status.NOT_IDENTIFIABLE, (words, recovery.reason)
            assert not recovery.verified


def nan_in_a_layer(model):
    name, weight = next(
        (n, w) for n, w in model.named_parameters() if "1" in n and w.ndim == 2
    )
    weight[0, 0] = torch.nan
    return name


def infinite_token(model):
    table(model)[7] = torch.inf


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_model_without_numbers_is_refused_by_the_name_of_the_weight(family):
    model, tokenizer = damaged(family, nan_in_a_layer)
    name = nan_in_a_layer(model)
    with pytest.raises(InputError, match=f"its weights hold some, in {name}"):
        leak_of(model, tokenizer, TEXTS[0], Exposure("hidden", 3))


SHORT = {  # searches too short to find the text
    "hidden:2": EncoderStates(rounds=4, opening=4, most=0),
    "kv:1": CachedKeys(encoder=EncoderStates(rounds=4, opening=4, most=0)),
    "attention:1": SubLayerOutput(
        TokenSearch(rounds=1, passes=10), EncoderStates(rounds=4, opening=4, most=0)
    ),
}


@pytest.mark.parametrize(
    ("family", "exposure"),
    [
        ("bert", "hidden:2"),
        ("bert", "kv:1"),
        ("bert", "attention:1"),
        ("llama", "hidden:2"),
        ("gpt2", "kv:1"),
        ("llama", "attention:1"),
    ],
)
def test_a_leak_of_a_model_that_was_damaged_since(family, exposure):
    sound, tokenizer = damaged(family, lambda model: None)
    leak = leak_of(sound, tokenizer, TEXTS[0], Exposure.parse(exposure))
    for change in (nan_in_a_layer, infinite_token):
        model, _ = damaged(family, change)
        about = type(leak)(**leak.tensors, layer=leak.layer)
        short = SHORT.get(exposure) if family == "bert" else None
        recovery = recover_text(model, tokenizer, about, method=short)
        assert not recovery.verified or recovery.text == TEXTS[0]
        assert "nan" not in recovery.reason
        assert "\n" not in recovery.reason


@pytest.mark.parametrize("change", [all_equal, all_zero])
def test_gradients_of_such_models(change):
    model = tiny_models.model("bert", head="AutoModelForSequenceClassification")
    tokenizer = tiny_models.tokenizer()
    with torch.no_grad():
        change(model)
    recovery = recover_batch(model, tokenizer, update(model, tokenizer))
    assert recovery.status is not Status.RECOVERED
    assert not recovery.verified


def update(model, tokenizer):
    batch = batch_of(
        model, tokenizer, [Example("", NO_LABEL, text) for text in TEXTS], 20
    )
    return replace(update_of(model, batch), model=None)


@pytest.mark.parametrize(
    "place", ["word_embeddings", "layer.0.attention", "layer.1.attention"]
)
def test_a_gradient_of_a_model_that_was_damaged_since(place):
    model = tiny_models.model("bert", head="AutoModelForSequenceClassification")
    tokenizer = tiny_models.tokenizer()
    given = update(model, tokenizer)
    with torch.no_grad():
        next(w for n, w in model.named_parameters() if place in n and w.ndim == 2)[
            0, 0
        ] = torch.nan
    recovery = recover_batch(model, tokenizer, given)
    assert recovery.status is not Status.RECOVERED
    assert not recovery.verified
