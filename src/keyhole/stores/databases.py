"""Vectors in databases, and served.

Chroma, Qdrant's local mode, LanceDB, Milvus, Weaviate, PostgreSQL; servers of embeddings.
"""

from __future__ import annotations

import io
import logging
import pickle
import shutil
import socket
import sqlite3
import tempfile
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlencode, urlsplit

import httpx
import numpy as np

from keyhole.core.endpoint import KEY, EndpointOptions, without_password
from keyhole.core.errors import InputError, KeyholeError, first_line
from keyhole.core.files import exists, is_folder, unreadable
from keyhole.oracle.connection import connected
from keyhole.oracle.http import Http
from keyhole.oracle.protocol import OracleError
from keyhole.stores.files import arrow_store
from keyhole.stores.store import Place, Store, column_store, library

# Chroma opens a folder to write to it (it migrates tables and takes locks), so it is given a copy
# in a temporary folder that only its owner may read, and that goes when the store is closed. Its
# telemetry is switched off.

_NOTE = "read from a temporary copy, because Chroma writes to what it opens"


@contextmanager
def open_chroma(place: Place) -> Generator[Store]:
    if not exists(Path(place.path) / "chroma.sqlite3"):
        raise InputError(f"{place.path} is not a folder of Chroma: it has no chroma.sqlite3")
    chromadb = library("chromadb")
    with tempfile.TemporaryDirectory(prefix="keyhole-") as folder:
        copy = Path(folder) / "copy"
        try:
            shutil.copytree(place.path, copy)
        except (OSError, shutil.Error) as error:
            raise unreadable("a folder of Chroma", place.path, error) from error
        settings = chromadb.Settings(anonymized_telemetry=False, allow_reset=False)
        client: Any = None
        try:
            client = chromadb.PersistentClient(str(copy), settings)
            yield _chroma_store(client, place)
        except chromadb.errors.ChromaError as error:
            raise unreadable("a folder of Chroma", place.path, error) from error
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

    where = f"{place.path}, {name}"
    return column_store(where, len(ids), read, "embeddings", "documents", np.float32, _NOTE)


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
            f"{place.path} is not a folder of Qdrant's local mode: it has no "
            "collection/NAME/storage.sqlite"
        )
    name = place.choice("collection", names, "collection")
    file = folder / name / "storage.sqlite"
    waiting = [end for end in ("-wal", "-journal") if exists(f"{file}{end}")]
    if waiting:
        raise InputError(f"Qdrant is writing to {file}{waiting[0]}: close it first")
    try:
        database = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        with closing(database):
            yield _qdrant_store(database, place, name)
    except sqlite3.Error as error:
        raise unreadable("a collection of Qdrant's local mode", file, error) from error


def _qdrant_store(database: sqlite3.Connection, place: Place, name: str) -> Store:
    numbers = array("q", (row for (row,) in database.execute(
        "SELECT rowid FROM points ORDER BY rowid"
    )))  # fmt: skip
    if not numbers:
        raise InputError(f"{place.path}, {name} holds no vectors")

    def point(row: int) -> dict[str, Any]:
        query = "SELECT point FROM points WHERE rowid = ?"
        return _read(database.execute(query, (numbers[row],)).fetchone()[0], place.path)

    first = point(0)
    vector = place.choice("vector", list(_vectors(first)), "vector of a point")
    text = place.text_column([
        key for key, value in _payload(first).items() if isinstance(value, str)
    ])  # fmt: skip

    def read(column: str, rows: Sequence[int]) -> list[Any]:
        points = [point(row) for row in rows]
        if column == "vector":
            return [_vectors(held).get(vector) for held in points]
        return [_payload(held).get(str(text)) for held in points]

    where = f"{place.path}, {name}"
    return column_store(where, len(numbers), read, "vector", None if text is None else "payload")


