"""Keys and values are read as rows of their positions, at every layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny_models as tiny
from keyhole.core import Status
from keyhole.models import Exposure, capture
from keyhole.recover import recover_text, recover_texts
from keyhole.recover.layers.key_values import CachedKeys
from keyhole.recover.leaks import HiddenStates, KeyValues

FIRST = [
    *((family, 1) for family in tiny.ENCODERS),
    *((family, 0) for family in tiny.DECODERS),
]


def leaks_of(model, layer, ids):
    given = capture(model, Exposure("kv", layer), ids=ids)
    return [
        KeyValues(k, v, layer)
        for k, v in zip(given["keys"], given["values"], strict=True)
    ]


@pytest.mark.parametrize(("family", "layer"), FIRST)
def test_the_first_layer(family, layer):
    causal = family in tiny.DECODERS
    model = tiny.shared(family)
    ids = tiny.ids(texts=3, length=14, causal=causal)
    texts = [ids[:1], ids[1:2, :9], ids[2:]]
    leaks = [leaks_of(model, layer, text)[0] for text in texts]
    for result, text in zip(
        recover_texts(model, tiny.tokenizer(causal), leaks), texts, strict=True
    ):
        assert result.ids == text[0].tolist()
        assert result.verified


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_deeper_layers_of_an_encoder(family):
    model = tiny.shared(family)
    ids = tiny.ids(texts=2, length=10)
    for result, text in zip(
        recover_texts(model, tiny.tokenizer(), leaks_of(model, 2, ids)),
        ids.tolist(),
        strict=True,
    ):
        assert result.ids == text
        assert result.verified


def test_noise_and_a_missing_position():
    model = tiny.shared("bert")
    ids = tiny.ids(texts=1, length=10)
    leak = leaks_of(model, 1, ids)[0]
    stream = torch.Generator().manual_seed(0)
    sigma = 0.05 * float(leak.keys.std())
    noisy = {
        n: t + sigma * torch.randn(t.shape, generator=stream)
        for n, t in leak.tensors.items()
    }
    result = recover_text(model, tiny.tokenizer(), replace(leak, **noisy, noise=sigma))
    assert result.ids == ids[0].tolist()
    gap = {name: tensor.clone() for name, tensor in leak.tensors.items()}
    for tensor in gap.values():
        tensor[:, 4] = torch.nan
    result = recover_text(model, tiny.tokenizer(), replace(leak, **gap))
    assert [a for n, a in enumerate(result.ids) if n != 4] == ids[
        0, [0, 1, 2, 3, *range(5, 10)]
    ].tolist()
    assert not result.verified


def test_another_models_keys_are_not_believed():
    ids = tiny.ids(texts=1, length=10)
    leak = leaks_of(tiny.shared("bert", seed=7), 1, ids)[0]
    result = recover_text(tiny.shared("bert"), tiny.tokenizer(), leak)
    assert not result.verified
    assert result.status is not Status.RECOVERED


def test_another_kind_of_leak():
    model = tiny.shared("bert")
    leak = HiddenStates(torch.zeros(5, 32), 1)
    result = recover_text(model, tiny.tokenizer(), leak, method=CachedKeys())
    assert result.status is Status.NOT_APPLICABLE
