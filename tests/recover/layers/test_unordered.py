"""Text from rows in no order, and from incomplete rows."""

from __future__ import annotations

import functools

import pytest
import torch

import tiny_models as tiny
from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.models import Exposure, capture
from keyhole.recover import EncoderStates
from keyhole.recover.layers.unordered import UnorderedStates

WORDS = tiny.tokenizer()
IDS = tiny.ids(texts=3, length=12)


@functools.cache
def model(family="bert"):
    return tiny.shared(family)


def recovered(layer, forms, precision="float32", family="bert", ids=IDS, method=None):
    stream = torch.Generator().manual_seed(0)
    values = capture(model(family), Exposure("hidden", layer), ids=ids)["values"]
    leaks = [
        invert.degrade(invert.HiddenStates(text, layer), precision, 0.0, stream, forms)
        for text in values
    ]
    return invert.recover_texts(model(family), WORDS, leaks, method=method)


@pytest.mark.parametrize(
    ("layer", "forms", "precision"),
    [
        (1, ["permuted"], "float32"),
        (1, ["permuted"], "bfloat16"),
        (1, ["normalised", "permuted"], "float32"),
        (3, ["normalised"], "float32"),
        (3, ["normalised"], "bfloat16"),
        (2, ["truncated:20"], "float32"),
        (2, ["truncated:24", "normalised"], "float32"),
    ],
)
def test_texts_come_back_and_are_verified(layer, forms, precision):
    for result, truth in zip(
        recovered(layer, forms, precision), IDS.tolist(), strict=True
    ):
        assert result.ids == truth
        assert result.verified
        assert result.status is Status.RECOVERED
        assert result.method == (
            "UnorderedStates" if "permuted" in forms else "EncoderStates"
        )


@pytest.mark.parametrize(
    "forms", [["subset:8"], ["subset:9", "permuted"], ["truncated:4"]]
)
def test_what_is_lost_is_never_claimed(forms):
    method = None if "permuted" in forms else EncoderStates(rounds=4, opening=4, most=0)
    (result,) = recovered(2, forms, ids=IDS[:1], method=method)
    assert not result.verified or result.ids == IDS[0].tolist()


def test_an_order_that_leaks_nothing_is_not_claimed():
    """Without position embeddings every order of a text gives the same rows."""
    blind = tiny.model("bert", seed=3)
    blind.embeddings.position_embeddings.weight.zero_()
    values = capture(blind, Exposure("hidden", 1), ids=IDS)["values"]
    leaks = [
        invert.degrade(invert.HiddenStates(text, 1), forms=["permuted"])
        for text in values
    ]
    for result, truth in zip(
        invert.recover_texts(blind, WORDS, leaks), IDS.tolist(), strict=True
    ):
        assert sorted(result.ids) == sorted(truth)
        assert not result.verified
        assert "the order of" in result.reason


@pytest.mark.parametrize("ids", [[2], [2, 3], [2, 30, 3], [2, 30, 30, 3]])
def test_the_shortest_texts(ids):
    (result,) = recovered(1, ["permuted"], ids=torch.tensor([ids]))
    assert (result.ids, result.verified) == (ids, True)


def test_settings_are_checked():
    with pytest.raises(InputError, match="orders"):
        UnorderedStates(orders=0)