def _read(blob: bytes, path: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = _Harmless(io.BytesIO(blob)).load().fields
    except Exception as error:  # whatever bytes that are no pickle may lead to
        raise InputError(f"{path} holds a point that is not Qdrant's: {error!r:.80}") from error
    if "vector" not in fields:
        raise InputError(f"{path} holds a point of Qdrant without a vector")
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
        raise InputError(
            f"cannot read {place.path} as a folder of LanceDB: there is no such folder"
        )
    lancedb = library("lancedb")
    names = sorted(path.stem for path in Path(place.path).glob("*.lance"))
    try:
        table = lancedb.connect(place.path).open_table(place.choice("table", names, "table"))
        schema, count = table.schema, int(table.count_rows())
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise unreadable("a folder of LanceDB", place.path, error) from error

    def taken(column: str, rows: Sequence[int]) -> Any:
        return table.take_offsets(list(rows)).select([column]).to_arrow().column(column)

    yield arrow_store(place, schema, count, taken)


# Vectors in a collection of Milvus, of a server or of Milvus Lite: one client reads both.
#
# Milvus Lite is a server inside this process, on a folder that it locks and writes a log to, so it
# is given a copy, as Chroma is. Of a server nothing is changed: a collection that is not loaded is
# not loaded for it.

_LITE = "read from a temporary copy, because Milvus Lite writes to what it opens"
_ROWS = 1000  # of one answer of a server


@contextmanager
def open_milvus(place: Place) -> Generator[Store]:
    if "://" in place.path:
        with _milvus_at(place.path, without_password(place.path)) as client:
            yield _milvus_store(client, replace(place, path=without_password(place.path)), "")
        return
    if not exists(Path(place.path) / "collections"):
        raise InputError(
            f"{place.path} is not a folder of Milvus Lite: it has no folder collections (of Milvus "
            "Lite 2, which kept one file, export the vectors to Parquet)"
        )
    library("pymilvus")
    lite = library("milvus_lite.server_manager", "milvus-lite").server_manager_instance
    with tempfile.TemporaryDirectory(prefix="keyhole-") as folder:
        copy = Path(folder) / "copy.db"
        try:
            shutil.copytree(place.path, copy)
        except (OSError, shutil.Error) as error:
            raise unreadable("a folder of Milvus Lite", place.path, error) from error
        try:
            with _milvus_at(str(copy), place.path) as client:
                yield _milvus_store(client, place, _LITE)
        finally:
            lite.release_server(str(copy))


@contextmanager
def _milvus_at(address: str, shown: str) -> Generator[Any]:
    """A client of a server, or of the folder that Milvus Lite serves; `shown` has no password."""
    milvus = library("pymilvus")
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # what goes wrong is raised as well
    parts = urlsplit(address)
    token = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    given = {"token": token} if parts.username else {}
    try:
        with closing(milvus.MilvusClient(without_password(address), timeout=10, **given)) as client:
            yield client
    except milvus.MilvusException as error:
        raise KeyholeError(f"{shown} does not answer as Milvus: {first_line(error)}") from error


def _milvus_store(client: Any, place: Place, note: str) -> Store:
    name = place.choice("collection", sorted(client.list_collections()), "collection")
    if note:  # the copy is ours
        client.load_collection(name)
    elif client.get_load_state(name)["state"].name != "Loaded":
        raise InputError(f"the collection {name} of {place.path} is not loaded: load it first")
    fields = client.describe_collection(name)["fields"]
    vectors = [field["name"] for field in fields if field["type"].name == "FLOAT_VECTOR"]
    vector = place.choice("vector", vectors, f"field of float vectors in {name}")
    (key,) = (field["name"] for field in fields if field.get("is_primary"))
    keys = sorted(_milvus_keys(client, name, key))
    if not keys:
        raise InputError(f"{place.path}, {name} holds no vectors")
    (first,) = client.get(name, ids=keys[:1], output_fields=["*"])
    text = place.text_column([
        column for column, value in first.items() if isinstance(value, str) and column != key
    ])  # fmt: skip

    def read(column: str, rows: Sequence[int]) -> list[Any]:
        def get(ids: list[Any]) -> dict[Any, Any]:
            given = client.get(name, ids=ids, output_fields=[key, column])
            return {row[key]: row.get(column) for row in given}

        return _in_parts([keys[row] for row in rows], get)

    where = f"{place.path}, {name}"
    return column_store(where, len(keys), read, vector, text, np.float32, note)


def _in_parts(keys: list[Any], get: Callable[[list[Any]], dict[Any, Any]]) -> list[Any]:
    """What a server holds under each of the keys, in as many answers as it takes."""
    starts, held = range(0, len(keys), _ROWS), dict[Any, Any]()
    for start in starts:
        held |= get(keys[start : start + _ROWS])
    return [held.get(key) for key in keys]


def _milvus_keys(client: Any, name: str, key: str) -> Iterator[Any]:
    rows = client.query_iterator(name, batch_size=_ROWS, output_fields=[key])
    with closing(rows):
        while part := rows.next():
            yield from (row[key] for row in part)


# Vectors in a collection of Weaviate: its own client asks a server, and changes nothing there.
#
# What the client checks first is left out: it would ask PyPI for its newest release, and tries for
# a minute where nobody listens at the port of gRPC, so that is tried here.

_REFUSED = (401, 403)


@contextmanager
def open_weaviate(place: Place) -> Generator[Store]:
    weaviate = library("weaviate", "weaviate-client")
    shown = without_password(place.path)
    try:
        port = int(place.options.get("grpc_port", 50051))
        address = weaviate.connect.ConnectionParams.from_url(place.path, port)
    except ValueError as error:
        raise InputError(
            f"{shown} is not an address of Weaviate: write weaviate:http://HOST:PORT, with "
            "?grpc_port=PORT where that is not 50051"
        ) from error
    headers = EndpointOptions().secrets()
    client = weaviate.WeaviateClient(address, additional_headers=headers, skip_init_checks=True)
    try:
        with closing(client):
            _connect_to_weaviate(client, address.grpc, shown)
            yield _weaviate_store(client, replace(place, path=shown))
    except weaviate.exceptions.WeaviateStartUpError as error:
        raise KeyholeError(f"nobody answers at {shown}: is Weaviate running there?") from error
    except weaviate.exceptions.WeaviateBaseError as error:
        if getattr(error, "status_code", None) in _REFUSED:
            raise InputError(f"{shown} asks for a key, or another: set {KEY}") from error
        raise KeyholeError(f"{shown} does not answer as Weaviate: {first_line(error)}") from error


def _connect_to_weaviate(client: Any, grpc: Any, shown: str) -> None:
    try:
        client.connect()
    except (httpx.HTTPError, LookupError, TypeError, AttributeError) as error:  # of another server
        raise KeyholeError(f"{shown} does not answer as Weaviate: {error!r:.80}") from error
    try:
        socket.create_connection((grpc.host, grpc.port), timeout=10).close()
    except OSError as error:
        raise KeyholeError(
            f"{shown} does not answer on its gRPC port, {grpc.port}: open it, or add "
            "?grpc_port=PORT"
        ) from error


def _weaviate_store(client: Any, place: Place) -> Store:
    name = place.choice("collection", list(client.collections.list_all()), "collection")
    collection = client.collections.use(name)
    if "tenant" in place.options:
        collection = collection.with_tenant(place.options["tenant"])
    keys = sorted(
        each.uuid for each in collection.iterator(return_properties=False, cache_size=_ROWS)
    )
    if not keys:
        raise InputError(f"{place.path}, {name} holds no vectors")
    (first,) = collection.query.fetch_objects_by_ids(keys[:1], include_vector=True).objects
    vector = place.choice("vector", list(_vectors({"vector": first.vector})), "vector of an object")
    text = place.text_column([
        key for key, value in first.properties.items() if isinstance(value, str)
    ])  # fmt: skip

    def read(column: str, rows: Sequence[int]) -> list[Any]:
        of_text = column == "text"

        def get(ids: list[Any]) -> dict[Any, Any]:
            given = collection.query.fetch_objects_by_ids(
                ids, limit=len(ids), include_vector=not of_text,
                return_properties=[text] if of_text else False,
            )  # fmt: skip
            return {
                each.uuid: each.properties.get(text) if of_text else each.vector.get(vector)
                for each in given.objects
            }

        return _in_parts([keys[row] for row in rows], get)

    where = f"{place.path}, {name}"
    return column_store(where, len(keys), read, "vector", text and "text", np.float32)


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
        raise KeyholeError(f"{shown} does not answer: {first_line(error)}") from error
    except psycopg.Error as error:
        raise InputError(f"cannot read vectors from {shown}: {first_line(error)}") from error


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
    counting = sql.SQL("SELECT count({column}) FROM {table}").format(**names)
    (count,) = connection.execute(counting).fetchone()

    def read(chosen: str, rows: Sequence[int]) -> list[Any]:
        what = sql.SQL("{}::real[]" if chosen == column else "{}").format(sql.Identifier(chosen))
        query = sql.SQL(
            "SELECT given FROM (SELECT {what} AS given, row_number() OVER (ORDER BY tableoid, ctid)"
            " - 1 AS place FROM {table} WHERE {column} IS NOT NULL) AS placed"
            " WHERE place = ANY(%s) ORDER BY place"
        ).format(what=what, **names)
        return [value for (value,) in connection.execute(query, (list(rows),)).fetchall()]

    name = f"{place.path}, {table}.{column}"
    return column_store(name, count, read, column, text, np.float32)


def _table_name(schema: str, name: str) -> str:
    """A table as people write it."""
    return name if schema == "public" else f"{schema}.{name}"


# A server that turns texts into embeddings, in the form of OpenAI's `POST /v1/embeddings`.
#
# It keeps no vectors. It is asked for those of texts that one knows, which shows how the vectors of
# its other clients are made (encoder, pooling), and whether they can be read.

_AT_ONCE = 32  # texts in one request


@contextmanager
def open_embeddings_api(place: Place) -> Generator[Store]:
    if not place.known:
        raise InputError(
            f"{place.path} keeps no vectors: give --known with texts to ask for their embeddings"
        )
    url = place.path.rstrip("/")
    with closing(connected(EndpointOptions(), url, retries=2)) as http:
        url = without_password(url)
        name = place.options.get("model") or _only_model(http, url)

        def read(column: str, rows: Sequence[int]) -> list[Any]:
            wanted = [place.known[row] for row in rows]
            if column == "text":
                return wanted
            parts = (wanted[start : start + _AT_ONCE] for start in range(0, len(wanted), _AT_ONCE))
            return [vector for part in parts for vector in _ask(http, url, name, part)]

        note = "the texts of --known, asked for now"
        yield column_store(url, len(place.known), read, "embedding", "text", note=note)


def _only_model(http: Http, url: str) -> str:
    """The model that a server has, where it says so and has one alone."""
    try:
        listed = http.request("GET", f"{url.removesuffix('/embeddings')}/models").get("data")
    except OracleError:  # not every server lists its models, nor needs a name
        return "default"
    entries = cast("list[Any]", listed) if isinstance(listed, list) else []
    names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and "id" in entry]
    if len(names) > 1:
        raise InputError(f"{url} has several models ({', '.join(names[:5])}): add ?model=NAME")
    return names[0] if names else "default"


def _ask(http: Http, url: str, model: str, texts: Sequence[str]) -> list[list[float]]:
    content = {"model": model, "input": list(texts), "encoding_format": "float"}
    answer = http.request("POST", url, content)
    try:
        entries = sorted(answer["data"], key=lambda entry: int(entry["index"]))
        given = [[float(number) for number in entry["embedding"]] for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise OracleError(f"{url} did not answer with embeddings: {error!r:.80}") from error
    if len(given) != len(texts):
        raise OracleError(f"{url} answered with {len(given)} embeddings for {len(texts)} texts")
    return given
