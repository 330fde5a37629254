"""Vectors in a folder of Qdrant's local mode: a table of pickled points, read without its library.

`QdrantClient(path=…)` keeps each collection as `collection/NAME/storage.sqlite`, a table
points(id, point) whose points are pickled. Unpickling runs what a file says, so nothing of it is
run here: whatever class a point names is taken for a bag of fields. The database is opened as one
that nobody changes (SQLite's `immutable`), so that not even a lock is taken.
"""

from __future__ import annotations

import io
import pickle
import sqlite3
from array import array
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import exists
from keyhole.stores.store import Place, Store

_ALONE = ""  # the name of the only vector of a point


class _Fields:
    """Stands for any class that a pickle names: it keeps the state that it is given."""

    def __init__(self, *_: object) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        held = cast("dict[str, Any]", state) if isinstance(state, dict) else {}
        inner = held.get("__dict__", held)  # pydantic keeps a model's fields there
        self.fields = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}


class _Harmless(pickle.Unpickler):
    """Reads a pickle without importing or calling anything that it names."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ARG002
        return _Fields

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError(f"a reference to something outside: {pid!r:.40}")


@contextmanager
def open_qdrant(place: Place) -> Generator[Store]:
    folder = Path(place.path) / "collection"
    names = sorted(path.parent.name for path in folder.glob("*/storage.sqlite"))
    if not names:
        raise InputError(
            f"expected a folder of Qdrant's local mode (with collection/NAME/storage.sqlite), got "
            f"{place.path}"
        )
    name = place.choice("collection", names, "collection")
    file = folder / name / "storage.sqlite"
    waiting = [end for end in ("-wal", "-journal") if exists(f"{file}{end}")]
    if waiting:
        raise InputError(
            f"expected a collection that nobody writes to, got {file}{waiting[0]}: close Qdrant"
        )
    try:
        database = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        with closing(database):
            yield _store(database, place, name)
    except sqlite3.Error as error:
        raise InputError(
            f"expected a collection of Qdrant's local mode, got {file}: {error}"
        ) from error


def _store(database: sqlite3.Connection, place: Place, name: str) -> Store:
    numbers = array("q", (row for (row,) in database.execute(
        "SELECT rowid FROM points ORDER BY rowid"
    )))  # fmt: skip
    if not numbers:
        raise InputError(f"expected vectors in {place.path}, {name}, got none")

    def point(row: int) -> dict[str, Any]:
        query = "SELECT point FROM points WHERE rowid = ?"
        return _read(database.execute(query, (numbers[row],)).fetchone()[0], place.path)

    first = point(0)
    vector = place.choice("vector", list(_vectors(first)), "vector of a point")
    text = place.text_column([
        key for key, value in _payload(first).items() if isinstance(value, str)
    ])  # fmt: skip

    def vectors(rows: Sequence[int]) -> Tensor:
        given = [_vectors(point(row)).get(vector) for row in rows]
        if any(values is None or len(values) != dim for values in given):
            raise InputError(f"expected {dim} numbers in every point of {place.path}, {name}")
        return torch.from_numpy(np.array(given, dtype=np.float64))

    def texts(rows: Sequence[int]) -> list[str | None]:
        given = [_payload(point(row)).get(str(text)) for row in rows]
        return [words if isinstance(words, str) else None for words in given]

    dim = len(_vectors(first)[vector])
    where = f"{place.path}, {name}"
    return Store(where, len(numbers), dim, vectors, None if text is None else texts)


def _read(blob: bytes, path: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = _Harmless(io.BytesIO(blob)).load().fields
    except Exception as error:  # whatever bytes that are no pickle may lead to
        raise InputError(f"expected points of Qdrant in {path}, got {error!r:.80}") from error
    if "vector" not in fields:
        raise InputError(f"expected points of Qdrant in {path}, got one without a vector")
    return fields


def _vectors(point: dict[str, Any]) -> dict[str, list[float]]:
    """Dense vectors by name; a point that has one alone gives it no name."""
    held = point["vector"]
    named = cast("dict[str, Any]", held) if isinstance(held, dict) else {_ALONE: held}
    return {
        name: values
        for name, values in named.items()
        if isinstance(values, list) and values and isinstance(values[0], int | float)
    }


def _payload(point: dict[str, Any]) -> dict[str, Any]:
    held = point.get("payload")
    return cast("dict[str, Any]", held) if isinstance(held, dict) else {}
