"""Tells the kind of a TARGET from its name, for every command, without opening it or loading torch.

| kind | TARGET |
|---|---|
| demo | `demo` |
| endpoint | `http(s)://host:port/v2/models/NAME`, of the Open Inference Protocol |
| server | `http(s)://host:port`: a server of a language model |
| route | any other address: one route of such a server |
| store | `chroma:FOLDER`, `postgresql://…`, `.npy` and others (stores/__init__.py) |
| leak | a saved slot of llama.cpp, a captured leak, tensors that another program wrote |
| model | a folder, a .gguf file, `owner/name` on the hub |
| attention | `MODEL:attention.LAYER[+residual]`: the attention of one block, as an endpoint |
| block | `MODEL:block.LAYER`: a whole block, as an endpoint |
| file | any other file: a planted endpoint |
| unknown | nothing of that name exists |
"""

from __future__ import annotations

import re
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from keyhole.core.endpoint import names_address
from keyhole.core.files import SLOT_MAGIC, exists, is_file, is_folder

DEMO = "demo"
ATTENTION_OF_A_MODEL = ":attention."
BLOCK_OF_A_MODEL = ":block."
MODELS = "/v2/models/"
POSTGRES = "postgresql://…"
# The forms of vector stores (stores/__init__.py opens them).
STORES = (
    "chroma:FOLDER",
    "qdrant:FOLDER",
    "lancedb:FOLDER",
    "milvus:FOLDER",
    "weaviate:URL",
    POSTGRES,
    ".faiss",
    ".parquet",
    ".npy",
    ".jsonl",
    "http(s)://…/v1/embeddings",
)
PREFIXED = (":FOLDER", ":URL")  # the ends of forms that begin with the store's name
_FILES = (".safetensors", ".json", ".bin", ".pt", ".npz")  # never a name on the hub


class TargetKind(StrEnum):
    DEMO = "demo"
    ENDPOINT = "endpoint"
    SERVER = "server"
    ROUTE = "route"
    STORE = "vector store"
    LEAK = "leak"
    MODEL = "model"
    ATTENTION = "attention"
    BLOCK = "block"
    FILE = "file"
    UNKNOWN = "unknown"


LANGUAGE_MODELS = (TargetKind.SERVER, TargetKind.ROUTE, TargetKind.MODEL)


def kind_of(name: str) -> TargetKind:
    """Return the kind of the target of this name; files are looked at, nothing is loaded."""
    if names_address(name) and _is_server(name):
        return TargetKind.SERVER
    if _is_leak(name):
        return TargetKind.LEAK
    if store_form(name) is not None:
        return TargetKind.STORE
    if names_address(name) and MODELS in name:
        return TargetKind.ENDPOINT
    if names_address(name):
        return TargetKind.ROUTE
    if ATTENTION_OF_A_MODEL in name:
        return TargetKind.ATTENTION
    if BLOCK_OF_A_MODEL in name:
        return TargetKind.BLOCK
    if _is_model(name):
        return TargetKind.MODEL
    if name == DEMO:
        return TargetKind.DEMO
    if exists(name):
        return TargetKind.FILE
    return TargetKind.UNKNOWN


def _is_server(name: str) -> bool:
    """Whether the address has no path, and so means a whole server."""
    try:
        parts = urlsplit(name)
    except ValueError:  # half an IPv6 address
        return False
    return parts.path in ("", "/") and not parts.query


def _is_model(name: str) -> bool:
    suffix = Path(name).suffix
    if is_folder(name) or suffix == ".gguf":
        return True
    named = re.fullmatch(r"[\w-]+/[\w.-]+", name)
    return named is not None and suffix not in _FILES and not exists(name)


def _is_leak(name: str) -> bool:
    """Whether this is a saved slot, a leak that Keyhole wrote, or tensors of another program."""
    if not is_file(name):
        return False
    path = Path(name)
    of_lmcache = "@" in path.name and path.suffix == ".data"
    if of_lmcache or path.suffix in (".pt", ".pth"):
        return True
    with suppress(OSError, SafetensorError):
        with path.open("rb") as file:
            if file.read(len(SLOT_MAGIC)) == SLOT_MAGIC:
                return True
        if path.suffix == ".safetensors":
            with safe_open(name, framework="np") as tensors:
                metadata = tensors.metadata() or {}
                return "leak" in metadata or "keyhole" not in metadata
    return False


def _pattern(form: str) -> re.Pattern[str]:
    """Return the pattern of TARGETs of this form."""
    if form.startswith("."):
        return re.compile(rf"(?!.*://).*\{form}", re.DOTALL)
    if form == POSTGRES:
        return re.compile(r"postgres(ql)?://.*", re.DOTALL)
    if form.endswith(PREFIXED):
        return re.compile(rf"{form.partition(':')[0]}:.*", re.DOTALL)
    return re.compile(r"https?://.*/v1/embeddings/*", re.DOTALL)


_PATTERNS = {form: _pattern(form) for form in STORES}


def store_form(name: str) -> str | None:
    """Return the form of store that a name has; None if it does not name a store."""
    path = parted(name)[0]
    return next(
        (form for form, pattern in _PATTERNS.items() if pattern.fullmatch(path)), None
    )


def parted(target: str) -> tuple[str, str]:
    """Return the parts before and after `?`, unless it is part of the name of a file."""
    if "://" not in target and exists(Path(target)):
        return target, ""
    path, _, query = target.partition("?")
    return path, query
