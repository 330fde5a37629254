"""Text is read from model families that the code does not know by name."""

from __future__ import annotations

import pytest
import torch
import transformers

import tiny_models as tiny
from keyhole.models import Exposure, anatomy, capture
from keyhole.recover import recover_texts
from keyhole.recover.simulate import leak_of

SHAPE = {**tiny.SHAPE, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}
ENCODERS = {
    "mpnet": SHAPE,  # its own attention module, relative positions
    "modernbert": {
        **SHAPE,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "global_attn_every_n_layers": 2,
    },
    "t5": {
        "vocab_size": SHAPE["vocab_size"],
        "d_model": 32,
        "num_layers": 3,
        "num_heads": 4,
        "d_kv": 8,
        "d_ff": 64,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
    },
}
DECODERS = {
    "mistral": GROUPED,
    "gemma": GROUPED,  # norms of 1 + weight, embeddings times √d
    "gpt_neox": SHAPE,  # a joint projection, rotary positions in a quarter of each key
    "bloom": {**SHAPE, "n_layer": 3, "n_head": 4},  # positions only in the scores
    "cohere": GROUPED,  # rotary planes of neighbouring numbers
}
WORDS = tiny.WORDS[7], tiny.WORDS[100], tiny.WORDS[42], tiny.WORDS[3], tiny.WORDS[150]


def made(family):
    settings = {**ENCODERS, **DECODERS}[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **settings)
        model = transformers.AutoModel.from_config(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.05)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_text_comes_back_from_states_and_caches(family):
    model = made(family)
    causal = family in DECODERS
    parts = anatomy(model)
    tokenizer = tiny.tokenizer(causal)
    assert (parts.causal, parts.layers, parts.heads, parts.head_dim) == (
        causal,
        3,
        4,
        8,
    )
    for exposure in (
        "hidden:1",
        "hidden:3",
        *(("kv:0", "kv:2") if causal else ("kv:1",)),
    ):
        leak = leak_of(model, tokenizer, " ".join(WORDS), exposure)
        (found,) = recover_texts(model, tokenizer, [leak])
        assert found.ids == tokenizer(" ".join(WORDS))["input_ids"], (
            exposure,
            found.reason,
        )
        assert found.verified


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_what_is_captured_is_the_model_s_own(family):
    model = made(family)
    parts = anatomy(model)
    ids = tiny.ids(2, 9, causal=family in DECODERS)
    with torch.no_grad():
        whole = parts.base(
            input_ids=ids,
            output_hidden_states=True,
            output_attentions=True,
            use_cache=parts.causal,
            return_dict=True,
        )
    for layer in range(4):
        got = capture(model, Exposure("hidden", layer), ids=ids)["values"]
        assert torch.allclose(got, whole.hidden_states[layer], atol=1e-6)
    for number in (1, 3):
        if whole.attentions:  # sdpa returns no maps unless asked
            got = capture(model, Exposure("maps", number), ids=ids)["values"]
            assert torch.allclose(got.sum(-1), torch.ones(2, 4, 9), atol=1e-5)
        if parts.causal:
            got = capture(model, Exposure("kv", number - 1), ids=ids)
            layer = whole.past_key_values.layers[number - 1]
            assert torch.equal(got["keys"], layer.keys)
            assert torch.equal(got["values"], layer.values)


@pytest.mark.parametrize("family", ["mistral", "gemma", "gpt_neox", "cohere"])
def test_keys_of_one_token_are_the_same_without_their_positions(family):
    model = made(family)
    places = torch.arange(30)[None]
    parts = anatomy(model)
    assert parts.rotary
    for layer in (0, 2):
        cached = capture(model, Exposure("kv", layer), ids=torch.full((1, 30), 9))[
            "keys"
        ]
        keys = parts.unrotated(layer, cached, places)
        assert torch.allclose(keys, cached[:, :, :1].expand_as(keys), atol=1e-5)
        assert torch.allclose(parts.rotated(layer, keys, places), cached, atol=1e-5)
        assert not torch.allclose(cached, keys, atol=1e-3)
