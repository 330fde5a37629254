"""Tokens tried after one cached prefix, against the model run on each whole text."""

from __future__ import annotations

import pytest
import torch
import transformers

import tiny_models as tiny
from keyhole.models import Exposure, anatomy, capture
from keyhole.models.branches import Branches


def alone(model, exposure, ids):
    return capture(model, exposure, ids=torch.tensor([ids]))["values"][0][..., -1, :]


@pytest.mark.parametrize("family", tiny.DECODERS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("exposure", ["hidden:2", "hidden:3", "kv:1", "attention:2"])
def test_chains_and_fans_of_texts_of_different_lengths(family, attention, exposure):
    model = tiny.shared(family)
    exposure = Exposure.parse(exposure)
    model.config._attn_implementation = attention
    texts = tiny.ids(texts=3, length=9, causal=True).tolist()
    branches = Branches(model, torch.zeros(3, dtype=torch.long))
    chain = torch.tensor([True, False, True])
    fan = [7, 8, texts[1][0], 9]
    given = branches.expose(
        exposure, chain, ids=torch.tensor([texts[0][:4], fan, texts[2][:4]])
    )
    for place in range(4):
        assert torch.allclose(
            given["values"][0][..., place, :],
            alone(model, exposure, texts[0][: place + 1]),
            atol=1e-5,
        )
        expected = alone(model, exposure, [fan[place]])
        assert torch.allclose(given["values"][1][..., place, :], expected, atol=1e-5)
    # The third text ends; the first keeps three tokens of its chain, the second node 2
    # of its fan.
    branches.accept(torch.tensor([0, 2]), torch.tensor([3, 1]), torch.tensor([0, 1]))
    assert branches.lengths.tolist() == [3, 1]
    given = branches.expose(
        exposure, ~chain[:2], ids=torch.tensor([[7, 8], texts[1][1:3]])
    )
    for place in range(2):
        first = alone(model, exposure, [*texts[0][:3], 7 + place])
        second = alone(model, exposure, texts[1][: 2 + place])
        assert torch.allclose(given["values"][0][..., place, :], first, atol=1e-5)
        assert torch.allclose(given["values"][1][..., place, :], second, atol=1e-5)


def test_memory_grows_with_the_prefix_not_with_the_candidates():
    model = tiny.shared("llama")
    branches = Branches(model, torch.zeros(1, dtype=torch.long))
    chain = torch.tensor([True])
    exposure = Exposure("hidden", 2)
    branches.expose(exposure, chain, ids=tiny.ids(1, 10, causal=True))
    branches.accept(torch.tensor([0]), torch.tensor([10]), torch.tensor([0]))
    branches.expose(exposure, ~chain, ids=torch.arange(5, 55)[None])
    assert branches.layers[0].keys.shape == (1, 2, 60, 8)
    branches.accept(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
    assert branches.layers[0].keys.shape == (1, 2, 10, 8)
    assert branches.layers[2].keys is None  # the layer above the exposure never ran


@pytest.mark.parametrize("family", tiny.DECODERS)
def test_rotation_is_undone(family):
    """A key without its position is the same token's key at position 0."""
    model = tiny.shared(family)
    parts = anatomy(model)
    places = torch.arange(6)
    cached = capture(model, Exposure("kv", 0), ids=torch.full((1, 6), 9))["keys"]
    keys = parts.unrotated(0, cached, places[None])
    if parts.rotary:
        assert torch.allclose(keys, cached[:, :, :1].expand_as(keys), atol=1e-5)
        assert not torch.allclose(
            cached[:, :, 1:], cached[:, :, :1].expand_as(cached[:, :, 1:])
        )
    else:
        assert torch.equal(keys, cached)


def test_the_window_is_read_from_the_configuration():
    """Models that differ only in the window agree on texts that are shorter than it.

    Real windows are thousands of tokens long, so that no trial of a few shows one: here
    the cache would go on past it, and be wrong.
    """
    config = tiny.model("llama").config
    shape = {name: getattr(config, name) for name in tiny.SHAPE}
    made = transformers.MistralConfig(
        **shape,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        initializer_range=0.12,
    )
    torch.manual_seed(0)
    model = transformers.MistralModel(made).eval()
    text = tiny.ids(1, 10, causal=True)[0].tolist()
    exposure = Exposure("hidden", 3)
    for configured in (True, False):
        made.sliding_window = 6
        branches = Branches(model, torch.zeros(1, dtype=torch.long))
        if not configured:
            made.sliding_window = None
            branches = Branches(model, torch.zeros(1, dtype=torch.long))
            made.sliding_window = 6
        chain = torch.tensor([True])
        branches.expose(exposure, chain, ids=torch.tensor([text[:9]]))
        branches.accept(torch.tensor([0]), torch.tensor([9]), torch.tensor([0]))
        given = branches.expose(exposure, ~chain, ids=torch.tensor([text[9:]]))[
            "values"
        ][0, 0]
        right = torch.allclose(given, alone(model, exposure, text), atol=1e-4)
        assert right == configured
        (each,) = branches.each(exposure, 0, 9, torch.tensor(text[9:]))[0]["values"][0]
        assert torch.allclose(each, alone(model, exposure, text), atol=1e-4)


def test_padding_of_a_chain_does_not_leave_the_window():
    """One text of a batch is tried with many tokens, so another's short chain is padded."""
    shape = {name: getattr(tiny.model("llama").config, name) for name in tiny.SHAPE}
    made = transformers.MistralConfig(
        **shape, num_key_value_heads=2, head_dim=8, sliding_window=6
    )
    model = transformers.MistralModel(made).eval()
    text = tiny.ids(1, 4, causal=True)[0].tolist()
    exposure = Exposure("hidden", 3)
    branches = Branches(model, torch.zeros(2, dtype=torch.long))
    padded = torch.tensor([text[:3] + text[2:3] * 7, list(range(10))])
    chain = torch.tensor([True, False])
    counts = torch.tensor([3, 10])
    branches.expose(exposure, chain, padded, counts)
    assert int(branches.positions.max()) == 2
    branches.accept(torch.tensor([0]), torch.tensor([3]), torch.tensor([0]))
    (each,) = branches.each(exposure, 0, 3, torch.tensor(text[3:]))[0]["values"][0]
    assert torch.allclose(each, alone(model, exposure, text), atol=1e-4)
