"""Opens targets that are endpoints: planted ones, servers, language models, a model's attention.

target.py tells the kind of a TARGET.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from keyhole.core.endpoint import (
    EndpointOptions,
    expect_authorized,
    names_address,
    without_password,
)
from keyhole.core.errors import InputError
from keyhole.models.block import block, sub_layer
from keyhole.models.demo import open_model
from keyhole.models.next_token import NextTokenLogits
from keyhole.oracle.completions import Completions
from keyhole.oracle.http import Limits
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.protocol import Oracle, stated
from keyhole.oracle.storage import load, plant
from keyhole.oracle.token_questions import Logits
from keyhole.target import (
    ATTENTION_OF_A_MODEL,
    BLOCK_OF_A_MODEL,
    LANGUAGE_MODELS,
    MODELS,
    TargetKind,
    kind_of,
)


def demo_endpoints() -> dict[str, Oracle]:
    """Return the endpoints that ship with Keyhole: a planted one for every kind of answer."""
    seed = 2601
    return {
        "the scoring head": plant("head", dim=64, rank=8, seed=seed),
        "the scorer with four heads": plant(
            "multi-head", dim=32, heads=4, rank=8, seed=seed
        ),
        "the one-layer Transformer": plant("one-layer", dim=16, width=32, seed=seed),
        "the attention layer, last token": plant("attention", dim=64, seed=seed),
        "the attention layer, every token": plant(
            "attention", dim=64, every_token=True, causal=True, seed=seed
        ),
        "the attention layer, every token, no mask": plant(
            "attention", dim=16, every_token=True, seed=seed
        ),
    }


def open_endpoint(
    name: str,
    limits: Limits | None = None,
    *,
    options: EndpointOptions | None = None,
    authorized: bool = False,
) -> Oracle:
    """Open the endpoint of this name; of the demo, its scoring head.

    `limits` bounds the cost of querying a server, and `options` say how requests are
    sent. A server on another machine is opened only if the user is `authorized`.
    """
    options = options or EndpointOptions()
    if names_address(name):
        base, model = server_and_model(name)
        expect_authorized(name, authorized)
        return OpenInference(base, model, limits=limits, options=options)
    options.expect_none(name)
    kind = kind_of(name)
    if kind is TargetKind.ATTENTION:
        return _attention(name)
    if kind is TargetKind.BLOCK:
        return _block(name)
    if kind is TargetKind.DEMO:
        return demo_endpoints()["the scoring head"]
    return load(name)


def open_language_model(
    name: str,
    options: EndpointOptions,
    *,
    authorized: bool,
) -> Oracle:
    """Open a language model, or a server of one, as an oracle of next-token logits."""
    kind = kind_of(name)
    if kind not in LANGUAGE_MODELS:
        raise InputError(
            f"output-layer reads a language model, and {without_password(name)} is none: give "
            "http://host:port, a folder, a .gguf file or a hub name"
        )
    if kind is TargetKind.MODEL:
        options.expect_none(name)
        return Logits(NextTokenLogits(open_model(name, task="causal")))
    expect_authorized(name, authorized)
    return Completions.at(name, options.only_connecting(without_password(name)))


def _attention(name: str) -> Oracle:
    model, _, part = name.rpartition(ATTENTION_OF_A_MODEL)
    layer, plus, added = part.partition("+")
    if not layer.isdecimal() or (plus and added != "residual"):
        raise InputError(
            f"{name} must end in :attention.LAYER or :attention.LAYER+residual"
        )
    loaded = open_model(model, None)
    return sub_layer(loaded.model, int(layer), residual=bool(plus))


def _block(name: str) -> Oracle:
    model, _, layer = name.rpartition(BLOCK_OF_A_MODEL)
    if not layer.isdecimal():
        raise InputError(f"{name} must end in :block.LAYER")
    loaded = open_model(model, None)
    return block(loaded.model, int(layer))


def server_and_model(address: str) -> tuple[str, str]:
    """Return the server and the model in http://host:port/v2/models/NAME."""
    public = without_password(address)
    base, mark, model = address.partition(MODELS)
    model = model.strip("/")
    if "?" in public or "#" in public:
        # The query is not shown: it may hold a secret, and identities and ledgers must
        # not.
        start = public.partition("?")[0].partition("#")[0]
        raise InputError(f"{start} must be an address without ? and #: use --header")
    if not mark or not model:
        raise InputError(f"{public} must have the form http://host:port/v2/models/NAME")
    return base, model


def describe(name: str, oracle: Oracle) -> str:
    """Return a description of an endpoint for the head of a report."""
    if kind := stated(oracle, "kind"):
        return f"planted {kind}, d = {oracle.dim} ({name})"
    public = without_password(name)
    note = getattr(oracle, "note", "")
    about = f"{public}; {note}" if note else public
    return f"{urlsplit(public).path.rsplit('/', 1)[-1]}, d = {oracle.dim} ({about})"
