"""The parts that discovery finds, against the known modules of seven families."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import tiny_architectures as zoo
import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.models.anatomy import anatomy

# Where the source of transformers keeps the parts: blocks, attention, query, key,
# value, output, tokens; then the opening norm and the closing one in a block, and the
# final one in the model.
BERT = (
    "encoder.layer.{}",
    "attention.self",
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "embeddings.word_embeddings",
    "",
    "output.LayerNorm",
    "",
)
LLAMA = (
    "layers.{}",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "embed_tokens",
    "input_layernorm",
    "",
    "norm",
)
KNOWN = {
    "bert": BERT,
    "roberta": BERT,
    "distilbert": (
        "transformer.layer.{}",
        "attention",
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        "embeddings.word_embeddings",
        "",
        "output_layer_norm",
        "",
    ),
    "albert": (
        "encoder.albert_layer_groups.0.albert_layers.0",
        "attention",
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.dense",
        "embeddings.word_embeddings",
        "",
        "full_layer_layer_norm",
        "",
    ),
    "gpt2": (
        "h.{}",
        "attn",
        "attn.c_attn",
        "attn.c_attn",
        "attn.c_attn",
        "attn.c_proj",
        "wte",
        "ln_1",
        "",
        "ln_f",
    ),
    "llama": LLAMA,
    "qwen3": LLAMA,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", KNOWN)
def test_parts_are_those_of_the_source(family, dtype):
    model = tiny.model(family).to(dtype)
    parts = anatomy(model)
    at = model.get_submodule
    block, module, query, key, value, output, tokens, opening, closing, final = KNOWN[
        family
    ]
    causal = family in tiny.DECODERS
    blocks = [at(block.format(number)) for number in range(3)]
    assert list(parts.blocks) == blocks
    assert parts.tokens is at(tokens)
    assert (parts.layers, parts.width, parts.heads, parts.head_dim) == (3, 32, 4, 8)
    assert parts.key_heads == (2 if family in ("llama", "qwen3") else 4)
    assert parts.causal == causal
    assert parts.rotary == (family in ("llama", "qwen3"))
    assert [rotation is not None for rotation in parts.rotations] == [parts.rotary] * 3
    for number, (each, attention) in enumerate(
        zip(blocks, parts.attentions, strict=True), 1
    ):
        inside = each.get_submodule
        assert attention.module is inside(module)
        assert attention.output is inside(output)
        maps = [each.module for each in attention.apart]
        assert maps == [inside(query), inside(key), inside(value)]
        assert parts.opening_norm(number) is (inside(opening) if opening else None)
        last = at(final) if final and number == 3 else None
        assert parts.closing_norm(number) is (inside(closing) if closing else last)
    first = at("embeddings.LayerNorm") if not causal and family != "albert" else None
    assert parts.closing_norm(0) is first
    assert all(
        parts.lacks(kind, 2) == "" for kind in ("hidden", "kv", "maps", "attention")
    )


@pytest.mark.parametrize(("family", "thirds"), [("gpt2", True), ("gpt_neox", False)])
def test_a_joint_map_is_split_into_queries_keys_and_values(family, thirds):
    """GPT-2 has queries, then keys, then values; GPT-NeoX has all three head by head."""
    projections = anatomy(zoo.model(family)).attention(1).apart
    key = projections[1]
    places = torch.arange(96)
    if thirds:
        whole = places.view(3, 32)
    else:
        whole = places.view(4, 3, 8).transpose(0, 1).flatten(1)
    assert torch.equal(torch.stack([each.rows for each in projections]), whole)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    expected = key.module(x)[:, whole[1]]
    assert torch.allclose(key(x), expected)
    assert torch.allclose(x @ key.weight.T + key.bias, expected, atol=1e-5)


def test_discovery_leaves_no_trace_on_the_model_and_does_not_keep_it_alive():
    model = tiny.model("bert")
    model.config._attn_implementation = "sdpa"
    model.train()
    model.encoder.layer[1].eval()
    modes = [part.training for part in model.modules()]
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert not any(part._forward_hooks for part in model.modules())
    anatomy(model)
    assert not any(part._forward_hooks for part in model.modules())
    assert [part.training for part in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(
        torch.equal(each, weights[name]) for name, each in model.state_dict().items()
    )
    ran = []
    handle = model.register_forward_hook(lambda *_: ran.append(1))
    anatomy(model)
    assert ran == []  # once for each model
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None


def test_a_pair_has_the_parts_of_its_encoder():
    model = zoo.model("t5")
    parts = anatomy(model)
    assert parts.base is model.encoder
    assert not parts.causal
    assert parts.max_length > 10**9  # relative positions go on


def test_models_that_read_no_text_are_refused():
    with pytest.raises(
        InputError, match="Linear is not a model of the transformers library"
    ):
        anatomy(torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="ViTModel reads pixel_values, not text"):
        anatomy(zoo.model("vit"))
