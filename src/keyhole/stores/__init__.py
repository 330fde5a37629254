"""Vector stores, which keep sentence embeddings: opened for reading only.

To add a kind of store, write a function that opens it, and add a row to KINDS and its
form to STORES (target.py), which recognises a TARGET without importing this package.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import parse_qsl

from keyhole.core.errors import InputError
from keyhole.stores.databases import (
    open_chroma,
    open_embeddings_api,
    open_lancedb,
    open_milvus,
    open_postgres,
    open_qdrant,
    open_weaviate,
)
from keyhole.stores.files import open_faiss, open_json_lines, open_npy, open_parquet
from keyhole.stores.store import Kind, Place, Store
from keyhole.target import POSTGRES, PREFIXED, parted, store_form

__all__ = ["KINDS", "Kind", "Place", "Store", "address_of", "kind_of", "open_store"]

KINDS = (
    Kind("Chroma", "chroma:FOLDER", open_chroma, ("collection",)),
    Kind("Qdrant", "qdrant:FOLDER", open_qdrant, ("collection", "vector", "text")),
    Kind("LanceDB", "lancedb:FOLDER", open_lancedb, ("table", "column", "text")),
    Kind("Milvus", "milvus:FOLDER", open_milvus, ("collection", "vector", "text")),
    Kind(
        "Weaviate",
        "weaviate:URL",
        open_weaviate,
        ("collection", "vector", "text", "tenant", "grpc_port"),
    ),
    Kind("PostgreSQL", POSTGRES, open_postgres, ("table", "column", "text")),
    Kind("an index of FAISS", ".faiss", open_faiss),
    Kind("Parquet", ".parquet", open_parquet, ("column", "text")),
    Kind("a NumPy array", ".npy", open_npy),
    Kind("JSON lines", ".jsonl", open_json_lines, ("column", "text")),
    Kind(
        "a server of embeddings",
        "http(s)://…/v1/embeddings",
        open_embeddings_api,
        ("model",),
    ),
)


def kind_of(target: str) -> Kind | None:
    """Return the kind of store that TARGET names; None if it names something else."""
    form = store_form(target)
    return next((kind for kind in KINDS if kind.form == form), None)


@contextmanager
def open_store(
    target: str,
    known: Sequence[str] = (),
    shown: str | None = None,
) -> Generator[Store]:
    """Open the store that TARGET names, for the length of a block.

    `known` texts are for a server of embeddings. `shown` is TARGET as the user wrote
    it, if `target` is a longer path to the same file.
    """
    kind = kind_of(target)
    if kind is None:
        forms = ", ".join(kind.form for kind in KINDS)
        raise InputError(f"{target} is not a vector store ({forms})")
    path, query = parted(target)
    options = dict(parse_qsl(query, keep_blank_values=True))
    path = _without_prefix(path, kind)
    unknown = [name for name in options if name not in kind.options]
    if unknown and kind.form != POSTGRES:  # whose other options are the driver's
        takes = ", ".join(f"?{name}=" for name in kind.options) or "none"
        raise InputError(
            f"{path} has no option ?{unknown[0]}=: its options are {takes}"
        )
    with kind.open(Place(path, options, tuple(known))) as store:
        if shown is None or shown == target:
            yield store
            return
        given = _without_prefix(parted(shown)[0], kind)
        yield replace(store, name=f"{given}{store.name.removeprefix(path)}")


def address_of(target: str) -> str | None:
    """Return the address of a store's HTTP server; None for files and PostgreSQL."""
    path = parted(target)[0].removeprefix("milvus:").removeprefix("weaviate:")
    return path if path.lower().startswith(("http://", "https://")) else None


def _without_prefix(path: str, kind: Kind) -> str:
    """Remove `chroma:` and the like."""
    return path.partition(":")[2] if kind.form.endswith(PREFIXED) else path
