"""What `keyhole extract TARGET` asks: an endpoint, a file, a part of a model, a language model.

FILE, demo, http://host:port/v2/models/NAME   an endpoint (oracle/target.py)
MODEL:attention.LAYER[+residual]              the attention of one block
MODEL, http://host:port                       a language model's next tokens, for its last layer
"""

from __future__ import annotations

from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.models.demo import folder_of, open_model
from keyhole.models.loading import names_model, task_of
from keyhole.models.next_token import NextTokenLogits
from keyhole.models.sub_layer import sub_layer
from keyhole.oracle.completions import Completions
from keyhole.oracle.connection import expect_authorized, names_address, without_password
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.target import open_target
from keyhole.oracle.token_questions import Logits

_OF_A_MODEL = ":attention."


def named_method(name: str) -> str | None:
    """The method for a target whose name says what it is."""
    if _OF_A_MODEL in name:
        return "attention-sub-layer"
    return "output-layer" if _names_language_model(name) else None


def opened(
    name: str, options: EndpointOptions, *, authorized: bool, language_model: bool
) -> Oracle:
    """The oracle that the name stands for; of a language model, its next tokens."""
    if language_model:
        return _language_model(name, options, authorized=authorized)
    if _OF_A_MODEL not in name:
        return open_target(name, options=options, authorized=authorized)
    options.expect_none(name)
    return _attention(name)


def _names_language_model(name: str) -> bool:
    """A server of a language model, or one of its routes, or a model that is opened here."""
    return "/v2/models/" not in name if names_address(name) else names_model(name)


def _language_model(name: str, options: EndpointOptions, *, authorized: bool) -> Oracle:
    if not _names_language_model(name):
        raise InputError(
            "expected a language model for output-layer: http://host:port, a folder, a .gguf file "
            f"or a hub name, got {without_password(name)}"
        )
    if names_address(name):
        expect_authorized(name, authorized)
        return Completions.at(name, options.only_connecting(without_password(name)))
    options.expect_none(name)
    return Logits(NextTokenLogits(open_model(name, task="causal")))


def _attention(name: str) -> Oracle:
    model, _, part = name.rpartition(_OF_A_MODEL)
    layer, plus, added = part.partition("+")
    if not layer.isdecimal() or (plus and added != "residual"):
        raise InputError(
            f"expected MODEL:attention.LAYER or MODEL:attention.LAYER+residual, got {name}"
        )
    loaded = open_model(model, task_of(folder_of(model)))
    return sub_layer(loaded.model, int(layer), residual=bool(plus))
