"""Arrays by name, against what the model exposes at that layer."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import Exposure, capture
from keyhole.recover.files.readings import role_of, sections_by_name

IDS = torch.tensor([[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]])


def expect_exposed(model, arrays, exposures, ids=IDS):
    sections = {
        str(section.exposure): section
        for section in sections_by_name(arrays, anatomy(model))
    }
    assert set(sections) == set(exposures)
    for section in sections.values():
        with torch.no_grad():
            given = capture(model, section.exposure, ids=ids)
        for name, tensor in section.tensors.items():
            torch.testing.assert_close(tensor, given[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_names_of_transformer_lens(family):
    model = tiny.model(family)
    parts = anatomy(model)
    arrays = {}
    with torch.no_grad():
        whole = model(IDS, output_hidden_states=True)
    for layer in range(3):
        arrays[f"blocks.{layer}.hook_resid_pre"] = whole.hidden_states[layer]
        arrays[f"blocks.{layer}.hook_resid_post"] = whole.hidden_states[layer + 1]
        cached = whole.past_key_values.layers[layer]
        arrays[f"blocks.{layer}.attn.hook_v"] = cached.values.transpose(1, 2)
        keys = cached.keys.transpose(1, 2)
        if parts.rotary:  # before and after the rotation, as its hooks see them
            arrays[f"blocks.{layer}.attn.hook_rot_k"] = keys
            keys = torch.zeros_like(keys)
        arrays[f"blocks.{layer}.attn.hook_k"] = keys
    arrays["blocks.2.hook_resid_post"] = torch.zeros_like(
        whole.hidden_states[0]
    )  # before the norm
    layers = [
        *(f"hidden:{layer}" for layer in range(3)),
        *(f"kv:{layer}" for layer in range(3)),
    ]
    expect_exposed(model, arrays, layers)


def test_names_of_transformers():
    model = tiny.model("gpt2")
    with torch.no_grad():
        whole = model(IDS, output_hidden_states=True)
    cache = whole.past_key_values.layers
    pairs = {f"{n}.0": layer.keys for n, layer in enumerate(cache)}
    pairs |= {f"{n}.1": layer.values for n, layer in enumerate(cache)}
    expect_exposed(model, pairs, ["kv:0", "kv:1", "kv:2"])
    old = {f"key_cache.{n}": layer.keys for n, layer in enumerate(cache)}
    old |= {f"value_cache.{n}": layer.values for n, layer in enumerate(cache)}
    expect_exposed(model, old, ["kv:0", "kv:1", "kv:2"])
    states = {f"hidden_states.{n}": rows for n, rows in enumerate(whole.hidden_states)}
    expect_exposed(model, states, [f"hidden:{layer}" for layer in range(4)])
    expect_exposed(model, {"last_hidden_state": whole.last_hidden_state}, ["hidden:3"])


def test_maps_by_name():
    model = tiny.model("bert")
    with torch.no_grad():
        maps = capture(model, Exposure("maps", 2), ids=IDS)["values"]
    expect_exposed(model, {"attentions.1": maps}, ["maps:2"])
    expect_exposed(model, {"blocks.1.attn.hook_pattern": maps}, ["maps:2"])


def test_unknown_names():
    parts = anatomy(tiny.model("bert"))
    assert role_of("activations", parts) is None
    assert role_of("encoder.layer.7", parts) is None
    keys = {
        "layers.0.keys": torch.zeros(4, 5, 8),
        "layers.0.values": torch.zeros(4, 6, 8),
    }
    with pytest.raises(InputError, match="keys and values must have the same shape"):
        sections_by_name(keys, parts)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("neighbours", [True, False])
def test_the_order_of_numbers_in_keys_of_llama_cpp(family, neighbours):
    """By the numbers, whatever the family is called: a Mistral's keys are kept as a Llama's."""
    model = tiny.model(family)
    with torch.no_grad():
        cache = model(IDS[:1], use_cache=True).past_key_values
    arrays = {"input_ids": IDS[0]}
    for number, layer in enumerate(cache.layers):
        keys = layer.keys[0].transpose(0, 1)  # positions first
        if neighbours:
            keys = keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        values = layer.values[0].transpose(0, 1)
        arrays |= {f"gguf.{number}.keys": keys, f"gguf.{number}.values": values}
    expect_exposed(model, arrays, ["kv:0", "kv:1", "kv:2"], ids=IDS[:1])
