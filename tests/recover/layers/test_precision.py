"""The precision of a quantised cache is inferred from its numbers, and its text is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import QuantizedCache

import reference
import tiny_models as tiny
from keyhole.models import Exposure, capture
from keyhole.recover import AttentionMaps, KeyValues, recover_text
from keyhole.recover.layers.precision import FLOAT32, precision_of

WORDS = tiny.tokenizer(causal=True)
WIDE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
}  # two heads of keys, 32 numbers each
LENGTH = 16


def tokens_of(shape):
    """Return a group for each head and token, as for KIVI's values."""
    return np.arange(np.prod(shape)).reshape(-1, shape[-1])


def channels_of(shape):
    """Return a group for each head and channel over 16 tokens, as for KIVI's keys."""
    places = np.arange(np.prod(shape)).reshape(shape)
    return [
        places[h, t : t + 16, c]
        for h in range(shape[0])
        for t in range(0, shape[1], 16)
        for c in range(shape[2])
    ]


def strided_of(shape):
    """Return groups of numbers at equal distances, as for hqq's axis 0."""
    return np.arange(np.prod(shape)).reshape(32, -1).T


def cache(model, ids, layer=1):
    with torch.no_grad():
        given = capture(model, Exposure("kv", layer), ids=torch.tensor([ids]))
    return given["keys"][0], given["values"][0]


@pytest.fixture(scope="module")
def subject():
    return tiny.model("llama", **WIDE), tiny.ids(1, LENGTH, causal=True)[0].tolist()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("groups", [tokens_of, channels_of, strided_of])
def test_steps_of_groups(subject, bits, groups):
    keys, values = cache(*subject)
    given, steps = reference.quantised(keys.numpy(), bits, groups(keys.shape))
    more, others = reference.quantised(values.numpy(), bits, tokens_of(values.shape))
    leak = KeyValues(torch.tensor(given), torch.tensor(more), layer=1)
    found = precision_of(leak)
    expected = leak.rows({"keys": torch.tensor(steps), "values": torch.tensor(others)})
    right = (found.sigma * 12**0.5 / expected - 1).abs() < 0.01
    assert right.float().mean() > 0.9
    assert (
        found.sigma * 12**0.5 > 0.99 * expected
    ).all()  # with few levels the step may be larger
    off = leak.rows({"keys": keys, "values": values}) - leak.rows(leak.tensors)
    assert (off.abs() <= 1.001 * found.most).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_eight_bit_floats_with_and_without_a_scale(subject, dtype, scale):
    keys, values = cache(*subject)
    kept = [
        (part / scale).to(getattr(torch, dtype)).float() * scale
        for part in (keys, values)
    ]
    leak = KeyValues(*kept, layer=1)
    found = precision_of(leak)
    off = leak.rows({"keys": keys, "values": values}) - leak.rows(leak.tensors)
    assert (off.abs() <= 1.001 * found.most).all()
    assert 0.8 < (off / found.sigma).square().mean() < 1.2


def lies_on_no_grid(leak):
    """Nothing is left of the error but the difference of float32 between machines."""
    size = leak.rows(leak.tensors).square().mean().sqrt()
    return torch.allclose(precision_of(leak).rounding, FLOAT32 * size)


def test_numbers_as_they_are_have_no_steps(subject):
    keys, values = cache(*subject)
    assert lies_on_no_grid(KeyValues(keys, values, layer=1))


def test_numbers_of_few_sizes_are_no_grid():
    """In a saturated map nearly all numbers are 0 or 1 to three digits, and still in float32."""
    stream = torch.Generator().manual_seed(0)
    maps = (40 * torch.randn(12, 11, 11, generator=stream)).softmax(-1)
    assert lies_on_no_grid(AttentionMaps(maps, layer=1))
    assert lies_on_no_grid(KeyValues(maps, maps, layer=1))


def test_read_from_the_librarys_own_fp8_cache(subject):
    model, ids = subject
    quantised = QuantizedCache("fp8", model.config)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=quantised)
    one_more = torch.zeros(1, 2, 1, 32)
    keys, values = quantised.update(
        one_more, one_more, 1
    )  # the whole cache and this token
    leak = KeyValues(keys[:, :, :-1], values[:, :, :-1], layer=1)
    recovery = recover_text(model, WORDS, leak)
    assert recovery.verified
    assert recovery.ids == ids


def test_read_from_kivi(subject):
    model, ids = subject
    keys, values = cache(*subject)
    given = reference.quantised(keys.numpy(), 2, channels_of(keys.shape))[0]
    more = reference.quantised(values.numpy(), 2, tokens_of(values.shape))[0]
    leak = KeyValues(torch.tensor(given), torch.tensor(more), layer=1)
    recovery = recover_text(model, WORDS, leak)
    assert recovery.verified
    assert recovery.ids == ids
    other = recover_text(tiny.model("llama", seed=3, **WIDE), WORDS, leak)
    assert not other.verified


def test_a_coarse_grid_that_lies_on_a_fine_one():
    """Steps of 12 below 127 also lie on the grid of 127 steps."""
    levels = torch.tensor([127, 67, 31, 19, 7, -5, -17, -29, -41, -53]) * 6e-4
    stream = torch.Generator().manual_seed(0)
    rows = levels[torch.randint(1, len(levels), (1, 4, 32), generator=stream)]
    rows[..., 0] = levels[0]
    found = precision_of(KeyValues(rows, rows, layer=0))
    assert torch.allclose(found.sigma * 12**0.5, torch.tensor(12 * 6e-4), rtol=0.01)
