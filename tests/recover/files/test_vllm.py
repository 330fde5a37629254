"""Hidden states as vLLM's connector writes them: a layer that is not named, with the ids."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import tiny_models as tiny
from keyhole import recover
from keyhole.core.errors import InputError

TEXT = "w1 w20 w3 w4 w99"


@pytest.fixture(scope="module")
def subject():
    model = tiny.model("llama")
    return tiny.loaded(model, True, "llama")


@pytest.fixture(scope="module")
def saved(subject, tmp_path_factory):
    """Files of the states at chosen layers, before the final norm, and the prompt's ids."""
    ids = subject.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    blocks = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: blocks.append(out))
        for layer in subject.model.layers
    ]
    with torch.no_grad():
        subject.model(ids)
    for hook in hooks:
        hook.remove()

    def write(*layers):
        path = tmp_path_factory.mktemp("vllm") / "states.safetensors"
        states = torch.stack([blocks[layer - 1][0] for layer in layers], 1)
        save_file({"hidden_states": states, "token_ids": ids[0]}, path)
        return path

    return write


def last(subject):
    return len(subject.model.layers)


def test_the_ids_in_the_file_are_checked(subject, saved):
    (result,) = recover.run(subject, saved(1, 2))
    assert (result.text, result.verified) == (TEXT, True)


@pytest.mark.parametrize("layers", [(1, 2), (2,), ()])
def test_the_states_alone_give_the_text(subject, saved, layers):
    layers = layers or (last(subject),)
    (result,) = recover.run(subject, saved(*layers), method="decoder-states")
    assert (result.text, result.verified) == (TEXT, True)
    assert result.method == "DecoderStates"


def test_a_layer_may_be_named(subject, saved):
    (result,) = recover.run(subject, saved(1, last(subject)), expose="hidden:1")
    assert result.verified
    number = last(subject)
    (result,) = recover.run(subject, saved(1, number), expose=f"hidden:{number}")
    assert result.verified


def test_another_models_states_are_refused(subject, tmp_path):
    path = tmp_path / "noise.safetensors"
    states = torch.randn(5, 2, subject.model.config.hidden_size)
    save_file({"hidden_states": states, "token_ids": torch.arange(5)}, path)
    with pytest.raises(InputError, match="no text explains these numbers"):
        recover.run(subject, path)
