"""What TARGET means, found out once for every command, and the endpoints among targets.

| kind | as people write it |
|---|---|
| demo | `demo` |
| endpoint | `http(s)://host:port/v2/models/NAME`, of the Open Inference Protocol |
| server | `http(s)://host:port`: a server of a language model |
| route | any other address: one route of such a server |
| store | `chroma:FOLDER`, `postgresql://…`, `.npy` and others (stores/__init__.py) |
| leak | a saved slot of llama.cpp, a captured leak, tensors that another program wrote |
| model | a folder, a .gguf file, `owner/name` on the hub |
| attention | `MODEL:attention.LAYER[+residual]`: the attention of one block, as an endpoint |
| file | any other file: a planted endpoint |
| unknown | there is no such thing |
"""

from __future__ import annotations

import re
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from keyhole.configs.files import SLOT_MAGIC
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.core.files import exists, is_file, is_folder
from keyhole.models.demo import DEMO, folder_of, open_model
from keyhole.models.loading import task_of
from keyhole.models.next_token import NextTokenLogits
from keyhole.models.sub_layer import sub_layer
from keyhole.oracle.completions import Completions
from keyhole.oracle.connection import expect_authorized, names_address, without_password
from keyhole.oracle.http import Limits
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.storage import load, plant
from keyhole.oracle.token_questions import Logits
from keyhole.stores import kind_of as kind_of_store

_OF_A_MODEL = ":attention."
_MODELS = "/v2/models/"
_FILES = (".safetensors", ".json", ".bin", ".pt", ".npz")  # what a hub name does not end in


class TargetKind(StrEnum):
    DEMO = "demo"
    ENDPOINT = "endpoint"
    SERVER = "server"
    ROUTE = "route"
    STORE = "vector store"
    LEAK = "leak"
    MODEL = "model"
    ATTENTION = "attention"
    FILE = "file"
    UNKNOWN = "unknown"


LANGUAGE_MODELS = (TargetKind.SERVER, TargetKind.ROUTE, TargetKind.MODEL)


def kind_of(name: str) -> TargetKind:
    if names_address(name) and _is_server(name):
        return TargetKind.SERVER
    if _is_leak(name):
        return TargetKind.LEAK
    if kind_of_store(name) is not None:
        return TargetKind.STORE
    if names_address(name):
        return TargetKind.ENDPOINT if _MODELS in name else TargetKind.ROUTE
    if _OF_A_MODEL in name:
        return TargetKind.ATTENTION
    if _is_model(name):
        return TargetKind.MODEL
    if name == DEMO:
        return TargetKind.DEMO
    return TargetKind.FILE if exists(name) else TargetKind.UNKNOWN


def _is_server(name: str) -> bool:
    """Without a path that says what is asked?"""
    try:
        parts = urlsplit(name)
    except ValueError:  # half an IPv6 address
        return False
    return parts.path in ("", "/") and not parts.query


def _is_model(name: str) -> bool:
    path = Path(name)
    if exists(path) or path.suffix == ".gguf":
        return is_folder(path) or path.suffix == ".gguf"
    return re.fullmatch(r"[\w-]+/[\w.-]+", name) is not None and path.suffix not in _FILES


def _is_leak(name: str) -> bool:
    """A saved slot, a leak that Keyhole wrote, or a file of another program's."""
    if not is_file(name):
        return False
    if name.endswith((".pt", ".pth")):
        return True
    with suppress(OSError, SafetensorError):
        with Path(name).open("rb") as file:
            if file.read(len(SLOT_MAGIC)) == SLOT_MAGIC:
                return True
        if name.endswith(".safetensors"):
            with safe_open(name, framework="pt") as tensors:
                metadata = tensors.metadata() or {}
                return "leak" in metadata or "keyhole" not in metadata
    return False


def demo_endpoints() -> dict[str, Oracle]:
    """Those that ship with Keyhole: one planted endpoint for every kind of answer."""
    seed = 2601
    return {
        "the scoring head": plant("head", dim=64, rank=8, seed=seed),
        "the scorer with four heads": plant("multi-head", dim=32, heads=4, rank=8, seed=seed),
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
    """The oracle that `name` stands for; of the demo, its scoring head.

    `limits` bounds what a server may cost and `options` say how it is asked, for which one must be
    `authorized` where it is another machine.
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
    return demo_endpoints()["the scoring head"] if kind is TargetKind.DEMO else load(name)


def open_language_model(name: str, options: EndpointOptions, *, authorized: bool) -> Oracle:
    """The next tokens of a model, or of a server of one."""
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
    model, _, part = name.rpartition(_OF_A_MODEL)
    layer, plus, added = part.partition("+")
    if not layer.isdecimal() or (plus and added != "residual"):
        raise InputError(f"{name} must end in :attention.LAYER or :attention.LAYER+residual")
    loaded = open_model(model, task_of(folder_of(model)))
    return sub_layer(loaded.model, int(layer), residual=bool(plus))


def server_and_model(address: str) -> tuple[str, str]:
    """The server and the model that http://host:port/v2/models/NAME names."""
    public = without_password(address)
    base, mark, model = address.partition(_MODELS)
    model = model.strip("/")
    if "?" in public or "#" in public:
        # Not shown: it may hold a secret, which has no place in identities and ledgers.
        start = public.partition("?")[0].partition("#")[0]
        raise InputError(f"{start} must be an address without ? and #: use --header")
    if not mark or not model:
        raise InputError(f"{public} must have the form http://host:port/v2/models/NAME")
    return base, model


def describe(name: str, oracle: Oracle) -> str:
    """What an endpoint is, in words that a report can open with."""
    layer, kind = oracle, None
    while kind is None and layer is not None:  # behind degraded answers
        layer, kind = getattr(layer, "inner", None), getattr(layer, "kind", None)
    if kind:
        return f"planted {kind}, d = {oracle.dim} ({name})"
    public, note = without_password(name), getattr(oracle, "note", "")
    about = f"{public}; {note}" if note else public
    return f"{urlsplit(public).path.rsplit('/', 1)[-1]}, d = {oracle.dim} ({about})"
