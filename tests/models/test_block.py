"""Blocks of checkpoints, and their attention, answer as the modules of transformers do."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import tiny_architectures as tiny
from keyhole.core.errors import InputError
from keyhole.endpoints import open_endpoint
from keyhole.models.block import block, sub_layer


def test_an_encoder_to_rounding():
    model = tiny.model("bert", seed=1)
    with torch.no_grad():
        for name, part in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(part)
    stream = torch.Generator().manual_seed(0)
    X = torch.randn(2, 6, tiny.WIDTH, generator=stream, dtype=torch.float64)
    target = block(model, 1)
    given = model.double().encoder.layer[1](X)
    given = given[0] if isinstance(given, tuple) else given
    assert (target.norm, target.activation) == ("behind", "gelu")
    assert torch.allclose(target(X), given[:, -1], rtol=0, atol=1e-11)


def test_a_decoder_has_gates_and_norms_in_front():
    target = block(
        tiny.model("llama", seed=2), 0
    )  # held against the model's own states there
    assert (target.norm, target.activation) == ("rms", "silu")
    assert len(target.G) == len(target.A)


def test_a_target_names_a_block():
    assert open_endpoint("demo:block.0").norm == "behind"
    with pytest.raises(InputError, match=r"must end in :block\.LAYER"):
        open_endpoint("demo:block.x")
    with pytest.raises(InputError, match="not read here"):
        block(tiny.model("gpt2"), 0)


def tokens(n=6, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, tiny.WIDTH, generator=stream, dtype=torch.float64)


def test_the_attention_of_an_encoder_to_rounding():
    model = tiny.model("bert", seed=1)
    with torch.no_grad():
        for name, part in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(part)
    attention = model.double().encoder.layer[1].attention
    X = tokens()
    expected = attention.output.dense(attention.self(X)[0])
    assert torch.allclose(
        sub_layer(model, 1, every_token=True)(X), expected, rtol=0, atol=1e-11
    )
    # The last token's alone, with the input added.
    last = sub_layer(model, 1, residual=True)(X)
    assert torch.allclose(last, expected[:, -1] + X[:, -1], rtol=0, atol=1e-11)


def test_the_attention_of_a_decoder_to_what_transformers_computes_in_float32():
    model = tiny.model("llama", seed=2)
    block = model.layers[1]
    X = tokens(n=9)
    states = block.input_layernorm(X.float())
    where = torch.arange(9)[None]
    cos_sin = model.rotary_emb(states, where)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    added = block.self_attn(states, position_embeddings=cos_sin, attention_mask=mask)[0]
    target = sub_layer(model, 1, residual=True, every_token=True)
    scale = float(added.abs().max())
    assert torch.allclose(target(X), X + added.double(), rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("family", "layer", "message"),
    [
        ("bert", 2, "must be from 0 to 1, not 2"),
        ("gpt2", 0, "the attention of gpt2 adds something that is not read here"),
    ],
)
def test_what_is_no_sub_layer_here_is_refused(family, layer, message):
    with pytest.raises(InputError, match=message):
        sub_layer(tiny.model(family), layer)


def test_a_bias_of_positions_to_rounding():
    sizes = {
        "vocab_size": 20,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model = hf.MPNetModel(hf.MPNetConfig(**sizes, intermediate_size=16)).eval()
    torch.nn.init.normal_(model.encoder.relative_attention_bias.weight)
    target = sub_layer(model, 0)
    assert target.places.shape == (
        2,
        92,
    )  # as many distances as have a number of their own
    X = torch.randn(
        1, 100, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    encoder = model.double().encoder
    attention = encoder.layer[0].attention.attn
    given = attention(X, position_bias=encoder.compute_position_bias(X))[0]
    assert torch.allclose(target(X), given[:, -1], rtol=0, atol=1e-11)
    with pytest.raises(InputError, match="biases are of tokens in front"):
        sub_layer(model.float(), 0, every_token=True)
