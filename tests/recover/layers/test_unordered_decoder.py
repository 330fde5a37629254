"""Text from rows of a causal model in no order."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.models import Exposure, capture
from keyhole.recover.layers.unordered import UnorderedPrefixes

WORDS = tiny.tokenizer(causal=True)
IDS = tiny.ids(texts=2, length=12)


def recovered(family, layer, forms, precision="float32"):
    model = tiny.shared(family)
    stream = torch.Generator().manual_seed(0)
    values = capture(model, Exposure("hidden", layer), ids=IDS)["values"]
    leaks = [
        invert.degrade(invert.HiddenStates(text, layer), precision, 0.0, stream, forms)
        for text in values
    ]
    return invert.recover_texts(model, WORDS, leaks)


@pytest.mark.parametrize("family", tiny.DECODERS)
@pytest.mark.parametrize("layer", [1, 3])
def test_every_family(family, layer):
    for result, truth in zip(
        recovered(family, layer, ["permuted"]), IDS.tolist(), strict=True
    ):
        assert result.ids == truth
        assert result.verified
        assert result.status is Status.RECOVERED
        assert result.method == "UnorderedPrefixes"


@pytest.mark.parametrize("layer", [2, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_without_lengths_too(layer, precision):
    results = recovered("llama", layer, ["normalised", "permuted"], precision)
    for result, truth in zip(results, IDS.tolist(), strict=True):
        assert result.ids == truth
        assert result.verified


def test_embeddings_of_tokens_have_no_order_to_find():
    """Layer 0 of a rotary model shows the set of tokens, and no order."""
    for result, truth in zip(
        recovered("llama", 0, ["permuted"]), IDS.tolist(), strict=True
    ):
        assert sorted(result.ids) == sorted(truth)
        assert not result.verified
        assert "the order of" in result.reason


def test_a_missing_row_ends_the_search_and_is_not_claimed():
    results = recovered("gpt2", 2, ["subset:9", "permuted"])
    assert not any(result.verified for result in results)
    assert all(len(result.ids) == 12 for result in results)


def test_settings_are_checked():
    with pytest.raises(InputError, match="fans must be positive"):
        UnorderedPrefixes(fans=())
