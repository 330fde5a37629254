"""Vectors in a folder of Chroma, read with its own library from a copy.

Chroma opens a folder to write to it (it migrates tables and takes locks), so it is given a copy in
a temporary folder that only its owner may read, and that goes when the store is closed. Its
telemetry is switched off.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import exists, trouble
from keyhole.stores.store import Place, Store, library, one_line

_NOTE = "read from a temporary copy, because Chroma writes to what it opens"


@contextmanager
def open_chroma(place: Place) -> Generator[Store]:
    if not exists(Path(place.path) / "chroma.sqlite3"):
        raise InputError(
            f"expected a folder that Chroma keeps (with chroma.sqlite3), got {place.path}"
        )
    chromadb = library("chromadb")
    with tempfile.TemporaryDirectory(prefix="keyhole-") as folder:
        copy = Path(folder) / "copy"
        try:
            shutil.copytree(place.path, copy)
        except (OSError, shutil.Error) as error:
            raise trouble("a folder that can be copied", place.path, error) from error
        settings = chromadb.Settings(anonymized_telemetry=False, allow_reset=False)
        client = None
        try:
            client = chromadb.PersistentClient(str(copy), settings)
            yield _store(client, place)
        except chromadb.errors.ChromaError as error:
            raise InputError(
                f"expected a folder that Chroma keeps, got {place.path}: {one_line(error)}"
            ) from error
        finally:
            _close(client)


def _store(client: Any, place: Place) -> Store:
    names = [collection.name for collection in client.list_collections()]
    name = place.choice("collection", sorted(names), "collection")
    collection = client.get_collection(name)
    ids: list[str] = sorted(collection.get(include=[])["ids"])

    def read(what: str, rows: Sequence[int]) -> list[Any]:
        wanted = [ids[row] for row in rows]
        given = collection.get(ids=wanted, include=[what])
        by_id = dict(zip(given["ids"], given[what], strict=True))  # in an order of its own
        return [by_id[id_] for id_ in wanted]

    def vectors(rows: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.array(read("embeddings", rows), dtype=np.float32))

    def texts(rows: Sequence[int]) -> list[str | None]:
        return read("documents", rows)

    dim = vectors([0]).shape[1] if ids else 0
    return Store(f"{place.path}, {name}", len(ids), dim, vectors, texts, _NOTE)


def _close(client: Any) -> None:
    close = getattr(client, "close", None)
    if close is not None:
        close()
