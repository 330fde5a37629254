"""Vectors in databases: Chroma, Qdrant's local mode, LanceDB, PostgreSQL."""

from __future__ import annotations

import io
import pickle
import shutil
import sqlite3
import tempfile
from array import array
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode, urlsplit

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.files import exists, is_folder, trouble
from keyhole.stores.files import arrow_store
from keyhole.stores.store import Place, Store, library, one_line

# Chroma opens a folder to write to it (it migrates tables and takes locks), so it is given a copy
# in a temporary folder that only its owner may read, and that goes when the store is closed. Its
# telemetry is switched off.

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
        client: Any = None
        try:
            client = chromadb.PersistentClient(str(copy), settings)
            yield _chroma_store(client, place)
        except chromadb.errors.ChromaError as error:
            raise InputError(
                f"expected a folder that Chroma keeps, got {place.path}: {one_line(error)}"
            ) from error
        finally:
            if hasattr(client, "close"):
                client.close()


def _chroma_store(client: Any, place: Place) -> Store:
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


# Vectors in a folder of Qdrant's local mode: a table of pickled points, read without its library.
#
# `QdrantClient(path=…)` keeps each collection as `collection/NAME/storage.sqlite`, a table
# points(id, point) whose points are pickled. Unpickling runs what a file says, so nothing of it is
# run here: whatever class a point names is read as plain fields. The database is opened as one
# that nobody changes (SQLite's `immutable`), so that not even a lock is taken.

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
            yield _qdrant_store(database, place, name)
    except sqlite3.Error as error:
        raise InputError(
            f"expected a collection of Qdrant's local mode, got {file}: {error}"
        ) from error


def _qdrant_store(database: sqlite3.Connection, place: Place, name: str) -> Store:
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


# Vectors in a table of LanceDB: a folder of files that are written once and only read here.


@contextmanager
def open_lancedb(place: Place) -> Generator[Store]:
    if not is_folder(place.path):
        raise InputError(f"expected a folder of LanceDB, got {place.path}: there is no such folder")
    lancedb = library("lancedb")
    names = sorted(path.stem for path in Path(place.path).glob("*.lance"))
    try:
        table = lancedb.connect(place.path).open_table(place.choice("table", names, "table"))
        schema, count = table.schema, int(table.count_rows())
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"expected a folder of LanceDB, got {place.path}: {one_line(error)}"
        ) from error

    def taken(column: str, rows: Sequence[int]) -> Any:
        return table.take_offsets(list(rows)).select([column]).to_arrow().column(column)

    yield arrow_store(place, schema, count, taken)


# Vectors in a table of PostgreSQL: columns of pgvector (vector, halfvec), or arrays of numbers.
#
# Everything is read in one transaction that is READ ONLY and REPEATABLE READ: the server itself
# refuses to write, and row numbers mean the same from the first query to the last.

_OURS = ("table", "column", "text")
_SECONDS = "10"
_COLUMNS = """
SELECT table_schema, table_name, column_name, udt_name FROM information_schema.columns
WHERE table_schema NOT IN ('pg_catalog', 'information_schema')
ORDER BY table_schema, table_name, ordinal_position
"""
_VECTORS = ("vector", "halfvec", "_float4", "_float8")
_TEXTS = ("text", "varchar", "bpchar")


@contextmanager
def open_postgres(place: Place) -> Generator[Store]:
    psycopg = library("psycopg")
    parts = urlsplit(place.path)
    theirs = {name: value for name, value in place.options.items() if name not in _OURS}
    address = f"{place.path}?{urlencode({'connect_timeout': _SECONDS, **theirs})}"
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # no password
    try:
        with psycopg.connect(address) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            yield _postgres_store(psycopg.sql, connection, Place(shown, place.options))
    except psycopg.OperationalError as error:
        raise KeyholeError(f"expected an answer from {shown}, got {one_line(error)}") from error
    except psycopg.Error as error:
        raise InputError(f"expected vectors in {shown}, got {one_line(error)}") from error


def _postgres_store(sql: Any, connection: Any, place: Place) -> Store:
    listed = connection.execute(_COLUMNS).fetchall()
    tables = list(dict.fromkeys(_table_name(*row[:2]) for row in listed if row[3] in _VECTORS))
    table = place.choice("table", tables, "table with a vector column")
    kinds = {row[2]: row[3] for row in listed if _table_name(*row[:2]) == table}
    columns = [name for name, kind in kinds.items() if kind in _VECTORS]
    column = place.choice("column", columns, f"vector column in the table {table}")
    text = place.text_column([name for name, kind in kinds.items() if kind in _TEXTS])
    schema, relation = next(row[:2] for row in listed if _table_name(*row[:2]) == table)
    names = {"table": sql.Identifier(schema, relation), "column": sql.Identifier(column)}
    count, dim = connection.execute(
        sql.SQL("SELECT count({column}), max(cardinality({column}::real[])) FROM {table}").format(
            **names
        )
    ).fetchone()

    def read(what: Any, rows: Sequence[int]) -> list[Any]:
        query = sql.SQL(
            "SELECT given FROM (SELECT {what} AS given, row_number() OVER (ORDER BY tableoid, ctid)"
            " - 1 AS place FROM {table} WHERE {column} IS NOT NULL) AS placed"
            " WHERE place = ANY(%s) ORDER BY place"
        ).format(what=what, **names)
        return [value for (value,) in connection.execute(query, (list(rows),)).fetchall()]

    def vectors(rows: Sequence[int]) -> Tensor:
        values = read(sql.SQL("{}::real[]").format(names["column"]), rows)
        if any(len(value) != dim or None in value for value in values):
            raise InputError(f"expected {dim} numbers in every row of {place.path}, {table}")
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def texts(rows: Sequence[int]) -> list[str | None]:
        return read(sql.Identifier(str(text)), rows)

    name = f"{place.path}, {table}.{column}"
    return Store(name, count, dim or 0, vectors, None if text is None else texts)


def _table_name(schema: str, name: str) -> str:
    """A table as people write it."""
    return name if schema == "public" else f"{schema}.{name}"
