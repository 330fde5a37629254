"""A decoder given an encoder's states computes the same as inside the whole model."""

import pytest
import torch

import tiny_architectures as zoo
from keyhole.core.errors import InputError
from keyhole.models import Exposure, anatomy, capture
from keyhole.models.pairs import behind, decoder_of, encoder_of, is_pair

IDS = torch.tensor([[7, 9, 20, 31, 8], [11, 12, 50, 6, 33]])


@pytest.mark.parametrize("family", zoo.PAIRS)
def test_the_decoder_computes_what_the_whole_model_does(family):
    model = zoo.model(family)
    source = zoo.inputs(family)["input_ids"][:1]
    given = model(
        input_ids=source.expand(2, -1),
        decoder_input_ids=IDS,
        output_hidden_states=True,
        use_cache=True,
    )
    states = encoder_of(model)(input_ids=source).last_hidden_state[0]
    decoder = decoder_of(model)
    with behind(decoder, states):
        parts = anatomy(decoder)
        hidden = capture(decoder, Exposure("hidden", 1), ids=IDS)["values"]
        cached = capture(decoder, Exposure("kv", 1), ids=IDS)
    assert parts.causal
    assert torch.allclose(hidden, given.decoder_hidden_states[1], atol=1e-5)
    own = given.past_key_values.self_attention_cache.layers[1]
    assert torch.allclose(cached["keys"], own.keys, atol=1e-5)
    assert torch.allclose(cached["values"], own.values, atol=1e-5)
    assert not anatomy(model).causal  # the whole is its encoder


def test_the_states_are_removed_when_the_context_ends():
    model = zoo.model("bart")
    decoder = decoder_of(model)
    states = torch.randn(4, zoo.WIDTH)
    alone = decoder(input_ids=IDS).last_hidden_state
    with behind(decoder, states):
        assert not torch.allclose(decoder(input_ids=IDS).last_hidden_state, alone)
    assert torch.equal(decoder(input_ids=IDS).last_hidden_state, alone)


def test_only_an_encoder_with_a_decoder_is_a_pair():
    model = zoo.model("bart")
    assert is_pair(model)
    assert not is_pair(decoder_of(model))
    assert not is_pair(encoder_of(model))
    assert not is_pair(zoo.model("bert"))
    assert not is_pair(zoo.model("gpt2"))
    with (
        pytest.raises(InputError, match="takes no encoder states of shape"),
        behind(decoder_of(model), torch.randn(4, zoo.WIDTH + 1)),
    ):
        pass


def test_an_encoder_of_sounds_is_refused():
    with pytest.raises(
        InputError, match="WhisperEncoder reads input_features, not text"
    ):
        anatomy(zoo.model("whisper"))
