"""An encoder and a decoder: the decoder is a causal model, given the states of the encoder.

A decoder attends to its own tokens and, in every block, to the encoder's states E (m,
e). With E known it is a causal model like any other, and other code need not know of
the pair:

    with behind(decoder, E):
        capture(decoder, Exposure("hidden", 3), ids=ids)

A hook passes E whenever the decoder is run. The keys and values that the blocks compute
from E do not depend on the decoder's tokens: they are computed once and shared by all
texts of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, first_line
from keyhole.models.hooks import hooks


def is_pair(model: nn.Module) -> bool:
    """Return whether this is an encoder with a decoder, and not one of them on its own."""
    config = getattr(model, "config", None)
    pair = bool(getattr(config, "is_encoder_decoder", False))
    return pair and decoder_of(model) is not model


def encoder_of(model: Any) -> nn.Module:
    return model.get_encoder()


def decoder_of(model: Any) -> nn.Module:
    """Return the decoder of a pair; a model that is no pair is its own decoder."""
    return model.get_decoder()


@contextmanager
def behind(decoder: nn.Module, states: Tensor) -> Generator[None]:
    """Give the decoder the encoder's `states` (m, e) of one text whenever it is run."""
    weight = next(decoder.parameters())  # its device and dtype
    states = states.to(weight)[None]
    cached = _cross_cache(decoder, states)

    def pass_states(
        _m: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        texts = next(len(each) for each in given if each is not None)
        kwargs = {**kwargs, "encoder_hidden_states": states.expand(texts, -1, -1)}
        if kwargs.get("use_cache") is not False:
            own = kwargs.get("past_key_values")
            kwargs["past_key_values"] = _shared(cached, own, texts)
        return args, kwargs

    register = partial(decoder.register_forward_pre_hook, with_kwargs=True)
    with hooks((register, pass_states)):
        yield


@torch.no_grad()
def _cross_cache(decoder: nn.Module, states: Tensor) -> Any:
    """Return a cache with the keys and values that every block computes from the states.

    The decoder has to run for that, on any token; `_shared` leaves out what it keeps of
    the token.
    """
    ids = torch.zeros(1, 1, dtype=torch.long, device=states.device)
    try:
        output = decoder(input_ids=ids, encoder_hidden_states=states, use_cache=True)
        cached = output.past_key_values
        cached.cross_attention_cache  # noqa: B018 - is there one?
    except Exception as error:  # a model that takes no such states raises anything
        raise InputError(
            f"{type(decoder).__name__} takes no encoder states of shape {tuple(states[0].shape)}: "
            f"{first_line(error)}"
        ) from error
    return cached


def _shared(
    cached: Any,
    own: Any,
    texts: int,
) -> Any:
    """Return the cache for a batch: the states' keys and values, expanded without copies.

    They stand next to the batch's `own` cache of its tokens, if it has one.
    """
    pair = copy.copy(cached)
    cross = copy.copy(cached.cross_attention_cache)
    cross.layers = [copy.copy(layer) for layer in cross.layers]
    for layer in cross.layers:
        layer.keys, layer.values = (
            kept.expand(texts, -1, -1, -1) for kept in (layer.keys, layer.values)
        )
    pair.cross_attention_cache = cross
    pair.self_attention_cache = type(cross)() if own is None else own
    return pair
