"""Every kind of vector store, and how TARGET tells which it is.

To add one, write a module with a function that opens it and add one line to KINDS.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl

from keyhole.core.errors import InputError
from keyhole.core.files import exists
from keyhole.stores.databases import open_chroma, open_lancedb, open_postgres, open_qdrant
from keyhole.stores.embeddings_api import open_embeddings_api
from keyhole.stores.files import open_faiss, open_json_lines, open_npy, open_npz, open_parquet
from keyhole.stores.store import Kind, Place, Store

KINDS = (
    Kind("Chroma", "chroma:FOLDER", open_chroma, ("collection",)),
    Kind("Qdrant", "qdrant:FOLDER", open_qdrant, ("collection", "vector", "text")),
    Kind("LanceDB", "lancedb:FOLDER", open_lancedb, ("table", "column", "text")),
    Kind("PostgreSQL", "postgresql://…", open_postgres, ("table", "column", "text")),
    Kind("an index of FAISS", ".faiss", open_faiss),
    Kind("Parquet", ".parquet", open_parquet, ("column", "text")),
    Kind("a NumPy array", ".npy", open_npy),
    Kind("NumPy arrays", ".npz", open_npz, ("array", "text")),
    Kind("JSON lines", ".jsonl", open_json_lines, ("column", "text")),
    Kind("a server of embeddings", "http(s)://…/v1/embeddings", open_embeddings_api, ("model",)),
)


def kind_of(target: str) -> Kind | None:
    """The kind of store that TARGET names; None where it names something else."""
    path = _parted(target)[0]
    for kind in KINDS:
        if kind.form.startswith("."):
            if path.endswith(kind.form) and "://" not in path:
                return kind
        elif "…" not in kind.form:
            if path.startswith(kind.form.partition(":")[0] + ":"):
                return kind
        elif _matches(path, kind.form):
            return kind
    return None


def names_store(target: str) -> bool:
    return kind_of(target) is not None


@contextmanager
def open_store(target: str, known: Sequence[str] = ()) -> Generator[Store]:
    """The store that TARGET names, for the length of a block; `known` texts are for a server."""
    kind = kind_of(target)
    if kind is None:
        forms = ", ".join(kind.form for kind in KINDS)
        raise InputError(f"expected a vector store ({forms}), got {target}")
    path, query = _parted(target)
    options = dict(parse_qsl(query, keep_blank_values=True))
    if kind.form != "postgresql://…":  # where the rest of the query is the driver's
        path = path.removeprefix(_prefix(kind))
        unknown = [name for name in options if name not in kind.options]
        if unknown:
            takes = ", ".join(f"?{name}=" for name in kind.options) or "nothing"
            raise InputError(f"expected {takes} after {path}, got ?{unknown[0]}=")
    with kind.open(Place(path, options, tuple(known))) as store:
        yield store


def _prefix(kind: Kind) -> str:
    return kind.form.partition(":")[0] + ":" if kind.form.endswith(":FOLDER") else ""


def _matches(path: str, form: str) -> bool:
    """`http(s)://…/end` and `postgresql://…`, the scheme also as people shorten it."""
    scheme, _, end = form.partition("://…")
    schemes = {"http(s)": ("http", "https"), "postgresql": ("postgresql", "postgres")}[scheme]
    return path.partition("://")[0] in schemes and path.rstrip("/").endswith(end)


def _parted(target: str) -> tuple[str, str]:
    """What comes before and after `?`; a file may have one in its name."""
    if "://" not in target and exists(Path(target)):
        return target, ""
    path, _, query = target.partition("?")
    return path, query
