"""Captures against the model's own outputs; hooks are always removed."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.models import Exposure, anatomy, capture

FAMILIES = tiny.ENCODERS + tiny.DECODERS


def hooks_of(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.modules()
    )


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    model = tiny.model(request.param)
    ids = tiny.ids(causal=request.param in tiny.DECODERS)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    whole = model(
        input_ids=ids,
        attention_mask=mask,
        output_hidden_states=True,
        output_attentions=True,
    )
    return model, ids, mask, whole


def test_hidden_states_are_the_models_own(case):
    model, ids, mask, whole = case
    for layer in range(4):
        got = capture(model, Exposure("hidden", layer), ids=ids, mask=mask)["values"]
        assert torch.equal(got, whole.hidden_states[layer])


def test_maps_are_the_models_own(case):
    model, ids, mask, whole = case
    model.config._attn_implementation = "sdpa"
    for layer in (1, 2, 3):
        got = capture(model, Exposure("maps", layer), ids=ids, mask=mask)["values"]
        assert torch.allclose(got, whole.attentions[layer - 1], atol=1e-6)
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"


def test_keys_and_values(case):
    """A causal model's come from its cache, an encoder's from its projections."""
    model, ids, mask, _whole = case
    parts = anatomy(model)
    if parts.causal:
        cache = model(
            input_ids=ids, attention_mask=mask, use_cache=True
        ).past_key_values
        for layer in range(3):
            got = capture(model, Exposure("kv", layer), ids=ids, mask=mask)
            assert torch.equal(got["keys"], cache.layers[layer].keys)
            assert torch.equal(got["values"], cache.layers[layer].values)
        return
    for layer in (1, 2, 3):
        got = capture(model, Exposure("kv", layer), ids=ids)
        _, key, value = parts.attention(layer).apart
        states = capture(model, Exposure("hidden", layer - 1), ids=ids)["values"]
        keys = states @ key.weight.T + key.bias
        values = states @ value.weight.T + value.bias
        head = torch.stack([got["keys"][:, 1], got["values"][:, 1]])
        expected = torch.stack([keys[..., 8:16], values[..., 8:16]])
        assert torch.allclose(head, expected, atol=1e-6)


def test_attention_output_is_maps_times_values(case):
    model, ids, mask, whole = case
    parts = anatomy(model)
    for layer in (1, 3):
        got = capture(model, Exposure("attention", layer), ids=ids, mask=mask)["values"]
        number = layer - 1 if parts.causal else layer
        values = capture(model, Exposure("kv", number), ids=ids, mask=mask)["values"]
        values = values.repeat_interleave(parts.heads // parts.key_heads, 1)
        mixed = (whole.attentions[layer - 1] @ values).transpose(1, 2).flatten(2)
        expected = parts.attentions[layer - 1].output(mixed)
        assert torch.allclose(got, expected, atol=1e-5)


def test_gradients_reach_the_embeddings_and_layers_above_never_run(case):
    model, ids, mask, whole = case
    parts = anatomy(model)
    ran = []
    handle = parts.base.register_forward_hook(lambda *_: ran.append("base"))
    words = parts.tokens(ids).requires_grad_()
    got = capture(model, Exposure("hidden", 1), embeddings=words, mask=mask)["values"]
    assert torch.allclose(got, whole.hidden_states[1], atol=1e-6)
    got.square().sum().backward()
    assert words.grad.abs().sum() > 0
    handle.remove()
    assert ran == []


def test_pooled_embedding():
    model = tiny.model("bert")
    ids = tiny.ids()
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    whole = model(input_ids=ids, attention_mask=mask)
    states = whole.last_hidden_state
    mean = torch.stack([states[0].mean(0), states[1, :9].mean(0), states[2].mean(0)])
    unit = mean / mean.norm(dim=-1, keepdim=True)
    got = capture(model, Exposure("pooled"), ids=ids, mask=mask)["values"]
    assert torch.allclose(got, unit, atol=1e-6)
    got = capture(model, Exposure("pooled", normalised=False), ids=ids, mask=mask)[
        "values"
    ]
    assert torch.allclose(got, mean, atol=1e-6)
    got = capture(model, Exposure("pooled", pooling="pooler"), ids=ids, mask=mask)[
        "values"
    ]
    assert torch.allclose(got, whole.pooler_output, atol=1e-6)
    got = capture(model, Exposure("pooled", pooling="cls", normalised=False), ids=ids)[
        "values"
    ]
    assert torch.allclose(got[0], states[0, 0], atol=1e-6)
    with pytest.raises(InputError, match="has no pooler"):
        capture(tiny.model("distilbert"), Exposure("pooled", pooling="pooler"), ids=ids)


@pytest.mark.parametrize(
    "exposure", ["hidden:2", "kv:1", "maps:2", "attention:2", "pooled"]
)
def test_hooks_come_off(exposure):
    model = tiny.model("albert")
    ids = tiny.ids()
    before = hooks_of(model)
    capture(model, Exposure.parse(exposure), ids=ids)
    assert hooks_of(model) == before
    with pytest.raises(IndexError):
        capture(model, Exposure.parse(exposure), ids=ids + 10_000)
    assert hooks_of(model) == before
    broken = anatomy(model).attention(1).apart[2].module
    handle = broken.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        capture(model, Exposure.parse(exposure), ids=ids)
    handle.remove()
    assert hooks_of(model) == before
    assert model.config._attn_implementation == "eager"


def test_a_model_with_a_head_is_read_below_it():
    import transformers

    base = tiny.model("bert")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        topped = transformers.BertForSequenceClassification(base.config).eval()
    topped.bert.load_state_dict(base.state_dict())
    got = capture(topped, Exposure("hidden", 3), ids=tiny.ids())["values"]
    assert torch.equal(
        got, capture(base, Exposure("hidden", 3), ids=tiny.ids())["values"]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hidden", "an exposure such as hidden:3"),
        ("hidden:x", "an exposure such as hidden:3"),
        ("gradients:1", "an exposure must be one of hidden"),
        ("logits:2", "an exposure such as hidden:3, pooled or logits"),
    ],
)
def test_an_invalid_exposure_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        Exposure.parse(text)


@pytest.mark.parametrize(
    ("family", "exposure", "layers"),
    [
        ("bert", "hidden:4", "0 to 3"),
        ("bert", "maps:0", "1 to 3"),
        ("bert", "kv:0", "1 to 3"),
        ("gpt2", "kv:3", "0 to 2"),
    ],
)
def test_a_layer_out_of_range_is_refused(family, exposure, layers):
    with pytest.raises(InputError, match=f"must be from {layers}"):
        capture(tiny.model(family), Exposure.parse(exposure), ids=tiny.ids())


def test_logits_follow_the_last_token_wherever_the_padding_is():
    model = tiny.language_model("llama")
    ids = tiny.ids(2, 6, causal=True)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    exposure = Exposure("logits")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = ids[:1, :4]
    last = ids[1:, 2:]
    right = capture(model, exposure, ids=ids[:1], mask=mask[:1])["values"]
    assert torch.allclose(
        right, capture(model, exposure, ids=first)["values"], atol=1e-5
    )
    left = capture(
        model, exposure, ids=ids[1:], mask=mask[1:], position_ids=positions[1:]
    )
    assert torch.allclose(left["values"][0, 0], model(last).logits[0, -1], atol=1e-5)


def test_logits_need_a_causal_model_with_its_head():
    with pytest.raises(
        InputError, match="logits needs a causal model, and bert is none"
    ):
        Exposure("logits").block(anatomy(tiny.model("bert")))
    with pytest.raises(InputError, match="LlamaModel has no head for the next token"):
        capture(
            tiny.model("llama"), Exposure("logits"), ids=tiny.ids(1, 4, causal=True)
        )
