"""An encoder and a decoder: the decoder is a causal model, given what the encoder made.

A decoder attends to its own tokens and, in every block, to the encoder's states E (m, e). With E
known it is a causal model like any other, and nothing else has to know of the pair:

    with behind(decoder, E):
        capture(decoder, Exposure("hidden", 3), ids=ids)

A hook hands E over whenever the decoder is run. The keys and values that the blocks make of it do
not depend on the decoder's tokens: they are computed once and shared by all texts of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, first_line
from keyhole.models.hooks import hooks


def is_pair(model: nn.Module) -> bool:
    """Is this an encoder and a decoder, and not one of the two?"""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and decoder_of(model) is not model


def encoder_of(model: nn.Module) -> nn.Module:
    return cast("Any", model).get_encoder()


def decoder_of(model: nn.Module) -> nn.Module:
    """The decoder of an encoder and a decoder; a model that is no pair is its own."""
    return cast("Any", model).get_decoder()


@contextmanager
def behind(decoder: nn.Module, states: Tensor) -> Generator[None]:
    """The decoder is given the encoder's `states` (m, e) of one text, whenever it is run."""
    weight = next(decoder.parameters())
    states = states.to(weight)[None]
    crossed = _crossed(decoder, states)

    def hand_over(
        _m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = next(
            kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None
        )
        kwargs = {**kwargs, "encoder_hidden_states": states.expand(len(given), -1, -1)}
        if kwargs.get("use_cache") is not False:
            own = kwargs.get("past_key_values")
            kwargs["past_key_values"] = _shared(crossed, own, len(given))
        return args, kwargs

    with hooks((partial(decoder.register_forward_pre_hook, with_kwargs=True), hand_over)):
        yield


@torch.no_grad()
def _crossed(decoder: nn.Module, states: Tensor) -> Any:
    """A cache with the keys and values that every block makes of the encoder's states."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=states.device)
    try:
        given = decoder(input_ids=ids, encoder_hidden_states=states, use_cache=True)
        crossed = given.past_key_values
        crossed.cross_attention_cache  # noqa: B018 - is there one?
    except Exception as error:  # whatever a model says that takes no such states
        raise InputError(
            f"{type(decoder).__name__} takes no encoder states of shape {tuple(states[0].shape)}: "
            f"{first_line(error)}"
        ) from error
    return crossed


def _shared(crossed: Any, own: Any, texts: int) -> Any:
    """The same for a batch of texts, without copies, next to their own cache."""
    pair, cross = copy.copy(crossed), copy.copy(crossed.cross_attention_cache)
    cross.layers = [copy.copy(layer) for layer in cross.layers]
    for layer in cross.layers:
        layer.keys, layer.values = (
            kept.expand(texts, -1, -1, -1) for kept in (layer.keys, layer.values)
        )
    pair.cross_attention_cache = cross
    pair.self_attention_cache = type(cross)() if own is None else own
    return pair
